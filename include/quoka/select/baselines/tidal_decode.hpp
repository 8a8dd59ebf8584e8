// TidalDecode: exact choice at two layers, reused by the layers between and after.
//
//   score[t] = mean over the group's heads and the chunk's queries of softmax over t of logits
//
// at the choosing layers: 2 * q_heads * q_len * kv_len * head_dim FLOPs there and none elsewhere.
// Source: Yang et al., "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse
// Attention", arXiv 2410.05076, which decodes one query at a time and keeps a set per query head.
// Deviations: one set per KV head and chunk; the correction layer by rule (LayerPlan).
#pragma once

#include <quoka/select/layer_shared.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/top_k.hpp>

namespace quoka::inline QUOKA_ABI {

struct TidalDecodeOptions {
  Budget budget = 1024;
  LayerPlan plan = {};
  Index window = 1;      // neighbouring keys kept together; 1: none
  Index keep_first = 0;  // attention sinks, inside the budget
  Index keep_last = 0;   // recent keys, inside the budget
};

class TidalDecodeChoice {
 public:
  using Options = TidalDecodeOptions;

  struct State : NoState {
    detail::QueryScoreState query_scores;
    Buffer<float> scores;  // [batch, kv_heads, kv_len]
    WorkerScratch<detail::TopKScratch> top_k;

    Index bytes() const { return query_scores.bytes() + scores.bytes() + top_k.bytes(); }
  };

  // Throws std::invalid_argument for a window < 1 and a negative keep_first or keep_last.
  explicit TidalDecodeChoice(const Options& options = {}) : options_(options) {
    detail::check_top_k(0, top_k_options());
  }

  template <class T>
  void choose(const SelectorInput<T>& input, Index budget, State& s, Selection& selection,
              ExecutorRef executor) const {
    const TensorView<const T>& k = input.k;
    const Index capacity = std::max(k.len(), input.capacity);
    float* scores = s.scores.reserve_amortised(k.batch() * k.heads() * capacity);
    s.top_k.reserve(executor.workers(), capacity, options_.window);
    detail::exact_scores(
        input, input.q.len(), [](Index m) { return m; }, Domain::softmax, detail::MassOver::sum,
        scores, s.query_scores, executor);
    detail::select_top_k(scores, k.batch(), k.heads(), k.len(), budget, top_k_options(), selection,
                         s.top_k, executor);
  }

 private:
  TopKOptions top_k_options() const {
    return {options_.window, options_.keep_first, options_.keep_last};
  }

  Options options_;
};

using TidalDecodeSelector = LayerSharedSelector<TidalDecodeChoice>;
static_assert(Selector<TidalDecodeSelector>);

}  // namespace quoka::inline QUOKA_ABI
