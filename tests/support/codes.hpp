// Queries of 8-bit codes as the ISA's dot products take them.
#pragma once

#include <quoka/simd/code_dots.hpp>

#include <span>

namespace quoka_test {

// Makes codes of one query smaller, by one factor, where products in 16 bits would saturate.
inline void keep_to_run_sums(std::span<int> query) {
  const int sum = quoka::simd::run_sum(query.data(), std::ssize(query));
  if (sum <= quoka::simd::most_run_sum) return;
  for (int& code : query) code = code * quoka::simd::most_run_sum / sum;
}

}  // namespace quoka_test
