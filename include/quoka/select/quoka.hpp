// QuoKA: query-oriented KV selection (Algorithm 1), composed of its stages.
//
//   kept   = subselect_queries(q, n_queries)     least like the chunk's mean query
//   q_bar  = pre_aggregate(kept, kv_heads)       one set of queries per KV head
//   scores = score_keys(q_bar, past_k)           maximum cosine
//   keep   = top_k(scores, budget)
//
// A past no longer than the budget is kept whole and not scored. FLOPs per chunk: 5 * q_heads *
// q_len * head_dim for the queries, 2 * kv_heads * n_queries * kv_len * head_dim for the keys,
// against 4 * q_heads * q_len * kv_len * head_dim of dense attention: 1/64 with 32/8 heads, chunk
// 128 and 16 queries. Scratch: 4 bytes of score per key and KV head, and per worker 8 bytes per
// key. Source: Jones et al., "QuoKA: Query-Oriented KV Selection for Efficient LLM Prefill", ICLR
// 2026, arXiv 2602.08722. Deviations, all off by default: options.hpp, top_k.hpp.
#pragma once

#include <quoka/select/concepts.hpp>
#include <quoka/select/pre_aggregate.hpp>
#include <quoka/select/score_keys.hpp>
#include <quoka/select/subselect_queries.hpp>
#include <quoka/select/top_k.hpp>

namespace quoka::inline QUOKA_ABI {

struct QuokaOptions {
  Budget budget = 1024;                                // B_SA: 512, 1024, 2048, or 0.25
  Index n_queries = 16;                                // N_Q: queries kept for scoring
  Scoring scoring = Scoring::cosine;                   // S
  Aggregation aggregation = Aggregation::max;          // over the kept queries
  GroupMode group_mode = GroupMode::rank;              // over the heads of a group
  QueryChoice query_choice = QueryChoice::dissimilar;  // which queries score
  Index window = 1;                                    // neighbouring keys kept together; 1: none
  Index keep_first = 0;                                // attention sinks, inside the budget
  Index keep_last = 0;                                 // recent keys, inside the budget
};

class QuokaSelector {
 public:
  using Options = QuokaOptions;

  // Reused memory; nothing is carried from chunk to chunk.
  struct State {
    Buffer<Position> positions;  // [batch, q_heads, n_queries]
    Buffer<float> q_bar;         // [batch, kv_heads, rows, head_dim]
    Buffer<float> scores;        // [batch, kv_heads, kv_len]
    WorkerScratch<detail::SubselectScratch> subselect;
    WorkerScratch<detail::ScoreScratch> score;
    WorkerScratch<detail::TopKScratch> top_k;

    void truncate(Index) {}
    Index bytes() const {
      return positions.bytes() + q_bar.bytes() + scores.bytes() + subselect.bytes() +
             score.bytes() + top_k.bytes();
    }
  };

  // Throws std::invalid_argument for n_queries or window < 1 and for negative keep_first or
  // keep_last.
  explicit QuokaSelector(const Options& options = {}) : options_(options) {
    detail::require_at_least("n_queries", options.n_queries, 1);
    detail::check_top_k(0, top_k_options());
  }

  const Options& options() const { return options_; }

  template <class T, class E>
  void select(const SelectorInput<T>& input, State& state, Selection& selection,
              E&& executor) const {
    detail::check_selector_input(input);
    const TensorView<const T>&q = input.q, &k = input.k;
    const Index budget = options_.budget.keys(k.len());
    if (budget == k.len()) return selection.select_all(k.batch(), k.heads(), k.len());
    if (budget == 0) return selection.resize(k.batch(), k.heads(), k.len(), 0);

    const Index group = q.heads() / k.heads(), n = std::min(options_.n_queries, q.len());
    const Index rows = detail::aggregated_rows(n, group, options_.group_mode);
    const SubselectOptions subselect{options_.query_choice,
                                     options_.group_mode == GroupMode::shared ? group : 1};
    Position* positions = state.positions.reserve(q.batch() * q.heads() * n);
    detail::subselect_positions(q, n, subselect, positions, state.subselect, executor);

    float* q_bar = state.q_bar.reserve(k.batch() * k.heads() * rows * k.dim());
    executor.run(k.batch() * k.heads(), [&](Index task, int) {
      const Index b = task / k.heads(), first_head = task % k.heads() * group;
      const auto row_of = [&](Index r, Index m) {
        const Index head = first_head + r;
        return q.row(b, head, positions[(b * q.heads() + head) * n + m]);
      };
      detail::pre_aggregate_head(row_of, n, group, k.dim(), options_.group_mode, options_.scoring,
                                 q_bar + task * rows * k.dim());
    });

    const Index capacity = std::max(k.len(), input.capacity);
    const Index heads = k.batch() * k.heads();
    float* scores = state.scores.reserve_amortised(heads * capacity);
    detail::score_all_keys(q_bar, rows, k, input.inverse_norms,
                           {options_.scoring, options_.aggregation}, scores, state.score, executor);
    state.top_k.reserve(executor.workers(), capacity, options_.window);
    selection.reserve(heads * options_.budget.keys(capacity));
    detail::select_top_k(scores, k.batch(), k.heads(), k.len(), budget, top_k_options(), selection,
                         state.top_k, executor);
  }

  template <class T, class E>
  void appended(const SelectorInput<T>&, State&, E&&) const {}

  // For a caller's own cache: q [batch, q_heads, q_len, head_dim], past_k [batch, kv_heads, kv_len,
  // head_dim]. Throws std::invalid_argument when shapes do not fit together.
  template <TensorLike Q, class E = SerialExecutor>
  requires Executor<E> Selection select(const Q& q, TensorView<const storage_t<Q>> past_k,
                                        E&& executor = E{},
                                        TensorView<const float, 3> inverse_norms = {})
  const {
    State state;
    Selection selection;
    select(SelectorInput<storage_t<Q>>{view_of(q), past_k, inverse_norms, past_k.len()}, state,
           selection, executor);
    return selection;
  }

 private:
  TopKOptions top_k_options() const {
    return {options_.window, options_.keep_first, options_.keep_last};
  }

  Options options_;
};

static_assert(Selector<QuokaSelector>);

}  // namespace quoka::inline QUOKA_ABI
