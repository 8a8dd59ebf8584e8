// QuoKA: query-oriented KV selection (Algorithm 1), composed of its stages.
//
//   kept   = subselect_queries(q, n_queries)     least like the chunk's mean query
//   q_bar  = pre_aggregate(kept, kv_heads)       one set of queries per KV head
//   scores = score_keys(q_bar, past_k)           maximum cosine
//   keep   = top_k(scores, budget)
//
// Where a sketch of the keys is kept, the last two are one step: sketched_top_k(q_bar, sketch,
// past_k) scores all keys by 8-bit codes and in float only those near the threshold.
//
// A past no longer than the budget is kept whole and not scored. FLOPs per chunk: 5 * q_heads *
// q_len * head_dim for the queries, 2 * kv_heads * n_queries * kv_len * head_dim for the keys,
// against 4 * q_heads * q_len * kv_len * head_dim of dense attention: 1/64 with 32/8 heads, chunk
// 128 and 16 queries. Scratch: 4 bytes of score per key and KV head, and per worker 12 bytes per
// key. With a sketch the State keeps 8-bit codes of the keys it was told of by appended(), head_dim
// + 12 bytes each, and selection takes 0.3 of the time; the Selection is the same, bit for bit
// (sketch/sketched_top_k.hpp); scratch is then 32 bytes per key and worker.
//
// Domain::softmax: raw queries score by their own attention to the past, softmax over t of
// scale * q . k[t]: its maximum or mean over the kept rows, those of all heads of the group with
// per_head. With a sketch from 8-bit logits alone, in 0.3 of the time: keys of nearly equal mass may be
// exchanged (sketch/sketched_mass.hpp). Under attention's soft-cap, if it has one: in float then, without the sketch,
// a cascade and levels.
//
// Cascade: a part of these rows looks at all keys, all of them at the best candidates alone, so that many
// queries cost little more than few (sketch/sketched_mass.hpp). It begins once the past is longer than twice
// the candidates. Where more than half of the queries would look first (of a single token), all look at once.
// Another Selection than without; what is lost on trained models: bench/results/cascade.md.
//
// Source: Jones et al., "QuoKA: Query-Oriented KV Selection for Efficient LLM Prefill", ICLR 2026,
// arXiv 2602.08722. Deviations, all off by default: options.hpp, steps/top_k.hpp, Domain::softmax.
// Algorithm 1 gathers normalised keys for attention; here attention gets the raw ones, as Algorithm 2
// and every dense layer need them.
#pragma once

#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/select/steps/pre_aggregate.hpp>
#include <quoka/select/steps/score.hpp>
#include <quoka/select/steps/subselect.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {

// How many queries of a chunk score: so many of each query head, the paper's N_Q, or so many of all heads that
// share a KV head, which then costs the same whatever the group. The group comes from the shapes of the call.
//
//   .n_queries = 16                              16 of each query head
//   .n_queries = QueryCount::per_kv_head(64)     64 / group of each query head, at least 4
class QueryCount {
 public:
  // Of each query head.
  template <detail::WholeNumber T>
  constexpr QueryCount(T count) : count_(static_cast<Index>(count)) {}
  // Of all query heads of a group together.
  static constexpr QueryCount per_kv_head(Index count) {
    QueryCount queries(count);
    queries.is_per_kv_head_ = true;
    return queries;
  }

  // Queries of each of the `group` >= 1 query heads that share a KV head.
  constexpr Index per_head(Index group) const {
    return is_per_kv_head_ ? std::max<Index>(least_per_head, count_ / group) : count_;
  }
  constexpr Index count() const { return count_; }                   // as it was given
  constexpr bool is_per_kv_head() const { return is_per_kv_head_; }  // likewise
  friend constexpr bool operator==(const QueryCount& a, const QueryCount& b) = default;

 private:
  static constexpr Index least_per_head = 4;

  Index count_;
  bool is_per_kv_head_ = false;
};

// What QuoKA leaves open. The defaults are the paper's; recommended() is what to take in its place.
struct QuokaOptions {
  Budget budget = Budget::keys(1024);                  // B_SA: keys(512), keys(2048), share(0.25)
  QueryCount n_queries = 16;                           // N_Q: queries kept for scoring
  Aggregation aggregation = Aggregation::max;          // over the kept queries
  GroupMode group_mode = GroupMode::rank;              // over the heads of a group
  QueryChoice query_choice = QueryChoice::dissimilar;  // which queries score
  Domain domain = Domain::logit;                       // softmax: the kept queries' own attention
  TopKOptions top_k = {};                              // window, sinks and recent keys
  Sketch sketch = Sketch::automatic;                   // 8-bit codes
  Index cascade = 0;                                   // candidates for all queries, times the
                                                       // budget; 0: off. Of Domain::softmax by the
                                                       // sketch

  // The paper's, which are the defaults.
  static QuokaOptions paper(Budget budget = Budget::keys(1024)) { return {.budget = budget}; }

  // What to take where answers count (bench/results/which_preset.md; models with real weights:
  // bench/results/real_models.md). Queries of every kind, each by its own softmax, 256 per KV head, and a key's two
  // neighbours come with it. A quarter of the past unless you say otherwise: what fewer keys lose is there, too. In a
  // past of more than eight budgets a quarter of the queries choose candidates for all. A layer's call attends to all
  // keys where selecting would take longer: single tokens without 8-bit codes of the keys, above all.
  static QuokaOptions recommended(Budget budget = Budget::share(0.25)) {
    QuokaOptions options = balanced(budget);
    options.n_queries = QueryCount::per_kv_head(256);
    return options;
  }

