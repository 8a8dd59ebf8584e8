// 8-bit codes of rows of floats: keys as a sketch keeps them (select/key_sketch.hpp), and queries
// as products take them (code_units.hpp). A row x is scale * code + an error, code[c] in [-127,
// 127].
//
//   encode_key      a key of a block: its direction's codes, scale and error, and its length
//   encode_query    a query's codes (CodedRows of code_units.hpp); the error of the rounding is
//                   bounded by its length
//   gather_block    a block of keys from where they lie in other blocks
//
// Layout of codes: simd/code_dots.hpp. About 4 operations per channel to encode.
#pragma once

#include <quoka/kernels/kernels.hpp>
#include <quoka/simd/code_layout.hpp>

#include <algorithm>
#include <cstdint>

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/simd/code_dots.hpp>
#include <quoka/simd/simd.hpp>
#include <cmath>
#include <cstring>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The layout, the same for all instructions: a block of code_block keys, a step of code_channels
// channels, and a pair of blocks, which products take together.
using simd::code_block;
using simd::code_block_bytes;
using simd::code_blocks;
using simd::code_channels;
using simd::code_pair;
using simd::code_steps;
using simd::KeyPair;
using simd::QueryCodes;
inline constexpr Index code_line = code_block * code_channels;  // bytes of a block's step

// Are products of codes faster than those of floats, with some 64 rows of a KV head, or with those
// of every query?
QUOKA_FUNC bool codes_beat_float(bool every_query);

// Lengths of vectors that codes stand for: products of two such stay far from float's ends, so that
// rounding is relative to the lengths.
inline constexpr float least_coded_length = 1e-12f, most_coded_length = 1e12f;

// ---- keys ---------------------------------------------------------------------------------------

// The place of a key: number `at` of a block of codes, and of three numbers of the block's keys.
struct KeyCodes {
  std::uint8_t* block;
  Index at;
  float *scale, *error, *length;  // [code_block]
};

// Zeros, in place of key `at` of a block.
inline void clear_key_codes(std::uint8_t* block, Index at, Index dim) {
  for (Index c = 0; c < dim; ++c) block[simd::key_code_at(at, c)] = simd::stored_key_code(0);
}
// All keys of a block.
inline void clear_block_codes(std::uint8_t* block, Index bytes) {
  std::fill_n(block, bytes, simd::stored_key_code(0));
}

// key [dim].
QUOKA_FUNC void encode_key(const float* key, Index dim, const KeyCodes& to);

// Has key `at` the same codes in both blocks?
inline bool same_key_codes(const std::uint8_t* a, const std::uint8_t* b, Index at, Index dim) {
  bool same = true;
  for (Index c = 0; c < dim; ++c)
    same = same && a[simd::key_code_at(at, c)] == b[simd::key_code_at(at, c)];
  return same;
}

// Keys of a block that lie in others: key i is number at[i] of block[i], and the block ahead[i] is
// prefetched, unless it is null.
struct ScatteredKeys {
  const std::uint8_t* block[code_block];
  const std::uint8_t* ahead[code_block];
  Index at[code_block];
};
// The codes of the first n > 0 keys to a block.
QUOKA_FUNC void gather_block(const ScatteredKeys& keys, Index n, Index steps, std::uint8_t* to);

#if QUOKA_DEFINES_KERNELS

QUOKA_FUNC bool codes_beat_float(bool every_query) {
  return every_query ? simd::has_fast_code_products : simd::code_dots_beat_float;
}

// The scale at which the largest of x [dim] is coded as 127, whichever way quotients are rounded.
inline float code_scale(const float* x, Index dim) {
  simd::Packet most = simd::zero();
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet packet = simd::load_unaligned(x + c);
    most = simd::max(most, simd::max(packet, simd::sub(simd::zero(), packet)));
  }
  float largest = simd::reduce_max(most);
  for (; c < dim; ++c) largest = simd::max(largest, std::abs(x[c]));
  return largest * ((1.0f + 0x1p-20f) / 127.0f);
}

// x [dim] as code * scale, for finite x and a scale of code_scale() or more: put(c, n, codes) is
// called with integers in [-127, 127] of the channels [c, c + n), c a multiple of code_slab, and
// with zeros up to code_slab. Returns an upper bound on the length of the error. Taken in units of
// the scale, where squares neither underflow nor overflow; a scale of 0 codes zeros. Each quotient
// is off by at most 2^-23 of 127, and so is what is left of it.
inline constexpr Index code_slab = 64;

