// Selectors by a score per key: checks, budget, forced keys, neighbours and top-k are written here
// once; a method is a Scorer.
//
//   struct MyScorer : ScorerDefaults {        // ScoredSelector<MyScorer> is a Selector
//     struct Options { Budget budget; ... };  // perhaps kernel_size, keep_first, keep_last
//     using State = NoState;                  // or what a layer carries from chunk to chunk, with
//                                             // truncate(), and perhaps kept_bytes() and
//                                             // kept_len() (selector.hpp)
//     explicit MyScorer(const Options&);
//     // scores [batch, kv_heads, kv_len]; more is better
//     void score(const SelectorInput&, State&, TensorView<float, 3> scores, ExecutorRef) const;
//     // in place of score(): the whole choice
//     void decide(const SelectorInput&, State&, Selection&, ExecutorRef) const;
//     // and its own form of any member of ScorerDefaults
//   };
//
// select() checks the input and the State's keys (StateKeys). Then a Scorer with decide() writes
// the Selection itself; another one's score() fills the scores, and top_k.hpp selects by them
// (select_by_scores()). If they fail, truncate() takes the State back to the keys that it had
// before the call. So truncate() to the present length must not change what is kept of these keys,
// and must also restore a State that a failed call left partly updated.
//
// A Scorer that keeps data per key takes in, during score() or decide(), the keys that appended()
// has not seen (Quest, the block methods, those that evict): so their select() changes the State.
//
// query_rows.hpp, key_scores.hpp and softmax_scores.hpp have parts to write a Scorer with. score()
// is not called for a past no longer than the budget, which is kept whole, nor with a budget of 0,
// by which nothing is kept; a decide() sees to both itself (select_unscored()).
// Beyond the scorer's own, scratch is 4 bytes of score per key and KV head and 12 bytes per key and
// worker.
#pragma once

#include <quoka/select/key_checksums.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/top_k.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Can these members be called as a ScoredSelector calls them?
template <class S>
concept ScorerScores = requires(const S& scorer, const SelectorInput& input,
                                typename S::State& state, TensorView<float, 3> scores,
                                ExecutorRef executor) {
  scorer.score(input, state, scores, executor);
};
template <class S>
concept ScorerDecides = requires(const S& scorer, const SelectorInput& input,
                                 typename S::State& state, Selection& selection,
                                 ExecutorRef executor) {
  { scorer.decide(input, state, selection, executor) } -> std::same_as<void>;
};
// One of these two: with both, one would never be called.
template <class S>
concept ScorerChooses = (ScorerScores<S> != ScorerDecides<S>);
template <class S>
concept ScorerKeeps = requires(const typename S::State& state) {
  { state.kept_bytes() } -> std::same_as<Index>;
  { state.kept_len() } -> std::same_as<Index>;
};

}  // namespace detail

// What a Scorer does unless it says otherwise.
struct ScorerDefaults {
  // After the chunk's keys were appended.
  template <class State>
  static void appended(const SelectorInput&, State&, ExecutorRef) {}
  // Does it weigh attention's logits, by SelectorInput::logit_scale()? Then a call that does not
  // say what they are is refused at once.
  static bool weighs_logits() { return false; }
  // Does it cap them, by SelectorInput::softcap()? If it weighs them and does not, a soft-cap is
  // refused.
  static bool supports_softcap() { return false; }
  static constexpr bool evicts = false;            // are keys dropped for good?
  static constexpr Index most_queries = max_keys;  // queries of a chunk that one list serves
  static constexpr Index keep_last = 0;            // forced last keys, where no option says so
};

