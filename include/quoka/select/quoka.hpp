// QuoKA: query-oriented KV selection (Algorithm 1), composed of its stages.
//
//   kept      = subselect_queries(q, n_queries)     least like the chunk's mean query
//   q_bar     = pre_aggregate(kept, kv_heads)       one set of queries per KV head
//   scores    = score_keys(q_bar, past_k)           maximum cosine
//   selection = top_k(scores, budget)
//
// The flow is QuokaScorer::decide(): QueryStages (queries.hpp) makes q_bar. Where a sketch of the
// keys is kept, SketchedCosines scores all keys by 8-bit codes, and in float only those near the
// threshold.
//
// A past no longer than the budget is kept whole and not scored. FLOPs per chunk: 5 * q_heads *
// q_len * head_dim for the queries, 2 * kv_heads * n_queries * kv_len * head_dim for the keys,
// against 4 * q_heads * q_len * kv_len * head_dim of dense attention: 1/64 with 32/8 heads, chunk
// 128 and 16 queries. Scratch: 4 bytes of score per key and KV head, and per worker 12 bytes per
// key. With a sketch the State keeps 8-bit codes of the keys passed to appended(), head_dim + 12
// bytes each, and selection takes 0.3 of the time. The Selection is the same, bit for bit
// (sketched_cosines.hpp). Scratch is then 28 bytes per key and worker.
//
// This is the paper and nothing else; mass_selector.hpp has what keeps answers better. Variations
// of the stages, such as a mean in place of the maximum, are there stage by stage (stages.hpp).
//
// Source: Jones et al., "QuoKA: Query-Oriented KV Selection for Efficient LLM Prefill", ICLR 2026,
// arXiv 2602.08722. Deviations, off by default: keep_first and keep_last. Algorithm 1 gathers
// normalised keys for attention; here attention gets the raw ones, as Algorithm 2 and every dense
// layer need them.
#pragma once

#include <quoka/select/queries.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/sketched_keys.hpp>
#include <quoka/select/softmax_scores.hpp>

#if QUOKA_DEFINES
#include <quoka/select/key_scores.hpp>
#include <quoka/select/sketched_cosines.hpp>

#include <algorithm>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Options of QuoKA. The defaults are the paper's.
struct QuokaOptions {
  Budget budget = Budget::keys(1024);  // B_SA: keys(512), keys(2048), share(0.25)
  Index n_queries = 16;                // N_Q: queries of each query head that score
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;   // 8-bit codes; the Selection is the same
};

// The scores behind QuokaSelector.
class QuokaScorer : public ScorerDefaults {
 public:
  using Options = QuokaOptions;

  // Reused memory, and the sketch of the keys.
  struct State : StateSketch {
    // For the call's queries, KV heads at work and workers.
    Arenas queries, call, heads, workers;
    detail::KeyScoresMemory scores;  // in float
  };

  // Throws std::invalid_argument for n_queries < 1.
  explicit QuokaScorer(const Options& options = {});

  // Writes the keys to attend to: by way of the sketch, where there is one of all keys.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const;

  // Sketches the new keys. A State that has not seen all keys scores in float.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const;

 private:
  Options options_;
};

using QuokaSelector = ScoredSelector<QuokaScorer>;

// In the library.
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
extern template void QuokaSelector::select(const SelectorInput&, State&, Selection&,
                                           ExecutorRef) const;
extern template void QuokaSelector::appended(const SelectorInput&, State&, ExecutorRef) const;
#endif

#if QUOKA_DEFINES

QUOKA_FUNC QuokaScorer::QuokaScorer(const Options& options) : options_(options) {
  detail::require_at_least("n_queries", options.n_queries, 1);
}

QUOKA_FUNC void QuokaScorer::decide(const SelectorInput& input, State& state, Selection& selection,
                                    ExecutorRef executor) const {
  const Rows& k = input.k;
  if (select_unscored(k, options_.budget, selection)) return;
  const Index heads = k.batch() * k.heads(), budget = options_.budget.count(k.len());
  const auto [first, last] = ForcedKeys(options_, budget);
  const detail::HeadPlan plan(heads, executor);
  std::optional<SketchedKeys> keys;
  if (by_codes(options_.sketch)) keys = state.find_codes(k, input.sketch);
  const detail::QueryStages queries(input, options_.n_queries, state.queries, state.workers,
                                    executor);
  if (!keys)
    return detail::select_by_scores(
        input, options_.budget, {.keep_first = first, .keep_last = last}, state.scores, selection,
        executor, [&](const TensorView<float, 3>& scores) {
          plan.run(queries);
          detail::score_all_keys(
              {queries.q_bar(), queries.rows(), k, &input.inverse_norms, Aggregation::max},
              scores.data(), state.workers, executor);
        });
  selection.reserve(heads, heads * options_.budget.count(std::max(k.len(), input.capacity)));
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), budget);
  const detail::CosineCall call{.keys = *keys,
                                .q_bar = queries.q_bar(),
                                .rows = queries.rows(),
                                .inverse_norms = input.inverse_norms,
                                .capacity = input.capacity,
                                .first = first,
                                .last = last,
                                .wanted = budget - first - last,
                                .writer = writer};
  const detail::SketchedCosines cosines(call, plan, state.call, state.heads, state.workers,
                                        executor);
  plan.run([&](const detail::HeadLoops& on) { queries(on), cosines(on); });
  writer.commit();
}

QUOKA_FUNC void QuokaScorer::appended(const SelectorInput& input, State& state,
                                      ExecutorRef executor) const {
  if (by_codes(options_.sketch) && input.sketch == nullptr)
    state.append(input.k, input.capacity, executor);
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
