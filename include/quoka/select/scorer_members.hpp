// What a Scorer has (selector.hpp has the list), checked member by member: what is missing, and an optional
// member that does not fit, is one sentence at compile time. Otherwise an option would be taken for absent:
// a State whose kept_bytes() cannot be called would be handed keys of another sequence.
#pragma once

#include <quoka/base/member.hpp>
#include <quoka/select/selector.hpp>

#include <concepts>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_DEFINE_HAS_MEMBER(select);
QUOKA_DEFINE_HAS_MEMBER(choose);
QUOKA_DEFINE_HAS_MEMBER(appended);
QUOKA_DEFINE_HAS_MEMBER(shard_keys);
QUOKA_DEFINE_HAS_MEMBER(for_each_setting);
QUOKA_DEFINE_HAS_MEMBER(score_selected);
QUOKA_DEFINE_HAS_MEMBER(top_k);
QUOKA_DEFINE_HAS_MEMBER(keep_first);

// A list of settings, as for_each_setting() fills it.
struct AnySetting {
  template <class T>
  void operator()(const char*, const T&) const {}
};

template <class S>
concept ScorerSelects = requires(const S& scorer, const SelectorInput& input, Index budget,
                                 typename S::State& state, Selection& selection,
                                 ExecutorRef executor) {
  { scorer.select(input, budget, state, selection, executor) } -> std::same_as<bool>;
};
template <class S>
concept ScorerSelectsBefore = requires(const S& scorer, const SelectorInput& input, Index budget,
                                       typename S::State& state, Selection& selection,
                                       ExecutorRef executor, AfterSelection* after) {
  { scorer.select(input, budget, state, selection, executor, after) } -> std::same_as<bool>;
};

template <class S>
constexpr bool has_options() {
  return requires {
    { std::declval<typename S::Options&>().budget } -> std::same_as<Budget&>;
  };
}

// The optional members of a Scorer that has all others.
template <class S>
constexpr bool checked_optional_members() {
  using Options = typename S::Options;
  using State = typename S::State;
  bool fits = checked_kept_bytes<State>();
  if constexpr (has_kept_bytes<State> && checked_kept_bytes<State>()) {
    constexpr bool ok = requires(const State& state) {
      { state.kept_len() } -> std::same_as<Index>;
    };
    static_assert(ok, "quoka: a Scorer's State that has kept_bytes() needs Index kept_len() const");
    fits = fits && ok;
  }
  if constexpr (has_top_k<Options>) {
    constexpr bool ok = requires(const Options& options) {
      { options.top_k } -> std::same_as<const TopKOptions&>;
    };
    static_assert(ok, "quoka: a Scorer's Options::top_k must be a TopKOptions");
    fits = fits && ok;
  } else if constexpr (has_keep_first<Options>) {
    constexpr bool ok = requires(const Options& options) {
      { options.keep_first } -> std::same_as<const Index&>;
    };
    static_assert(ok, "quoka: a Scorer's Options::keep_first must be an Index");
    fits = fits && ok;
  }
  if constexpr (has_select<S>) {
    constexpr bool ok = ScorerSelects<S> || ScorerSelectsBefore<S>;
    static_assert(
        ok,
        "quoka: a Scorer's select() must be bool select(const SelectorInput&, Index budget, "
        "State&, Selection&, ExecutorRef, AfterSelection* = nullptr) const");
    fits = fits && ok;
  }
  if constexpr (has_choose<S>) {
    constexpr bool ok = requires(const S& scorer, const SelectorInput& input, State& state,
                                 Selection& selection, ExecutorRef executor) {
      { scorer.choose(input, state, selection, executor) } -> std::same_as<bool>;
    };
    static_assert(ok,
                  "quoka: a Scorer's choose() must be bool choose(const SelectorInput&, State&, "
                  "Selection&, ExecutorRef) const");
    fits = fits && ok;
  }
  if constexpr (has_appended<S>) {
    constexpr bool ok =
        requires(const S& scorer, const SelectorInput& input, State& state, ExecutorRef executor) {
      scorer.appended(input, state, executor);
    };
    static_assert(
        ok,
        "quoka: a Scorer's appended() must be void appended(const SelectorInput&, State&, "
        "ExecutorRef) const");
    fits = fits && ok;
  }
  if constexpr (has_shard_keys<S>) {
    constexpr bool ok = requires(const S& scorer) {
      { scorer.shard_keys() } -> std::same_as<Index>;
    };
    static_assert(ok, "quoka: a Scorer's shard_keys() must be Index shard_keys() const");
    fits = fits && ok;
  }
  if constexpr (has_for_each_setting<S>) {
    constexpr bool ok = requires(const S& scorer, const AnySetting& add) {
      scorer.for_each_setting(add);
    };
    static_assert(
        ok, "quoka: a Scorer's for_each_setting() must be void for_each_setting(auto&& f) const");
    fits = fits && ok;
  }
  if constexpr (has_score_selected<S>) {
    constexpr bool ok =
        ScorerSelects<S> &&
        requires(const S& scorer, const SelectorInput& input, State& state,
                 const Selection& selection, Index stride, float* scores, ExecutorRef executor) {
      scorer.score_selected(input, state, selection, stride, scores, executor);
    };
    static_assert(ok,
                  "quoka: a Scorer's score_selected() must be void score_selected(const "
                  "SelectorInput&, State&, const Selection&, Index stride, float* scores, "
                  "ExecutorRef) const, beside select()");
    fits = fits && ok;
  }
  return fits;
}

