// Selection by attention: a chunk's queries score the keys of the past by their own attention to them.
//
//   score[t] = mean over rows m of softmax over t of scale * q[m] . k[t]
//   keep     = top_k(scores, budget), where a key's score is the largest of its own and its neighbours'
//
// The rows are queries of all query heads that share a KV head, each for itself: of each head the chunk's last ones, the
// least like the mean query, and others evenly spaced (steps/subselect.hpp). With a sketch of the keys (SelectorInput,
// or one that the State keeps) from 8-bit logits alone, in 0.3 of the time: keys of nearly equal mass may be exchanged
// (sketch/sketched_mass.hpp). Under attention's soft-cap, if it has one: in float then, without the sketch.
//
// In a past of more than eight budgets, by the sketch, a quarter of the rows looks at all keys and chooses candidates,
// four times the budget; all rows then score these alone, so that many queries cost little more than few
// (sketch/sketched_mass.hpp). Where more than half of the queries would look first (of a single token), all look at
// once. What is lost on trained models: bench/results/cascade.md.
//
// A past no longer than the budget is kept whole and not scored. 2 * kv_heads * queries * kv_len * head_dim FLOPs per
// chunk, and an exponential per query and key. Scratch: 4 bytes of score per key and KV head, and per worker 12 bytes
// per key. With a sketch the State keeps head_dim + 12 bytes for each key passed to appended().
#pragma once

#include <quoka/select/query_scores.hpp>
#include <quoka/select/query_stages.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/sketch/sketched_call.hpp>

#include <algorithm>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

// The defaults are recommended().
struct MassOptions {
  Budget budget = Budget::share(0.25);  // keys that each KV head keeps: keys(1024), share(0.25)
  Index queries = 256;   // of a chunk that score, for each KV head: its query heads share them, at
                         // least 4 of each
  Index window = 3;      // neighbouring keys that share their maximum; 1: none
  Index keep_first = 0;  // attention sinks, inside the budget
  Index keep_last = 0;   // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;  // 8-bit codes
  Index cascade = 4;                  // candidates of a first look, times the budget; 0: all rows
                                      // look at all keys

  // What to take where answers count (bench/results/which_preset.md; models with real weights:
  // bench/results/real_models.md). A quarter of the past unless you say otherwise: what fewer keys lose is there, too.
  // A layer's call attends to all keys where selecting would take longer: single tokens without 8-bit codes of the
  // keys, above all.
  static MassOptions recommended(Budget budget = Budget::share(0.25)) { return {.budget = budget}; }

  // The same with 64 queries per KV head. Selecting takes half of recommended()'s time. Within a point or two of dense
  // attention's answers on models trained for the tasks; loses some points more on small models with real weights.
  static MassOptions balanced(Budget budget = Budget::keys(1024)) {
    return {.budget = budget, .queries = 64};
  }

  // Queries of each of the `group` >= 1 query heads that share a KV head.
  Index queries_per_head(Index group) const { return std::max<Index>(4, queries / group); }
};

// The scores behind MassSelector.
class MassScorer {
 public:
  using Options = MassOptions;

  // Reused memory, and the sketch of the keys.
  struct State {
    detail::QueryMemory queries;
    Buffer<Index> first_rows;  // of a first look
    QueryScoreState in_float;
    std::unique_ptr<detail::SketchedMassState> sketched;
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
    // Of the last scores by codes: by how many nats the logits of head b * kv_heads + kv_head may be off, at most;
    // infinite where the head was done in float.
    float logit_error(Index head) const;
  };

  // Throws std::invalid_argument for queries < 1 and for a cascade outside [0, 2^20].
  explicit MassScorer(const Options& options = {});

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const;

  // All keys, where attention follows in the same call and selecting would take longer; else false, and nothing is done.
  bool select(const SelectorInput& input, Index budget, State& state, Selection& selection,
              ExecutorRef executor) const;

  // Does selecting and attending to what was chosen take less than attention to all keys? A call that attends as well
  // (SelectorInput::attends) chooses all keys where it does not.
  bool pays(const SelectorInput& input, const State& state) const;
  // Does a call attend to all keys now, where it will select once its cache is full? True once for each capacity: a
  // selection is made then that nobody reads, so that a decode loop has the memory before it crosses the border.
  bool will_select(const SelectorInput& input, State& state) const;

  // Sketches the new keys. A State that has not seen all keys scores in float.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const;

  static bool weighs_logits() { return true; }
  // In float, without the sketch.
  static bool knows_softcap() { return true; }

 private:
  Index rows(const SelectorInput& input) const;
  detail::QueryStages query_stages(const SelectorInput& input, State& state,
                                   ExecutorRef executor) const;
  void score_in_float(const SelectorInput& input, State& state, TensorView<float, 3> scores,
                      ExecutorRef executor) const;
  void score_by_codes(const SelectorInput& input, State& state, TensorView<float, 3> scores,
                      ExecutorRef executor) const;
  bool has_codes(const SelectorInput& input, const State& state) const;
  bool pays_among(Index keys, bool codes, const SelectorInput& input) const;
  bool uses_sketch(const SelectorInput& input) const;
  detail::FirstLook first_look(const SelectorInput& input, State& state) const;
  Options options_;
};

using MassSelector = ScoredSelector<MassScorer>;
static_assert(Selector<MassSelector>);

// In the library.
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
extern template void MassSelector::select(const SelectorInput&, State&, Selection&,
                                          ExecutorRef) const;
extern template void MassSelector::appended(const SelectorInput&, State&, ExecutorRef) const;
#endif

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/mass_selector_impl.hpp>
#endif
