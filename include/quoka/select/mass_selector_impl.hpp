// Definitions of mass_selector.hpp.
#pragma once

#include <quoka/select/mass/select_by_mass_impl.hpp>
#include <quoka/select/mass_selector.hpp>

#include <algorithm>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC MassScorer::State::State() = default;
QUOKA_FUNC MassScorer::State::State(State&&) noexcept = default;
QUOKA_FUNC MassScorer::State& MassScorer::State::operator=(State&&) noexcept = default;
QUOKA_FUNC MassScorer::State::~State() = default;
QUOKA_FUNC Index MassScorer::State::bytes() const {
  return sketch.bytes() + (memory != nullptr ? memory->bytes() : 0);
}
QUOKA_FUNC float MassScorer::State::logit_error(Index head) const {
  return memory != nullptr ? memory->errors.data()[head] : simd::infinity;
}

QUOKA_FUNC MassScorer::MassScorer(const Options& options) : options_(options) {
  detail::require_at_least("queries", options.queries, 1);
  detail::require_at_least("least", options.least, 0);
  if (!(options.threshold >= 0.0f && options.threshold <= detail::most_option))
    detail::fail_range("threshold", static_cast<double>(options.threshold), "[0, 1e30]");
}

// Codes have no soft-cap.
QUOKA_FUNC bool MassScorer::uses_sketch(const SelectorInput& input) const {
  return input.softcap() == 0.0f &&
         (options_.sketch == Sketch::on ||
          (options_.sketch == Sketch::automatic && detail::sketched_mass_is_fast()));
}

// Is there a sketch of all keys, and do codes serve?
QUOKA_FUNC bool MassScorer::has_codes(const SelectorInput& input, const State& state) const {
  return uses_sketch(input) && (input.sketch != nullptr || state.sketch.len() == input.k.len()) &&
         detail::codes_fit(input.k.dim());
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
  return (codes || rows >= 24) && 4 * options_.expected_keys(keys) <= (many ? 3 : 1) * keys;
}

// Does a call attend to all keys now, where it will select once its cache is full? True once for each capacity: a
// selection is made then that nobody reads, so that a decode loop has the memory before it crosses the border.
QUOKA_FUNC bool MassScorer::will_select(const SelectorInput& input, State& state) const {
  if (!input.attends || input.capacity <= input.k.len() || input.capacity == state.prepared)
    return false;
  const bool codes = has_codes(input, state);
  if (pays_among(input.k.len(), codes, input) || !pays_among(input.capacity, codes, input))
    return false;
  state.prepared = input.capacity;
  return true;
}

QUOKA_FUNC void MassScorer::select(const SelectorInput& input, State& state, Selection& selection,
                                   ExecutorRef executor) const {
  const Index keys = input.k.len();
  const detail::MassRule rule{.threshold = options_.threshold,
                              .most = options_.most_keys(keys),
                              .least = options_.least_keys(keys),
                              .queries = options_.queries,
                              .kernel_size = options_.kernel_size,
                              .keep_first = options_.keep_first,
                              .keep_last = options_.keep_last,
                              .all_channels = options_.all_channels};
  if (state.memory == nullptr) state.memory = std::make_unique<detail::MassMemory>();
  if (!has_codes(input, state))
    return detail::select_by_mass(input, rule, nullptr, *state.memory, selection, executor);
  const detail::SketchedKeys codes(input.k, state.sketch, input.sketch);
  detail::select_by_mass(input, rule, &codes, *state.memory, selection, executor);
}

QUOKA_FUNC void MassScorer::decide(const SelectorInput& input, State& state, Selection& selection,
                                   ExecutorRef executor) const {
  const Rows& k = input.k;
  if (options_.least_keys(k.len()) == k.len())
    return selection.select_all(k.batch(), k.heads(), k.len());
  if (options_.most_keys(k.len()) == 0) return selection.select_none(k.batch(), k.heads(), k.len());
  if (will_select(input, state)) select(input, state, selection, executor);  // for its memory
  if (input.attends && !pays(input, state))
    return selection.select_all(k.batch(), k.heads(), k.len());
  select(input, state, selection, executor);
}

QUOKA_FUNC void MassScorer::appended(const SelectorInput& input, State& state,
                                     ExecutorRef executor) const {
  if (uses_sketch(input) && input.sketch == nullptr)
    state.sketch.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
