// A FLASH_ATTN_EXT node as the library sees it, and which nodes this backend takes.
//
//   q     F32  [head_dim, n_q, q_heads, streams]     any strides; channels side by side
//   k, v  any  [dim, cells, kv_heads, streams]       the cache, or a view of it
//   mask  F16  [cells, n_q, 1 or q_heads, 1 or streams]; may be absent
//   sinks F32  [q_heads]; may be absent
//   out   F32  [v_dim, q_heads, n_q, streams]        heads inside, unlike q
//
// float, half, bfloat16 and q8_0 are read where they lie. Other types of K and V are dequantised to
// float first, by ggml.
#pragma once

#include <quoka/quoka.hpp>

#include <ggml.h>

namespace quoka_ggml {

using quoka::Index;

struct Node {
  explicit Node(const ggml_tensor& op);

  const ggml_tensor &q, &k, &v, &out;
  const ggml_tensor *mask, *sinks;
  float scale = 0, max_bias = 0, softcap = 0;
  int layer;  // -1: K is of no cache

  Index n_q() const { return q.ne[1]; }
  Index q_heads() const { return q.ne[2]; }
  Index kv_heads() const { return k.ne[2]; }
  Index head_dim() const { return q.ne[0]; }
  Index cells() const { return k.ne[1]; }
  Index streams() const { return q.ne[3]; }

  // Queries [first, first + count) of a stream: [1, q_heads, count, head_dim], and their results.
  quoka::Rows queries(Index stream, Index first, Index count) const;
  quoka::OutputRows results(Index stream, Index first, Index count) const;
  const std::uint16_t* mask_row(Index stream, Index query) const;
  quoka::Mask mask_of(Index stream, Index first, Index count) const;
};

// k or v of one stream: [1, kv_heads, cells, dim]. floats: where dequantise() wrote, or null.
quoka::Rows cache_rows(const ggml_tensor& t, Index stream, const float* floats);
// Is a type read in place?
const quoka::Format* format_of_type(ggml_type type);
// All of t [dim, len, heads, streams] as floats, to [streams, heads, len, dim].
void dequantise(const ggml_tensor& t, float* to, quoka::ExecutorRef executor);

// Why the CPU backend computes this one; null: it is taken.
//
// Engines decide whether to use flash attention at all by a graph with one token per sequence, and
// switch it off if that lands on another device than the layer's weights. They ask before anything was
// cached: their cache is zeros then. So a cache without keys is refused for few queries, and decode
// steps over a cache with keys are taken. min_queries > 0: fewer are refused, and this alone decides.
const char* reason_to_refuse(const ggml_tensor& op, Index min_queries);

}  // namespace quoka_ggml
