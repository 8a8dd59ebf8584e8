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
// 128 and 16 queries. Scratch: 4 bytes of score per key and KV head, and per worker 12 bytes per
// key. With `sketch` the State keeps 8-bit codes of the keys it was told of by appended(), head_dim
// + 8 bytes each, and selection takes 0.3 of the time; the Selection is the same, bit for bit
// (sketched_top_k.hpp); scratch is then 32 bytes per key and worker. Source: Jones et al., "QuoKA:
// Query-Oriented KV Selection for Efficient LLM Prefill", ICLR 2026, arXiv 2602.08722. Deviations,
// all off by default: options.hpp, top_k.hpp, and Domain::softmax, where raw queries score by their
// own attention to the past, softmax over t of scale * q . k[t]: its maximum or mean over the kept
// rows, those of all heads of the group with per_head.
#pragma once

#include <quoka/select/pre_aggregate.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/score_keys.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/sketched_top_k.hpp>
#include <quoka/select/subselect_queries.hpp>

namespace quoka::inline QUOKA_ABI {

struct QuokaOptions {
  Budget budget = 1024;                                // B_SA: 512, 1024, 2048, or 0.25
  Index n_queries = 16;                                // N_Q: queries kept for scoring
  Scoring scoring = Scoring::cosine;                   // S; Domain::softmax has its own
  Aggregation aggregation = Aggregation::max;          // over the kept queries
  GroupMode group_mode = GroupMode::rank;              // over the heads of a group
  QueryChoice query_choice = QueryChoice::dissimilar;  // which queries score
  Domain domain = Domain::logit;                       // softmax: the kept queries' own attention
  Index window = 1;                                    // neighbouring keys kept together; 1: none
  Index keep_first = 0;                                // attention sinks, inside the budget
  Index keep_last = 0;                                 // recent keys, inside the budget
  bool sketch = detail::int8_dot_is_fast;              // score by 8-bit codes first: same Selection

  // The paper's, which are the defaults.
  static QuokaOptions paper(Budget budget = 1024) { return {.budget = budget}; }

  // Queries of every kind, each by its own softmax, about 32 per KV head (max(4, 32 / group) of
  // each head): more of the attention mass, and the needles that the paper's defaults miss, for 1.4
  // (2,046 tokens of TinyLlama) to 2.7 times (32,768 keys of Qwen3-4B's shape) their scoring time
  // in float; the 8-bit sketch does not serve it. Evidence, exceptions included:
  // bench/results/accuracy.md, evaluate.md. Throws std::invalid_argument for a group, q_heads /
  // kv_heads, below 1.
  static QuokaOptions robust(Index group, Budget budget = 1024) {
    detail::require_at_least("group", group, 1);
    return {.budget = budget,
            .n_queries = std::max<Index>(4, 32 / group),
            .aggregation = Aggregation::mean,
            .group_mode = GroupMode::per_head,
            .query_choice = QueryChoice::mixed,
            .domain = Domain::softmax};
  }
};

class QuokaScorer {
 public:
  using Options = QuokaOptions;

  // Reused memory; nothing is carried from chunk to chunk.
  struct State {
    Buffer<Position> positions;  // [batch, q_heads, n_queries]
    Buffer<float> q_bar;         // [batch, kv_heads, rows, head_dim]
    WorkerScratch<detail::SubselectScratch> subselect;
    WorkerScratch<detail::ScoreScratch> score;
    detail::QueryScoreState softmax;
    detail::SketchState sketch;  // grows with the cache: appended()

    void truncate(Index kv_len) { sketch.keys.truncate(kv_len); }
    Index kept_bytes() const { return sketch.keys.bytes(); }
    Index bytes() const {
      return positions.bytes() + q_bar.bytes() + subselect.bytes() + score.bytes() +
             softmax.bytes() + sketch.bytes();
    }
  };

  // Throws std::invalid_argument for n_queries < 1.
  explicit QuokaScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("n_queries", options.n_queries, 1);
  }

