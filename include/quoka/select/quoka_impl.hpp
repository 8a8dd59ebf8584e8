// Definitions of quoka.hpp.
#pragma once

#include <quoka/select/quoka.hpp>
#include <quoka/select/sketch/sketched_top_k.hpp>

#include <algorithm>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC QuokaScorer::State::State() = default;
QUOKA_FUNC QuokaScorer::State::State(State&&) noexcept = default;
QUOKA_FUNC QuokaScorer::State& QuokaScorer::State::operator=(State&&) noexcept = default;
QUOKA_FUNC QuokaScorer::State::~State() = default;
QUOKA_FUNC void QuokaScorer::State::truncate(Index kv_len) { sketch.truncate(kv_len); }
QUOKA_FUNC Index QuokaScorer::State::kept_len() const { return sketch.len(); }
QUOKA_FUNC Index QuokaScorer::State::kept_bytes() const { return sketch.bytes(); }
QUOKA_FUNC Index QuokaScorer::State::bytes() const {
  return bytes_of(queries, score, sketch) + (sketched != nullptr ? sketched->bytes() : 0);
}

QUOKA_FUNC QuokaScorer::QuokaScorer(const Options& options) : options_(options) {
  detail::require_at_least("n_queries", options.n_queries, 1);
}

QUOKA_FUNC bool QuokaScorer::uses_sketch() const {
  return options_.sketch == Sketch::on ||
         (options_.sketch == Sketch::automatic && detail::sketch_is_fast());
}

QUOKA_FUNC detail::QueryStages QuokaScorer::query_stages(const SelectorInput& input, State& state,
                                                         ExecutorRef executor) const {
  return {input, {.n_queries = options_.n_queries}, state.queries, executor};
}

QUOKA_FUNC void QuokaScorer::score(const SelectorInput& input, State& state,
                                   TensorView<float, 3> scores, ExecutorRef executor) const {
  const detail::QueryStages stages = query_stages(input, state, executor);
  const detail::HeadPlan plan(input.k.batch() * input.k.heads(), executor);
  plan.run(stages);
  detail::score_all_keys(
      {stages.q_bar(), stages.rows(), input.k, &input.inverse_norms, Aggregation::max},
      scores.data(), state.score, executor);
}

QUOKA_FUNC bool QuokaScorer::select(const SelectorInput& input, Index budget, State& state,
                                    Selection& selection, ExecutorRef executor) const {
  const Index rows = std::min(options_.n_queries, input.q.len());
  if (!uses_sketch() || (input.sketch == nullptr && state.sketch.len() != input.k.len()) ||
      !detail::codes_fit(rows, input.k.dim(), Aggregation::max))
    return false;
  if (state.sketched == nullptr) state.sketched = std::make_unique<detail::SketchedTopKState>();
  const detail::SketchedKeys keys(input.k, state.sketch, input.sketch);
  const detail::QueryStages stages = query_stages(input, state, executor);
  const detail::HeadWork first(stages);
  const detail::SketchedCall call{keys,           stages.q_bar(), rows,  Aggregation::max,
                                  input.capacity, executor,       &first};
  const TopKOptions forced{.keep_first = options_.keep_first, .keep_last = options_.keep_last};
  detail::sketched_top_k(call, input.inverse_norms, budget, forced, selection, *state.sketched);
  return true;
}

QUOKA_FUNC void QuokaScorer::appended(const SelectorInput& input, State& state,
                                      ExecutorRef executor) const {
  if (uses_sketch() && input.sketch == nullptr)
    state.sketch.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