// Members of a Scorer: as MyScorer at the top of scored_selector.hpp. An optional member that does
// not fit is an error, too, if it is public and not overloaded: if a kept_bytes() that cannot be
// called counted as absent, the State would not be checked for keys of another sequence.
template <class S>
concept Scorer = std::constructible_from<S, const typename S::Options&> &&
                 std::default_initializable<typename S::State> && detail::ScorerChooses<S> &&
                 (detail::ScorerDecides<S> || !requires { &S::decide; }) &&
                 (detail::ScorerKeeps<S> || !requires { &S::State::kept_bytes; }) &&
                 requires(const S& scorer, typename S::Options& options, typename S::State& state,
                          const SelectorInput& input, ExecutorRef executor, Index kv_len) {
  { options.budget } -> std::same_as<Budget&>;
  state.truncate(kv_len);
  scorer.appended(input, state, executor);
  { scorer.weighs_logits() } -> std::same_as<bool>;
  { scorer.supports_softcap() } -> std::same_as<bool>;
  // Constants, of these types.
  typename std::bool_constant<S::evicts>;
  requires std::same_as<decltype(S::evicts), const bool>;
  typename std::integral_constant<Index, S::most_queries>;
  requires std::same_as<decltype(S::most_queries), const Index>;
  typename std::integral_constant<Index, S::keep_last>;
  requires std::same_as<decltype(S::keep_last), const Index>;
};

// Which keys a State covers. A State belongs to the sequences of one cache: with other keys it
// would select by data of the first ones.
class StateKeys {
 public:
  Index len() const { return len_; }  // keys that were appended

  // Before a call. Throws std::invalid_argument if input's keys have another shape or sequence than
  // the first ones since truncate(0), and if the cache has become shorter without a truncate().
  // Also if a remembered key has changed (key_checksums.hpp).
  void check(const SelectorInput& input) {
    if (len_ > 0) {
      detail::require_equal("the batch", input.k.batch(), "that of the state's keys", batch_);
      detail::require_equal("kv_heads", input.k.heads(), "that of the state's keys", kv_heads_);
      detail::require_equal("head_dim", input.k.dim(), "that of the state's keys", dim_);
      if (input.sequence != sequence_)
        detail::fail("the sequence's number", static_cast<Index>(input.sequence), "but must equal",
                     "that of the state's keys", static_cast<Index>(sequence_));
      detail::require_at_most("the state's length", len_, "the keys' (truncate() was not called)",
                              input.k.len());
    }
    if (const Index changed = checksums_.find_changed(input.k); changed >= 0) fail_changed(changed);
  }
  // After it: input's keys are covered, and the State keeps something of the first `kept` ones.
  // Nothing has changed where it throws.
  void take(const SelectorInput& input, Index kept) {
    checksums_.remember(input.k, kept_, kept);
    kept_ = std::max(kept_, kept);
    batch_ = input.k.batch(), kv_heads_ = input.k.heads(), dim_ = input.k.dim();
    sequence_ = input.sequence;
    len_ = input.k.len();
  }
  void truncate(Index kv_len) {
    len_ = std::min(len_, kv_len);
    kept_ = std::min(kept_, kv_len);
    checksums_.truncate(kv_len);
  }

 private:
  [[noreturn, gnu::cold]] void fail_changed(Index position) const {
    detail::require_rounding_to_nearest();
    detail::fail_because("the key at position " + std::to_string(position) + " of " +
                         std::to_string(len_) +
                         " is not the one that was appended: the cache has changed. "
                         "truncate(n) of the state to the first keys that are as they were, then "
                         "appended(), or truncate(0) for another sequence");
  }

  Index batch_ = 0, kv_heads_ = 0, dim_ = 0;
  std::uint64_t sequence_ = 0;
  Index len_ = 0, kept_ = 0;
  detail::KeyChecksums checksums_;
};

// For a decide(): selects all keys or none if the budget alone decides; else returns false and does
// nothing.
inline bool select_unscored(const Rows& k, const Budget& budget, Selection& selection) {
  const Index count = budget.count(k.len());
  if (count == k.len())
    selection.select_all(k.batch(), k.heads(), k.len());
  else if (count == 0)
    selection.select_none(k.batch(), k.heads(), k.len());
  return count == k.len() || count == 0;
}

