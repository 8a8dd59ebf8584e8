// Definitions of quoka.hpp.
#pragma once

#include <quoka/select/quoka.hpp>
#include <quoka/select/sketch/sketched_mass.hpp>
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

// The first phases of each KV head: its queries to q_bar.
class QueryStages {
 public:
  QueryStages(const SelectorInput& input, const QuokaOptions& options, QuokaScorer::State& state,
              const HeadPlan& plan, int workers)
      : input_(input),
        options_(options),
        state_(state),
        n_(std::min(options.n_queries.per_head(input.group()), input.q.len())),
        parts_(plan.workers() == 1 ? 1 : std::min<Index>(n_, 4)),
        subselect_{options.query_choice, input.group()} {
    const Rows &q = input.q, &k = input.k;
    state.positions.reserve(q.batch() * q.heads() * n_);
    state.subselect.reserve(workers, &q.format(), q.dim(), q.len());
    state.rows.reserve(workers, q);
    state.q_bar.reserve(k.batch() * k.heads() *
                        aggregated_rows(n_, input.group(), options.group_mode) * k.dim());
  }

  void operator()(const HeadLoops& on) const {
    const bool some = n_ < input_.q.len();  // a token, or a chunk of few, keeps all in order
    if (some)
      on.each(input_.group(), [&](Index task, Index member, int worker) {
        subselect_head(input_.q, n_, subselect_, state_.positions.data(),
                       task * input_.group() + member, state_.subselect[worker]);
      });
    on.each(parts_, [&](Index task, Index part, int worker) {
      pre_aggregate_head(
          {input_.q, some ? state_.positions.data() : nullptr, n_, input_.k.heads(),
           options_.group_mode, options_.domain == Domain::softmax, state_.q_bar.data()},
          task, part * n_ / parts_, (part + 1) * n_ / parts_, state_.rows[worker]);
    });
  }

 private:
  const SelectorInput& input_;
  const QuokaOptions& options_;
  QuokaScorer::State& state_;
  Index n_, parts_;  // of a head: queries that are kept, and tasks that see to some of them
  SubselectOptions subselect_;
};

// What selection by codes is asked, for QuokaScorer: each KV head's work begins with its queries.
struct QuokaCall {
  SketchedKeys keys;
  QueryStages queries;
  HeadWork first;
  SketchedCall sketched;

  QuokaCall(const SelectorInput& input, const QuokaOptions& options, QuokaScorer::State& state,
            Index rows, ExecutorRef executor)
      : keys(input.k, state.sketch, input.sketch),
        queries(input, options, state, HeadPlan(input.k.batch() * input.k.heads(), executor),
                executor.workers()),
        first(queries),
        sketched{keys,           state.q_bar.data(), rows,  options.aggregation,
                 input.capacity, executor,           &first} {}
  QuokaCall(const QuokaCall&) = delete;
  QuokaCall& operator=(const QuokaCall&) = delete;
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
  return uses_sketch(input) && input.sketch == nullptr;
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
  const detail::HeadPlan plan(input.k.batch() * input.k.heads(), executor);
  plan.run(detail::QueryStages(input, options_, state, plan, executor.workers()));
}

QUOKA_FUNC void QuokaScorer::score(const SelectorInput& input, State& state,
                                   TensorView<float, 3> scores, ExecutorRef executor) const {
  if (options_.domain == Domain::softmax && has_codes(input, state))
    return score_by_codes(input, state, scores, executor, nullptr);
  aggregate_queries(input, state, executor);
  if (options_.domain == Domain::softmax) return score_in_float(input, state, scores, executor);
  detail::score_all_keys(scoring(input, state), scores.data(), state.score, executor);
}

// Is there a sketch of all keys, and do codes serve?
QUOKA_FUNC bool QuokaScorer::has_codes(const SelectorInput& input, const State& state) const {
  const bool softmax = options_.domain == Domain::softmax;
  return uses_sketch(input) && (input.sketch != nullptr || state.sketch.len() == input.k.len()) &&
         detail::codes_fit(kept_rows(input), input.k.dim(),
                           softmax ? Aggregation::max : options_.aggregation);
}

// Measured on a Zen 4, five shapes of heads, 1, 8 and 128 queries, shares of a half to a sixteenth: right within 5 % in
// 194 of 200 calls. Without codes selecting packs and multiplies every key in float, for one token 1.6 to 8 times the
// attention to all of them.
QUOKA_FUNC bool QuokaScorer::pays(const SelectorInput& input, const State& state) const {
  if (options_.domain == Domain::logit) return true;
  return pays_among(input.k.len(), has_codes(input, state), input);
}