template <class Put>
float encode(const float* x, Index dim, float scale, Put&& put) {
  const float magic = 12582912.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  alignas(64) float shifted[code_slab];
  std::int8_t codes[code_slab];
  simd::Packet sums = simd::zero();
  float sum = 0.0f;
  for (Index first = 0; first < dim; first += code_slab) {
    const Index n = std::min(code_slab, dim - first);
    Index c = 0;
    for (; c + simd::lanes <= n; c += simd::lanes) {
      const simd::Rounded rounded(
          simd::mul(simd::load_unaligned(x + first + c), simd::broadcast(inverse)),
          simd::broadcast(magic));
      sums = simd::fma(rounded.fraction, rounded.fraction, sums);
      simd::store(shifted + c, rounded.shifted);
    }
    for (; c < n; ++c) {
      const simd::Rounded rounded(x[first + c] * inverse, magic);
      sum = simd::fma(rounded.fraction, rounded.fraction, sum);
      shifted[c] = rounded.shifted;
    }
    std::fill_n(shifted + n, code_slab - n, 0.0f);
    for (c = 0; c < code_slab; ++c) codes[c] = static_cast<std::int8_t>(simd::bits_of(shifted[c]));
    put(first, n, codes);
  }
  const float rounding = 127.0f * 0x1p-22f * std::sqrt(static_cast<float>(dim));
  return (std::sqrt(simd::reduce_add(sums) + sum) * (1.0f + 1e-5f) + rounding) * scale;
}

// ---- keys ---------------------------------------------------------------------------------------

QUOKA_FUNC void encode_key(const float* key, Index dim, const KeyCodes& to) {
  const auto put = [&](Index first, Index n, const std::int8_t* codes) {
    std::uint8_t stored[code_slab];
    for (Index c = 0; c < code_slab; ++c) stored[c] = simd::stored_key_code(codes[c]);
    std::uint8_t* const at = to.block + simd::key_code_at(to.at, first);
    Index c = 0;
    for (; c + code_channels <= n; c += code_channels)
      std::memcpy(at + c * code_block, stored + c, code_channels);
    for (Index i = c; i < n; ++i) at[c * code_block + i - c] = stored[i];
  };
  const float inverse = inverse_norm_of_row(key, dim);
  if (inverse > 1.0f / most_coded_length && inverse < 1.0f / least_coded_length) {
    const float unit = code_scale(key, dim);
    to.error[to.at] = encode(key, dim, unit, put) * inverse * (1.0f + 1e-6f);
    to.scale[to.at] = unit * inverse;
    to.length[to.at] = 1.0f / inverse;
    return;
  }
  clear_key_codes(to.block, to.at, dim);
  const bool zero = std::all_of(key, key + dim, [](float x) { return x == 0.0f; });
  to.scale[to.at] = to.length[to.at] = 0.0f;
  to.error[to.at] = zero ? 0.0f : infinity;
}

QUOKA_FUNC void gather_block(const ScatteredKeys& keys, Index n, Index steps, std::uint8_t* to) {
  for (Index i = 0; i < n; ++i) {
    const std::uint8_t* const from = keys.block[i] + keys.at[i] * code_channels;
    // A key's codes lie in every line of its block.
    for (Index s = 0; s < steps; ++s) {
      std::memcpy(to + (s * code_block + i) * code_channels, from + s * code_line, code_channels);
      if (keys.ahead[i] != nullptr) prefetch(keys.ahead[i] + s * code_line);
    }
  }
}

// ---- queries ------------------------------------------------------------------------------------

// The length of a row [dim], rounded up.
inline float coded_length(const float* row, Index dim) {
  return std::sqrt(sum_of_squares(row, dim)) * (1.0f + 1e-5f);
}

// The least unit with which products of its codes do not overflow.
inline float query_unit(const float* row, Index dim) {
  return std::max(code_scale(row, dim), simd::run_scale(row, dim));
}

// Codes of a row [dim] to codes [steps][stride], as query m, and what takes the keys' bias back to
// `offset`. Returns the length of the error, rounded up.
inline float encode_query(const float* row, Index dim, float unit, Index m, Index stride,
                          std::int32_t* codes, std::int32_t& offset) {
  std::int32_t sum = 0;
  const float missed = encode(row, dim, unit, [&](Index channel, Index n, const std::int8_t* some) {
    simd::store_query_codes(some, n, stride, m, channel, codes);
    sum += simd::sum_of_codes<code_slab>(some);
  });
  offset = simd::code_offset(sum);
  return missed;
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
