// The median, for all who time something.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace quoka_examples {

// The middle one; of an even number the upper middle one.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace quoka_examples
