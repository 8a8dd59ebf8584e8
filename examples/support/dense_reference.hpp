// Dense attention over captured layers, which every method is held against.
#pragma once

#include "support/capture.hpp"
#include "support/paired_steps.hpp"

#include <quoka/attention/diagnostics.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/methods/oracle.hpp>

#include <map>
#include <tuple>

namespace quoka_examples {

inline quoka::LayerShape shape_of(const LayerCapture& layer) {
  return {.q_heads = layer.q.dimension(1),
          .kv_heads = layer.k.dimension(1),
          .head_dim = layer.q.dimension(3),
          .v_dim = layer.v.dimension(3),
          .batch = layer.q.dimension(0)};
}

// Outputs, the log-sum-exp of each chunk's past, and what the oracle selects. Memory: an output and
// a number per query row, and the selections asked for. The layers must outlive it.
class DenseReference {
 public:
  // Throws std::invalid_argument for a chunk below 1 and for layers of different length.
  DenseReference(const std::vector<LayerCapture>& layers, Index chunk,
                 const quoka::AttentionOptions& attention, quoka::ThreadPool& threads)
      : layers_(layers), chunk_(chunk), attention_(attention), threads_(threads) {
    if (layers.empty() || chunk < 1)
      throw std::invalid_argument("there are " + std::to_string(layers.size()) +
                                  " layers and chunks of " + std::to_string(chunk) +
                                  " tokens; at least 1 of each is needed");
    for (const LayerCapture& layer : layers) {
      if (layer.q.dimension(2) != len())
        throw std::invalid_argument(layer.name + " has " + std::to_string(layer.q.dimension(2)) +
                                    " tokens, " + layers.front().name + " has " +
                                    std::to_string(len()));
      seconds_ += run(layer);
    }
  }

  const std::vector<LayerCapture>& layers() const { return layers_; }
  quoka::AttentionOptions attention() const { return attention_.view(); }
  Index len() const { return layers_.front().q.dimension(2); }
  Index chunk() const { return chunk_; }
  Index chunk_len(Index begin) const { return std::min(chunk_, len() - begin); }
  double seconds() const { return seconds_; }  // of attention, all layers
  // FLOPs of attention to the chunk that begins there: 2 (head_dim + v_dim) per visible (query,
  // key) pair.
  double flops(std::size_t layer, Index begin) const {
    const auto& [q, v] = std::tie(layers_[layer].q, layers_[layer].v);
    const double n = static_cast<double>(chunk_len(begin));
    const double pairs = n * static_cast<double>(begin) + n * (n + 1.0) / 2.0;
    return 2.0 * static_cast<double>(q.dimension(0) * q.dimension(1)) *
           static_cast<double>(q.dimension(3) + v.dimension(3)) * pairs;
  }
  // [batch, q_heads, chunk_len, v_dim] of the chunk that begins there.
  quoka::TensorView<const float> out(std::size_t layer, Index begin) const {
    return quoka::TensorView<const float>(outs_[layer]).slice(begin, chunk_len(begin));
  }
  // [batch, q_heads, chunk_len] over the past of that chunk.
  const quoka::Tensor<float, 3>& past_lse(std::size_t layer, Index begin) const {
    return lses_[layer][static_cast<std::size_t>(begin / chunk_)];
  }
  // The `count` keys with the most attention mass of that chunk's; found when first asked for.
  const quoka::Selection& oracle(std::size_t layer, Index begin, Index count) {
    quoka::Selection& found = oracles_[{layer, begin, count}];
    if (found.kv_len() > 0 || begin == 0) return found;
    const quoka::TensorView<const float> q = layers_[layer].q, k = layers_[layer].k;
    const quoka::OracleSelector selector({.budget = quoka::Budget::keys(count)});
    quoka::OracleSelector::State state;
    selector.select(quoka::SelectorInput{.q = q.slice(begin, chunk_len(begin)),
                                         .k = k.slice(0, begin),
                                         .logits = attention(),
                                         .capacity = begin},
                    state, found, threads_);
    return found;
  }

 private:
  double run(const LayerCapture& layer) {
    const quoka::TensorView<const float> q = layer.q, k = layer.k, v = layer.v;
    Tensor<float>& outs = outs_.emplace_back(q.batch(), q.heads(), q.len(), v.dim());
    auto& lses = lses_.emplace_back();
    double seconds = 0.0;
    for (Index begin = 0; begin < len(); begin += chunk_) {
      const Index n = chunk_len(begin);
      const quoka::TensorView<const float> rows = q.slice(begin, n), past_k = k.slice(0, begin);
      const auto to = quoka::TensorView<float>(outs).slice(begin, n);
      seconds += seconds_of([&] {
        quoka::attention(rows, {past_k, v.slice(0, begin)}, {k.slice(begin, n), v.slice(begin, n)},
                         to, attention(), threads_);
      });
      lses.push_back(quoka::past_lse(rows, past_k, attention(), threads_));
    }
    return seconds;
  }

  const std::vector<LayerCapture>& layers_;
  Index chunk_;
  quoka::OwnedAttentionOptions attention_;
  quoka::ThreadPool& threads_;
  double seconds_ = 0.0;
  std::vector<Tensor<float>> outs_;
  std::vector<std::vector<quoka::Tensor<float, 3>>> lses_;
  std::map<std::tuple<std::size_t, Index, Index>, quoka::Selection> oracles_;
};

}  // namespace quoka_examples
