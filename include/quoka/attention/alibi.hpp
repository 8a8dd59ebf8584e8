// ALiBi's slopes for models that do not bring them.
#pragma once

#include <quoka/base/check.hpp>

#include <cmath>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// One slope per query head, for AttentionOptions::alibi_slopes, or mask_factors where a mask holds the
// distances: 2^(-max_bias i / n) for i = 1..n, n the largest power of two up to q_heads, and for further
// heads those halfway between. max_bias 8 is the paper's. Throws std::invalid_argument for q_heads below 1, and for a
// max_bias that is negative, NaN or above 1e30.
// Source: Press et al., "Train Short, Test Long", ICLR 2022, arXiv 2108.12409.
inline std::vector<float> alibi_slopes(Index q_heads, float max_bias = 8.0f) {
  detail::require_at_least("q_heads", q_heads, 1);
  if (!(max_bias >= 0.0f && max_bias <= detail::most_option))
    detail::fail_range("max_bias", static_cast<double>(max_bias), "[0, 1e30]");
  const double whole = std::exp2(std::floor(std::log2(static_cast<double>(q_heads))));
  std::vector<float> slopes;
  for (double h = 0; h < static_cast<double>(q_heads); ++h) {
    const double power = h < whole ? h + 1 : h - whole + 0.5;
    slopes.push_back(static_cast<float>(std::exp2(-static_cast<double>(max_bias) * power / whole)));
  }
  return slopes;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
