// A KV cache for those who have none: one layer's keys and values, and each key's inverse norm.
//
// Append-only with truncate, for multi-turn use and prefix reuse: what is kept is what was
// appended, rounded to the cache's formats. Growth doubles (row_store.hpp); reserve() ahead and
// nothing is copied or allocated. Views are good until the next append that grows.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/views/rows.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

class KvCache {
 public:
  // Empty cache for keys of key_dim and values of value_dim channels. Throws std::invalid_argument
  // for a size below 1 and for a format that is only read. Formats that keep scales apart have none
  // here: they are 1.
  KvCache(Index batch, Index kv_heads, Index key_dim, Index value_dim,
          const Format& k_format = float_format(), const Format& v_format = float_format());

  // Cached keys per (batch, KV head).
  Index len() const { return k_.len(); }
  Index capacity() const {
    return std::min({k_.capacity(), v_.capacity(), inverse_norms_.capacity()});
  }
  Index bytes() const { return k_.bytes() + v_.bytes() + inverse_norms_.bytes(); }

  // [batch, kv_heads, len, key_dim]
  Rows k() const { return rows_of(k_, *k_format_, key_dim_); }
  // [batch, kv_heads, len, value_dim]
  Rows v() const { return rows_of(v_, *v_format_, value_dim_); }
  // 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, len]
  TensorView<const float, 3> inverse_norms() const {
    return {inverse_norms_.data(), {k_.batch(), k_.heads(), len()}, inverse_norms_.strides()};
  }

  // Room for `capacity` keys. Throws std::invalid_argument for a negative one and std::bad_alloc;
  // the keys are then as they were.
  void reserve(Index capacity) {
    k_.reserve(capacity);
    v_.reserve(capacity);
    inverse_norms_.reserve(capacity);
  }
  // Room for `len` keys, by doubling at least.
  void grow(Index len) {
    if (len > capacity()) reserve(std::max(len, 2 * capacity()));
  }

  // Appends k [batch, kv_heads, n, key_dim] and v [batch, kv_heads, n, value_dim], of any formats.
  // Throws std::invalid_argument, with the cache as it was, when shapes do not fit and when k or v
  // lie in this cache's memory, which growth frees.
  void append(const Rows& k, const Rows& v);

  // Back to the first `len` keys. Throws std::invalid_argument beyond the present length.
  void truncate(Index len) {
    detail::require_at_least("truncate's len", len, 0);
    detail::require_at_most("truncate's len", len, "the cache's len", this->len());
    set_len(len);
  }

  // Throws std::invalid_argument if append(k, v) would.
  void check(const Rows& k, const Rows& v) const;
  // Throws std::invalid_argument if x lies in this cache's memory; `message` says what x is.
  void require_outside(const Rows& x, std::string_view message) const;

 private:
  [[gnu::noinline]] static Rows rows_of(const RowStore<std::byte>& store, const Format& format,
                                        Index dim) {
    return {
        store.data(), format, {store.batch(), store.heads(), store.len(), dim}, store.strides()};
  }
  [[gnu::noinline]] void set_len(Index len) {
    k_.resize(len);
    v_.resize(len);
    inverse_norms_.resize(len);
  }

  const Format *k_format_, *v_format_;
  Index key_dim_, value_dim_;
  RowStore<std::byte> k_, v_;
  RowStore<float> inverse_norms_;
  Buffer<float> row_;  // one key or value, widened
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/cache/kv_cache_impl.hpp>
#endif
