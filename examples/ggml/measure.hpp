// What the programs that time something share.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>
#include <vector>

namespace quoka_ggml {

// Seconds: of the wall's clock, and of all processors together.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline double cpu() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// The middle one; of an even number the upper middle one.
inline double median(std::vector<double> x) {
  const auto middle = x.begin() + std::ssize(x) / 2;
  std::nth_element(x.begin(), middle, x.end());
  return *middle;
}

}  // namespace quoka_ggml
