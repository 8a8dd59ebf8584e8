// What a selector is: something that looks at a chunk's queries and the cached keys and says which
// keys the chunk attends to.
//
//   struct MySelector {
//     struct Options { ... };
//     struct State { void truncate(Index kv_len); };  // carried from chunk to chunk of one layer
//     explicit MySelector(const Options&);
//     template <class T, class E>                     // before the chunk's attention
//     void select(const SelectorInput<T>&, State&, Selection&, E&& executor) const;
//     template <class T, class E>                     // after its keys were appended
//     void appended(const SelectorInput<T>&, State&, E&& executor) const;
//   };
//
// A selector is const and shareable; all that changes lives in the State its caller holds: reused
// buffers, and for some methods something kept per key (projected keys, page bounds), a retained
// set, or a choice shared with other layers. appended() sees the cache with the chunk's keys at its
// end, so such state grows with it (q is empty where keys came without queries, from a saved
// prefix); truncate() takes it back to a shorter prefix.
#pragma once

#include <quoka/core/executor.hpp>
#include <quoka/core/view.hpp>
#include <quoka/select/selection.hpp>

namespace quoka::inline QUOKA_ABI {

// One layer, one chunk.
template <class T>
struct SelectorInput {
  TensorView<const T> q;  // [batch, q_heads, q_len, head_dim]
  TensorView<const T> k;  // [batch, kv_heads, kv_len, head_dim], cached keys
  TensorView<const float, 3> inverse_norms = {};  // [batch, kv_heads, kv_len] of k; optional
  Index capacity = 0;  // keys the cache has room for; what follows kv_len is allocated for that
                       // many at once
};

template <class S>
concept Selector = requires(const S& selector, const SelectorInput<float>& input,
                            typename S::State& state, Selection& selection,
                            SerialExecutor& executor, Index kv_len) {
  typename S::Options;
  S(typename S::Options{});
  selector.select(input, state, selection, executor);
  selector.appended(input, state, executor);
  state.truncate(kv_len);
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
  if (input.inverse_norms.data() != nullptr)
    require_sizes("inverse_norms", input.inverse_norms.sizes(),
                  {input.k.batch(), input.k.heads(), input.k.len()});
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