// True, or a sentence for what is missing first and for each optional member that does not fit.
template <class S>
constexpr bool checked_scorer() {
  constexpr bool options = has_options<S>();
  static_assert(options, "quoka: a Scorer needs struct Options with a member Budget budget");
  if constexpr (!options) {
    return false;
  } else {
    constexpr bool made = std::constructible_from<S, const typename S::Options&>;
    static_assert(made, "quoka: a Scorer needs a constructor from const Options&");
    constexpr bool state = requires { requires std::default_initializable<typename S::State>; };
    static_assert(state,
                  "quoka: a Scorer needs struct State, which can be made without arguments, or "
                  "using State = quoka::NoState");
    if constexpr (!made || !state) {
      return false;
    } else {
      using State = typename S::State;
      constexpr bool truncate = requires(State & x, Index kv_len) { x.truncate(kv_len); };
      static_assert(truncate, "quoka: a Scorer's State needs void truncate(Index kv_len)");
      constexpr bool bytes = requires(const State& x) {
        { x.bytes() } -> std::same_as<Index>;
      };
      static_assert(bytes, "quoka: a Scorer's State needs Index bytes() const");
      constexpr bool score = requires(const S& scorer, const SelectorInput& input, State& x,
                                      TensorView<float, 3> scores, ExecutorRef executor) {
        scorer.score(input, x, scores, executor);
      };
      static_assert(score,
                    "quoka: a Scorer needs void score(const SelectorInput&, State&, "
                    "TensorView<float, 3> scores, ExecutorRef) const");
      if constexpr (!truncate || !bytes || !score)
        return false;
      else
        return checked_optional_members<S>();
    }
  }
}

// In the place of a scorer whose members were named, so that nothing more is said.
template <class S>
struct NoScorer {
  struct OwnOptions {
    Budget budget = Budget::keys(0);
    TopKOptions top_k = {};
  };
  template <class T>
  struct OptionsOf {
    using type = OwnOptions;
  };
  template <class T>
  requires(has_options<T>()) struct OptionsOf<T> {
    using type = typename T::Options;
  };
  using Options = typename OptionsOf<S>::type;
  using State = NoState;
  explicit NoScorer(const Options&) {}
  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef) const {}
};
template <class S>
using CheckedScorer = std::conditional_t<checked_scorer<S>(), S, NoScorer<S>>;

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
