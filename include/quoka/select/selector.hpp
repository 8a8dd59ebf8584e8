// A selector reads a chunk's queries and the cached keys, and chooses which keys the chunk attends
// to. Most do it by a score per key; they are written as a Scorer.
//
//   struct MyScorer {                       // ScoredSelector<MyScorer> is a Selector
//     struct Options { Budget budget; ... };  // perhaps kernel_size, keep_first, keep_last
//     using State = NoState;                // or what a layer carries from chunk to chunk, with
//                                           // truncate() and perhaps kept_bytes() as below
//     explicit MyScorer(const Options&);
//     // scores [batch, kv_heads, kv_len]; more is better
//     void score(const SelectorInput&, State&, TensorView<float, 3> scores, ExecutorRef) const;
//     // in place of score(): the whole choice
//     void decide(const SelectorInput&, State&, Selection&, ExecutorRef) const;
//     // optional: does it weigh attention's logits, by SelectorInput::logit_scale()? Then a call
//     // that does not say what they are is refused at once
//     bool weighs_logits() const;
//     // optional, beside it: does it cap them, by SelectorInput::softcap()? Without it a soft-cap
//     // is refused
//     bool supports_softcap() const;
//   };
//
//   struct MySelector {
//     struct Options { ... };
//     struct State {
//       void truncate(Index kv_len);
//       Index kept_bytes() const;  // memory of what is kept per key; optional
//       Index kept_len() const;    // beside it: of how many keys, the first ones
//     };
//     explicit MySelector(const Options&);
//     // optional: queries of a chunk that one list serves at most; ChunkedPrefill cuts longer
//     // chunks
//     Index most_queries() const;
//     // optional: the State cannot be made again from the keys. Refused where a mask hides some of
//     // them
//     static constexpr bool evicts = true;
//     // before the chunk's attention
//     void select(const SelectorInput&, State&, Selection&, ExecutorRef) const;
//     // after its keys were appended; optional in a Scorer
//     void appended(const SelectorInput&, State&, ExecutorRef) const;
//   };
//
// If select() or appended() throws, a State is as it was before, or recomputes what it keeps. After
// a failure of a Scorer, truncate() takes its State back to the keys that it had before the call.
// So truncate() to the present length must not change what is kept of these keys, and must repair
// what a call left half done. The data that a State keeps depends on the keys alone, not on the
// calls that passed them.
//
// Both are const and shareable. All that changes is in the State, which the caller holds: reused
// buffers, and for some methods data per key (projected keys, page bounds), a retained set, or a
// choice shared with other layers. appended() gets the cache with the chunk's keys at its end, so
// that such data grows with it. q is empty if keys came without queries, from a saved prefix.
// truncate() takes the data back to a shorter prefix. query_rows.hpp, key_scores.hpp
// and softmax_scores.hpp have parts to build selectors from.
//
// The concepts Selector, below, and Scorer (scored_selector.hpp) check these requirements.
#pragma once

#include <quoka/rows/key_checksums.hpp>
#include <quoka/rows/logit_options.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/options.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>

