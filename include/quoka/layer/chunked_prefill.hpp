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

#include <quoka/attention/attention.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/selector.hpp>

#include <algorithm>
#include <utility>

#if QUOKA_DEFINES
#include <quoka/rows/overlap.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// The part of a layer that does not depend on its selector: sizes, attention's options, a cache,
// and the checks of a whole call before anything is done. Not a template: compiled once.
class Layer {
 public:
  // Throws std::invalid_argument for sizes below 1 and for q_heads that are not a multiple of
  // kv_heads. Also for what KvCache, attention() or OwnedAttentionOptions refuse.
  Layer(const LayerShape& shape, const AttentionOptions& options);

  // Each throws std::invalid_argument for shapes that do not fit, for memory of this layer's own
  // cache, which growth frees, and for outputs that share memory.
  void check_queries(const Rows& q) const;
  void check_chunk(const Rows& q, const Rows& k, const Rows& v) const;
  void check_forward(const Rows& q, const Rows& k, const Rows& v, const AttentionOutput& out) const;

  // Attention to the cached keys in `selection` and to the chunk, after the checks.
  void attend(const Rows& q, const Selection& selection, const Chunk& chunk,
              const AttentionOutput& out, ExecutorRef executor);

  // For a selector: these queries over the cached keys.
  SelectorInput input(const Rows& q, const Rows& chunk_k) const;

  bool is_causal() const { return options_.view().causal; }
  KvCache& cache() { return cache_; }
  const KvCache& cache() const { return cache_; }
  // From now on scratch memory is `workspace`, which outlives the layer.
  void share_workspace(AttentionWorkspace& workspace) {
    workspace_ = {};
    shared_workspace_ = &workspace;
  }
  Index scratch_bytes() const { return workspace_.bytes(); }  // of its own

 private:
  LayerShape shape_;  // v_dim and formats filled in, no scales
  OwnedAttentionOptions options_;
  KvCache cache_;
  AttentionWorkspace workspace_;
  AttentionWorkspace* shared_workspace_ = nullptr;  // in its place, if given
};

}  // namespace detail

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
  // (MassSelector: 128) is cut into parts of that length, unless attention is not causal, whose
  // queries see the whole chunk. Each part selects for itself. After a throw (std::invalid_argument
  // where shapes do not fit) the cache is as it was; of out, rows may be written.
  void forward(const Rows& q, const Rows& k, const Rows& v, const AttentionOutput& out,
               ExecutorRef executor = SerialExecutor{}) {
    layer_.check_forward(q, k, v, out);
    layer_.cache().grow(kv_len() + q.len());
    const Index most = layer_.is_causal() ? most_queries_of(selector_) : max_keys;
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
    if (q.len() > 0)
      layer_.check_forward(q, k, v, out);
    else
      layer_.check_chunk(q, k, v);
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

#if QUOKA_DEFINES
namespace detail {

inline LayerShape whole_shape(LayerShape shape) {
  require_multiple("q_heads", shape.q_heads, "kv_heads", shape.kv_heads);
  if (shape.v_dim == 0) shape.v_dim = shape.head_dim;
  if (shape.k_format == nullptr) shape.k_format = &float_format();
  if (shape.v_format == nullptr) shape.v_format = &float_format();
  return shape;
}

QUOKA_FUNC Layer::Layer(const LayerShape& shape, const AttentionOptions& options)
    : shape_(whole_shape(shape)),
      options_(options),
      cache_(shape_.batch, shape_.kv_heads, shape_.head_dim, shape_.v_dim,
             {*shape_.k_format, shape_.k_scales}, {*shape_.v_format, shape_.v_scales}) {
  check_options(options, shape.q_heads);
  shape_.k_scales = shape_.v_scales = {};  // the cache has its own
}

QUOKA_FUNC void Layer::check_queries(const Rows& q) const {
  require_sizes("q", q.sizes(), {shape_.batch, shape_.q_heads, q.len(), shape_.head_dim});
}

QUOKA_FUNC void Layer::check_chunk(const Rows& q, const Rows& k, const Rows& v) const {
  check_queries(q);
  require_equal("k's len", k.len(), "q_len", q.len());
  cache_.check(k, v);
  cache_.require_outside(q, "q lies in the layer's cache");
}

QUOKA_FUNC void Layer::check_forward(const Rows& q, const Rows& k, const Rows& v,
                                     const AttentionOutput& out) const {
  check_chunk(q, k, v);
  cache_.require_outside(out.out, "out lies in the layer's cache");
  check_attention({q, Past(cache_.k(), cache_.v()), {k, v}, out}, options_.view());
}

QUOKA_FUNC void Layer::attend(const Rows& q, const Selection& selection, const Chunk& chunk,
                              const AttentionOutput& out, ExecutorRef executor) {
  if (cache_.len() > 0)  // a selector may be the caller's own
    selection.require_fits(shape_.batch, shape_.kv_heads, shape_.q_heads, cache_.len());
  else
    require_equal("the selection's kv_len", selection.kv_len(), "the keys' kv_len", 0);
  const AttentionSequence call{q, {cache_.k(), cache_.v(), selection}, chunk, out};
  detail::run_checked({&call, 1}, options_.view(), executor,
                      shared_workspace_ != nullptr ? *shared_workspace_ : workspace_);
}

QUOKA_FUNC SelectorInput Layer::input(const Rows& q, const Rows& chunk_k) const {
  const AttentionOptions options = options_.view();
  const Index rows = q.len() * q.heads() / shape_.kv_heads;  // of a KV head
  return {.q = q,
          .k = cache_.k(),
          .logits = options,
          .inverse_norms = cache_.inverse_norms(),
          .capacity = cache_.capacity(),
          .chunk_k = chunk_k,
          .in_int8 = multiplies_int8(options.arithmetic, rows)};
}

}  // namespace detail
#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
