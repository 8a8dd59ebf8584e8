// TidalDecode: exact choice at two layers, reused by the layers between and after.
//
//   score[t] = mean over the group's heads and the chunk's queries of softmax over t of logits
//
// at the choosing layers: 2 * q_heads * q_len * kv_len * head_dim FLOPs there and none elsewhere.
// Source: Yang et al., "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse
// Attention", arXiv 2410.05076, which decodes one query at a time and keeps a set per query head.
// Deviations: one set per KV head and chunk; the correction layer by rule (LayerPlan).
#pragma once

#include <quoka/methods/chunk_shape.hpp>
#include <quoka/methods/layer_shared.hpp>
#include <quoka/select/query_scores.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// What TidalDecodeSelector leaves open.
struct TidalDecodeOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  LayerPlan plan = {};                 // this layer, and which layers choose
  TopKOptions top_k = {};              // neighbours, sinks and recent keys, inside the budget
};
// FLOPs of a chunk's scores (chunk_shape.hpp): the oracle's at the layers that choose, none at the others.
inline double flops(const TidalDecodeOptions& o, const ChunkShape& c) {
  return o.plan.chooses() ? detail::exact_flops(c) : 0.0;
}

// The choice behind TidalDecodeSelector.
class TidalDecodeChoice {
 public:
  using Options = TidalDecodeOptions;

  struct State : NoState {
    QueryScoreState query_scores;
    Buffer<float> scores;  // [batch, kv_heads, kv_len]
    WorkerScratch<TopKScratch> top_k;

    Index bytes() const { return bytes_of(query_scores, scores, top_k); }
  };

  // Throws std::invalid_argument for a kernel_size < 1 and a negative keep_first or keep_last.
  explicit TidalDecodeChoice(const Options& options = {}) : options_(options) {
    check_top_k(options.top_k);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }
  static bool knows_softcap() { return true; }

  void select(const SelectorInput& input, Index budget, State& s, Selection& selection,
              ExecutorRef executor) const {
    const Rows& k = input.k;
    const Index capacity = std::max(k.len(), input.capacity);
    float* const scores = s.scores.reserve_amortised(k.batch() * k.heads() * capacity);
    s.top_k.reserve(executor.workers(), capacity, options_.top_k.kernel_size);
    const TensorView<float, 3> view = score_view(scores, k.batch(), k.heads(), k.len());
    exact_scores(
        input, input.q.len(), [](Index m) { return m; }, Domain::softmax, Aggregation::mean, view,
        s.query_scores, executor);
    best_keys(view, budget, options_.top_k, s.top_k, selection, executor);
  }

 private:
  Options options_;
};

using TidalDecodeSelector = LayerSharedSelector<TidalDecodeChoice>;
static_assert(Selector<TidalDecodeSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
