// Oracle: the exact attention of every query of the chunk to every cached key. A control: it costs
// as much as it saves.
//
//   score[t] = mean over the group's heads and the chunk's queries of softmax over t of logits
//            = their maximum                                       (Aggregation::max)
//
// By the mean, no other selection of `budget` keys per KV head keeps more of the past's attention
// mass, summed over the chunk. The maximum keeps keys that are the best of some query. 2 * q_heads
// * q_len * kv_len * head_dim FLOPs. The softmax is over the past alone.
#pragma once

#include <quoka/select/softmax_scores.hpp>
#include <quoka/select/scored_selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of OracleSelector.
struct OracleOptions {
  Budget budget = Budget::keys(1024);           // keys per KV head
  Aggregation aggregation = Aggregation::mean;  // over the queries
  Index keep_first = 0;                         // attention sinks, inside the budget
  Index keep_last = 0;                          // most recent keys, inside the budget
};

// The scores behind OracleSelector.
class OracleScorer : public ScorerDefaults {
 public:
  using Options = OracleOptions;
  using State = SoftmaxScoreState;

  // Refuses none of the options.
  explicit OracleScorer(const Options& options = {}) : options_(options) {}

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }
  static bool supports_softcap() { return true; }

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
      for_each_query(input, kv_head,
                     [&](Index head, Index i) { rows.add(q, b, head, i, input.logit_scale()); });
    };
    softmax_scores({.rows = {input.group() * q.len(), k.dim(), q.dim()},
                    .fill = fill,
                    .keys = k,
                    .capacity = input.capacity,
                    .rule = {.over = options_.aggregation, .softcap = input.softcap()}},
                   scores, state, executor);
  }

 private:
  Options options_;
};

using OracleSelector = ScoredSelector<OracleScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
