// Definitions of layer.hpp.
#pragma once

#include <quoka/layer/layer.hpp>
#include <quoka/rows/overlap.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline LayerShape whole_shape(LayerShape shape, const Format& own) {
  require_multiple("q_heads", shape.q_heads, "kv_heads", shape.kv_heads);
  if (shape.v_dim == 0) shape.v_dim = shape.head_dim;
  if (shape.k_format == nullptr) shape.k_format = &own;
  if (shape.v_format == nullptr) shape.v_format = &own;
  return shape;
}

QUOKA_FUNC Layer::Layer(const LayerShape& shape, const Format& own, const AttentionOptions& options)
    : shape_(whole_shape(shape, own)),
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
  check_attention(q, Past(cache_.k(), cache_.v()), {k, v}, out, options());
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
  detail::attend(q, past(selection), chunk, out, options(), executor, workspace());
}

QUOKA_FUNC SelectorInput Layer::input(const Rows& q, const Rows& chunk_k) const {
  return {.q = q,
          .k = cache_.k(),
          .logits = options(),
          .inverse_norms = cache_.inverse_norms(),
          .capacity = cache_.capacity(),
          .chunk_k = chunk_k};
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
