// Selection and attention for a batch of sequences of different lengths, over the engine's caches.
// Prefill chunks and decode steps may be mixed, as in continuous batching.
//
//   RaggedWorkspace<QuokaSelector> workspace;                // kept from call to call
//   select_and_attend(selector, sequences, {}, threads, workspace);
//
// If attention to all keys is faster, MassSelector selects all of them (MassScorer::pays). Each
// sequence has its own past, chunk, output and State. Its results are those of select() and
// attention() for it alone, to the last bit. Work is balanced over the workers by its cost. All
// workers together select for a long sequence, one worker for a short one, and all of attention is
// one list of tasks.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/visible.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// Throws std::invalid_argument if two of `count` sequences have the same object, pointer_of(i);
// null: none. `order` is scratch.
template <class PointerOf>
void require_own(const char* name, Index count, std::vector<Index>& order, PointerOf&& pointer_of) {
  order.clear();
  for (Index i = 0; i < count; ++i)
    if (pointer_of(i) != nullptr) order.push_back(i);
  sort(order.data(), std::ssize(order), [&](Index a, Index b) {
    const auto x = reinterpret_cast<std::uintptr_t>(pointer_of(a)),
               y = reinterpret_cast<std::uintptr_t>(pointer_of(b));
    return x == y ? a < b : x < y;
  });
  for (std::size_t i = 1; i < order.size(); ++i)
    if (pointer_of(order[i]) == pointer_of(order[i - 1])) {
      char message[128];
      std::snprintf(message, sizeof message, "sequences %td and %td have the same %s", order[i - 1],
                    order[i], name);
      fail_because(message);
    }
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_lists_and_state() {
  fail_because(
      "there are lists of each query's keys and a State, whose Selection all queries share: hand "
      "in one of them");
}

}  // namespace detail

// One sequence of a batch.
template <Selector S>
struct RaggedSequence {
  Rows q = {};                         // [1, q_heads, q_len, head_dim]
  Rows past_k = {};                    // [1, kv_heads, kv_len, head_dim], any layout
  Rows past_v = {};                    // [1, kv_heads, kv_len, v_dim]
  Chunk chunk = {};                    // [1, kv_heads, q_len, ...], in the cache or apart
  AttentionOutput out;                 // [1, q_heads, q_len, v_dim]
  typename S::State* state = nullptr;  // its own; null: attends to all of its past. Where a mask
                                       // hides cells: select_visible()
  TensorView<const float, 3> inverse_norms = {};  // of past_k; optional
  const KeySketch* sketch = nullptr;              // of the cache; optional
  std::uint64_t sequence = 0;                     // its number, for a State that checks it
  Mask mask = {};                                 // of past and chunk
  std::optional<Index> q_offset = {};  // position of the first query; absent: where the past ends
};

// Memory of select_and_attend(), kept from call to call. One call at a time.
template <Selector S>
class RaggedWorkspace {
 public:
  // The Selection of the last call for sequence i.
  const Selection& selection(Index i) const { return keep_[static_cast<std::size_t>(i)]; }
  Index bytes() const { return attention_.bytes(); }  // of attention's scratch memory

 private:
  template <Selector T>
  friend void select_and_attend(const T& selector,
                                std::type_identity_t<std::span<const RaggedSequence<T>>> batch,
                                const AttentionOptions& options, ExecutorRef executor,
                                RaggedWorkspace<T>& workspace);

