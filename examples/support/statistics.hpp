// Numbers about samples, for all who time something.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace quoka_examples {

// Linear between neighbours, as numpy's default.
inline double quantile_of_sorted(std::span<const double> sorted, double share) {
  const double place = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (place - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}
inline double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return quantile_of_sorted(values, share);
}
inline double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

// above[i] / below[i]: of what was measured in the same round.
inline std::vector<double> ratios(std::span<const double> above, std::span<const double> below) {
  std::vector<double> result;
  for (std::size_t i = 0; i < above.size(); ++i) result.push_back(above[i] / below[i]);
  return result;
}
inline double median_ratio(std::span<const double> above, std::span<const double> below) {
  return median(ratios(above, below));
}

}  // namespace quoka_examples
