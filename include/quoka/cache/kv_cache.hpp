// A KV cache for those who have none: one layer's keys and values, and each key's inverse norm.
//
// Append-only with truncate, for multi-turn use and prefix reuse: what is kept is what was
// appended. Growth doubles (row_store.hpp); reserve() ahead and nothing is copied or allocated.
// Views are good until the next append that grows.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/core/inverse_norm.hpp>

namespace quoka::inline QUOKA_ABI {

template <Storage T>
class KvCache {
 public:
  // Empty cache for keys of key_dim and values of value_dim channels. Throws std::invalid_argument
  // for a size below 1.
  KvCache(Index batch, Index kv_heads, Index key_dim, Index value_dim)
      : k_(batch, kv_heads, key_dim),
        v_(batch, kv_heads, value_dim),
        inverse_norms_(batch, kv_heads, 1) {
    detail::require_at_least("batch", batch, 1);
    detail::require_at_least("kv_heads", kv_heads, 1);
    detail::require_at_least("head_dim", key_dim, 1);
    detail::require_at_least("v's dim", value_dim, 1);
  }

  // Cached keys per (batch, KV head).
  Index len() const { return k_.len(); }
  Index capacity() const {
    return std::min({k_.capacity(), v_.capacity(), inverse_norms_.capacity()});
  }
  Index bytes() const { return k_.bytes() + v_.bytes() + inverse_norms_.bytes(); }

  // [batch, kv_heads, len, key_dim]
  TensorView<const T> k() const { return k_.view(); }
  // [batch, kv_heads, len, value_dim]
  TensorView<const T> v() const { return v_.view(); }
  // 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, len]
  TensorView<const float, 3> inverse_norms() const {
    const Index row = inverse_norms_.capacity();
    return {
        inverse_norms_.row(0, 0, 0), {k_.batch(), k_.heads(), len()}, {k_.heads() * row, row, 1}};
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

  // Appends k [batch, kv_heads, n, key_dim] and v [batch, kv_heads, n, value_dim], which must not
  // be views of this cache. Throws std::invalid_argument, with the cache as it was, when shapes do
  // not fit.
  void append(TensorView<const T> k, TensorView<const T> v) {
    check(k, v);
    const Index begin = len(), n = k.len();
    grow(begin + n);
    for (Index b = 0; b < k.batch(); ++b) {
      for (Index head = 0; head < k.heads(); ++head) {
        for (Index i = 0; i < n; ++i) {
          const T* key = k.row(b, head, i);
          std::copy_n(key, k.dim(), k_.row(b, head, begin + i));
          std::copy_n(v.row(b, head, i), v.dim(), v_.row(b, head, begin + i));
          *inverse_norms_.row(b, head, begin + i) = inverse_norm(key, k.dim());
        }
      }
    }
    set_len(begin + n);
  }

  // Back to the first `len` keys. Throws std::invalid_argument beyond the present length.
  void truncate(Index len) {
    detail::require_at_least("truncate's len", len, 0);
    detail::require_at_most("truncate's len", len, "the cache's len", this->len());
    set_len(len);
  }

  // Throws std::invalid_argument if append(k, v) would.
  void check(const TensorView<const T>& k, const TensorView<const T>& v) const {
    detail::require_sizes("k", k.sizes(), {k_.batch(), k_.heads(), k.len(), k_.dim()});
    detail::require_sizes("v", v.sizes(), {k_.batch(), k_.heads(), k.len(), v_.dim()});
  }

 private:
  void set_len(Index len) {
    k_.resize(len);
    v_.resize(len);
    inverse_norms_.resize(len);
  }

  RowStore<T> k_, v_;
  RowStore<float> inverse_norms_;
};

}  // namespace quoka::inline QUOKA_ABI
