// Definitions of key_sketch.hpp.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/formats/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/simd/code_dots.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Lengths of vectors that codes stand for: products of two such stay far from float's ends, so that
// rounding is relative to the lengths.
inline constexpr float least_coded_length = 1e-12f, most_coded_length = 1e12f;

// The scale at which the largest of x [dim] is coded as 127.
inline float code_scale(const float* x, Index dim) {
  float largest = 0.0f;
  for (Index c = 0; c < dim; ++c) {
    const float magnitude = std::abs(x[c]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest / 127.0f;
}

// x [dim] as code * scale, for finite x and a scale of code_scale() or more: code(c, value) is called
// with each integer in [-127, 127]. Returns an upper bound on the length of what is missed. Taken in
// units of the scale, where squares neither underflow nor overflow; a scale of 0 codes zeros. Each
// quotient is off by at most 2^-23 of 127, and so is what is left of it.
template <class Code>
float encode(const float* x, Index dim, float scale, Code&& code) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  float sum = 0.0f;
  for (Index c = 0; c < dim; ++c) {
    const float quotient = x[c] * inverse;
    const float rounded = std::nearbyint(quotient);
    const float rest = quotient - rounded;
    sum += rest * rest;
    code(c, static_cast<int>(rounded));
  }
  const float rounding = 127.0f * 0x1p-22f * std::sqrt(static_cast<float>(dim));
  return (std::sqrt(sum) * (1.0f + 1e-5f) + rounding) * scale;
}

// One key of a block of code_block keys.
struct SketchedKey {
  std::uint8_t* block;
  Index at;
  float *scale, *error;  // of the block's keys

  // key [dim].
  void write(const float* key, Index dim) const {
    const auto put = [&](Index c, int code) {
      block[simd::key_code_at(at, c)] = simd::stored_key_code(code);
    };
    const float inverse = inverse_norm_of_row(key, dim);
    if (inverse > 1.0f / most_coded_length && inverse < 1.0f / least_coded_length) {
      const float of_code = code_scale(key, dim);
      error[at] = encode(key, dim, of_code, put) * inverse * (1.0f + 1e-6f);
      scale[at] = of_code * inverse;
      return;
    }
    for (Index c = 0; c < dim; ++c) put(c, 0);
    const bool zero = std::all_of(key, key + dim, [](float x) { return x == 0.0f; });
    scale[at] = 0.0f;
    error[at] = zero ? 0.0f : simd::infinity;
  }
};

}  // namespace detail

QUOKA_FUNC void KeySketch::append(const Rows& k, Index capacity, ExecutorRef executor) {
  constexpr Index width = simd::code_block;
  if (codes_.batch() != k.batch() || codes_.heads() != k.heads() || dim_ != k.dim()) len_ = 0;
  detail::require_at_most("the length that the sketch knows", len_,
                          "the keys' (it was not told by truncate())", k.len());
  dim_ = k.dim();
  codes_.reshape(k.batch(), k.heads(), simd::code_block_bytes(k.dim()));
  scales_.reshape(k.batch(), k.heads(), width);
  errors_.reshape(k.batch(), k.heads(), width);
  codes_.reserve(simd::code_blocks(capacity)), codes_.resize(simd::code_blocks(k.len()));
  scales_.reserve(simd::code_blocks(capacity)), scales_.resize(simd::code_blocks(k.len()));
  errors_.reserve(simd::code_blocks(capacity)), errors_.resize(simd::code_blocks(k.len()));
  const Index begin = len_;
  floats_.reserve(executor.workers(), &k.format(), k.dim());
  executor.run(k.batch() * k.heads(), [&](Index task, int worker) {
    const Index b = task / k.heads(), head = task % k.heads();
    for (Index t = begin; t < k.len(); ++t) {
      const detail::SketchedKey key{codes_.row(b, head, t / width), t % width,
                                    scales_.row(b, head, t / width),
                                    errors_.row(b, head, t / width)};
      if (key.at == 0) {
        std::fill_n(key.block, codes_.dim(), simd::stored_key_code(0));
        std::fill_n(key.scale, width, 0.0f);
        std::fill_n(key.error, width, 0.0f);
      }
      key.write(floats_[worker].read(k.row(b, head, t)), k.dim());
    }
  });
  len_ = k.len();
}

QUOKA_FUNC void KeySketch::require_made_from(const Rows& k) {
  detail::require_sizes("the keys, other than those of the state,", k.sizes(),
                        {codes_.batch(), codes_.heads(), len_, dim_});
  if (len_ == 0) return;
  constexpr Index width = simd::code_block;
  constexpr Index most_bytes = 1024 * width;
  std::uint8_t block[most_bytes];
  float scale[width], error[width];
  if (codes_.dim() > most_bytes) return;
  floats_.reserve(1, &k.format(), dim_);
  const Index somewhere =
      static_cast<Index>((static_cast<std::uint64_t>(len_) * 0x9e3779b97f4a7c15u) >> 33) % len_;
  for (Index b = 0; b < k.batch(); ++b)
    for (Index head = 0; head < k.heads(); ++head)
      for (const Index t : {len_ - 1, somewhere}) {
        const Index at = t % width;
        const std::uint8_t* const kept = codes_.row(b, head, t / width);
        detail::SketchedKey{block, at, scale, error}.write(floats_[0].read(k.row(b, head, t)),
                                                           dim_);
        bool same = scale[at] == scales_.row(b, head, t / width)[at];
        for (Index c = 0; c < dim_; ++c)
          same = same && block[simd::key_code_at(at, c)] == kept[simd::key_code_at(at, c)];
        if (!same)
          detail::fail("the key at position", t,
                       "not the one that the state was told of; a state belongs to one sequence of",
                       "", len_);
      }
}

}  // namespace QUOKA_ABI
}  // namespace quoka
