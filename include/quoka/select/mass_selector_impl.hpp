// Definitions of mass_selector.hpp.
#pragma once

#include <quoka/select/mass_selector.hpp>
#include <quoka/select/sketch/sketched_mass.hpp>

#include <algorithm>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC MassScorer::State::State() = default;
QUOKA_FUNC MassScorer::State::State(State&&) noexcept = default;
QUOKA_FUNC MassScorer::State& MassScorer::State::operator=(State&&) noexcept = default;
QUOKA_FUNC MassScorer::State::~State() = default;
QUOKA_FUNC void MassScorer::State::truncate(Index kv_len) { sketch.truncate(kv_len); }
QUOKA_FUNC Index MassScorer::State::kept_len() const { return sketch.len(); }
QUOKA_FUNC Index MassScorer::State::kept_bytes() const { return sketch.bytes(); }
QUOKA_FUNC Index MassScorer::State::bytes() const {
  return bytes_of(queries, first_rows, in_float, sketch) +
         (sketched != nullptr ? sketched->bytes() : 0);
}
QUOKA_FUNC float MassScorer::State::logit_error(Index head) const {
  return sketched != nullptr ? sketched->errors.data()[head] : simd::infinity;
}

QUOKA_FUNC MassScorer::MassScorer(const Options& options) : options_(options) {
  detail::require_at_least("queries", options.queries, 1);
  detail::require_at_least("cascade", options.cascade, 0);
  detail::require_at_most("cascade", options.cascade, "", 1 << 20);
}

// Codes know no cap.
QUOKA_FUNC bool MassScorer::uses_sketch(const SelectorInput& input) const {
  return input.softcap() == 0.0f &&
         (options_.sketch == Sketch::on ||
          (options_.sketch == Sketch::automatic && detail::sketched_mass_is_fast()));
}

// Queries that score for each KV head.
QUOKA_FUNC Index MassScorer::rows(const SelectorInput& input) const {
  return input.group() * std::min(options_.queries_per_head(input.group()), input.q.len());
}

QUOKA_FUNC detail::QueryStages MassScorer::query_stages(const SelectorInput& input, State& state,
                                                        ExecutorRef executor) const {
  return {input,
          {.n_queries = options_.queries_per_head(input.group()),
           .choice = QueryChoice::mixed,
           .mode = GroupMode::per_head,
           .raw = true},
          state.queries,
          executor};
}

// Of each head's queries the last one, and each fourth of the others, begun elsewhere for each head: chosen among seven
// variants (bench/results/cascade.md).
QUOKA_FUNC detail::FirstLook MassScorer::first_look(const SelectorInput& input,
                                                    State& state) const {
  constexpr Index step = detail::FirstLook::step;
  const Index times = options_.cascade;
  if (times == 0) return {};
  // Fewer than half of the keys, or none.
  const auto candidates_of = [&](Index len) {
    const Index budget = options_.budget.count(len);
    return budget < ceil_div(len, 2 * times) ? times * budget : 0;
  };
  const Index keys = input.k.len(), candidates = candidates_of(keys);
  // With a share of the past as budget a longer one may have none.
  const Index most = std::max(candidates, candidates_of(std::max(keys, input.capacity)));
  const Index rows_of_head = rows(input), n = rows_of_head / input.group();
  const auto looks = [&](Index m) { return m % n == n - 1 || m % n % step == m / n % step; };
  Index count = 0;
  for (Index m = 0; m < rows_of_head; ++m) count += looks(m) ? 1 : 0;
  if (most == 0 || 2 * count > rows_of_head) return {};
  Index *const first = state.first_rows.reserve(count), *end = first;
  for (Index m = 0; m < rows_of_head; ++m)
    if (looks(m)) *end++ = m;
  return {{first, end}, candidates, most};
}

