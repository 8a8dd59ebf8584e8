// A KV cache for those who have none: one layer's keys and values, and each key's inverse norm.
//
// Append-only with truncate, for multi-turn use and prefix reuse: what is kept is what was
// appended. Growth doubles, so n appends copy O(n) rows; reserve() ahead and nothing is copied or
// allocated. Views are good until the next append that grows. Storage is [batch, kv_heads,
// capacity, dim].
#pragma once

#include <quoka/core/buffer.hpp>
#include <quoka/core/inverse_norm.hpp>
#include <quoka/core/view.hpp>

#include <algorithm>

namespace quoka::inline QUOKA_ABI {

template <Storage T>
class KvCache {
 public:
  // Empty cache for keys of key_dim and values of value_dim channels. Throws std::invalid_argument
  // for a size below 1.
  KvCache(Index batch, Index kv_heads, Index key_dim, Index value_dim)
      : batch_(batch), kv_heads_(kv_heads), key_dim_(key_dim), value_dim_(value_dim) {
    detail::require_at_least("batch", batch, 1);
    detail::require_at_least("kv_heads", kv_heads, 1);
    detail::require_at_least("head_dim", key_dim, 1);
    detail::require_at_least("v's dim", value_dim, 1);
  }

  // Cached keys per (batch, KV head).
  Index len() const { return len_; }
  Index capacity() const { return capacity_; }
  Index bytes() const { return k_.bytes() + v_.bytes() + inverse_norms_.bytes(); }

  // [batch, kv_heads, len, key_dim]
  TensorView<const T> k() const { return view(k_.data(), key_dim_); }
  // [batch, kv_heads, len, value_dim]
  TensorView<const T> v() const { return view(v_.data(), value_dim_); }
  // 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, len]
  TensorView<const float, 3> inverse_norms() const {
    return {
        inverse_norms_.data(), {batch_, kv_heads_, len_}, {kv_heads_ * capacity_, capacity_, 1}};
  }

  // Room for `capacity` keys. On failure to allocate nothing has changed.
  void reserve(Index capacity) {
    if (capacity <= capacity_) return;
    const Index heads = batch_ * kv_heads_;
    Buffer<T> k, v;
    Buffer<float> inverse_norms;
    k.reserve(heads * capacity * key_dim_);
    v.reserve(heads * capacity * value_dim_);
    inverse_norms.reserve(heads * capacity);
    for (Index head = 0; head < heads; ++head) {
      std::copy_n(k_.data() + head * capacity_ * key_dim_, len_ * key_dim_,
                  k.data() + head * capacity * key_dim_);
      std::copy_n(v_.data() + head * capacity_ * value_dim_, len_ * value_dim_,
                  v.data() + head * capacity * value_dim_);
      std::copy_n(inverse_norms_.data() + head * capacity_, len_,
                  inverse_norms.data() + head * capacity);
    }
    k_ = std::move(k), v_ = std::move(v), inverse_norms_ = std::move(inverse_norms);
    capacity_ = capacity;
  }

  // Room for `len` keys, by doubling at least.
  void grow(Index len) {
    if (len > capacity_) reserve(std::max(len, 2 * capacity_));
  }

  // Appends k [batch, kv_heads, n, key_dim] and v [batch, kv_heads, n, value_dim]. Throws
  // std::invalid_argument, with the cache as it was, when shapes do not fit.
  void append(TensorView<const T> k, TensorView<const T> v) {
    check(k, v);
    const Index n = k.len();
    grow(len_ + n);
    for (Index b = 0; b < batch_; ++b) {
      for (Index head = 0; head < kv_heads_; ++head) {
        const Index to = (b * kv_heads_ + head) * capacity_ + len_;
        for (Index i = 0; i < n; ++i) {
          const T* key = k.row(b, head, i);
          std::copy_n(key, key_dim_, k_.data() + (to + i) * key_dim_);
          std::copy_n(v.row(b, head, i), value_dim_, v_.data() + (to + i) * value_dim_);
          inverse_norms_.data()[to + i] = inverse_norm(key, key_dim_);
        }
      }
    }
    len_ += n;
  }

  // Back to the first `len` keys. Throws std::invalid_argument beyond the present length.
  void truncate(Index len) {
    detail::require_at_least("truncate's len", len, 0);
    detail::require_at_most("truncate's len", len, "the cache's len", len_);
    len_ = len;
  }

  // Throws std::invalid_argument if append(k, v) would.
  void check(const TensorView<const T>& k, const TensorView<const T>& v) const {
    detail::require_sizes("k", k.sizes(), {batch_, kv_heads_, k.len(), key_dim_});
    detail::require_sizes("v", v.sizes(), {batch_, kv_heads_, k.len(), value_dim_});
  }

 private:
  TensorView<const T> view(const T* data, Index dim) const {
    return {data,
            {batch_, kv_heads_, len_, dim},
            {kv_heads_ * capacity_ * dim, capacity_ * dim, dim, 1}};
  }

  Index batch_, kv_heads_, key_dim_, value_dim_;
  Index len_ = 0, capacity_ = 0;
  Buffer<T> k_, v_;
  Buffer<float> inverse_norms_;
};

}  // namespace quoka::inline QUOKA_ABI
