// Chunked prefill of one layer (QuoKA, Algorithm 2): select, attend, append.
//
//   keep = selector(q, cached keys)
//   out  = attention(q, cache[keep], {k, v})        the chunk itself always in full, causally
//   cache += {k, v}
//
// The same call with one query is a decode step. Queries, new keys, new values and outputs may each
// have a format of their own; the cache keeps T, or LayerShape's formats (byte_formats.hpp). A chunk
// attends to itself as it was given, and to its past as the cache keeps it. Selectors do not know of
// a sliding window: a layer that has one is best left dense. Every selector enters by the same
// concept; QuoKA has no private path. Buffers are kept from call to call: with reserve() a steady
// state does not allocate.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/cache/kv_cache.hpp>
#include <quoka/prefill/layer_shape.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/views/overlap.hpp>

#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

template <Selector S, Storage T = float>
class ChunkedPrefill {
 public:
  // A layer with an empty cache; sink_logits and scales are copied. Throws std::invalid_argument for
  // sizes below 1, q_heads not a multiple of kv_heads, formats and scales that KvCache refuses, and
  // options that attention() refuses.
  explicit ChunkedPrefill(const LayerShape& shape, const typename S::Options& options = {},
                          const AttentionOptions& attention = {}, typename S::State state = {})
      : shape_(checked(shape)),
        selector_(options),
        attention_(attention),
        sink_logits_(attention.sink_logits.begin(), attention.sink_logits.end()),
        state_(std::move(state)),
        cache_(shape_.batch, shape_.kv_heads, shape_.head_dim, shape_.v_dim,
               {*shape_.k_format, shape_.k_scales}, {*shape_.v_format, shape_.v_scales}) {
    detail::check_options(attention, shape.q_heads);
    shape_.k_scales = shape_.v_scales = {};  // the cache has its own
    attention_.sink_logits = sink_logits_;
  }

  // One chunk, or one decode step. q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, q_len,
  // head_dim], v [batch, kv_heads, q_len, v_dim], out [batch, q_heads, q_len, v_dim], optionally
  // {out, lse}. None of them may lie in this layer's cache, which growth moves. After a throw
  // (std::invalid_argument where shapes do not fit) the cache is as it was.
  void forward(const Rows& q, const Rows& k, const Rows& v, const AttentionOutput& out,
               ExecutorRef executor = SerialExecutor{}) {
    check_query(q, k);
    cache_.check(k, v);
    require_outside(q, out.out);
    detail::check_attention(q, Past(cache_.k(), cache_.v()), {k, v}, out, attention_);
    cache_.grow(cache_.len() + q.len());
    selector_.select(input(q, k), state_, selection_, executor);
    attention(q, Past(cache_.k(), cache_.v(), selection_), {k, v}, out, attention_, executor,
              workspace_);
    append_keys(q, k, v, executor);
  }

  // What forward() would attend to of the past, for these queries: selection alone, which selection()
  // then gives as well. Throws as forward(). Methods that look at the chunk's own keys (XAttention)
  // take them from the second form; forward() gives them.
  const Selection& select(const Rows& q, ExecutorRef executor = SerialExecutor{}) {
    return select(q, Rows(), executor);
  }
  // The same with the chunk's own keys k [batch, kv_heads, q_len, head_dim]. Throws as forward().
  const Selection& select(const Rows& q, const Rows& k, ExecutorRef executor = SerialExecutor{}) {
    detail::require_sizes("q", q.sizes(), {shape_.batch, shape_.q_heads, q.len(), shape_.head_dim});
    selector_.select(input(q, k), state_, selection_, executor);
    return selection_;
  }

