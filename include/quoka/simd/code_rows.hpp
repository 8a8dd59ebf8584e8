// Dot products of 8-bit rows where they lie: 16 keys, each with a scale per 32 channels, against some
// queries of one scale.
//
//   score[i] = max, or sum, over queries m of sum over groups g of
//              scales[i][g] * (sum over channels of g of (keys[i][c] - 128) * query[m][c])
//
// Integers are exact, their scaled sums are float's. Queries lie as in code_dots.hpp, [step][query][4
// channels], with offsets [group][query] that take the keys' bias back. A query lies in a lane, so
// that a key's four channels are broadcast, and nothing is transposed.
#pragma once

#include <quoka/simd/code_dots.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

struct CodeRows {
  const std::uint8_t* keys;  // [16][groups * 32]
  const float* scales;       // [16][groups]
  Index groups;
};
struct CodeQueries {
  const std::int32_t* codes;    // [steps][rows], groups * 8 steps
  const std::int32_t* offsets;  // [groups][rows]
  Index rows;
};

template <CodeScores Over>
void code_row_scores(const CodeRows& keys, const CodeQueries& queries,
                     float* scores) requires(!has_code_dots) {
  for (Index i = 0; i < code_block; ++i) {
    const std::uint8_t* const key = keys.keys + i * keys.groups * code_row_group;
    float best = Over == CodeScores::max ? -infinity : 0.0f;
    for (Index m = 0; m < queries.rows; ++m) {
      float sum = 0.0f;
      for (Index g = 0; g < keys.groups; ++g) {
        std::int32_t dot = queries.offsets[g * queries.rows + m];
        for (Index s = g * code_row_steps; s < (g + 1) * code_row_steps; ++s) {
          std::int8_t query[code_channels];
          std::memcpy(query, queries.codes + s * queries.rows + m, sizeof query);
          for (Index c = 0; c < code_channels; ++c)
            dot += static_cast<std::int32_t>(key[s * code_channels + c]) * query[c];
        }
        sum = fma(static_cast<float>(dot), keys.scales[i * keys.groups + g], sum);
      }
      best = Over == CodeScores::max ? std::max(best, sum) : best + sum;
    }
    scores[i] = best;
  }
}

// squares[i] = sum over groups g of scales[i][g]^2 * (sum over channels of g of (keys[i][c] - 128)^2).
template <class Keys>
void code_row_squares(const Keys& keys, float* squares) requires(!has_code_dots) {
  for (Index i = 0; i < code_block; ++i) {
    squares[i] = 0.0f;
    for (Index g = 0; g < keys.groups; ++g) {
      const std::uint8_t* const key = keys.keys + (i * keys.groups + g) * code_row_group;
      const float scale = keys.scales[i * keys.groups + g];
      std::int32_t sum = 0;
      for (Index c = 0; c < code_row_group; ++c) {
        const std::int32_t x = key[c] - code_bias;
        sum += x * x;
      }
      squares[i] = fma(static_cast<float>(sum), scale * scale, squares[i]);
    }
  }
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
