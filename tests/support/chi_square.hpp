// Pearson's test that counts are draws of a distribution.
#pragma once

#include <cmath>
#include <ranges>

namespace quoka_examples {

// sum of (count - expected)^2 / expected.
template <std::ranges::range Counts>
double chi_square(const Counts& counts, double expected) {
  double sum = 0.0;
  for (const auto count : counts) {
    const double off = static_cast<double>(count) - expected;
    sum += off * off / expected;
  }
  return sum;
}

// 99.9 % of the distribution with this many degrees of freedom lie below (Wilson and Hilferty
// 1931).
inline double chi_square_bound(double freedom) {
  const double a = 2.0 / (9.0 * freedom), root = 1.0 - a + 3.0902 * std::sqrt(a);
  return freedom * root * root * root;
}

}  // namespace quoka_examples
