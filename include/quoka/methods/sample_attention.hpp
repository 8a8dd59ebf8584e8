// SampleAttention: evenly spaced queries of the chunk, their exact attention to the past.
//
//   queries   j_m = floor((m + 1) * q_len / n) - 1, n = min(n_queries, q_len): the last one always
//   logits    l[h][m][t] = scale * q[h][j_m] . k[t]
//   score[t]  = mean over the group's heads and m of softmax over t of l[h][m]   (Domain::softmax)
//             = mean over the group's heads and m of l[h][m][t]                  (Domain::logit)
//
// 2 * q_heads * n_queries * kv_len * head_dim FLOPs (softmax), 1/n_queries and 1/group of that
// (logit). With a sketch of the keys softmax is that of 8-bit logits, nearly the same
// (select/code_mass.hpp). Source: Zhu et al., "SampleAttention: Near-Lossless Acceleration of Long
// Context LLM Inference with Adaptive Structured Sparse Attention", arXiv 2406.15486, in the form QuoKA's
// paper compares with. Deviations: a fixed budget in place of the share of mass alpha; no local window
// (the chunk itself is attended in full); one set per KV head; softmax over the past alone.
#pragma once

#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <algorithm>
#include <optional>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of SampleAttentionSelector.
struct SampleAttentionOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index n_queries = 16;                // queries of the chunk that are sampled, evenly spaced
  Domain domain = Domain::softmax;     // in which several queries' logits are averaged
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;   // 8-bit logits, of softmax
};

// The scores behind SampleAttentionSelector.
class SampleAttentionScorer {
 public:
  using Options = SampleAttentionOptions;

  struct State : SketchKept {
    QueryScoreState scores;

    Index bytes() const { return bytes_of(sketch, scores); }
  };

  // Throws std::invalid_argument for n_queries < 1.
  explicit SampleAttentionScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("n_queries", options.n_queries, 1);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const Index len = q.len(), n = std::min(options_.n_queries, len), group = input.group();
    const float logit_scale = input.logit_scale();
    const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
      for (Index r = 0; r < group; ++r)
        for (Index m = 0; m < n; ++m)
          rows.add(q, b, kv_head * group + r, (m + 1) * len / n - 1, logit_scale);
    };
    const QueryRows shape{group * n, k.dim(), q};
    if (options_.domain == Domain::logit)
      return mean_logit_scores(shape, fill, k, scores, state.scores, executor);
    softmax_scores(
        {.rows = shape,
         .fill = fill,
         .keys = k,
         .capacity = input.capacity,
         .codes = uses_sketch() ? SketchedKeys::find(k, state.sketch, input.sketch) : std::nullopt},
        scores, state.scores, executor);
  }

  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    if (uses_sketch() && input.sketch == nullptr)
      state.sketch.append(input.k, input.capacity, executor);
  }

 private:
  bool uses_sketch() const {
    return options_.domain == Domain::softmax && by_codes(options_.sketch);
  }

  Options options_;
};

using SampleAttentionSelector = ScoredSelector<SampleAttentionScorer>;
static_assert(Selector<SampleAttentionSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
