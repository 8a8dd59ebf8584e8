// The keys with the largest norms.
//
//   score[t] = |k[t]|
//
// kv_heads * kv_len FLOPs where the cache keeps the inverse norms, 2 * kv_heads * kv_len * head_dim
// more where it does not. Queries are not looked at. Source: none, the simplest method that reads
// keys. Deviations: a zero key, as one with a NaN or an infinity, is chosen last.
#pragma once

#include <quoka/select/query_rows.hpp>
#include <quoka/select/scored_selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of KeyNormSelector.
struct KeyNormOptions {
  quoka::Budget budget = quoka::Budget::keys(1024);  // keys per KV head
  Index keep_first = 0, keep_last = 0;               // sinks and recent keys, inside the budget
};

// The scores behind KeyNormSelector.
class KeyNormScorer : public ScorerDefaults {
 public:
  using Options = KeyNormOptions;

  // Reused memory; nothing is carried from chunk to chunk.
  struct State : NoState {
    Arenas workers;
  };

  // Refuses none of the options.
  explicit KeyNormScorer(const Options& = {}) {}

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows& k = input.k;
    const auto reader_in = [&](Arena& arena) { return RowReader(arena, k.dim()); };
    state.workers.reserve(executor.workers(), reader_in);
    for_each_kv_head(k, executor, [&](Index b, Index kv_head, int worker) {
      Arena arena = state.workers[worker];
      RowReader reader = reader_in(arena);
      for (Index t = 0; t < k.len(); ++t) {
        const float inverse = input.inverse_norms.absent()
                                  ? inverse_norm(reader.read(k, b, kv_head, t), k.dim())
                                  : input.inverse_norms.at(b, kv_head, t);
        scores.at(b, kv_head, t) = 1.0f / inverse;  // of 0, not finite: the last choice of top-k
      }
    });
  }
};

using KeyNormSelector = ScoredSelector<KeyNormScorer>;
static_assert(Selector<KeyNormSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