  // Between the two: the same with 64 queries per KV head (at least 4 of each query head). Selecting takes half of
  // recommended()'s time. Within a point or two of dense attention's answers on models trained for the tasks; loses some
  // points more on small models with real weights.
  static QuokaOptions balanced(Budget budget = Budget::keys(1024)) {
    return {.budget = budget,
            .n_queries = QueryCount::per_kv_head(64),
            .aggregation = Aggregation::mean,
            .group_mode = GroupMode::per_head,
            .query_choice = QueryChoice::mixed,
            .domain = Domain::softmax,
            .top_k = {.window = 3},
            .cascade = 4};
  }

  // "paper", "balanced" or "recommended"; budget: null: the preset's own. Throws std::invalid_argument for another name.
  static QuokaOptions preset(std::string_view name, std::optional<Budget> budget = {}) {
    QuokaOptions options;
    if (name == "paper")
      options = paper();
    else if (name == "balanced")
      options = balanced();
    else if (name == "recommended")
      options = recommended();
    else
      detail::fail_because("the preset is \"" + std::string(name) +
                           "\", but must be paper, balanced or recommended");
    options.budget = budget.value_or(options.budget);
    return options;
  }

  // The first look of a cascade is that of each head's last query and of each fourth of the others: chosen
  // among seven variants (bench/results/cascade.md).
  static constexpr Index cascade_step = 4;
};

// The scores behind QuokaSelector.
class QuokaScorer {
 public:
  using Options = QuokaOptions;

  // Reused memory, and the sketch of the keys.
  struct State {
    Buffer<Position> positions;  // [batch, q_heads, n_queries]
    Buffer<Index> first_rows;    // of a cascade
    Buffer<float> q_bar;         // [batch, kv_heads, rows, head_dim]
    WorkerScratch<detail::SubselectScratch> subselect;
    WorkerScratch<detail::FloatRow> rows;  // to read one
    WorkerScratch<detail::ScoreScratch> score;
    QueryScoreState softmax;
    Buffer<float> mass;  // [batch, kv_heads, kv_len] by codes
    WorkerScratch<detail::TopKScratch> top_k;
    std::unique_ptr<detail::SketchedTopKState> sketched_top_k;
    std::unique_ptr<detail::SketchedMassState> sketched_mass;
    KeySketch sketch;    // grows with the cache: appended()
    Index prepared = 0;  // will_select(): the capacity for which there is memory

    // Out of line: a caller that keeps a State does not compile what becomes of all its memory.
    State();
    State(State&&) noexcept;
    State& operator=(State&&) noexcept;
    ~State();

    void truncate(Index kv_len);
    Index kept_len() const;
    Index kept_bytes() const;
    Index bytes() const;
    // Of the last scores by codes in Domain::softmax: by how many nats the logits of head b * kv_heads + kv_head may be
    // off, at most; infinite where the head was done in float.
    float logit_error(Index head) const;
  };

  // Throws std::invalid_argument for n_queries < 1 and for a cascade outside [0, 2^20].
  explicit QuokaScorer(const Options& options = {});

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const;

  // The Selection by way of the sketch; false, and nothing done, where there is none of all keys.
  bool select(const SelectorInput& input, Index budget, State& state, Selection& selection,
              ExecutorRef executor) const;

  // Does selecting and attending to what was chosen take less than attention to all keys? In Domain::softmax; cosines
  // are always selected by. A call that attends as well (SelectorInput::attends) chooses all keys where it does not.
  bool pays(const SelectorInput& input, const State& state) const;
  // Does a call attend to all keys now, where it will select once its cache is full? True once for each capacity: a
  // selection is made then that nobody reads, so that a decode loop has the memory before it crosses the border.
  bool will_select(const SelectorInput& input, State& state) const;

  // Sketches the new keys. A State that was not told of all keys scores in float.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const;

  // In Domain::softmax.
  bool weighs_logits() const { return options_.domain == Domain::softmax; }
  // In float: without the sketch and a cascade.
  static bool knows_softcap() { return true; }

 private:
  Index kept_rows(const SelectorInput& input) const;
  detail::KeyScoring scoring(const SelectorInput& input, const State& state) const;
  void aggregate_queries(const SelectorInput& input, State& state, ExecutorRef executor) const;
  void score_in_float(const SelectorInput& input, State& state, TensorView<float, 3> scores,
                      ExecutorRef executor) const;
  void score_by_codes(const SelectorInput& input, State& state, TensorView<float, 3> scores,
                      ExecutorRef executor, const detail::HeadWork* after) const;
  void select_by_mass(const SelectorInput& input, Index budget, State& state, Selection& selection,
                      ExecutorRef executor) const;
  bool has_codes(const SelectorInput& input, const State& state) const;
  bool pays_among(Index keys, bool codes, const SelectorInput& input) const;
  bool uses_sketch(const SelectorInput& input) const;
  bool sketches(const SelectorInput& input) const;
  detail::FirstLook first_look(const SelectorInput& input, State& state) const;
  Options options_;
};

using QuokaSelector = ScoredSelector<QuokaScorer>;
static_assert(Selector<QuokaSelector>);

// In the library.
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
extern template void QuokaSelector::select(const SelectorInput&, State&, Selection&,
                                           ExecutorRef) const;
extern template void QuokaSelector::appended(const SelectorInput&, State&, ExecutorRef) const;
#endif

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/quoka_impl.hpp>
#endif
