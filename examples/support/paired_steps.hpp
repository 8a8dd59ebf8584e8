// Times chunk steps of several layers against each other, and adds them up to a whole prefill.
//
// Dense attention takes minutes for a prefill of 32,768 tokens. The cost per chunk is a smooth
// function of the cache's length, so it is measured at a few positions and integrated. All layers
// are timed in turn at one position before the next one, and the whole round is repeated. A machine
// that slows down slows all of them, and ratios are taken within a round.
#pragma once

#include "support/clock.hpp"
#include "support/methods.hpp"
#include "support/progress.hpp"
#include "support/statistics.hpp"

#include <quoka/rows/tensor.hpp>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace quoka_examples {

using quoka::Index;

// Queries, keys and values of one chunk, and a cache to attend to; generated, normal, the same each
// run.
struct GeneratedPrompt {
  using Tensor = quoka::Tensor<float>;

  GeneratedPrompt(const quoka::LayerShape& shape, Index chunk_len)
      : q(shape.batch, shape.q_heads, chunk_len, shape.head_dim),
        k(shape.batch, shape.kv_heads, chunk_len, shape.head_dim),
        v(shape.batch, shape.kv_heads, chunk_len, shape.v_dim == 0 ? shape.head_dim : shape.v_dim),
        out(shape.batch, shape.q_heads, chunk_len, v.dimension(3)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (Tensor* tensor : {&q, &k, &v})
      std::generate_n(tensor->data(), tensor->size(), [&] { return normal(random); });
  }

  // Caches `len` generated keys and values in the layer.
  void fill(AnyLayer& layer, Index len) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    Tensor more_k = k, more_v = v;
    layer.reserve(len + k.dimension(2));
    while (layer.kv_len() < len) {
      for (Tensor* tensor : {&more_k, &more_v})
        std::generate_n(tensor->data(), tensor->size(), [&] { return normal(random); });
      const quoka::TensorView<const float> keys = more_k, values = more_v;
      const Index n = std::min(len - layer.kv_len(), keys.len());
      layer.append(keys.slice(0, n), values.slice(0, n));
    }
  }

  Tensor q, k, v, out;
};

// Sets the layer's cache to its first kv_len keys, runs one chunk step and returns its seconds.
using TimedStep = std::function<double(Index kv_len)>;

// One layer's share of a model of layer_count layers. A method that chooses at some layers for the
// others is three: dense below first_sparse, two that choose, and all those that reuse.
struct TimedMethod {
  std::string name;
  LayerStack layers;
  std::vector<double> weights;
};
inline TimedMethod timed_method(const std::string& name, const quoka::LayerShape& shape,
                                const MethodOptions& options, Index layer_count = 36,
                                const quoka::AttentionOptions& attention = {}) {
  if (!shares_layers(name)) return {name, make_layers(name, shape, options, attention), {1.0}};
  const double all = static_cast<double>(layer_count);
  return {name,
          make_layers(name, shape, options, attention, {0, 2, 3}, layer_count, 2),
          {2.0 / all, 2.0 / all, (all - 4.0) / all}};
}

// A step for each method, whose layers are run in turn, each counting its weight; their caches get
// `len` generated keys. Methods and prompt must outlive the steps.
inline std::vector<TimedStep> filled_steps(std::vector<TimedMethod>& methods,
                                           GeneratedPrompt& prompt, Index len,
                                           quoka::ThreadPool& threads) {
  std::vector<TimedStep> steps;
  for (TimedMethod& method : methods) {
    for (auto& layer : method.layers) prompt.fill(*layer, len);
    steps.push_back([&method, &prompt, &threads](Index kv_len) {
      for (auto& layer : method.layers) layer->truncate(kv_len);
      double seconds = 0.0;
      for (std::size_t i = 0; i < method.layers.size(); ++i)
        seconds += method.weights[i] * seconds_of([&] {
                     method.layers[i]->forward(prompt.q, prompt.k, prompt.v, prompt.out, threads);
                   });
      for (auto& layer : method.layers) layer->truncate(kv_len);
      return seconds;
    });
  }
  return steps;
}

// Cache lengths to measure for a prompt of `length` tokens, descending: the first chunk, the one
// where selection begins (`budget` keys cached), and `steps` more up to the last chunk.
inline std::vector<Index> measured_positions(Index length, Index chunk_len, Index budget,
                                             Index steps) {
  const Index last = std::max<Index>(0, length - chunk_len);
  std::vector<Index> positions{0, last};
  if (budget < last) positions.insert(positions.end(), {budget, std::min(budget + 1, last)});
  const Index from = std::min(budget, last);
  for (Index i = 1; i < steps; ++i)  // where chunks begin
    positions.push_back((from + (last - from) * i / steps) / chunk_len * chunk_len);
  std::sort(positions.begin(), positions.end(), std::greater<>());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  return positions;
}

// seconds[step][position][round].
using StepSeconds = std::vector<std::vector<std::vector<double>>>;

// Each position in turn, the steps in turns there. positions descend: a step keeps the cache's
// first keys only. after_position(), if there is one, is called when a position's rounds are done.
inline StepSeconds time_steps(const std::vector<TimedStep>& steps,
                              const std::vector<Index>& positions, int rounds,
                              const std::string& label,
                              const std::function<void()>& after_position = {}) {
  Progress bar(label, std::ssize(positions) * (rounds + 1));
  StepSeconds seconds(steps.size());
  for (std::size_t p = 0; p < positions.size(); ++p) {
    const auto at_position = time_in_turns(
        steps.size(), rounds, [&](std::size_t s) { return steps[s](positions[p]); },
        [&](int done) { bar.update(static_cast<Index>(p) * (rounds + 1) + done); });
    for (std::size_t s = 0; s < steps.size(); ++s) seconds[s].push_back(at_position[s]);
    if (after_position) after_position();
  }
  return seconds;
}

// The whole prefill of `length` tokens: the chunks' costs, linear between the measured positions.
inline double integrate(const std::vector<Index>& positions, const std::vector<double>& seconds,
                        Index length, Index chunk_len) {
  double total = 0.0;
  for (Index kv_len = 0; kv_len < length; kv_len += chunk_len) {
    std::size_t right = positions.size() - 1;  // positions descend
    while (right > 0 && positions[right] < kv_len) --right;
    const std::size_t left = std::min(right + 1, positions.size() - 1);
    const double span = static_cast<double>(positions[right] - positions[left]);
    const double share = span > 0.0 ? static_cast<double>(kv_len - positions[left]) / span : 1.0;
    total += seconds[left] + (seconds[right] - seconds[left]) * std::min(share, 1.0);
  }
  return total;
}

// Steps over whole prefills.
struct PrefillSeconds {
  StepSeconds at;                           // the positions that were measured
  std::vector<std::vector<double>> totals;  // [step][round], integrated
};
inline PrefillSeconds time_prefills(const std::vector<TimedStep>& steps,
                                    const std::vector<Index>& positions, Index length,
                                    Index chunk_len, int rounds,
                                    const std::function<void()>& after_position = {}) {
  PrefillSeconds times{
      time_steps(steps, positions, rounds, std::to_string(length) + " tokens", after_position), {}};
  for (const auto& of_step : times.at) {
    std::vector<double>& totals = times.totals.emplace_back();
    for (std::size_t round = 0; round < of_step.front().size(); ++round) {
      std::vector<double> seconds;
      for (const auto& at_position : of_step) seconds.push_back(at_position[round]);
      totals.push_back(integrate(positions, seconds, length, chunk_len));
    }
  }
  return times;
}

}  // namespace quoka_examples
