// SampleAttention: evenly spaced queries of the chunk, their exact attention to the past.
//
//   queries   j_m = floor((m + 1) * q_len / n) - 1, n = min(n_queries, q_len): the last one always
//   logits    l[h][m][t] = scale * q[h][j_m] . k[t]
//   score[t]  = mean over the group's heads and m of softmax over t of l[h][m]
//
// 2 * q_heads * n_queries * kv_len * head_dim FLOPs. Source: Zhu et al., "SampleAttention:
// Near-Lossless Acceleration of Long Context LLM Inference with Adaptive Structured Sparse
// Attention", arXiv 2406.15486, in the form QuoKA's paper compares with. Deviations: a fixed budget
// in place of the share of mass alpha, no local window (the chunk itself is attended in full), one
// set per KV head, softmax over the past only.
#pragma once

#include <quoka/methods/rows_scorer.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of SampleAttentionSelector.
struct SampleAttentionOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index n_queries = 16;                // queries of the chunk that are sampled, evenly spaced
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;   // 8-bit logits
};

// The rows that score.
class SampleAttentionRows {
 public:
  using Options = SampleAttentionOptions;
  using State = NoState;
  static constexpr bool every_query = false;  // only sampled ones score

  // Throws std::invalid_argument for n_queries < 1.
  explicit SampleAttentionRows(const Options& options = {}) : options_(options) {
    detail::require_at_least("n_queries", options.n_queries, 1);
  }

  // The interface of RowsScorer: the keys that rows are multiplied with,
  static ScoredKeys keys(const SelectorInput& input, State&, ExecutorRef) {
    return {input.k, input.sketch};
  }
  // at most this number of rows of a KV head,
  Index max_rows(const SelectorInput& input) const { return input.group() * sampled(input.q); }
  // and these rows of one, times the logit scale.
  void fill(const SelectorInput& input, State&, Index b, Index kv_head, RowWriter& rows) const {
    const Index group = input.group(), len = input.q.len(), n = sampled(input.q);
    for (Index r = 0; r < group; ++r)
      for (Index m = 0; m < n; ++m)
        rows.add(input.q, b, kv_head * group + r, (m + 1) * len / n - 1, input.logit_scale());
  }

 private:
  Index sampled(const Rows& q) const { return std::min(options_.n_queries, q.len()); }

  Options options_;
};

// SampleAttention scores: the softmax of the sampled rows.
using SampleAttentionScorer = RowsScorer<SampleAttentionRows>;
using SampleAttentionSelector = ScoredSelector<SampleAttentionScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