QUOKA_FUNC bool QuokaScorer::pays_among(Index keys, bool codes, const SelectorInput& input) const {
  const Index queries = input.q.len(), rows = input.group() * queries;
  const bool many = queries >= (codes ? 2 : 64);
  return (codes || rows >= 24) && 4 * options_.budget.count(keys) <= (many ? 3 : 1) * keys;
}

QUOKA_FUNC bool QuokaScorer::will_select(const SelectorInput& input, State& state) const {
  if (!input.attends || options_.domain == Domain::logit || input.capacity <= input.k.len() ||
      input.capacity == state.prepared)
    return false;
  const bool codes = has_codes(input, state);
  if (pays_among(input.k.len(), codes, input) || !pays_among(input.capacity, codes, input))
    return false;
  state.prepared = input.capacity;
  return true;
}

// In Domain::softmax, of the queries in state.q_bar.
QUOKA_FUNC void QuokaScorer::score_in_float(const SelectorInput& input, State& state,
                                            TensorView<float, 3> scores,
                                            ExecutorRef executor) const {
  const Rows& k = input.k;
  const Index rows = kept_rows(input);
  const float logit_scale = input.logit_scale();
  const auto fill = [&](Index b, Index kv_head, RowWriter& to) {
    const float* const head_queries =
        state.q_bar.data() + (b * k.heads() + kv_head) * rows * k.dim();
    for (Index m = 0; m < rows; ++m) to.add(head_queries + m * k.dim(), logit_scale);
  };
  softmax_scores(
      {{rows, k.dim()}, fill, RowSource(k), input.capacity, options_.aggregation, input.softcap()},
      scores, state.softmax, executor);
}

// In Domain::softmax, the queries first. after: what follows; null: nothing.
QUOKA_FUNC void QuokaScorer::score_by_codes(const SelectorInput& input, State& state,
                                            TensorView<float, 3> scores, ExecutorRef executor,
                                            const detail::HeadWork* after) const {
  if (state.sketched_mass == nullptr)
    state.sketched_mass = std::make_unique<detail::SketchedMassState>();
  const detail::QuokaCall call(input, options_, state, kept_rows(input), executor);
  detail::sketched_softmax_scores(call.sketched, input.logit_scale(), first_look(input, state),
                                  scores, *state.sketched_mass, after);
}

// Scores by codes, then top-k.
QUOKA_FUNC void QuokaScorer::select_by_mass(const SelectorInput& input, Index budget, State& state,
                                            Selection& selection, ExecutorRef executor) const {
  const Rows& k = input.k;
  const Index most = std::max(k.len(), input.capacity), heads = k.batch() * k.heads();
  const detail::HeadPlan plan(heads, executor);
  float* const mass = state.mass.reserve_amortised(heads * most);
  state.top_k.reserve(executor.workers(), most, options_.top_k.window);
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), budget);
  const detail::TopKStages top_k({mass, k.batch(), k.heads(), k.len()}, budget, options_.top_k,
                                 writer, state.top_k, plan);
  const auto choose = [&](const detail::HeadLoops& on) { top_k.run(on); };
  const detail::HeadWork after(choose);
  score_by_codes(input, state, {mass, {k.batch(), k.heads(), k.len()}}, executor, &after);
  writer.commit();
}

QUOKA_FUNC bool QuokaScorer::select(const SelectorInput& input, Index budget, State& state,
                                    Selection& selection, ExecutorRef executor) const {
  if (input.attends && !pays(input, state)) {
    selection.select_all(input.k.batch(), input.k.heads(), input.k.len());
    return true;
  }
  if (!has_codes(input, state)) return false;
  if (options_.domain == Domain::softmax) {
    select_by_mass(input, budget, state, selection, executor);
  } else {
    if (state.sketched_top_k == nullptr)
      state.sketched_top_k = std::make_unique<detail::SketchedTopKState>();
    const detail::QuokaCall call(input, options_, state, kept_rows(input), executor);
    detail::sketched_top_k(call.sketched, input.inverse_norms, budget, options_.top_k, selection,
                           *state.sketched_top_k);
  }
  return true;
}

QUOKA_FUNC void QuokaScorer::appended(const SelectorInput& input, State& state,
                                      ExecutorRef executor) const {
  if (!sketches(input)) return;
  state.sketch.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
