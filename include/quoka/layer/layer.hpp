// Layer: the part of ChunkedPrefill that does not depend on its selector. It has sizes, attention's
// options, a cache, and the checks of a whole call before anything is done. Not a template:
// compiled once.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/selector.hpp>

#if QUOKA_DEFINES
#include <quoka/rows/overlap.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

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
  void check_prompt(const Rows& q, const Rows& k, const Rows& v, const OutputRows& out) const;

  // Attention to the cached keys in `selection` and to the chunk, after the checks.
  void attend(const Rows& q, const Selection& selection, const Chunk& chunk,
              const AttentionOutput& out, ExecutorRef executor);

  // For a selector: these queries over the cached keys.
  SelectorInput input(const Rows& q, const Rows& chunk_k) const;

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

#if QUOKA_DEFINES

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

QUOKA_FUNC void Layer::check_prompt(const Rows& q, const Rows& k, const Rows& v,
                                    const OutputRows& out) const {
  check_chunk(q, k, v);
  cache_.require_outside(out, "out lies in the layer's cache");
  require_sizes("out", out.sizes(), {q.batch(), q.heads(), q.len(), v.dim()});
  require_no_overlap(Rows(out), q, "out shares memory with q");
  require_no_overlap(Rows(out), k, "out shares memory with k");
  require_no_overlap(Rows(out), v, "out shares memory with v");
}

QUOKA_FUNC void Layer::attend(const Rows& q, const Selection& selection, const Chunk& chunk,
                              const AttentionOutput& out, ExecutorRef executor) {
  if (cache_.len() > 0)  // a selector may be the caller's own
    selection.require_fits(shape_.batch, shape_.kv_heads, shape_.q_heads, cache_.len());
  else
    require_equal("the selection's kv_len", selection.kv_len(), "the keys' kv_len", 0);
  const AttentionSequence call{q, {cache_.k(), cache_.v(), selection}, chunk, out};
  detail::attend({&call, 1}, options_.view(), executor,
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

#endif  // QUOKA_DEFINES

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
