// What one KV head's queries attend to: the kept past in ascending order, then the chunk, as one
// sequence of keys.
#pragma once

#include <quoka/core/softmax_state.hpp>
#include <quoka/core/tuning.hpp>
#include <quoka/core/view.hpp>

#include <algorithm>
#include <limits>
#include <span>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// One attention call, checked and resolved; shared by its tasks.
template <class T>
struct AttentionCall {
  TensorView<const T> q;        // [batch, q_heads, q_len, head_dim]
  TensorView<const T> past_k;   // [batch, kv_heads, kv_len, head_dim]
  TensorView<const T> past_v;   // [batch, kv_heads, kv_len, v_dim]
  TensorView<const T> chunk_k;  // [batch, kv_heads, q_len or 0, head_dim]
  TensorView<const T> chunk_v;  // [batch, kv_heads, q_len or 0, v_dim]
  TensorView<T> out;            // [batch, q_heads, q_len, v_dim]
  TensorView<float, 3> lse;     // [batch, q_heads, q_len], or empty
  Index kv_heads, group, v_dim;
  float query_scale;  // logit in log2 units, or the argument of tanh
  float cap_log2;     // 0: no soft-cap
  std::span<const float> sink_logits;
  Index window;  // no window: the largest Index

  Index rows() const { return group * q.len(); }
  // The sink logit of a query head in log2 units, -inf without one. So large a sink that it would
  // overflow takes all.
  float sink_log2(Index q_head) const {
    if (sink_logits.empty()) return -std::numeric_limits<float>::infinity();
    return std::min(sink_logits[static_cast<std::size_t>(q_head)] * log2_e,
                    std::numeric_limits<float>::max());
  }
};

// Keys [begin, end) of a sequence.
struct KeyRange {
  Index begin, end;
};

// The keys of one KV head as one sequence: kept past, then chunk.
template <class T>
struct KeySequence {
  const AttentionCall<T>& call;
  Index b, kv_head;
  std::span<const Position> keep;  // empty: all of the past
  Index past_count;                // kept past keys

  Index position(Index i) const {
    if (i >= past_count) return call.past_k.len() + i - past_count;
    return keep.empty() ? i : keep[static_cast<std::size_t>(i)];
  }
  // Keys [first, first + count) as row pointers.
  void rows(Index first, Index count, const T** k, const T** v) const {
    for (Index i = 0; i < count; ++i) {
      const Index at = first + i;
      const bool past = at < past_count;
      const Index row = past ? position(at) : at - past_count;
      k[i] = (past ? call.past_k : call.chunk_k).row(b, kv_head, row);
      v[i] = (past ? call.past_v : call.chunk_v).row(b, kv_head, row);
    }
  }
  // One past the last key that query i sees.
  Index end_for(Index query) const { return past_count + std::min(query + 1, call.chunk_k.len()); }
  // The first key that query i sees through the window.
  Index begin_for(Index query) const {
    const Index hidden = call.past_k.len() + query - call.window;  // the last position out of sight
    if (call.window == std::numeric_limits<Index>::max() || hidden < 0) return 0;
    if (hidden >= call.past_k.len()) return past_count + hidden - call.past_k.len() + 1;
    if (keep.empty()) return std::min(hidden + 1, past_count);
    return std::upper_bound(keep.begin(), keep.end(), hidden) - keep.begin();
  }
  // All keys that queries first ... last see, from the beginning of a block on.
  KeyRange in_sight(Index first, Index last) const {
    return {begin_for(first) / tuning::block_keys * tuning::block_keys, end_for(last)};
  }
};

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