  // A whole prompt, chunk by chunk: shapes as in forward, any length. After a throw the cache is as
  // it was before the prompt.
  void prefill(const Rows& q, const Rows& k, const Rows& v, OutputRows out, Index chunk_len,
               ExecutorRef executor = SerialExecutor{}) {
    detail::require_at_least("chunk_len", chunk_len, 1);
    check_query(q, k);
    cache_.check(k, v);
    require_outside(q, out);
    detail::require_sizes("out", out.sizes(), {q.batch(), q.heads(), q.len(), v.dim()});
    detail::require_apart(Rows(out), q, "out shares memory with q");
    detail::require_apart(Rows(out), k, "out shares memory with k");
    detail::require_apart(Rows(out), v, "out shares memory with v");
    const Index before = kv_len();
    cache_.grow(before + q.len());
    const Rewind rewind{*this, before};
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
    append_keys({}, k, v, executor);
  }
  // The last step of forward() alone, for those who select() and attend by themselves: shapes as
  // there. Throws std::invalid_argument where shapes do not fit; the cache is then as it was.
  void append(const Rows& q, const Rows& k, const Rows& v,
              ExecutorRef executor = SerialExecutor{}) {
    check_query(q, k);
    require_outside(q, {});
    append_keys(q, k, v, executor);
  }

  // Back to the first `len` tokens: the next turn, another branch. Throws std::invalid_argument
  // beyond the present length.
  void truncate(Index len) {
    cache_.truncate(len);
    state_.truncate(len);
  }
  // Room for `len` tokens without another allocation of the cache.
  void reserve(Index len) { cache_.reserve(len); }

  Index kv_len() const { return cache_.len(); }    // tokens in the cache
  const KvCache& cache() const { return cache_; }  // keys and values so far
  // What the last forward() attended to of its past, or the last select() chose.
  const Selection& selection() const { return selection_; }
  const S& selector() const { return selector_; }  // made from the options
  typename S::State& state() { return state_; }    // the selector's
  // Memory beyond the cache that the selector keeps per key.
  Index kept_bytes() const { return kept_bytes_of(state_); }
  // Memory that calls reuse, without kept_bytes().
  Index scratch_bytes() const { return workspace_.bytes() + state_.bytes() - kept_bytes(); }

 private:
  // Back to `len` tokens unless all went well.
  struct Rewind {
    ChunkedPrefill& layer;
    Index len;
    mutable bool done = false;

    void dismiss() const { done = true; }
    ~Rewind() {
      if (!done) layer.truncate(len);
    }
  };

  [[gnu::noinline]] void append_keys(const Rows& q, const Rows& k, const Rows& v,
                                     ExecutorRef executor) {
    cache_.check(k, v);
    const Rewind rewind{*this, kv_len()};
    cache_.append(k, v);
    selector_.appended(input(q), state_, executor);
    rewind.dismiss();
  }

  // Growth frees what lies in the cache.
  [[gnu::noinline]] void require_outside(const Rows& q, const Rows& out) const {
    cache_.require_outside(q, "q lies in the layer's cache");
    cache_.require_outside(out, "out lies in the layer's cache");
  }
  static LayerShape checked(LayerShape shape) {
    detail::require_multiple("q_heads", shape.q_heads, "kv_heads", shape.kv_heads);
    if (shape.v_dim == 0) shape.v_dim = shape.head_dim;
    if (shape.k_format == nullptr) shape.k_format = &format_of<T>();
    if (shape.v_format == nullptr) shape.v_format = &format_of<T>();
    return shape;
  }
  [[gnu::noinline]] void check_query(const Rows& q, const Rows& k) const {
    detail::require_sizes("q", q.sizes(), {shape_.batch, shape_.q_heads, q.len(), shape_.head_dim});
    detail::require_equal("k's len", k.len(), "q_len", q.len());
  }
  [[gnu::noinline]] SelectorInput input(const Rows& q, const Rows& chunk_k = {}) const {
    return {.q = q,
            .k = cache_.k(),
            .inverse_norms = cache_.inverse_norms(),
            .capacity = cache_.capacity(),
            .scale = attention_.scale,
            .chunk_k = chunk_k};
  }

  LayerShape shape_;
  S selector_;
  AttentionOptions attention_;
  std::vector<float> sink_logits_;
  typename S::State state_;
  KvCache cache_;
  Selection selection_;
  AttentionWorkspace workspace_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
