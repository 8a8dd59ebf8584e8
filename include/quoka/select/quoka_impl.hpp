// Definitions of quoka.hpp.
#pragma once

#include <quoka/select/quoka.hpp>
#include <quoka/select/quoka_stages_impl.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC QuokaScorer::State::State() = default;
QUOKA_FUNC QuokaScorer::State::State(State&&) noexcept = default;
QUOKA_FUNC QuokaScorer::State& QuokaScorer::State::operator=(State&&) noexcept = default;
QUOKA_FUNC QuokaScorer::State::~State() = default;
QUOKA_FUNC void QuokaScorer::State::truncate(Index kv_len) { sketch.keys.truncate(kv_len); }
QUOKA_FUNC Index QuokaScorer::State::kept_len() const { return sketch.keys.len(); }
QUOKA_FUNC Index QuokaScorer::State::kept_bytes() const { return sketch.keys.bytes(); }
QUOKA_FUNC Index QuokaScorer::State::bytes() const {
  return positions.bytes() + first_rows.bytes() + q_bar.bytes() + subselect.bytes() + rows.bytes() +
         key.bytes() + score.bytes() + softmax.bytes() + sketched_mass.bytes() + sketch.bytes();
}

QUOKA_FUNC QuokaScorer::QuokaScorer(const Options& options) : options_(options) {
  detail::require_at_least("n_queries", options.n_queries.count(), 1);
  detail::require_at_least("cascade", options.cascade, 0);
  detail::require_at_most("cascade", options.cascade, "", 1 << 20);
}

namespace detail {

// Rows of 8-bit codes need no second sketch where they are scored in place.
inline bool are_codes(const Rows& k) { return !k.empty() && k.format().read_codes != nullptr; }
}  // namespace detail

QUOKA_FUNC bool QuokaScorer::uses_sketch(const SelectorInput& input) const {
  const bool softmax = options_.domain == Domain::softmax;
  if (softmax && input.softcap() > 0.0f) return false;  // codes know no cap
  const bool fast = softmax ? detail::sketched_mass_is_fast() : detail::sketch_is_fast();
  const bool wanted =
      options_.sketch == Sketch::on || (options_.sketch == Sketch::automatic && fast);
  return wanted && !options_.budget.by_scores() && (softmax || scoring() == Scoring::cosine);
}

// Does the State keep a sketch of these keys?
QUOKA_FUNC bool QuokaScorer::sketches(const SelectorInput& input) const {
  if (!uses_sketch(input) || input.sketch != nullptr) return false;
  return options_.domain == Domain::softmax ? input.shard == nullptr : !detail::are_codes(input.k);
}

// Of each head's queries the last one, and each fourth of the others, begun elsewhere for each head.
QUOKA_FUNC detail::FirstLook QuokaScorer::first_look(const SelectorInput& input,
                                                     State& state) const {
  const Index times = options_.cascade, step = Options::cascade_step;
  if (times == 0) return {};
  // Fewer than half of the keys, or none.
  const auto candidates_of = [&](Index len) {
    const Index budget = options_.budget.count(len);
    return budget < ceil_div(len, 2 * times) ? times * budget : 0;
  };
  const Index keys = input.k.len(), candidates = candidates_of(keys);
  // With a share of the past as budget a longer one may have none.
  const Index most = std::max(candidates, candidates_of(std::max(keys, input.capacity)));
  const Index rows = kept_rows(input),
              n = std::min(options_.n_queries.of_head(input.group()), input.q.len());
  const auto looks = [&](Index m) { return m % n == n - 1 || m % n % step == m / n % step; };
  Index count = 0;
  for (Index m = 0; m < rows; ++m) count += looks(m) ? 1 : 0;
  if (most == 0 || 2 * count > rows) return {};
  Index *const first = state.first_rows.reserve(count), *end = first;
  for (Index m = 0; m < rows; ++m)
    if (looks(m)) *end++ = m;
  return {{first, end}, candidates, most};
}

// Queries that score for each KV head.
QUOKA_FUNC Index QuokaScorer::kept_rows(const SelectorInput& input) const {
  return detail::aggregated_rows(std::min(options_.n_queries.of_head(input.group()), input.q.len()),
                                 input.group(), options_.group_mode);
}

// Those queries, to state.q_bar.
QUOKA_FUNC void QuokaScorer::aggregate_queries(const SelectorInput& input, State& state,
                                               ExecutorRef executor) const {
  Chains chains(input.k.batch() * input.k.heads(), Chains::most_slots);
  detail::QueryStages queries(input, options_, scoring(), state, executor.workers());
  queries.add_to(chains);
  executor.run_chains(chains);
}

QUOKA_FUNC void QuokaScorer::score(const SelectorInput& input, State& state,
                                   TensorView<float, 3> scores, ExecutorRef executor) const {
  if (options_.domain == Domain::softmax) return softmax_score(input, state, scores, executor);
  aggregate_queries(input, state, executor);
  detail::score_all_keys(state.q_bar.data(), kept_rows(input), input.k, input.inverse_norms,
                         {options_.scoring, options_.aggregation}, scores.data(), state.score,
                         executor);
}

// By the sketch?
QUOKA_FUNC bool QuokaScorer::has_sketched_mass(const SelectorInput& input,
                                               const State& state) const {
  return uses_sketch(input) && input.shard == nullptr &&
         (input.sketch != nullptr || state.sketch.keys.len() == input.k.len()) &&
         detail::codes_fit(kept_rows(input), input.k.dim(), Aggregation::max);
}
// Queries, their mass and what comes after it, as stages of `chains`.
QUOKA_FUNC void QuokaScorer::sketched_mass(const SelectorInput& input, State& state,
                                           TensorView<float, 3> scores, ExecutorRef executor,
                                           Chains& chains, const detail::StagesRef* after) const {
  detail::QueryStages queries(input, options_, scoring(), state, executor.workers());
  queries.add_to(chains);
  detail::softmax_scores_by_sketch(state.sketch.keys, input.sketch, state.q_bar.data(),
                                   kept_rows(input), input.k, input.logit_scale(), input.capacity,
                                   options_.aggregation, scores, state.sketched_mass, executor,
                                   first_look(input, state), &chains, after);
}

