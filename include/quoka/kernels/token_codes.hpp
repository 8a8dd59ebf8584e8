// Decode over keys that are 8-bit codes: integer products, four queries at once.
//
// Against few queries a float kernel spends more on widening codes than on multiplying them. Here a
// key's 16 bytes are broadcast to the four quarters of a register, one for each query, and
// multiplied as they are. Queries are rounded to 15 bits, q = unit * (128 * high + low), which
// takes two instructions. |unit| is max|q| / 16,319, so a channel is off by at most max|q| /
// 32,638, and a logit by at most that times sum |k[c]|. For Arithmetic::automatic only. Sums within
// a group of 32 channels are exact integers; the group's scale, the sum over groups and the unit
// are in float.
#pragma once

#include <quoka/kernels/kernels.hpp>
#include <quoka/simd/code_layout.hpp>

#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Four queries: a TokenCodeGroup for each group of 32 channels, then units [4 keys][4 queries].
//   high, low  [2 halves][4 queries][16 channels]
//   start      [4 queries][4 lanes]: takes the keys' bias back; counts 128 times, as `high` does
struct TokenCodeGroup {
  alignas(64) std::int8_t high[2][64], low[2][64];
  alignas(64) std::int32_t start[16];
};
inline constexpr Index token_code_rows = 4;

inline Index token_code_bytes(Index dim) {
  return ceil_div(dim, simd::code_group) * static_cast<Index>(sizeof(TokenCodeGroup)) + 64;
}

// Queries [4][dim] to `codes`, aligned to 64 bytes. False, and nothing written, where one of them
// has an infinity, or numbers below 1e-30 alone. Logits of one with a NaN are NaN.
QUOKA_FUNC bool code_token_queries(const float* queries, Index dim, std::byte* codes);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/rows/format.hpp>
#include <quoka/simd/code_dots.hpp>

#include <algorithm>
#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// x[key][4 queries] of four keys, the ISA's own where it has fast products of codes. The same
// numbers bit for bit.
template <class Group, class Queries>
void code_token_logits(const std::byte* const (&rows)[4], const Queries* queries, Index groups,
                       const float* units, float* x) requires(!has_token_codes) {
  for (Index k = 0; k < 4; ++k)
    for (Index r = 0; r < 4; ++r) {
      float sum[4] = {};
      for (Index g = 0; g < groups; ++g) {
        const Group group(rows[k], g * code_group);
        alignas(64) float scale[lanes];
        store(scale, group.scale);
        for (Index lane = 0; lane < 4; ++lane) {
          const Index from = r * 16 + lane * 4;
          std::int32_t high = queries[g].start[r * 4 + lane], low = 0;
          for (Index c = 0; c < 8; ++c) {
            const std::int32_t code = group.codes[c / 4 * 16 + lane * 4 + c % 4] + code_bias;
            high += code * queries[g].high[c / 4][from + c % 4];
            low += code * queries[g].low[c / 4][from + c % 4];
          }
          sum[lane] = fma(static_cast<float>(high * 128 + low), scale[0], sum[lane]);
        }
      }
      x[k * 4 + r] = ((sum[0] + sum[2]) + (sum[1] + sum[3])) * units[r];
    }
}

}  // namespace simd
namespace detail {

QUOKA_FUNC bool code_token_queries(const float* queries, Index dim, std::byte* codes) {
  constexpr float most = 16319.0f;  // 127 * 128 + 63
  float units[token_code_rows];
  for (Index r = 0; r < token_code_rows; ++r) {
    float poison = 0.0f, largest = 0.0f;
    for (Index c = 0; c < dim; ++c) {
      const float x = queries[r * dim + c];
      poison += x * 0.0f;  // NaN for NaN and infinity
      largest = std::max(largest, x < 0.0f ? -x : x);
    }
    units[r] = largest / most;
    if (largest == infinity) return false;
    if (poison != 0.0f)
      units[r] = poison;  // NaN: so are its logits, and the other rows keep theirs
    else if (largest != 0.0f && largest < 1e-30f)
      return false;  // the quotients would lose their bits
  }
  const Index groups = ceil_div(dim, simd::code_group);
  auto* const group_of = reinterpret_cast<TokenCodeGroup*>(codes);
  std::memset(codes, 0, static_cast<std::size_t>(token_code_bytes(dim)));
  for (Index r = 0; r < token_code_rows; ++r) {
    const float inverse = units[r] > 0.0f ? 1.0f / units[r] : 0.0f;
    for (Index c = 0; c < dim; ++c) {
      const float x = std::clamp(queries[r * dim + c] * inverse, -most, most);
      const int code = simd::round_to_int16(x), high = (code + 64) >> 7, low = code - (high << 7);
      TokenCodeGroup& group = group_of[c / simd::code_group];
      const Index half = c % simd::code_group / 16, at = r * 16 + c % 16;
      group.high[half][at] = static_cast<std::int8_t>(high);
      group.low[half][at] = static_cast<std::int8_t>(low);
      group.start[at / 4] -= simd::code_bias * high + low;
    }
  }
  auto* const to = reinterpret_cast<float*>(group_of + groups);
  for (Index i = 0; i < 16; ++i) to[i] = units[i % token_code_rows];
  return true;
}

// Logits x[key][4] of `count` keys, rounded up to whole fours, against coded queries. Group: what
// Row::Group of a format is that has_codes. One row of `upcoming`, if given, is prefetched per key.
template <class Group>
void token_code_logits(const RowRun& keys, Index count, const RowShape& shape,
                       const std::byte* coded, float* x, const RowsAhead* upcoming) {
  static_assert(Group::channels == simd::code_group);
  const Index groups = ceil_div(shape.dim, simd::code_group);
  const auto* const queries = reinterpret_cast<const TokenCodeGroup*>(coded);
  const auto* const units = reinterpret_cast<const float*>(queries + groups);
  for (Index i = 0; i < count; i += 4, x += 16) {
    ConstRow rows[4];
    for (Index j = 0; j < 4; ++j) {
      rows[j] = keys[std::min(i + j, count - 1)];
      if (upcoming != nullptr) prefetch_rows(*upcoming, i + j);
    }
    simd::code_token_logits<Group>(rows, queries, groups, units, x);
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES_KERNELS
