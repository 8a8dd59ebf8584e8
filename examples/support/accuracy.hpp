// The loss of methods on captured layers, chunk by chunk: attention that their selections keep,
// error of the output, agreement with the oracle, and the time of choosing. The figures are those
// of quoka/attention/diagnostics.hpp, summed over chunks, heads and layers.
//
// Every chunk gets the captured queries, keys and values, so an error does not grow from layer to
// layer as in a model.
#pragma once

#include "support/dense_reference.hpp"
#include "support/methods.hpp"
#include "support/policy_layers.hpp"

#include <limits>
#include <numeric>
#include <optional>

namespace quoka_examples {

struct Accuracy {
  double mass_kept = 1.0;             // of the past's attention mass, mean over rows
  double worst_mass = 1.0;            // the least of a row
  double worst_percent_mass = 1.0;    // mean of the worst 1 % of rows
  double output_error = 0.0;          // |out - dense| / |dense|
  double overlap = 1.0;               // with the oracle's selection of as many keys
  double hits = 1.0;                  // of the keys that queries seek; NaN: unknown
  double kv_pairs = 1.0;              // (query, key) pairs attended, as a share of dense
  double flops = 0.0, seconds = 0.0;  // of selecting, per chunk and layer; CPU time of one thread
  double dense_flops = 0.0;           // of dense attention, per chunk and layer
  Index chunks = 0, rows = 0;         // chunks measured; rows whose past was selected from
};

// The mean over sequences and heads.
inline double keys_per_head(const quoka::Selection& selection) {
  return static_cast<double>(selection.sum_of_counts()) /
         static_cast<double>(selection.batch() * selection.heads());
}

// Results of one method in one layer, a chunk at a time; several can be added up.
class AccuracySums {
 public:
  void add(const AccuracySums& other) {
    error_.add(other.error_);
    shares_.add(other.shares_);
    pairs_ += other.pairs_, dense_pairs_ += other.dense_pairs_;
    overlap_ += other.overlap_, compared_ += other.compared_;
    hits_ += other.hits_, targets_ += other.targets_;
    flops_ += other.flops_, dense_flops_ += other.dense_flops_;
    seconds_ += other.seconds_, chunks_ += other.chunks_;
  }
  void add_output(const Tensor<float>& out, quoka::TensorView<const float> dense_out,
                  const quoka::Selection& selection) {
    error_.add(out, dense_out);
    const double n = static_cast<double>(dense_out.len()), own = n * (n + 1.0) / 2.0;
    pairs_ += n * keys_per_head(selection) + own;
    dense_pairs_ += n * static_cast<double>(selection.kv_len()) + own;
    ++chunks_;
  }
  void add_mass(const quoka::Tensor<float, 3>& shares) { shares_.add(shares); }
  void add_overlap(const quoka::Selection& selection, const quoka::Selection& oracle) {
    const double keys = keys_per_head(oracle);
    overlap_ += keys * quoka::overlap(selection, oracle);
    compared_ += keys;
  }
  // targets [batch, q_heads, q_len]: counts those that lie in the past.
  void add_hits(const quoka::Selection& selection,
                quoka::TensorView<const quoka::Position, 3> targets) {
    const Index group = targets.heads() / selection.heads();
    for (Index b = 0; b < targets.batch(); ++b)
      for (Index head = 0; head < targets.heads(); ++head) {
        const auto kept = selection.row(b, head / group);
        for (Index i = 0; i < targets.len(); ++i) {
          const quoka::Position target = targets.at(b, head, i);
          if (target < 0 || target >= selection.kv_len()) continue;
          targets_ += 1.0;
          if (selection.is_all() || std::binary_search(kept.begin(), kept.end(), target))
            hits_ += 1.0;
        }
      }
  }
  void add_cost(double flops, double dense_flops, double seconds) {
    flops_ += flops, dense_flops_ += dense_flops, seconds_ += seconds;
  }

  Accuracy result() const {
    const double chunks = static_cast<double>(std::max<Index>(chunks_, 1));
    return {.mass_kept = shares_.mean(),
            .worst_mass = shares_.worst(),
            .worst_percent_mass = shares_.mean_of_worst(0.01),
            .output_error = error_.value(),
            .overlap = compared_ > 0.0 ? overlap_ / compared_ : 1.0,
            .hits = targets_ > 0.0 ? hits_ / targets_ : std::numeric_limits<double>::quiet_NaN(),
            .kv_pairs = dense_pairs_ > 0.0 ? pairs_ / dense_pairs_ : 1.0,
            .flops = flops_ / chunks,
            .seconds = seconds_ / chunks,
            .dense_flops = dense_flops_ / chunks,
            .chunks = chunks_,
            .rows = shares_.rows()};
  }