namespace detail {

inline void refuse_masks(const SelectorInput& input) {
  if (input.logits && input.logits->masked)
    fail_because(
        "there is a mask, or lists of each query's keys, and select() takes all keys to be seen: "
        "select_visible() reads masks");
}

// check_selector_input() for a method that leaves keys out. Throws std::invalid_argument for a
// sliding window and for masks and lists of each query's keys, too: the keys that these hide would
// take the budget of those that are seen; and what logit_scale() refuses.
template <class Method>
void check_choice_input(const SelectorInput& input, const Method& method) {
  check_selector_input(input);
  if (method.weighs_logits()) {
    (void)input.logit_scale();
    if (input.softcap() != 0.0f && !method.supports_softcap())
      fail_because("softcap is " + std::to_string(input.softcap()) +
                   ", and this method weighs logits without: leave the layer dense, or select by "
                   "cosines or by MassOptions::recommended()");
  }
  refuse_masks(input);
  if (input.logits && input.logits->sliding_window > 0)
    fail_because("sliding_window is " + std::to_string(input.logits->sliding_window) +
                 ", and selectors do not support windows: leave a layer with one dense");
}

// Reused memory of select_by_scores().
struct KeyScoresMemory {
  Buffer<float> scores;  // [batch, kv_heads, kv_len]
  Arenas workers;
};
// The best keys of each KV head by the scores [batch, kv_heads, kv_len] that score(scores) writes;
// it is not called where the budget alone decides.
template <class Score>
void select_by_scores(const SelectorInput& input, const Budget& budget, const TopKOptions& options,
                      KeyScoresMemory& memory, Selection& selection, ExecutorRef executor,
                      Score&& score) {
  const Rows& k = input.k;
  if (select_unscored(k, budget, selection)) return;
  const Index capacity = std::max(k.len(), input.capacity), heads = k.batch() * k.heads();
  selection.reserve(heads, heads * budget.count(capacity));
  const TensorView<float, 3> scores(memory.scores.reserve_amortised(heads * capacity),
                                    {k.batch(), k.heads(), k.len()});
  memory.workers.reserve(executor.workers(),
                         [&](Arena& arena) { TopKScratch(arena, capacity, options.kernel_size); });
  score(scores);
  select_top_k(scores, budget.count(k.len()), options, selection, memory.workers, executor);
}

}  // namespace detail

template <Scorer Method>
class ScoredSelector {
 public:
  using Options = typename Method::Options;
  static constexpr bool evicts = Method::evicts;  // selector.hpp

  struct State {
    typename Method::State scorer;
    StateKeys keys;
    detail::KeyScoresMemory scores;

    void truncate(Index kv_len) {
      scorer.truncate(kv_len);
      keys.truncate(kv_len);
    }
    // Keys of which the method keeps something.
    Index kept_len() const {
      if constexpr (detail::ScorerKeeps<Method>) return scorer.kept_len();
      return 0;
    }
    Index kept_bytes() const { return kept_bytes_of(scorer); }
  };

  // Throws std::invalid_argument for a kernel_size < 1, a negative keep_first or keep_last, and
  // what the scorer refuses.
  explicit ScoredSelector(const Options& options = {}) : options_(options), scorer_(options) {
    detail::check_top_k(0, top_k_of(options));
  }

  const Options& options() const { return options_; }
  const Method& scorer() const { return scorer_; }
  // Queries of a chunk that a list serves at most.
  Index most_queries() const { return Method::most_queries; }

