// Chunked prefill of one layer (QuoKA, Algorithm 2): select, attend, append.
//
//   selection = selector(q, cached keys)
//   out       = attention(q, cache[selection], {k, v})        the chunk itself always in full,
//                                                             causally
//   cache += {k, v}
//
// The same call with one query is a decode step. Queries, new keys, new values and outputs may each
// have a format of their own; the cache keeps LayerShape's (byte_formats.hpp). A chunk attends to
// itself as it was given, and to its past as the cache keeps it. Selectors refuse a sliding window:
// a layer that has one is left dense. If attention to all cached keys is faster than selecting,
// MassSelector selects all of them (MassScorer::pays). Every selector enters by the concept
// Selector; QuoKA has no private path. Buffers are kept from call to call, so after reserve() a
// steady state does not allocate.
#pragma once

#include <quoka/layer/layer.hpp>
#include <quoka/select/selector.hpp>

#include <algorithm>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {

template <Selector S>
class ChunkedPrefill {
 public:
  // A layer with an empty cache. Formats must outlive it; all that options and scales refer to is
  // copied. Throws std::invalid_argument for sizes below 1, for q_heads that are not a multiple of
  // kv_heads, and for formats, scales and options that KvCache or attention() refuse. Also for a
  // mask or a q_offset, which belong to one call.
  explicit ChunkedPrefill(const LayerShape& shape, const typename S::Options& options = {},
                          const AttentionOptions& attention = {}, typename S::State state = {})
      : layer_(shape, attention), selector_(options), state_(std::move(state)) {}

  // One chunk, or one decode step. q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, q_len,
  // head_dim], v [batch, kv_heads, q_len, v_dim], out [batch, q_heads, q_len, v_dim], optionally
  // {out, lse}. None of them may lie in this layer's cache, which growth moves. Do not append()
  // them before: forward() does. A chunk of more queries than a list of the selector serves
  // (MassSelector: 128) is cut into parts of that length. Each part selects for itself. After a
  // throw (std::invalid_argument where shapes do not fit) the cache is as it was; of out, rows may
  // be written.
  void forward(const Rows& q, const Rows& k, const Rows& v, const AttentionOutput& out,
               ExecutorRef executor = SerialExecutor{}) {
    layer_.check_forward(q, k, v, out);
    layer_.cache().grow(kv_len() + q.len());
    const Index most = most_queries_of(selector_);
    if (q.len() <= most) return forward_by_one_list(q, k, v, out, executor);
    Rewind rewind(*this);
    for (Index begin = 0; begin < q.len(); begin += most) {
      const Index n = std::min(most, q.len() - begin);
      AttentionOutput part(out.out.slice(begin, n));
      if (!out.lse_nat.absent()) part.lse_nat = out.lse_nat.slice(begin, n);
      forward_by_one_list(q.slice(begin, n), k.slice(begin, n), v.slice(begin, n), part, executor);
    }
    rewind.dismiss();
  }
  // Selection without attention: the Selection for these queries, which selection() then returns as
  // well. forward() may select all keys instead, if that is faster (MassScorer::pays). Throws as
  // forward(). Methods that look at the chunk's own keys (XAttention) need the second form;
  // forward() passes these keys by itself.
  const Selection& select(const Rows& q, ExecutorRef executor = SerialExecutor{}) {
    return select(q, Rows(), executor);
  }
  // The same with the chunk's own keys k [batch, kv_heads, q_len, head_dim]. Throws as forward().
  const Selection& select(const Rows& q, const Rows& k, ExecutorRef executor = SerialExecutor{}) {
    layer_.check_queries(q);
    selector_.select(layer_.input(q, k), state_, selection_, executor);
    return selection_;
  }