  void run(const S& selector, std::span<const RaggedSequence<S>> batch,
           const AttentionOptions& options, ExecutorRef executor) {
    keep_.resize(std::max(keep_.size(), batch.size()));
    calls_.clear();
    for (const RaggedSequence<S>& x : batch)
      calls_.push_back({.q = x.q,
                        .past = {x.past_k, x.past_v},
                        .chunk = x.chunk,
                        .out = x.out,
                        .mask = x.mask,
                        .q_offset = x.q_offset});
    detail::check_attention(calls_, options, attention_);
    if (!options.lists.absent())
      for (std::size_t i = 0; i < batch.size(); ++i)
        if (batch[i].state != nullptr)
          detail::name_part("sequence", static_cast<Index>(i), detail::fail_lists_and_state);
    detail::require_own("State", std::ssize(batch), order_,
                        [&](Index i) { return batch[static_cast<std::size_t>(i)].state; });
    select(selector, batch, options, executor);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const Rows& k = batch[i].past_k;
      if (k.len() > 0)  // a selector may be the caller's own
        detail::name_part("sequence", static_cast<Index>(i), [&] {
          keep_[i].require_fits(k.batch(), k.heads(), batch[i].q.heads(), k.len());
        });
      calls_[i].past.selection = k.len() > 0 ? &keep_[i] : nullptr;
    }
    detail::run_checked(calls_, options, executor, attention_);
  }

  void select(const S& selector, std::span<const RaggedSequence<S>> batch,
              const AttentionOptions& options, ExecutorRef executor) {
    const auto select_one = [&](std::size_t i, ExecutorRef by) {
      const RaggedSequence<S>& x = batch[i];
      if (x.state == nullptr || x.past_k.len() == 0)
        return keep_[i].select_all(x.q.batch(), x.past_k.heads(), x.past_k.len());
      SelectorInput input{.q = x.q,
                          .k = x.past_k,
                          .logits = options,
                          .inverse_norms = x.inverse_norms,
                          .capacity = x.past_k.len(),
                          .sequence = x.sequence,
                          .sketch = x.sketch,
                          .attends = true};
      input.in_int8 = multiplies_int8(options.arithmetic, input.group() * x.q.len());
      const Mask& mask = x.mask.absent() ? options.mask : x.mask;
      if (mask.absent()) input.chunk_k = x.chunk.k;  // causal: a mask may hide the chunk's own keys
      select_visible(selector, input, mask, *x.state, keep_[i], by);
    };
    const auto select_for = [&](Index i, ExecutorRef by) {
      detail::name_part("sequence", i, [&] { select_one(static_cast<std::size_t>(i), by); });
    };
    // By the number of keys.
    const auto cost = [&](Index i) {
      const RaggedSequence<S>& x = batch[static_cast<std::size_t>(i)];
      return x.state == nullptr ? 0 : x.past_k.len();
    };
    order_.resize(batch.size());
    std::iota(order_.begin(), order_.end(), Index{0});
    detail::sort(order_.data(), std::ssize(order_), [&](Index a, Index b) {
      return cost(a) > cost(b) || (cost(a) == cost(b) && a < b);
    });
    Index left = 0;
    for (const Index i : order_) left += cost(i);
    std::size_t at = 0;
    for (; at < order_.size() && executor.workers() > 1; ++at) {
      if (cost(order_[at]) * executor.workers() <= left) break;
      left -= cost(order_[at]);
      select_for(order_[at], executor);
    }
    executor.run(static_cast<Index>(order_.size() - at), [&](Index task, int) {
      select_for(order_[at + static_cast<std::size_t>(task)], SerialExecutor{});
    });
  }

  std::vector<Selection> keep_;
  std::vector<AttentionSequence> calls_;
  std::vector<Index> order_;
  AttentionWorkspace attention_;
};

// Selects for each sequence that has a State and attends, in one call. The options' mask and
// q_offset are those of the sequences that have none. Throws std::invalid_argument, with the number
// of the sequence. As attention() does, if two sequences have the same State, and if the options
// have lists and a sequence a State: before anything is done. As select() does: no output is
// written, but States may have been used.
template <Selector S>
void select_and_attend(const S& selector,
                       std::type_identity_t<std::span<const RaggedSequence<S>>> batch,
                       const AttentionOptions& options, ExecutorRef executor,
                       RaggedWorkspace<S>& workspace) {
  workspace.run(selector, batch, options, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
