// Definitions of quoka.hpp.
#pragma once

#include <quoka/select/quoka.hpp>
#include <quoka/select/sketch/sketched_cosines.hpp>

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

QUOKA_FUNC void QuokaScorer::score(const SelectorInput& input, State& state,
                                   TensorView<float, 3> scores, ExecutorRef executor) const {
  const Rows& k = input.k;
  const detail::QueryStages queries(input, {.n_queries = options_.n_queries}, state.queries,
                                    executor);
  detail::HeadPlan(k.batch() * k.heads(), executor).run(queries);
  detail::score_all_keys(
      {queries.q_bar(), queries.rows(), k, &input.inverse_norms, Aggregation::max}, scores.data(),
      state.score, executor);
}

QUOKA_FUNC bool QuokaScorer::select(const SelectorInput& input, Index budget, State& state,
                                    Selection& selection, ExecutorRef executor) const {
  const Rows& k = input.k;
  if (!uses_sketch() || (input.sketch == nullptr && state.sketch.len() != k.len()) ||
      !detail::codes_fit(std::min(options_.n_queries, input.q.len()), k.dim(), Aggregation::max))
    return false;
  if (state.sketched == nullptr) state.sketched = std::make_unique<detail::SketchedCosinesState>();
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), budget);
  const detail::SketchedKeys keys(k, state.sketch, input.sketch);
  const detail::HeadPlan plan(k.batch() * k.heads(), executor);
  const detail::QueryStages queries(input, {.n_queries = options_.n_queries}, state.queries,
                                    executor);
  const Index first = std::min(options_.keep_first, budget),
              last = std::min(options_.keep_last, budget - first);
  const detail::CosineCall call{.keys = keys,
                                .q_bar = queries.q_bar(),
                                .rows = queries.rows(),
                                .inverse_norms = input.inverse_norms,
                                .capacity = input.capacity,
                                .first = first,
                                .last = last,
                                .wanted = budget - first - last,
                                .writer = writer};
  const detail::SketchedCosines cosines(call, plan, *state.sketched, state.score, executor);
  plan.run([&](const detail::HeadLoops& on) { queries(on), cosines(on); });
  writer.commit();
  return true;
}

QUOKA_FUNC void QuokaScorer::appended(const SelectorInput& input, State& state,
                                      ExecutorRef executor) const {
  if (uses_sketch() && input.sketch == nullptr)
    state.sketch.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
