// Common code of the ggml backend's tests: backends loaded once, and comparisons.
#pragma once

#include "ggml/graph_of_one.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace quoka_test {

using namespace quoka_ggml;

inline Backends& backends() {
  static Backends all;
  return all;
}

// The sum of squared differences over that of squares, as llama.cpp's test of operators measures.
inline double relative_error(const std::vector<float>& x, const std::vector<float>& reference) {
  if (x.size() != reference.size()) return INFINITY;
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double of_x = x[i], of_reference = reference[i];
    error += (of_x - of_reference) * (of_x - of_reference), size += of_reference * of_reference;
  }
  if (!std::isfinite(error)) return INFINITY;
  return size > 0 ? error / size : error;
}

}  // namespace quoka_test
