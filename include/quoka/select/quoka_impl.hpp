// Definitions of quoka.hpp.
#pragma once

#include <quoka/select/quoka.hpp>
#include <quoka/select/quoka_stages_impl.hpp>
#include <quoka/select/sketch/sketched_mass.hpp>
#include <quoka/select/sketch/sketched_top_k.hpp>

#include <algorithm>
#include <memory>
#include <optional>

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
  return bytes_of(positions, first_rows, q_bar, subselect, rows, score, softmax, mass, top_k,
                  sketch) +
         (sketched_top_k != nullptr ? sketched_top_k->bytes() : 0) +
         (sketched_mass != nullptr ? sketched_mass->bytes() : 0);
}

QUOKA_FUNC float QuokaScorer::State::logit_error(Index head) const {
  return sketched_mass != nullptr ? sketched_mass->errors.data()[head] : simd::infinity;
}

QUOKA_FUNC QuokaScorer::QuokaScorer(const Options& options) : options_(options) {
  detail::require_at_least("n_queries", options.n_queries.count(), 1);
  detail::require_at_least("cascade", options.cascade, 0);
  detail::require_at_most("cascade", options.cascade, "", 1 << 20);
}

namespace detail {

// What selection by codes is asked, for QuokaScorer: each KV head's chain begins with its queries.
struct QuokaCall {
  SketchedKeys keys;
  Chains chains;
  QueryStages queries;
  SketchedCall sketched;

  QuokaCall(const SelectorInput& input, const QuokaOptions& options, QuokaScorer::State& state,
            Index rows, ExecutorRef executor)
      : keys(input.k, state.sketch, input.sketch),
        chains(input.k.batch() * input.k.heads(), chains_at_once(executor.workers())),
        queries(input, options, state, executor.workers()),
        sketched{keys,           state.q_bar.data(), rows,  options.aggregation,
                 input.capacity, executor,           chains} {
    queries.add_to(chains);
  }
};

// What QuokaScorer::softmax_score() is asked.
struct SoftmaxCall {
  const QuokaScorer& scorer;
  const SelectorInput& input;
  QuokaScorer::State& state;
  const TensorView<float, 3>& scores;
  ExecutorRef executor;
  const StagesRef* after;
};

}  // namespace detail

QUOKA_FUNC bool QuokaScorer::uses_sketch(const SelectorInput& input) const {
  const bool softmax = options_.domain == Domain::softmax;
  if (softmax && input.softcap() > 0.0f) return false;  // codes know no cap
  const bool fast = softmax ? detail::sketched_mass_is_fast() : detail::sketch_is_fast();
  return options_.sketch == Sketch::on || (options_.sketch == Sketch::automatic && fast);
}

// Does the State keep a sketch of these keys?
QUOKA_FUNC bool QuokaScorer::sketches(const SelectorInput& input) const {
  return uses_sketch(input) && input.sketch == nullptr &&
         (options_.domain == Domain::logit || input.shard == nullptr);
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
              n = std::min(options_.n_queries.per_head(input.group()), input.q.len());
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
  return detail::aggregated_rows(
      std::min(options_.n_queries.per_head(input.group()), input.q.len()), input.group(),
      options_.group_mode);
}

// The queries in state.q_bar against the keys.
QUOKA_FUNC detail::KeyScoring QuokaScorer::scoring(const SelectorInput& input,
                                                   const State& state) const {
  return {state.q_bar.data(), kept_rows(input), input.k, &input.inverse_norms,
          options_.aggregation};
}

// Those queries, to state.q_bar.
QUOKA_FUNC void QuokaScorer::aggregate_queries(const SelectorInput& input, State& state,
                                               ExecutorRef executor) const {
  Chains chains(input.k.batch() * input.k.heads(), Chains::most_slots);
  detail::QueryStages queries(input, options_, state, executor.workers());
  queries.add_to(chains);
  executor.run_chains(chains);
}

QUOKA_FUNC void QuokaScorer::score(const SelectorInput& input, State& state,
                                   TensorView<float, 3> scores, ExecutorRef executor) const {
  if (options_.domain == Domain::softmax)
    return softmax_score(input, state, scores, executor, nullptr);
  aggregate_queries(input, state, executor);
  detail::score_all_keys(scoring(input, state), scores.data(), state.score, executor);
}

// Is there a sketch of all keys, and do codes serve?
QUOKA_FUNC bool QuokaScorer::has_codes(const SelectorInput& input, const State& state) const {
  const bool softmax = options_.domain == Domain::softmax;
  return uses_sketch(input) && (!softmax || input.shard == nullptr) &&
         (input.sketch != nullptr || state.sketch.len() == input.k.len()) &&
         detail::codes_fit(kept_rows(input), input.k.dim(),
                           softmax ? Aggregation::max : options_.aggregation);
}

