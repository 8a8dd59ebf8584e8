// What a selector is: something that looks at a chunk's queries and the cached keys and says which
// keys the chunk attends to. Most do it by a score per key; they are written as a Scorer.
//
//   struct MyScorer {                       // ScoredSelector<MyScorer> is a Selector
//     struct Options { Budget budget; Index window, keep_first, keep_last; ... };
//     using State = NoState;                // or what is carried from chunk to chunk of one layer
//     explicit MyScorer(const Options&);
//     template <class T>                    // scores [batch, kv_heads, kv_len]; more is better
//     void score(const SelectorInput<T>&, State&, float* scores, ExecutorRef) const;
//     template <class T>                    // optional: the Selection that top_k would make of the
//     bool choose(const SelectorInput<T>&, Index budget, State&, Selection&, ExecutorRef) const;
//   };                                      // scores, by a shorter way; false where there is none
//
//   struct MySelector {
//     struct Options { ... };
//     struct State {
//       void truncate(Index kv_len);
//       Index bytes() const;       // all of it
//       Index kept_bytes() const;  // thereof what is kept per key; optional
//     };
//     explicit MySelector(const Options&);
//     template <class T>                    // before the chunk's attention
//     void select(const SelectorInput<T>&, State&, Selection&, ExecutorRef) const;
//     template <class T>                    // after its keys were appended; optional in a Scorer
//     void appended(const SelectorInput<T>&, State&, ExecutorRef) const;
//   };
//
// Both are const and shareable; all that changes lives in the State its caller holds: reused
// buffers, and for some methods something kept per key (projected keys, page bounds), a retained
// set, or a choice shared with other layers. appended() sees the cache with the chunk's keys at its
// end, so such state grows with it (q is empty where keys came without queries, from a saved
// prefix); truncate() takes it back to a shorter prefix.
#pragma once

#include <quoka/core/executor.hpp>
#include <quoka/core/view.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/selection.hpp>

#include <cmath>
#include <optional>

namespace quoka::inline QUOKA_ABI {

// One layer, one chunk.
template <class T>
struct SelectorInput {
  TensorView<const T> q;  // [batch, q_heads, q_len, head_dim]
  TensorView<const T> k;  // [batch, kv_heads, kv_len, head_dim], cached keys
  TensorView<const float, 3> inverse_norms = {};  // [batch, kv_heads, kv_len] of k; optional
  Index capacity = 0;  // keys the cache has room for: what follows kv_len is allocated for so many
  std::optional<float> scale = {};  // of attention's logits; absent: 1 / sqrt(head_dim)

  Index group() const { return q.heads() / k.heads(); }
  float logit_scale() const {
    return scale.value_or(1.0f / std::sqrt(static_cast<float>(k.dim())));
  }
};

// The state of a selector that carries nothing.
struct NoState {
  static void truncate(Index) {}
  static constexpr Index bytes() { return 0; }
};

// What a state keeps per key beside the cache, as against scratch.
template <class State>
Index kept_bytes_of(const State& state) {
  if constexpr (requires { state.kept_bytes(); }) return state.kept_bytes();
  return 0;
}

template <class S>
concept Selector = requires(const S& selector, const SelectorInput<float>& input,
                            typename S::State& state, Selection& selection, ExecutorRef executor,
                            Index kv_len) {
  typename S::Options;
  S(typename S::Options{});
  selector.select(input, state, selection, executor);
  selector.appended(input, state, executor);
  state.truncate(kv_len);
  { state.bytes() } -> std::convertible_to<Index>;
};

template <class S>
concept Scorer = requires(const S& scorer, const SelectorInput<float>& input,
                          typename S::State& state, float* scores, ExecutorRef executor,
                          typename S::Options options) {
  S(options);
  scorer.score(input, state, scores, executor);
  { options.budget } -> std::convertible_to<Budget>;
  { options.window } -> std::convertible_to<Index>;
  { options.keep_first } -> std::convertible_to<Index>;
  { options.keep_last } -> std::convertible_to<Index>;
};

namespace detail {

// Every selector's contract on its input.
template <class T>
void check_selector_input(const SelectorInput<T>& input) {
  require_at_least("q's batch", input.q.batch(), 1);
  require_at_least("q_len", input.q.len(), 1);
  require_at_least("head_dim", input.q.dim(), 1);
  require_multiple("q_heads", input.q.heads(), "kv_heads", input.k.heads());
  require_sizes("k", input.k.sizes(),
                {input.q.batch(), input.k.heads(), input.k.len(), input.q.dim()});
  if (!input.inverse_norms.absent())
    require_sizes("inverse_norms", input.inverse_norms.sizes(),
                  {input.k.batch(), input.k.heads(), input.k.len()});
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
