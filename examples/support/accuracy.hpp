// What a selection costs in accuracy, at the level of attention: sums over chunks, layers and
// heads.
#pragma once

#include "support/capture.hpp"
#include "support/methods.hpp"
#include "support/paired_steps.hpp"

#include <cmath>

namespace quoka_examples {

struct Accuracy {
  double output_error = 0.0;  // |out - dense| / |dense|, Frobenius
  double mass_kept = 1.0;   // of the past's attention mass, mean over rows that could not keep all
  double worst_mass = 1.0;  // the least of a row
  double kv_pairs = 1.0;    // (query, key) pairs attended, as a share of dense
};

// Add a chunk at a time; all sums are in double.
class AccuracySums {
 public:
  // `keep` was attended to, with this output; dense is the layer that keeps all and its output.
  void add(const Tensor<float>& out, const quoka::Selection& keep, const Tensor<float>& dense_out,
           const AnyLayer& dense, quoka::TensorView<const float> q,
           const quoka::AttentionOptions& options, quoka::ThreadPool& threads) {
    for (Index i = 0; i < out.size(); ++i) {
      const double x = double{out.data()[i]}, y = double{dense_out.data()[i]};
      error_ += (x - y) * (x - y);
      norm_ += y * y;
    }
    const double n = static_cast<double>(q.len()), own = n * (n + 1.0) / 2.0;
    pairs_ += n * static_cast<double>(keep.count()) + own;
    dense_pairs_ += n * static_cast<double>(keep.kv_len()) + own;
    if (!keep.is_all()) add_mass(keep, dense, q, options, threads);
  }

  Accuracy result() const {
    return {.output_error = std::sqrt(error_ / norm_),
            .mass_kept = rows_ > 0.0 ? mass_ / rows_ : 1.0,
            .worst_mass = worst_,
            .kv_pairs = pairs_ / dense_pairs_};
  }

 private:
  // Share of the past's softmax mass on the kept keys: exp(lse over the kept - lse over all).
  void add_mass(const quoka::Selection& keep, const AnyLayer& dense,
                quoka::TensorView<const float> q, const quoka::AttentionOptions& options,
                quoka::ThreadPool& threads) {
    const auto past_k = dense.keys().slice(0, keep.kv_len());
    const auto past_v = dense.values().slice(0, keep.kv_len());
    Tensor<float> out(q.batch(), q.heads(), q.len(), past_v.dim());
    quoka::Tensor<float, 3> kept(q.batch(), q.heads(), q.len()), all = kept;
    quoka::attention(q, {past_k, past_v, keep}, {}, {out, kept}, options, threads);
    quoka::attention(q, {past_k, past_v}, {}, {out, all}, options, threads);
    for (Index i = 0; i < kept.size(); ++i) {
      const double share = std::exp(double{kept.data()[i]} - double{all.data()[i]});
      mass_ += share;
      worst_ = std::min(worst_, share);
    }
    rows_ += static_cast<double>(kept.size());
  }

  double error_ = 0.0, norm_ = 0.0, mass_ = 0.0, rows_ = 0.0, worst_ = 1.0;
  double pairs_ = 0.0, dense_pairs_ = 0.0;
};

inline quoka::LayerShape shape_of(const LayerCapture& layer) {
  return {.q_heads = layer.q.dimension(1),
          .kv_heads = layer.k.dimension(1),
          .head_dim = layer.q.dimension(3),
          .v_dim = layer.v.dimension(3),
          .batch = layer.q.dimension(0)};
}

// One way of running the captured layers as a stack, and what came of it.
struct Contender {
  std::string method;
  MethodOptions options;
  AccuracySums sums = {};
  std::vector<double> seconds = {};  // per round, all layers and chunks
};

// Runs all chunks of all layers by dense and by each contender in turn, `rounds` times after a
// round that warms up and measures accuracy. A contender's layers are one sequence's: what it
// shares between layers it shares among these. Returns dense's seconds per round.
template <class Progress>
std::vector<double> run_captures(const std::vector<LayerCapture>& captures,
                                 std::vector<Contender>& contenders, Index chunk, int rounds,
                                 const quoka::AttentionOptions& attention,
                                 quoka::ThreadPool& threads, Progress&& progress) {
  const Index len = captures.front().q.dimension(2), count = std::ssize(captures);
  std::vector<Index> which;
  for (Index i = 0; i < count; ++i) which.push_back(i);
  std::vector<double> dense_seconds;
  for (int round = -1; round < rounds; ++round) {
    std::vector<LayerStack> stacks;
    const auto add_stack = [&](const std::string& method, const MethodOptions& options) {
      LayerStack& stack = stacks.emplace_back();
      stack = make_layers(method, shape_of(captures.front()), options, attention, which, count);
      for (auto& layer : stack) layer->reserve(len);
    };
    add_stack("dense", {});
    for (const Contender& contender : contenders) add_stack(contender.method, contender.options);
    std::vector<double> seconds(stacks.size());
    for (Index begin = 0; begin < len; begin += chunk) {
      const Index n = std::min(chunk, len - begin);
      for (std::size_t l = 0; l < captures.size(); ++l) {
        const quoka::TensorView<const float> q = captures[l].q, k = captures[l].k,
                                             v = captures[l].v;
        Tensor<float> dense_out(q.batch(), q.heads(), n, v.dim()), out = dense_out;
        for (std::size_t s = 0; s < stacks.size(); ++s) {
          Tensor<float>& to = s == 0 ? dense_out : out;
          AnyLayer& layer = *stacks[s][l];
          seconds[s] += seconds_of([&] {
            layer.forward(q.slice(begin, n), k.slice(begin, n), v.slice(begin, n), to, threads);
          });
          if (s > 0 && round < 0)
            contenders[s - 1].sums.add(out, layer.selection(), dense_out, *stacks[0][l],
                                       q.slice(begin, n), attention, threads);
        }
      }
      progress(round + 1, begin + n);
    }
    if (round < 0) continue;
    dense_seconds.push_back(seconds[0]);
    for (std::size_t s = 1; s < stacks.size(); ++s) contenders[s - 1].seconds.push_back(seconds[s]);
  }
  return dense_seconds;
}

}  // namespace quoka_examples
