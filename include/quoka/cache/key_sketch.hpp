// A sketch of the keys: 8-bit codes with one scale per key, an eighth of the bytes of float K and
// V, kept beside a cache so that a scan of all keys reads little and multiplies 8-bit numbers.
//
//   code[c] = round(k[c] / s), s = max |k[c]| / 127
//   scale   = s / |k|                     so that codes stand for the key's direction
//   error   = |k - s code| / |k|          what they miss of it, rounded up
//
// By Cauchy and Schwarz the sketched cosine misses by at most error times the query's length
// (sketched_top_k.hpp). A key that codes cannot stand for (NaN, infinite, or of a magnitude near
// the ends of float) has scale 0 and error infinity. Codes are blocked for int8_dot.hpp. A key
// takes head_dim + 8 bytes, rounded up to blocks, and when it comes about 4 operations per channel.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/core/int8_dot.hpp>
#include <quoka/core/inverse_norm.hpp>

#include <cmath>
#include <limits>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// The scale at which the largest of x [dim] is coded as 127.
template <class T>
float code_scale(const T* x, Index dim) {
  float largest = 0.0f;
  for (Index c = 0; c < dim; ++c) {
    const float magnitude = std::abs(static_cast<float>(x[c]));
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest / 127.0f;
}

// x [dim] as code * scale, for a scale of code_scale() or more: code(c, value) is called with each
// integer in [-127, 127]. Returns the length of what is missed.
template <class T, class Code>
float encode(const T* x, Index dim, float scale, Code&& code) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  float sum = 0.0f;
  for (Index c = 0; c < dim; ++c) {
    const float value = static_cast<float>(x[c]);
    // Adding and taking away 1.5 * 2^23 rounds to an integer, ties to even.
    const float rounded = (value * inverse + 12582912.0f) - 12582912.0f;
    const float rest = value - rounded * scale;
    sum += rest * rest;
    code(c, static_cast<int>(rounded));
  }
  return std::sqrt(sum) * (1.0f + 1e-5f) + static_cast<float>(dim) * 127e-7f * scale;
}

}  // namespace detail

class KeySketch {
 public:
  Index len() const { return len_; }
  Index bytes() const { return codes_.bytes() + scales_.bytes() + errors_.bytes(); }

  // Sketches the keys [len(), k.len()) of k [batch, kv_heads, kv_len, head_dim], whose first len()
  // keys it has seen; room for `capacity` keys is made at once.
  template <class T>
  void append(const TensorView<const T>& k, Index capacity, ExecutorRef executor) {
    const Index width = block_bytes(k.dim());
    if (codes_.batch() != k.batch() || codes_.heads() != k.heads() || codes_.dim() != width)
      len_ = 0;
    codes_.reshape(k.batch(), k.heads(), width);
    scales_.reshape(k.batch(), k.heads(), detail::code_block);
    errors_.reshape(k.batch(), k.heads(), detail::code_block);
    for_stores([&](auto& store) { store.reserve(blocks(capacity)); });
    for_stores([&](auto& store) { store.resize(blocks(k.len())); });
    const Index begin = std::min(len_, k.len());
    executor.run(k.batch() * k.heads(), [&](Index task, int) {
      const Index b = task / k.heads(), head = task % k.heads();
      for (Index t = begin; t < k.len(); ++t) sketch(k.row(b, head, t), k.dim(), b, head, t);
    });
    len_ = k.len();
  }
  void truncate(Index len) { len_ = std::min(len_, len); }

  // The block of 16 keys that begins at 16 * block. Places beyond len() hold zero keys or old ones.
  const std::uint8_t* codes(Index b, Index head, Index block) const {
    return codes_.row(b, head, block);
  }
  // Of each key: [len()], contiguous.
  const float* scales(Index b, Index head) const { return scales_.row(b, head, 0); }
  const float* errors(Index b, Index head) const { return errors_.row(b, head, 0); }

  // Steps of int8_dots for keys of `dim` channels.
  static Index steps(Index dim) { return ceil_div(dim, detail::code_channels); }

 private:
  static Index blocks(Index keys) { return ceil_div(keys, detail::code_block); }
  static Index block_bytes(Index dim) {
    return steps(dim) * detail::code_channels * detail::code_block;
  }
  template <class F>
  void for_stores(F&& f) {
    f(codes_), f(scales_), f(errors_);
  }

  template <class T>
  void sketch(const T* key, Index dim, Index b, Index head, Index t) {
    constexpr Index width = detail::code_block, channels = detail::code_channels;
    const Index at = t % width;
    std::uint8_t* const block = codes_.row(b, head, t / width);
    float& scale = scales_.row(b, head, t / width)[at];
    float& error = errors_.row(b, head, t / width)[at];
    if (at == 0) {
      std::fill_n(block, codes_.dim(), std::uint8_t{128});
      std::fill_n(&scale, width, 0.0f);
      std::fill_n(&error, width, 0.0f);
    }
    const float inverse = inverse_norm(key, dim);
    const bool ordinary = inverse > 1e-30f && inverse < 1e30f;
    const bool zero = inverse == 0.0f && std::all_of(key, key + dim, [](T x) {
                        return static_cast<float>(x) == 0.0f;
                      });
    const auto put = [&](Index c, int code) {
      block[(c / channels * width + at) * channels + c % channels] =
          static_cast<std::uint8_t>(code + 128);
    };
    if (!ordinary) {
      for (Index c = 0; c < dim; ++c) put(c, 0);
      scale = 0.0f;
      error = zero ? 0.0f : simd::infinity;
      return;
    }
    const float of_code = detail::code_scale(key, dim);
    error = detail::encode(key, dim, of_code, put) * inverse;
    scale = of_code * inverse;
  }

  RowStore<std::uint8_t> codes_;     // [batch, kv_heads, blocks, block_bytes]
  RowStore<float> scales_, errors_;  // [batch, kv_heads, blocks, 16]
  Index len_ = 0;
};

}  // namespace quoka::inline QUOKA_ABI
