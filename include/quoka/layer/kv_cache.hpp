// A KV cache for those who have none: one layer's keys and values, and each key's inverse norm.
//
// Append-only with truncate, for multi-turn use and prefix reuse: what is kept is what was
// appended, rounded to the cache's formats as it comes. Scales that a row holds (q8_0, u8 with its
// zero point) are made then, too. Scales of a head or a channel (i8, i8_channel, e4m3) stand before
// the first key: they are the caller's, measured on data like that to come. Growth doubles
// (row_store.hpp); reserve() ahead and nothing is copied or allocated. Views are good until the
// next append that grows.
#pragma once

#include <quoka/rows/row_store.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#include <algorithm>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// How a cache keeps its keys, or its values.
struct CacheFormat {
  // `own` must outlive the construction of the cache
  CacheFormat(const Format& as, std::span<const float> own = {})  // NOLINT
      : format(&as), scales(own) {}
  CacheFormat(const Format&& as, std::span<const float> own = {}) = delete;  // it would be gone

  const Format* format;  // not null
  // For formats that keep scales apart from their rows: [kv_heads, n], or [n] for all heads, with n
  // =
  // format->separate_scales(dim): 1, or dim for i8_channel. Empty: 1. The largest |x| that is kept is 127
  // scale (e4m3: 448 scale); what lies beyond is saturated, and i8 turns NaN into 0 (byte_formats.hpp).
  std::span<const float> scales;
};

class KvCache {
 public:
  // Empty cache for keys of key_dim and values of value_dim channels; scales are copied. Throws
  // std::invalid_argument for a size below 1, for a format that is only read, for another number of
  // scales than CacheFormat says, and for a scale that is negative or not finite.
  KvCache(Index batch, Index kv_heads, Index key_dim, Index value_dim,
          const CacheFormat& k_format = float_format(),
          const CacheFormat& v_format = float_format());

  // Cached keys per (batch, KV head).
  Index len() const { return k_.rows.len(); }
  // Keys that fit without another allocation.
  Index capacity() const {
    return std::min({k_.rows.capacity(), v_.rows.capacity(), inverse_norms_.capacity()});
  }
  Index bytes() const { return bytes_of(k_, v_, inverse_norms_); }  // of memory

  // [batch, kv_heads, len, key_dim]
  Rows k() const { return k_.view(len()); }
  // [batch, kv_heads, len, value_dim]
  Rows v() const { return v_.view(len()); }
  // 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, len]
  TensorView<const float, 3> inverse_norms() const { return norms(len()); }

  // Room for `capacity` keys. Throws std::invalid_argument for a negative one and for more than max_keys, and
  // std::bad_alloc; the keys are then as they were.
  void reserve(Index capacity) {
    detail::require_keys("capacity", capacity);
    k_.rows.reserve(capacity);
    v_.rows.reserve(capacity);
    inverse_norms_.reserve(capacity);
  }
  // Room for `len` keys, by doubling at least.
  void grow(Index len) {
    if (len > capacity()) reserve(std::max(len, std::min(2 * capacity(), max_keys)));
  }

  // Appends k [batch, kv_heads, n, key_dim] and v [batch, kv_heads, n, value_dim], of any formats.
  // Rows of the cache's format and scales keep their bytes. Throws std::invalid_argument, with the
  // cache as it was, when shapes do not fit, when there would be more than max_keys keys, and when k or v lie in this
  // cache's memory, which growth frees.
  void append(const Rows& k, const Rows& v, ExecutorRef executor = SerialExecutor{}) {
    check(k, v);
    append_checked(k, v, executor);
  }
  // The same of what check(k, v) has passed.
  void append_checked(const Rows& k, const Rows& v, ExecutorRef executor = SerialExecutor{});

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
  // The keys, or the values.
  struct Part {
    Part(const char* name, Index batch, Index kv_heads, Index channels, const CacheFormat& as);

    Index bytes() const { return rows.bytes() + scales.bytes(); }
    RowShape shape(Index head) const;
    Rows view(Index len) const;
    // Row i of (b, head) is row n of `from` now; `row` has room for dim floats.
    void put(const Rows& from, Index b, Index head, Index n, Index i, float* row);

    const Format* format;
    Index dim;
    RowStore<std::byte> rows;
    Buffer<float> scales;   // [kv_heads, scales_step]
    Index scales_step = 0;  // 0: none
  };

  TensorView<const float, 3> norms(Index count) const {
    return {
        inverse_norms_.data(), {k_.rows.batch(), k_.rows.heads(), count}, inverse_norms_.strides()};
  }
  [[gnu::noinline]] void set_len(Index len) {
    k_.rows.resize(len);
    v_.rows.resize(len);
    inverse_norms_.resize(len);
  }

  Index row_room() const { return std::max(k_.dim, v_.dim); }

  Part k_, v_;
  RowStore<float> inverse_norms_;
  Buffer<float> rows_;  // one key or value of each worker, widened
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/layer/kv_cache_impl.hpp>
#endif