  // Writes the keys to attend to. Throws std::invalid_argument when shapes do not fit together, and
  // when the State belongs to other keys (StateKeys::check). After a throw the State is as it was.
  void select(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const;

  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const;
  // Throws what select() throws for the input, whatever the State.
  void check(const SelectorInput& input) const { detail::check_choice_input(input, scorer_); }

  // For a caller's own cache, one call: q [batch, q_heads, q_len, head_dim], past_k [batch,
  // kv_heads, kv_len, head_dim], and the options that attention() gets, or {} for its defaults.
  // inverse_norms of past_k, [batch, kv_heads, kv_len], may be absent. Data that the method keeps
  // per key is recomputed in each call; if that is much work, use the call above, with a State.
  // Throws as above, and for a mask, which select_visible() reads.
  Selection select(const Rows& q, const Rows& past_k, const LogitOptions& logits,
                   ExecutorRef executor = SerialExecutor{},
                   TensorView<const float, 3> inverse_norms = {}) const {
    return select_once({q, past_k, logits, inverse_norms, past_k.len()}, executor);
  }
  // The same with the chunk's own keys chunk_k [batch, kv_heads, q_len, head_dim]. A method that
  // weighs attention then takes a key's share of the attention to past and chunk together, not of
  // the past's alone.
  Selection select(const Rows& q, const Rows& past_k, const Rows& chunk_k,
                   const LogitOptions& logits, ExecutorRef executor = SerialExecutor{}) const {
    return select_once(
        {.q = q, .k = past_k, .logits = logits, .capacity = past_k.len(), .chunk_k = chunk_k},
        executor);
  }

 private:
  // A state that keeps nothing per key may serve any keys.
  static constexpr bool keeps_per_key = detail::ScorerKeeps<Method>;

  // Selects with a State that is made for this call.
  Selection select_once(const SelectorInput& input, ExecutorRef executor) const {
    detail::refuse_masks(input);
    if (input.k.heads() == 0 && input.k.len() == 0) return Selection::all(input.q.batch(), 0, 0);
    State state;
    Selection selection;
    select(input, state, selection, executor);
    return selection;
  }

  // kernel_size, keep_first and keep_last, where the method or its options have them.
  static TopKOptions top_k_of(const Options& options) {
    TopKOptions top_k;
    if constexpr (requires { options.kernel_size; }) top_k.kernel_size = options.kernel_size;
    if constexpr (requires { options.keep_first; }) top_k.keep_first = options.keep_first;
    top_k.keep_last = Method::keep_last;
    if constexpr (requires { options.keep_last; }) top_k.keep_last = options.keep_last;
    return top_k;
  }

  // The State's keys, to which this call's must belong. Null for a State that keeps nothing, and if
  // the cache's owner keeps the sketch, because cells may then come and go. Beside such a sketch a
  // State may still keep data of its own, which belong to its keys (Loki, methods that evict).
  static StateKeys* keys_of(const SelectorInput& input, State& state) {
    if constexpr (keeps_per_key)
      if (input.sketch == nullptr || state.kept_len() > 0) return &state.keys;
    return nullptr;
  }
  // f() between the checks of the State's keys before and after it. After a throw the State is cut
  // back to the keys that it had.
  template <class F>
  static void guarded(const SelectorInput& input, State& state, F&& f) {
    if (StateKeys* const keys = keys_of(input, state)) keys->check(input);
    const Index len = state.keys.len();
    try {
      f();
      if (StateKeys* const keys = keys_of(input, state))
        keys->take(input, std::min(state.kept_len(), input.k.len()));
    } catch (...) {
      if (keeps_per_key) state.truncate(len);
      throw;
    }
  }

  Options options_;
  Method scorer_;
};

// Not inline: where the library has a selector compiled, callers do not compile it again.
template <Scorer Method>
void ScoredSelector<Method>::select(const SelectorInput& input, State& state, Selection& selection,
                                    ExecutorRef executor) const {
  detail::check_choice_input(input, scorer_);
  guarded(input, state, [&] {
    if constexpr (detail::ScorerDecides<Method>)
      scorer_.decide(input, state.scorer, selection, executor);
    else
      detail::select_by_scores(input, options_.budget, top_k_of(options_), state.scores, selection,
                               executor, [&](const TensorView<float, 3>& scores) {
                                 scorer_.score(input, state.scorer, scores, executor);
                               });
  });
}

template <Scorer Method>
void ScoredSelector<Method>::appended(const SelectorInput& input, State& state,
                                      ExecutorRef executor) const {
  detail::require_keys("kv_len", input.k.len());
  guarded(input, state, [&] { scorer_.appended(input, state.scorer, executor); });
}

}  // namespace QUOKA_ABI
}  // namespace quoka