QUOKA_FUNC void QuokaScorer::softmax_score(const SelectorInput& input, State& state,
                                           TensorView<float, 3> scores,
                                           ExecutorRef executor) const {
  const Rows& k = input.k;
  const Index rows = kept_rows(input);
  if (has_sketched_mass(input, state)) {
    Chains chains(k.batch() * k.heads(), detail::chains_at_once(executor.workers()));
    return sketched_mass(input, state, scores, executor, chains, nullptr);
  }
  aggregate_queries(input, state, executor);
  const float logit_scale = input.logit_scale();
  const auto fill = [&](Index b, Index kv_head, RowWriter& to) {
    const float* const of_head = state.q_bar.data() + (b * k.heads() + kv_head) * rows * k.dim();
    for (Index m = 0; m < rows; ++m) to.add(of_head + m * k.dim(), logit_scale);
  };
  softmax_scores({rows, k.dim()}, fill, k, input.capacity, options_.aggregation, scores,
                 state.softmax, executor, input.shard, input.softcap());
}

// Scores and top-k in one run.
QUOKA_FUNC bool QuokaScorer::softmax_select(const SelectorInput& input, Index budget, State& state,
                                            Selection& selection, ExecutorRef executor,
                                            AfterSelection* after) const {
  if (!has_sketched_mass(input, state)) return false;
  const Rows& k = input.k;
  const Index most = std::max(k.len(), input.capacity), tasks = k.batch() * k.heads();
  float* const scores = state.sketch.scores.reserve_amortised(tasks * most);
  state.sketch.top_k.reserve(executor.workers(), most, options_.top_k.window);
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), budget);
  Chains chains(tasks, detail::chains_at_once(executor.workers()));
  detail::TopKStages top_k(scores, k.heads(), k.len(), budget, options_.top_k, writer,
                           state.sketch.top_k, chains, executor.workers());
  detail::AfterWriting follows(writer, after);
  const auto rest = [&](Chains& to) {
    top_k.add_to(to);
    follows.add_to(to, executor.workers());
  };
  const detail::StagesRef add_rest(rest);
  sketched_mass(input, state, {scores, {k.batch(), k.heads(), k.len()}}, executor, chains,
                &add_rest);
  writer.commit();
  return true;
}

// Of the queries in state.q_bar.
QUOKA_FUNC void QuokaScorer::score_selected(const SelectorInput& input, State& state,
                                            const Selection& selection, Index stride, float* scores,
                                            ExecutorRef executor) const {
  detail::score_selected_keys(state.q_bar.data(), kept_rows(input), input.k, input.inverse_norms,
                              {scoring(), options_.aggregation}, selection, stride, scores,
                              state.score, executor);
}

QUOKA_FUNC bool QuokaScorer::select(const SelectorInput& input, Index budget, State& state,
                                    Selection& selection, ExecutorRef executor,
                                    AfterSelection* after) const {
  if (after != nullptr) {
    detail::SketchAfter with_sketch(*after, sketches(input) ? &state.sketch.keys : nullptr);
    if (!select_by_sketch(input, budget, state, selection, executor, &with_sketch)) return false;
    with_sketch.finish();
    return true;
  }
  return select_by_sketch(input, budget, state, selection, executor, nullptr);
}

QUOKA_FUNC bool QuokaScorer::select_by_sketch(const SelectorInput& input, Index budget,
                                              State& state, Selection& selection,
                                              ExecutorRef executor, AfterSelection* after) const {
  if (!uses_sketch(input)) return false;
  if (options_.domain == Domain::softmax)
    return softmax_select(input, budget, state, selection, executor, after);
  using detail::SketchOf;
  const SketchOf what = input.sketch != nullptr      ? SketchOf::cache
                        : detail::are_codes(input.k) ? SketchOf::codes
                                                     : SketchOf::keys;
  if (what == SketchOf::keys && state.sketch.keys.len() != input.k.len()) return false;
  const Index rows = kept_rows(input);
  if (!detail::codes_fit(rows, input.k.dim(), options_.aggregation)) return false;
  if (what == SketchOf::codes && options_.sketch == Sketch::automatic &&
      !detail::code_rows_are_fast(rows))
    return false;
  if (what == SketchOf::keys) state.sketch.keys.require_shape_of(input.k);
  const KeySketch* const sketch = input.sketch != nullptr ? input.sketch : &state.sketch.keys;
  if (what == SketchOf::cache) {
    state.key.reserve(input.k);
    sketch->require_held(input.k, sketch->places_of(input.k), state.turn++, state.key);
  }
  Chains chains(input.k.batch() * input.k.heads(), detail::chains_at_once(executor.workers()));
  detail::QueryStages queries(input, options_, scoring(), state, executor.workers());
  queries.add_to(chains);
  detail::sketched_top_k(sketch, what, state.q_bar.data(), rows, input.k, input.inverse_norms,
                         options_.aggregation, budget, input.capacity, options_.top_k, selection,
                         state.sketch, state.score, executor, &chains, after);
  return true;
}

QUOKA_FUNC void QuokaScorer::appended(const SelectorInput& input, State& state,
                                      ExecutorRef executor) const {
  if (!sketches(input)) return;
  if (state.sketch.keys.knows(input.k)) return;  // by select()
  state.sketch.keys.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