  template <class T>
  void score(const SelectorInput<T>& input, State& state, float* scores,
             ExecutorRef executor) const {
    aggregate_queries(input, state, executor);
    if (options_.domain == Domain::softmax) return score_by_softmax(input, state, scores, executor);
    detail::score_all_keys(state.q_bar.data(), kept_rows(input), input.k, input.inverse_norms,
                           {options_.scoring, options_.aggregation}, scores, state.score, executor);
  }

  // The Selection by way of the sketch; false, and nothing done, where there is none of all keys.
  template <class T>
  bool choose(const SelectorInput<T>& input, Index budget, State& state, Selection& selection,
              ExecutorRef executor) const {
    if (!uses_sketch() || state.sketch.keys.len() != input.k.len()) return false;
    const Index rows = kept_rows(input);
    if (!detail::codes_fit(rows, input.k.dim(), options_.aggregation)) return false;
    aggregate_queries(input, state, executor);
    detail::sketched_top_k(state.q_bar.data(), rows, input.k, input.inverse_norms,
                           options_.aggregation, budget, input.capacity,
                           {options_.window, options_.keep_first, options_.keep_last}, selection,
                           state.sketch, state.score, executor);
    return true;
  }

  // Sketches the new keys. A State that was not told of all keys scores in float.
  template <class T>
  void appended(const SelectorInput<T>& input, State& state, ExecutorRef executor) const {
    if (uses_sketch()) state.sketch.keys.append(input.k, input.capacity, executor);
  }

 private:
  // Queries that score for each KV head.
  template <class T>
  Index kept_rows(const SelectorInput<T>& input) const {
    return detail::aggregated_rows(std::min(options_.n_queries, input.q.len()), input.group(),
                                   options_.group_mode);
  }

  // Those queries, to state.q_bar.
  template <class T>
  void aggregate_queries(const SelectorInput<T>& input, State& state, ExecutorRef executor) const {
    const TensorView<const T>&q = input.q, &k = input.k;
    const Index group = input.group(), n = std::min(options_.n_queries, q.len());
    const Index rows = kept_rows(input);
    const SubselectOptions subselect{options_.query_choice,
                                     options_.group_mode == GroupMode::shared ? group : 1, group};
    Position* positions = state.positions.reserve(q.batch() * q.heads() * n);
    detail::subselect_positions(q, n, subselect, positions, state.subselect, executor);

    float* q_bar = state.q_bar.reserve(k.batch() * k.heads() * rows * k.dim());
    executor.run(k.batch() * k.heads(), [&](Index task, int) {
      const Index b = task / k.heads(), first_head = task % k.heads() * group;
      const auto row_of = [&](Index r, Index m) {
        const Index head = first_head + r;
        return q.row(b, head, positions[(b * q.heads() + head) * n + m]);
      };
      detail::pre_aggregate_head(row_of, n, group, k.dim(), options_.group_mode, scoring(),
                                 q_bar + task * rows * k.dim());
    });
  }

  // From state.q_bar.
  template <class T>
  void score_by_softmax(const SelectorInput<T>& input, State& state, float* scores,
                        ExecutorRef executor) const {
    const TensorView<const T>& k = input.k;
    const Index rows = kept_rows(input);
    const auto fill = [&](Index task, float factor, detail::RowWriter& to) {
      for (Index m = 0; m < rows; ++m)
        to.add(state.q_bar.data() + (task * rows + m) * k.dim(), factor * input.logit_scale());
    };
    detail::softmax_scores(
        {k.batch() * k.heads(), rows, k.dim()}, fill, k.len(), input.capacity,
        [&](Index task) { return detail::cached_keys(k, task); },
        options_.aggregation == Aggregation::mean ? detail::MassOver::sum : detail::MassOver::max,
        scores, state.softmax, executor);
  }

  Scoring scoring() const {
    return options_.domain == Domain::softmax ? Scoring::dot : options_.scoring;
  }
  bool uses_sketch() const { return options_.sketch && scoring() == Scoring::cosine; }

  Options options_;
};

using QuokaSelector = ScoredSelector<QuokaScorer>;
static_assert(Selector<QuokaSelector>);

}  // namespace quoka::inline QUOKA_ABI
