// Dot products of 8-bit codes: blocks of 16 keys against some queries, exact in 32-bit integers.
//
//   dot[m][i] = sum over channels of key[i][c] * query[m][c]
//
// of which the maximum over the queries is kept: their codes have one scale, so that integers
// compare as scores do. Codes are in [-127, 127], laid out as code_layout.hpp says. The
// bias of the keys' codes is taken back from each dot product (code_offset). Without an ISA's own
// functions (has_code_dots) plain integer loops give the same numbers.
//
// AVX2 and AVX-512 without VNNI add products in 16 bits, with saturation: code_run = 2 steps, four
// channels of a query against bytes of at most 255. Nothing saturates as long as those of these
// codes that have one sign add up to most_run_sum at most: 255 * 128 = 32,640. Query codes keep to
// that (run_sum) by a larger scale; codes of keys are the same on every ISA. On normal data it is
// 1.6 times as large; a code alone may still be 126.
#pragma once

#include <quoka/simd/code_layout.hpp>
#include <quoka/simd/simd.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// Where channel c of query m of `rows` lies, in bytes; a query's code is stored as it is. Channels
// beyond the last hold 0.
constexpr Index query_code_at(Index rows, Index m, Index c) {
  return (c / code_channels * rows + m) * code_channels + c % code_channels;
}
// Whole steps of the `rows` queries: codes [n, and zeros to the end of a step] of query m from
// channel `first` on, where a step begins.
inline void store_query_codes(const std::int8_t* codes, Index n, Index rows, Index m, Index first,
                              std::int32_t* queries) {
  std::int32_t* to = queries + first / code_channels * rows + m;
  for (Index c = 0; c < n; c += code_channels, to += rows)
    std::memcpy(to, codes + c, code_channels);
}
template <Index Count>
std::int32_t sum_of_codes(const std::int8_t* codes) {
  std::int32_t sum = 0;
  for (Index c = 0; c < Count; ++c) sum += codes[c];
  return sum;
}
// The correction for the keys' bias, from the sum of a query's codes.
constexpr std::int32_t code_offset(std::int32_t sum_of_query) {
  return -product_bias * sum_of_query;
}

// Query codes: the sum of those of one sign that products are added up over in 16 bits.
inline constexpr int most_run_sum = 128;

// The largest such sum, without its sign, of query [dim]: 0 where products are not added in 16
// bits.
template <class T>
T run_sum(const T* query, Index dim) {
  T largest{};
  constexpr Index pair = 2, run = code_run * code_channels;
  if constexpr (code_run > 0)
    for (Index begin = 0; begin < dim; begin += run)
      for (Index lane = begin; lane < begin + code_channels; lane += pair) {
        T positive{}, negative{};
        for (Index step = lane; step < begin + run; step += code_channels)
          for (Index c = step; c < std::min(step + pair, dim); ++c)
            (query[c] > T{} ? positive : negative) += query[c];
        largest = std::max(largest, std::max(positive, -negative));
      }
  return largest;
}

// The scale that a query [dim] of float needs at least for its codes to keep to that. Rounding may
// add 1 to each: 1/2 to nearest.
inline float run_scale(const float* query, Index dim) {
  return run_sum(query, dim) / static_cast<float>(most_run_sum - 2 * code_run);
}

// A pair of blocks against the first Queries of the queries: best[0, 16) of keys.codes[0], best[16,
// 32) of keys.codes[1] are raised to the dot products; best is aligned to 64 bytes.
template <int Queries>
void code_dots_of(const KeyPair& keys, const QueryCodes& queries,
                  std::int32_t* best) requires(!has_code_dots) {
  for (const std::uint8_t* block : keys.codes) {
    std::int32_t dot[static_cast<std::size_t>(Queries)][code_block];
    for (int m = 0; m < Queries; ++m)
      for (std::int32_t& x : dot[m]) x = queries.offsets[m];
    for (Index s = 0; s < queries.steps; ++s) {
      const std::uint8_t* const key = block + s * code_block * code_channels;
      for (int m = 0; m < Queries; ++m) {
        std::int8_t query[code_channels];
        std::memcpy(query, queries.codes + s * queries.stride + m, sizeof query);
        for (Index i = 0; i < code_block; ++i)
          for (Index c = 0; c < code_channels; ++c)
            dot[m][i] += static_cast<std::int32_t>(key[i * code_channels + c]) * query[c];
      }
    }
    for (int m = 0; m < Queries; ++m)
      for (Index i = 0; i < code_block; ++i) best[i] = std::max(best[i], dot[m][i]);
    best += code_block;
  }
}

// kernel(Constant) of `height`: a multiple of four up to Most, or 2, or 1 where that is the Least.
template <int Most, int Least, class Kernel>
void with_code_height(Index height, Kernel&& kernel) {
  constexpr int lower = Most > 4 ? Most - 4 : Most / 2;
  if (height == Most)
    kernel(Constant<Most>{});
  else if constexpr (lower >= Least)
    with_code_height<lower, Least>(height, kernel);
}

// How many of `left` queries the next tile takes, `most` at most. Tiles of four and more are of
// nearly one size.
inline Index code_tile_height(Index left, Index most) {
  if (left < 4) return left >= 2 ? 2 : 1;
  const Index equal = ceil_div(left, ceil_div(left, most));
  return std::min(round_up(equal, 4), left / 4 * 4);
}

// Products of codes, each by itself, as floats:
//
//   products[m][i] = sum over channels of key[i][c] * query[m][c]
//
// Exact below 2^24 in magnitude: up to 1,040 channels. has_fast_code_products: the ISA has a kernel
// of its own; elsewhere a query at a time goes through code_dots_of, which gives the same numbers.

// products[m * code_pair + i] of the first Queries of the queries; i < 16 is of keys.codes[0].
// Products are aligned to 64 bytes.
template <int Queries>
void code_products_of(const KeyPair& keys, const QueryCodes& queries,
                      float* products) requires(!has_fast_code_products) {
  for (int m = 0; m < Queries; ++m) {
    alignas(64) std::int32_t dots[code_pair];
    std::fill_n(dots, code_pair, std::numeric_limits<std::int32_t>::min());
    code_dots_of<1>(m == 0 ? keys : keys.alone(), queries.from(m), dots);
    for (const std::int32_t dot : dots) *products++ = static_cast<float>(dot);
  }
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