namespace quoka {
inline namespace QUOKA_ABI {

// One layer, one chunk.
struct SelectorInput {
  Rows q;  // [batch, q_heads, q_len, head_dim]
  Rows k;  // [batch, kv_heads, kv_len, head_dim], cached keys
  // The options of attention(), or LogitOptions{} for its defaults. Methods that weigh logits
  // refuse a call without them.
  std::optional<LogitOptions> logits = {};
  TensorView<const float, 3> inverse_norms = {};  // [batch, kv_heads, kv_len] of k; optional
  Index capacity = 0;  // keys the cache has room for: what follows kv_len is allocated for them;
                       // not above kv_len: by doubling
  std::uint64_t sequence = 0;  // the caller's number for these sequences: a State that has keys of
                               // one refuses another. 0: no number

  // The sketch of the cache that k lies in, kept by the owner of the cache; null: the State makes
  // its own. Paged or gathered keys should have one.
  const KeySketch* sketch = nullptr;

  // The chunk's own keys [batch, kv_heads, q_len, head_dim], for methods that share a query's
  // attention among past and chunk (MassSelector, XAttention). Optional: without them such a method
  // scores by the past alone.
  Rows chunk_k = {};

  // Attention to the chosen keys follows in the same call, so a method may choose all keys if that
  // takes less time (MassScorer::pays).
  bool attends = false;
  // That attention multiplies 8-bit integers (multiplies_int8() of arithmetic.hpp): attention to
  // all keys then takes a third of the time.
  bool in_int8 = false;

  Index group() const { return q.heads() / k.heads(); }  // query heads that share a KV head
  // Attention's scale, for methods that weigh its logits. Throws std::invalid_argument if `logits`
  // is absent, and for ALiBi, which no method here weighs.
  float logit_scale() const {
    if (!logits || !logits->alibi_slopes.empty()) fail_logits();
    return logits->scale_of(k.dim());
  }

  float softcap() const { return logits ? logits->softcap : 0.0f; }  // attention's; 0: none

 private:
  [[noreturn, gnu::cold, gnu::noinline]] void fail_logits() const {
    if (!logits)
      detail::fail_because(
          "SelectorInput::logits is absent, and this method weighs attention's logits: give it the "
          "options that attention() gets, or LogitOptions{} for its defaults");
    detail::fail_because("there are " + std::to_string(logits->alibi_slopes.size()) +
                         " alibi_slopes, and this method weighs logits without: leave the layer "
                         "dense, or select by cosines");
  }
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

// The state of a selector that carries nothing.
struct NoState {
  static void truncate(Index) {}
};

namespace detail {
// Does a method weigh logits, and does it support a soft-cap? False where it does not say.
template <class Method>
bool weighs_logits(const Method& method) {
  if constexpr (requires { method.weighs_logits(); }) return method.weighs_logits();
  return false;
}
template <class Method>
bool supports_softcap(const Method& method) {
  if constexpr (requires { method.supports_softcap(); }) return method.supports_softcap();
  return false;
}
}  // namespace detail

// Memory that a state keeps per key, without scratch.
template <class State>
Index kept_bytes_of(const State& state) {
  if constexpr (requires { state.kept_bytes(); }) return state.kept_bytes();
  return 0;
}

// The most queries that a selector's list serves without losing more: a layer cuts longer chunks
// into parts of that length.
template <class S>
Index most_queries_of(const S& selector) {
  if constexpr (requires { selector.most_queries(); }) return selector.most_queries();
  return max_keys;
}

// Members of a selector: as MySelector at the top of selector.hpp, where each member is explained.
template <class S>
concept Selector = requires(const S& selector, const SelectorInput& input, typename S::State& state,
                            Selection& selection, ExecutorRef executor, Index kv_len) {
  typename S::Options;
  S(typename S::Options{});
  selector.select(input, state, selection, executor);
  selector.appended(input, state, executor);
  state.truncate(kv_len);
};

// Every selector's contract on its input, before any key is read. Throws std::invalid_argument.
inline void check_selector_input(const SelectorInput& input) {
  detail::require_at_least("q's batch", input.q.batch(), 1);
  detail::require_at_least("q_len", input.q.len(), 1);
  detail::require_at_least("head_dim", input.q.dim(), 1);
  detail::require_keys("q_len", input.q.len());
  detail::require_keys("kv_len", input.k.len());
  if (input.logits) detail::check_logit_options(*input.logits);
  detail::require_multiple("q_heads", input.q.heads(), "kv_heads", input.k.heads());
  detail::require_sizes("k", input.k.sizes(),
                        {input.q.batch(), input.k.heads(), input.k.len(), input.q.dim()});
  if (!input.inverse_norms.absent())
    detail::require_sizes("inverse_norms", input.inverse_norms.sizes(),
                          {input.k.batch(), input.k.heads(), input.k.len()});
  if (input.chunk_k.len() > 0)
    detail::require_sizes("chunk_k", input.chunk_k.sizes(),
                          {input.k.batch(), input.k.heads(), input.q.len(), input.q.dim()});
}

namespace detail {

// The same of a selector that leaves keys out, as `method` says. Throws std::invalid_argument for a
// sliding window, too: the keys that it hides would take the budget of those that are seen; and
// what logit_scale() refuses.
template <class Method>
void check_choice_input(const SelectorInput& input, const Method& method) {
  check_selector_input(input);
  if (weighs_logits(method)) {
    (void)input.logit_scale();
    if (input.softcap() != 0.0f && !supports_softcap(method))
      fail_because("softcap is " + std::to_string(input.softcap()) +
                   ", and this method weighs logits without: leave the layer dense, or select by "
                   "cosines or by MassOptions::recommended()");
  }
  if (input.logits && input.logits->sliding_window > 0)
    fail_because("sliding_window is " + std::to_string(input.logits->sliding_window) +
                 ", and selectors do not support windows: leave a layer with one dense");
}

}  // namespace detail

// The selector that selects everything: dense attention through the same driver.
class DenseSelector {
 public:
  struct Options {};
  using State = NoState;

  DenseSelector() = default;
  explicit DenseSelector(const Options&) {}  // there is nothing to choose

  void select(const SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    check_selector_input(input);
    selection.select_all(input.k.batch(), input.k.heads(), input.k.len());
  }
  void appended(const SelectorInput&, State&, ExecutorRef) const {}
};

static_assert(Selector<DenseSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
