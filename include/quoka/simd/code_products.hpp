// Products of 8-bit codes, each by itself: two blocks of 16 keys against some queries, as floats.
//
//   products[m][i] = sum over channels of key[i][c] * query[m][c]
//
// Codes lie as code_dots.hpp has them. Exact below 2^24 in magnitude: up to 1,040 channels.
// has_fast_code_products says whether the ISA has a kernel of its own; elsewhere a query at a time
// goes through code_dots_of, which gives the same numbers.
//
// And pairs of weights, positive floats of which the upper halves share 32 bits: half the memory where
// three digits are enough.
#pragma once

#include <quoka/simd/code_dots.hpp>
#include <quoka/simd/isa/weight_pairs.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// Keys of two blocks.
inline constexpr Index code_pair = 2 * code_block;

// products[m * code_pair + i] of `Queries` of the `stride` queries that lie side by side in `queries`;
// i < 16 is of keys[0]. Keys and products are aligned to 64 bytes.
template <int Queries>
void code_products_of(const std::uint8_t* const (&keys)[2], const std::int32_t* queries,
                      Index stride, Index steps, const std::int32_t* offset, float* products,
                      const LaterBlocks& later) requires(!has_fast_code_products) {
  for (int m = 0; m < Queries; ++m) {
    alignas(64) std::int32_t dots[code_pair] = {};
    code_dots_of<1>(CodeScores::sum, keys, queries + m, stride, steps, offset + m, dots,
                    m == 0 ? later : LaterBlocks{});
    for (const std::int32_t dot : dots) *products++ = static_cast<float>(dot);
  }
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
