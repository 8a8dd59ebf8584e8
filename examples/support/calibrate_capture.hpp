// support/calibration.hpp on captured layers.
#pragma once

#include "support/calibration.hpp"
#include "support/dense_reference.hpp"
#include "support/layer_policy_file.hpp"
#include "support/require.hpp"

#include <functional>

namespace quoka_examples {

// The loss of these layers by a selector. Their names hold their numbers. progress(done) is called
// with the number of layers that are done. Throws std::invalid_argument as layer_numbers and
// Calibration do, for layers of different shapes, for a single chunk, and for a budget that keeps
// all of the longest past.
inline Calibration calibrate_capture(const DenseReference& reference, const std::string& selector,
                                     const MethodOptions& options,
                                     const std::vector<nlohmann::json>& ladder,
                                     quoka::ThreadPool& threads,
                                     const std::function<void(Index)>& progress = {}) {
  const std::vector<LayerCapture>& layers = reference.layers();
  const quoka::LayerShape shape = shape_of(layers.front());
  const Index chunk = reference.chunk(), longest_past = (reference.len() - 1) / chunk * chunk;
  if (longest_past == 0)
    refuse("a capture of ", reference.len(), " tokens is one chunk of ", chunk,
           ": nothing is selected from");
  for (const nlohmann::json& budget : ladder)
    if (budget_from("a budget of the ladder", budget).count(longest_past) == longest_past)
      refuse("a budget of ", budget.dump(), " keeps all of the longest past, ", longest_past,
             " tokens: it cannot be measured");
  for (const LayerCapture& layer : layers)
    if (const auto other = shape_of(layer);
        std::tie(other.batch, other.q_heads, other.kv_heads, other.head_dim, other.v_dim) !=
        std::tie(shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_dim))
      refuse(layer.name, " and ", layers.front().name, " are of different shapes");
  Calibration calibration(selector, shape, options, ladder, layer_numbers(layers),
                          reference.attention());
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const quoka::TensorView<const float> q = layers[layer].q, k = layers[layer].k,
                                         v = layers[layer].v;
    for (Index begin = 0; begin < reference.len(); begin += chunk) {
      const Index n = reference.chunk_len(begin);
      calibration.add(static_cast<Index>(layer), q.slice(begin, n), k.slice(begin, n),
                      v.slice(begin, n), reference.out(layer, begin), threads);
    }
    if (progress) progress(static_cast<Index>(layer) + 1);
  }
  return calibration;
}

}  // namespace quoka_examples
