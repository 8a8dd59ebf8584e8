// A FLASH_ATTN_EXT node as the library sees it.
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

class Node {
 public:
  explicit Node(const ggml_tensor& op);

  Index n_q() const { return q_->ne[1]; }
  Index q_heads() const { return q_->ne[2]; }
  Index kv_heads() const { return k_->ne[2]; }
  Index head_dim() const { return q_->ne[0]; }
  Index cells() const { return k_->ne[1]; }
  Index streams() const { return q_->ne[3]; }
  float scale() const { return param(0); }
  float max_bias() const { return param(1); }
  float softcap() const { return param(2); }
  const float* sinks() const;
  int layer() const { return layer_; }  // -1: K is of no cache

  // Queries [first, first + count) of a stream: [1, q_heads, count, head_dim], and their results.
  quoka::Rows q(Index stream, Index first, Index count) const;
  quoka::OutputRows out(Index stream, Index first, Index count) const;
  // [1, kv_heads, cells, dim]. floats: where dequantise() wrote, or null.
  quoka::Rows k(Index stream, const float* floats) const { return rows(*k_, stream, floats); }
  quoka::Rows v(Index stream, const float* floats) const { return rows(*v_, stream, floats); }
  const ggml_tensor& k_tensor() const { return *k_; }
  const ggml_tensor& v_tensor() const { return *v_; }

  bool masked() const { return mask_ != nullptr; }
  bool one_mask() const { return mask_->ne[2] == 1; }  // the same for all heads
  const std::uint16_t* mask_row(Index stream, Index query) const;
  quoka::Mask mask(Index stream, Index first, Index count) const;

 private:
  float param(int i) const;
  static quoka::Rows rows(const ggml_tensor& t, Index stream, const float* floats);

  const ggml_tensor &op_, *q_, *k_, *v_, *mask_;
  int layer_;
};

// Is a type read in place?
const quoka::Format* format_of_type(ggml_type type);
// All of t [dim, len, heads, streams] as floats, to [streams, heads, len, dim].
void dequantise(const ggml_tensor& t, float* to, quoka::ExecutorRef executor);

// What the engine calls the cache that k is a view of: "cache_k_l3" gives 3, others -1.
int layer_of(const ggml_tensor& k);

}  // namespace quoka_ggml