// Measured on a Zen 4, five shapes of heads, 1, 8 and 128 queries, shares of a half to a sixteenth: right within 5 % in
// 194 of 200 calls. Without codes selecting packs and multiplies every key in float, for one token 1.6 to 8 times the
// attention to all of them. A shard's sketch does not count: all ranks must know the answer.
QUOKA_FUNC bool QuokaScorer::pays(const SelectorInput& input, const State& state) const {
  if (options_.domain == Domain::logit) return true;
  const bool codes = input.shard == nullptr && has_codes(input, state);
  const Index queries = input.q.len(), rows = input.group() * queries, keys = input.kv_len();
  const bool many = queries >= (codes ? 2 : 64);
  return (codes || rows >= 24) && 4 * options_.budget.count(keys) <= (many ? 3 : 1) * keys;
}

// In Domain::softmax. after: what follows in the same run, where scores are by codes.
QUOKA_FUNC void QuokaScorer::softmax_score(const SelectorInput& input, State& state,
                                           TensorView<float, 3> scores, ExecutorRef executor,
                                           const detail::StagesRef* after) const {
  const detail::SoftmaxCall call{*this, input, state, scores, executor, after};
#if defined(QUOKA_COMPILED)
  detail::score_by_softmax(call);
#else
  options_.domain.score_(call);
#endif
}

// What Domain::softmax brings.
QUOKA_FUNC void detail::score_by_softmax(const SoftmaxCall& call) {
  const QuokaScorer& scorer = call.scorer;
  const SelectorInput& input = call.input;
  QuokaScorer::State& state = call.state;
  const Rows& k = input.k;
  const Index rows = scorer.kept_rows(input);
  const float logit_scale = input.logit_scale();
  if (scorer.has_codes(input, state)) {
    if (state.sketched_mass == nullptr) state.sketched_mass = std::make_unique<SketchedMassState>();
    const QuokaCall sketched(input, scorer.options_, state, rows, call.executor);
    return sketched_softmax_scores(sketched.sketched, logit_scale, scorer.first_look(input, state),
                                   call.scores, *state.sketched_mass, call.after);
  }
  scorer.aggregate_queries(input, state, call.executor);
  const auto fill = [&](Index b, Index kv_head, RowWriter& to) {
    const float* const head_queries =
        state.q_bar.data() + (b * k.heads() + kv_head) * rows * k.dim();
    for (Index m = 0; m < rows; ++m) to.add(head_queries + m * k.dim(), logit_scale);
  };
  softmax_scores({{rows, k.dim()},
                  fill,
                  RowSource(k),
                  input.capacity,
                  scorer.options_.aggregation,
                  input.shard,
                  input.softcap()},
                 call.scores, state.softmax, call.executor);
}

// Scores by codes and top-k in one run.
QUOKA_FUNC void QuokaScorer::select_by_mass(const SelectorInput& input, Index budget, State& state,
                                            Selection& selection, ExecutorRef executor,
                                            AfterSelection* after) const {
  const Rows& k = input.k;
  const int workers = executor.workers();
  const Index most = std::max(k.len(), input.capacity), heads = k.batch() * k.heads();
  float* const mass = state.mass.reserve_amortised(heads * most);
  state.top_k.reserve(workers, most, options_.top_k.window);
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), budget);
  detail::TopKStages top_k({mass, k.batch(), k.heads(), k.len()}, budget, options_.top_k, writer,
                           state.top_k, workers);
  detail::AfterWriting follows(writer, after);
  const auto rest = [&](Chains& chains) {
    top_k.add_to(chains);
    follows.add_to(chains, workers);
  };
  const detail::StagesRef add_rest(rest);
  softmax_score(input, state, {mass, {k.batch(), k.heads(), k.len()}}, executor, &add_rest);
  writer.commit();
}

// Of the queries in state.q_bar.
QUOKA_FUNC void QuokaScorer::score_selected(const SelectorInput& input, State& state,
                                            const Selection& selection, Index stride, float* scores,
                                            ExecutorRef executor) const {
  detail::score_selected_keys(scoring(input, state), selection, stride, scores, state.score,
                              executor);
}

QUOKA_FUNC bool QuokaScorer::select(const SelectorInput& input, Index budget, State& state,
                                    Selection& selection, ExecutorRef executor,
                                    AfterSelection* after) const {
  if (input.attends && !pays(input, state)) {
    selection.select_all(input.k.batch(), input.k.heads(), input.k.len());
    return true;
  }
  if (!has_codes(input, state)) return false;
  std::optional<detail::SketchAfter> with_sketch;
  if (after != nullptr)
    after = &with_sketch.emplace(*after, sketches(input) ? &state.sketch : nullptr);
  if (options_.domain == Domain::softmax) {
    select_by_mass(input, budget, state, selection, executor, after);
  } else {
    if (state.sketched_top_k == nullptr)
      state.sketched_top_k = std::make_unique<detail::SketchedTopKState>();
    const detail::QuokaCall call(input, options_, state, kept_rows(input), executor);
    detail::sketched_top_k(call.sketched, input.inverse_norms, budget, options_.top_k, selection,
                           *state.sketched_top_k, after);
  }
  if (with_sketch) with_sketch->finish();
  return true;
}

QUOKA_FUNC void QuokaScorer::appended(const SelectorInput& input, State& state,
                                      ExecutorRef executor) const {
  if (!sketches(input)) return;
  if (state.sketch.knows(input.k)) return;  // by select()
  state.sketch.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
