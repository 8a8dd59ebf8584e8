// A selector reads a chunk's queries and the cached keys, and chooses which keys the chunk attends
// to. Most do it by a score per key. They are written as a Scorer, and scored_selector.hpp makes
// them a selector.
//
//   struct MySelector {
//     struct Options { ... };
//     struct State {
//       void truncate(Index kv_len);
//       Index kept_bytes() const;  // memory of what is kept per key; optional
//       Index kept_len() const;    // always beside it: of how many keys, the first ones
//     };
//     explicit MySelector(const Options&);
//     // optional: queries of a chunk that one list serves at most; ChunkedPrefill cuts longer
//     // chunks of causal attention
//     Index most_queries() const;
//     // optional: the State cannot be made again from the keys. Refused where a mask hides some of
//     // them
//     static constexpr bool evicts = true;
//     // before the chunk's attention
//     void select(const SelectorInput&, State&, Selection&, ExecutorRef) const;
//     // after its keys were appended
//     void appended(const SelectorInput&, State&, ExecutorRef) const;
//   };
//
// It is const and shareable. All that changes is in the State, which the caller holds: reused
// buffers, and for some methods data per key (projected keys, page bounds), a retained set, or a
// choice shared with other layers. appended() gets the cache with the chunk's keys at its end, so
// that such data grows with it. q is empty if keys came without queries, from a saved prefix.
// truncate() takes the data back to a shorter prefix. The data depends on the keys alone, not on
// the calls that passed them. If select() or appended() throws, a State is as it was before, or
// recomputes what it keeps.
//
// The concept Selector, below, checks these members; DenseSelector has the fewest.
#pragma once

#include <quoka/rows/logit_options.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/options.hpp>

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

// The state of a selector that carries nothing.
struct NoState {
  static void truncate(Index) {}
};

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

}  // namespace QUOKA_ABI
}  // namespace quoka