 private:
  quoka::RelativeError error_;
  quoka::RowShares shares_;
  double pairs_ = 0.0, dense_pairs_ = 0.0, overlap_ = 0.0, compared_ = 0.0;
  double hits_ = 0.0, targets_ = 0.0, flops_ = 0.0, dense_flops_ = 0.0, seconds_ = 0.0;
  Index chunks_ = 0;
};

// How to measure.
struct AccuracyRules {
  // Only chunks count whose past is longer than this many times the budget: if most of the past is
  // kept, every policy looks good. 0: all chunks. Budgets of single layers do not move that limit:
  // all layers are measured on the same chunks.
  double past_per_budget = 2.0;
  bool one_sequence = true;  // layers of one model: choices may be shared; otherwise each is alone
  bool overlap = true;       // with the oracle, whose selection costs as much as dense attention
  // Dense layers and budgets, by the numbers in the layers' names; of one sequence's layers. Its
  // own `budget` is ignored.
  std::optional<LayerPolicy> policy = {};
};

// One method over all chunks of all layers, in steps that can be timed: select, attend, append.
class AccuracyRun {
 public:
  AccuracyRun(const std::string& method, const MethodOptions& options, DenseReference& reference,
              const AccuracyRules& rules, quoka::ThreadPool& threads)
      : options_(options),
        reference_(reference),
        rules_(rules),
        threads_(threads),
        sums_(reference.layers().size()) {
    const std::vector<LayerCapture>& captures = reference.layers();
    std::vector<Index> numbers(captures.size());
    std::iota(numbers.begin(), numbers.end(), 0);
    if (rules.policy) numbers = layer_numbers(captures);
    if (rules.one_sequence)
      layers_ =
          make_policy_layers(method, shape_of(captures.front()), options,
                             rules.policy.value_or(LayerPolicy{}), numbers, reference.attention());
    else
      for (const LayerCapture& capture : captures)
        layers_.push_back(std::move(
            make_layers(method, shape_of(capture), options, reference.attention()).front()));
    for (auto& layer : layers_) layer->reserve(reference.len());
  }

  // A sum per layer.
  std::vector<AccuracySums> run() {
    for (Index begin = 0; begin < reference_.len(); begin += reference_.chunk())
      for (std::size_t layer = 0; layer < layers_.size(); ++layer) chunk(layer, begin);
    return sums_;
  }

 private:
  void chunk(std::size_t index, Index begin) {
    const LayerCapture& capture = reference_.layers()[index];
    AnyLayer& layer = *layers_[index];
    const Index n = reference_.chunk_len(begin);
    const quoka::TensorView<const float> all_q = capture.q, all_k = capture.k, all_v = capture.v;
    const auto q = all_q.slice(begin, n), k = all_k.slice(begin, n), v = all_v.slice(begin, n);
    const double flops = layer.scoring_flops(n);
    double seconds = seconds_of([&] { layer.select(q, one_thread_, k); }, thread_seconds);
    const double limit = rules_.past_per_budget * static_cast<double>(options_.budget.count(begin));
    const bool counts = rules_.past_per_budget == 0.0 || static_cast<double>(begin) > limit;
    if (counts) {
      Tensor<float> out(q.batch(), q.heads(), n, v.dim());
      quoka::attention(q, {layer.keys(), layer.values(), layer.selection()}, {k, v}, out,
                       reference_.attention(), threads_);
      compare(index, begin, q, out);
    }
    seconds += seconds_of([&] { layer.append(q, k, v, one_thread_); }, thread_seconds);
    if (counts) sums_[index].add_cost(flops, reference_.flops(index, begin), seconds);
  }

  void compare(std::size_t index, Index begin, const quoka::TensorView<const float>& q,
               const Tensor<float>& out) {
    const quoka::Selection& selection = layers_[index]->selection();
    AccuracySums& sums = sums_[index];
    sums.add_output(out, reference_.out(index, begin), selection);
    if (!selection.is_all()) {
      sums.add_mass(quoka::mass_kept(q, layers_[index]->keys(), selection,
                                     reference_.past_lse(index, begin), reference_.attention(),
                                     threads_));
      if (rules_.overlap)
        sums.add_overlap(selection, reference_.oracle(index, begin, selection.max_count()));
    }
    const auto& targets = reference_.layers()[index].targets;
    if (targets.size() > 0)
      sums.add_hits(selection,
                    quoka::TensorView<const quoka::Position, 3>(targets).slice(begin, q.len()));
  }

  MethodOptions options_;
  DenseReference& reference_;
  AccuracyRules rules_;
  quoka::ThreadPool& threads_;
  quoka::ThreadPool one_thread_{1};
  LayerStack layers_;
  std::vector<AccuracySums> sums_;
};

// All layers as one.
inline Accuracy overall(const std::vector<AccuracySums>& layers) {
  AccuracySums sums;
  for (const AccuracySums& layer : layers) sums.add(layer);
  return sums.result();
}

}  // namespace quoka_examples
