// Common code of the ggml backend's tests: backends loaded once, and comparisons, with the library too.
#pragma once

#include "ggml/graph_of_one.hpp"
#include "ggml/known_cells.hpp"
#include "ggml/node.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

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

// What the library makes of a node of one stream, whose cache it knows from earlier calls or sees for the first time.
inline std::vector<float> by_the_library(
    const GraphOfOne& graph, const quoka::MaskedOptions& masked = {},
    quoka::Arithmetic arithmetic = quoka::Arithmetic::automatic, KnownCells* known = nullptr) {
  const Node node(*graph.out);
  const quoka::SerialExecutor alone;
  std::vector<float> floats[2];
  const auto rows = [&](const ggml_tensor& t, std::vector<float>& to) {
    if (const quoka::Format* const format = format_of_type(t.type))
      return rows_of<quoka::Rows>(t, *format, 0, 2, 1);
    to.resize(static_cast<std::size_t>(ggml_nelements(&t)));
    dequantise(t, to.data(), alone);
    return quoka::Rows(quoka::TensorView<const float>(to.data(), {1, t.ne[2], t.ne[1], t.ne[0]}));
  };
  auto* const out = static_cast<float*>(graph.out->data);
  std::fill_n(out, ggml_nelements(graph.out), std::numeric_limits<float>::quiet_NaN());
  KnownCells fresh;
  quoka::MaskedAttention().run(
      std::vector{quoka::MaskedStream{
          .q = rows_of<quoka::Rows>(node.q, quoka::format_of<float>(), 0, 2, 1),
          .k = rows(node.k, floats[0]),
          .v = rows(node.v, floats[1]),
          .mask = rows_of<quoka::Rows>(*node.mask, quoka::format_of<Eigen::half>(), 0, 2, 1),
          .out = rows_of<quoka::OutputRows>(*graph.out, quoka::format_of<float>(), 0, 1, 2),
          .known = known != nullptr ? known : &fresh}},
      masked, {.scale = node.scale, .arithmetic = arithmetic}, alone);
  return {out, out + ggml_nelements(graph.out)};
}

}  // namespace quoka_test