  // A whole prompt, chunk by chunk: shapes as in forward, any length. After a throw the cache is as
  // it was before the prompt.
  void prefill(const Rows& q, const Rows& k, const Rows& v, OutputRows out, Index chunk_len,
               ExecutorRef executor = SerialExecutor{}) {
    detail::require_at_least("chunk_len", chunk_len, 1);
    layer_.check_prompt(q, k, v, out);
    Rewind rewind(*this);
    layer_.cache().grow(kv_len() + q.len());
    for (Index begin = 0; begin < q.len(); begin += chunk_len) {
      const Index n = std::min(chunk_len, q.len() - begin);
      forward(q.slice(begin, n), k.slice(begin, n), v.slice(begin, n), out.slice(begin, n),
              executor);
    }
    rewind.dismiss();
  }

  // Takes over keys and values that were computed before (a saved prefix), without attention: k
  // [batch, kv_heads, n, head_dim], v [batch, kv_heads, n, v_dim]. Throws as KvCache::append.
  void append(const Rows& k, const Rows& v, ExecutorRef executor = SerialExecutor{}) {
    layer_.cache().check(k, v);
    append_checked({}, k, v, executor);
  }
  // The last step of forward() alone, for those who select() and attend by themselves: shapes as
  // there. Throws std::invalid_argument where shapes do not fit; the cache is then as it was.
  void append(const Rows& q, const Rows& k, const Rows& v,
              ExecutorRef executor = SerialExecutor{}) {
    layer_.check_chunk(q, k, v);
    append_checked(q, k, v, executor);
  }

  // Back to the first `len` tokens: the next turn, another branch. Throws std::invalid_argument
  // beyond the present length.
  void truncate(Index len) {
    layer_.cache().truncate(len);
    state_.truncate(len);
  }
  // Room for `len` tokens without another allocation of the cache.
  void reserve(Index len) { layer_.cache().reserve(len); }

  // From now on attention takes its scratch memory, some MiB a worker, from `workspace`, which must
  // outlive the layer. A model's layers, called one at a time, may share one workspace.
  void share_workspace(AttentionWorkspace& workspace) { layer_.share_workspace(workspace); }

  Index kv_len() const { return cache().len(); }           // tokens in the cache
  const KvCache& cache() const { return layer_.cache(); }  // keys and values in the cache
  // The Selection of the last forward() or select(); as Selection() after one that threw.
  const Selection& selection() const { return selection_; }
  const S& selector() const { return selector_; }  // made from the options
  typename S::State& state() { return state_; }    // the selector's
  // Memory beyond the cache that the selector keeps per key.
  Index kept_bytes() const { return kept_bytes_of(state_); }
  // Attention's scratch memory, without a workspace that is shared.
  Index scratch_bytes() const { return layer_.scratch_bytes(); }

 private:
  // Truncates the layer to the length that it had, unless dismissed.
  class Rewind {
   public:
    explicit Rewind(ChunkedPrefill& layer) : layer_(&layer), len_(layer.kv_len()) {}
    Rewind(const Rewind&) = delete;
    Rewind& operator=(const Rewind&) = delete;
    ~Rewind() {
      if (layer_ != nullptr) layer_->truncate(len_);
    }
    void dismiss() { layer_ = nullptr; }

   private:
    ChunkedPrefill* layer_;
    Index len_;
  };

  // After the checks.
  void forward_by_one_list(const Rows& q, const Rows& k, const Rows& v, const AttentionOutput& out,
                           ExecutorRef executor) {
    SelectorInput input = layer_.input(q, k);
    input.attends = true;
    selector_.select(input, state_, selection_, executor);
    layer_.attend(q, selection_, {k, v}, out, executor);
    append_checked(q, k, v, executor);
  }
  void append_checked(const Rows& q, const Rows& k, const Rows& v, ExecutorRef executor) {
    Rewind rewind(*this);
    layer_.cache().append_checked(k, v, executor);
    selector_.appended(layer_.input(q, {}), state_, executor);
    rewind.dismiss();
  }

  detail::Layer layer_;
  S selector_;
  typename S::State state_;
  Selection selection_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