QUOKA_FUNC void MassScorer::score(const SelectorInput& input, State& state,
                                  TensorView<float, 3> scores, ExecutorRef executor) const {
  if (has_codes(input, state)) return score_by_codes(input, state, scores, executor);
  score_in_float(input, state, scores, executor);
}

// Is there a sketch of all keys, and do codes serve?
QUOKA_FUNC bool MassScorer::has_codes(const SelectorInput& input, const State& state) const {
  return uses_sketch(input) && (input.sketch != nullptr || state.sketch.len() == input.k.len()) &&
         detail::codes_fit(rows(input), input.k.dim(), Aggregation::max);
}

// Measured on a Zen 4, five shapes of heads, 1, 8 and 128 queries, shares of a half to a sixteenth: right within 5 % in
// 194 of 200 calls. Without codes selecting packs and multiplies every key in float, for one token 1.6 to 8 times the
// attention to all of them.
QUOKA_FUNC bool MassScorer::pays(const SelectorInput& input, const State& state) const {
  return pays_among(input.k.len(), has_codes(input, state), input);
}

QUOKA_FUNC bool MassScorer::pays_among(Index keys, bool codes, const SelectorInput& input) const {
  const Index queries = input.q.len(), rows = input.group() * queries;
  const bool many = queries >= (codes ? 2 : 64);
  return (codes || rows >= 24) && 4 * options_.budget.count(keys) <= (many ? 3 : 1) * keys;
}

QUOKA_FUNC bool MassScorer::will_select(const SelectorInput& input, State& state) const {
  if (!input.attends || input.capacity <= input.k.len() || input.capacity == state.prepared)
    return false;
  const bool codes = has_codes(input, state);
  if (pays_among(input.k.len(), codes, input) || !pays_among(input.capacity, codes, input))
    return false;
  state.prepared = input.capacity;
  return true;
}

QUOKA_FUNC void MassScorer::score_in_float(const SelectorInput& input, State& state,
                                           TensorView<float, 3> scores,
                                           ExecutorRef executor) const {
  const Rows& k = input.k;
  const detail::QueryStages stages = query_stages(input, state, executor);
  detail::HeadPlan(k.batch() * k.heads(), executor).run(stages);
  const Index rows = stages.rows();
  const float logit_scale = input.logit_scale();
  const auto fill = [&](Index b, Index kv_head, RowWriter& to) {
    const float* const head_queries = stages.q_bar() + (b * k.heads() + kv_head) * rows * k.dim();
    for (Index m = 0; m < rows; ++m) to.add(head_queries + m * k.dim(), logit_scale);
  };
  softmax_scores(
      {{rows, k.dim()}, fill, RowSource(k), input.capacity, Aggregation::mean, input.softcap()},
      scores, state.in_float, executor);
}

QUOKA_FUNC void MassScorer::score_by_codes(const SelectorInput& input, State& state,
                                           TensorView<float, 3> scores,
                                           ExecutorRef executor) const {
  if (state.sketched == nullptr) state.sketched = std::make_unique<detail::SketchedMassState>();
  const detail::SketchedKeys keys(input.k, state.sketch, input.sketch);
  const detail::QueryStages stages = query_stages(input, state, executor);
  const detail::HeadWork first(stages);
  const detail::SketchedCall call{keys,           stages.q_bar(), stages.rows(), Aggregation::mean,
                                  input.capacity, executor,       &first};
  detail::sketched_softmax_scores(call, input.logit_scale(), first_look(input, state), scores,
                                  *state.sketched);
}

QUOKA_FUNC bool MassScorer::select(const SelectorInput& input, Index, State& state,
                                   Selection& selection, ExecutorRef) const {
  const Rows& k = input.k;
  if (input.attends && !pays(input, state)) {
    selection.select_all(k.batch(), k.heads(), k.len());
    return true;
  }
  return false;
}

QUOKA_FUNC void MassScorer::appended(const SelectorInput& input, State& state,
                                     ExecutorRef executor) const {
  if (uses_sketch(input) && input.sketch == nullptr)
    state.sketch.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
