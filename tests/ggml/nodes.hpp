// Common code of the ggml backend's tests: backends loaded once, and comparisons.
#pragma once

#include "ggml/graph_of_one.hpp"

#include <quoka/attention/attention.hpp>

#include <gtest/gtest.h>

#include <cmath>

namespace quoka_test {

using namespace quoka_ggml;

inline Backends& backends() {
  static Backends all;
  return all;
}

// Are floats multiplied as floats by `automatic`? AMX's tiles split them into parts of bfloat16.
inline bool automatic_is_float() {
  return quoka::arithmetic_used(quoka::Arithmetic::automatic, quoka::float_format(),
                                quoka::float_format(), 64) == quoka::Arithmetic::float_;
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
