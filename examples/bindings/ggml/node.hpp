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

#include "arithmetics.hpp"

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/quoka.hpp>

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string_view>

namespace quoka_ggml {

// How rows of this type are read in place; null: they are not.
inline const quoka::Format* format_of_type(ggml_type type) {
  if (type == GGML_TYPE_F32) return &quoka::format_of<float>();
  if (type == GGML_TYPE_F16) return &quoka::format_of<Eigen::half>();
  if (type == GGML_TYPE_BF16) return &quoka::format_of<Eigen::bfloat16>();
  return type == GGML_TYPE_Q8_0 ? &quoka::q8_0_format() : nullptr;
}

// Does llama.cpp's CPU backend round as much over keys and values so stored as products of bfloat16
// do?
//
// Errors of FLASH_ATTN_EXT, the largest over logits with standard deviations from 0.3 to 10
// (ggml_bench --errors; bench/results/ggml.md):
//
//   cache                                  llama.cpp         bf16 here
//   quantised: q8_0, q4_0 ...              1.7e-2 to 2.3e-2  1.0e-2   queries are rounded to 8 bits
//                                                                     there
//   bf16                                   5.2e-3 to 6.8e-3  6.1e-3   queries to bfloat16; small
//                                                                     logits: 5e-4, here 2e-3
//   f16, fewer than 64 queries             6.7e-3            1.1e-2   queries and sums to half
//   f16 from 64 queries on, f32            2e-6              1.1e-2   float
//
// So one answer by type is right at any number of queries. Models agree: over f16, bf16's
// divergence from llama.cpp's logits is 3 % above float's on SmolLM2-135M, but 11 to 17 % on Gemma
// 3 270M and 13 % on TinyLlama, more than chance.
inline bool llama_rounds_as_bf16(ggml_type k, ggml_type v) {
  return ggml_is_quantized(k) && ggml_is_quantized(v);
}

// The arithmetic of a node with this many queries, where a setting asks for `asked`. Automatic:
// bf16 where that is faster than float and llama.cpp rounds as much; elsewhere, and for decode
// steps, what the library has for caches of that type, which rounds no more than the cache did.
inline Arithmetic arithmetic_of_node(Arithmetic asked, ggml_type k, ggml_type v, Index queries) {
  constexpr Index of_a_chunk = 32;  // fewer may be decode steps of several sequences
  if (asked == Arithmetic::automatic && queries >= of_a_chunk && llama_rounds_as_bf16(k, v) &&
      quoka::arithmetic_used(Arithmetic::bf16) == Arithmetic::bf16)
    return Arithmetic::bf16;
  return asked;
}

// The arithmetic that a node with this many queries uses over these types, `group` query heads for
// each head of K and V, if a setting asks for `asked`.
inline Arithmetic arithmetic_used(Arithmetic asked, ggml_type k, ggml_type v, Index queries,
                                  Index group) {
  const auto format = [](ggml_type type) -> const quoka::Format& {
    const quoka::Format* const in_place = format_of_type(type);
    return in_place != nullptr ? *in_place : quoka::format_of<float>();
  };
  if (queries == 1) return Arithmetic::float_;  // bound by memory: always in float
  return quoka::arithmetic_used(arithmetic_of_node(asked, k, v, queries), format(k), format(v),
                                group * queries);
}

// One stream as [1, heads, len, dim], heads and len being these axes of t.
template <class R>
R rows_of(const ggml_tensor& t, const quoka::Format& format, Index stream, int heads, int len) {
  const auto stride = [&](int axis) { return static_cast<Index>(t.nb[axis]); };
  return {static_cast<std::byte*>(t.data) + stream * stride(3),
          format,
          {1, t.ne[heads], t.ne[len], t.ne[0]},
          {0, stride(heads), stride(len)}};
}

struct Node {
  const ggml_tensor &out, &q = *out.src[0], &k = *out.src[1], &v = *out.src[2];
  const ggml_tensor *mask = out.src[3], *sinks = out.src[4];  // or null
  float scale = parameter(0), max_bias = parameter(1), softcap = parameter(2);
  const ggml_tensor* cache = cache_of(&k);  // the engine's tensor; null: K is of no cache
  int cache_layer = layer_of(cache);        // the layer that wrote it; -1: unknown
  int layer = reading_layer();              // that attends, by the model's numbers; -1: unknown
  bool cached = cache != nullptr && k.view_src == cache;  // it lies there

  explicit Node(const ggml_tensor& op) : out(op) {}

  // It has no keys of its own and attends to those of an earlier layer.
  bool shares_keys() const { return layer != cache_layer; }
  // Cells of the cache that K is of, whether seen now or not; 0: of none.
  Index cache_cells() const { return cache != nullptr ? cache->ne[1] : 0; }
  // Does the model say by itself which keys a query attends to? So it is where it says how many
  // (n_kv_max), where its graph computes the mask, and where K is put together from a cache and
  // other keys (deepseek4's compressed layers).
  bool model_chooses() const {
    const ggml_tensor* const keys = behind_copies(&k);
    return out.op_params[4] > 0 || (cache != nullptr && keys->op != GGML_OP_NONE) ||
           (mask != nullptr && behind_copies(mask)->op != GGML_OP_NONE);
  }

  // Why selection is not possible here, other than a window; null: it is possible.
  const char* unselectable() const {
    if (model_chooses()) return "keys that the model chooses";
    if (max_bias > 0) return "ALiBi";
    if (mask == nullptr) return "no mask";
    return mask->ne[2] == 1 ? nullptr : "a mask for each head";
  }

  Index q_heads() const { return q.ne[2]; }
  Index kv_heads() const { return k.ne[2]; }

 private:
  float parameter(int i) const {
    float value;
    std::memcpy(&value, out.op_params + i, sizeof value);
    return value;
  }
  // The layer's number in the engine's name of its cache: "cache_k_l3" gives 3.
  static int layer_of(const ggml_tensor* named) {
    int layer = -1;
    if (named != nullptr) std::sscanf(named->name, "cache_k_l%d", &layer);
    return layer;
  }
  // Engines name what they compute by layer: "Qcur-20" gives 20; -1: it has no such name.
  static int layer_named(std::string_view name) {
    int layer = -1;
    const std::size_t dash = name.rfind('-');
    if (dash == name.npos) return layer;
    const char* const end = name.data() + name.size();
    return std::from_chars(name.data() + dash + 1, end, layer).ptr == end ? layer : -1;
  }
  // Layers that share keys read a cache of an earlier one; their queries say which they are. Where
  // layers are run several times (loops over the same weights), each time has a cache, and queries
  // the number of the weights.
  int reading_layer() const {
    if (cache_layer < 0) return cache_layer;
    int named = -1;
    for (const ggml_tensor* x = &q; x != nullptr && named < 0;
         x = keeps_numbers(x->op) ? x->src[0] : nullptr)
      named = layer_named(x->name);
    return std::max(cache_layer, named);
  }
  // The cache that k is a view, or a converted copy, of, or is put together from.
  static const ggml_tensor* cache_of(const ggml_tensor* k) {
    for (; k != nullptr; k = k->src[0])
      if (layer_of(k->view_src) >= 0) return k->view_src;
    return nullptr;
  }
  static bool keeps_numbers(ggml_op op) {
    return op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE || op == GGML_OP_CPY || op == GGML_OP_CONT || op == GGML_OP_DUP;
  }
  // Where x comes from, through views and copies in other types and orders.
  static const ggml_tensor* behind_copies(const ggml_tensor* x) {
    while (keeps_numbers(x->op) && x->src[0] != nullptr) x = x->src[0];
    return x;
  }
};

// All of t [dim, len, heads, streams] as floats, to [streams, heads, len, dim].
inline void dequantise(const ggml_tensor& t, float* to, quoka::ExecutorRef executor) {
  const ggml_to_float_t to_float = ggml_get_type_traits(t.type)->to_float;
  constexpr Index step = 64;
  const Index parts = quoka::ceil_div(t.ne[1], step);
  executor.run(parts * t.ne[2] * t.ne[3], [&](Index task, int) {
    const Index head = task / parts, begin = task % parts * step;
    const auto* const of_head = static_cast<const char*>(t.data) +
                                static_cast<std::size_t>(head % t.ne[2]) * t.nb[2] +
                                static_cast<std::size_t>(head / t.ne[2]) * t.nb[3];
    for (Index i = begin; i < std::min(begin + step, t.ne[1]); ++i)
      to_float(of_head + static_cast<std::size_t>(i) * t.nb[1], to + (head * t.ne[1] + i) * t.ne[0],
               t.ne[0]);
  });
}

// Does the first cell hold nothing but zeros, or cannot be looked at?
inline bool empty_cache(const ggml_tensor& k) {
  const ggml_backend_buffer_t buffer = k.view_src->buffer;
  if (k.data == nullptr || buffer == nullptr || !ggml_backend_buffer_is_host(buffer)) return true;
  const auto* const key = static_cast<const char*>(k.data);
  return std::all_of(key, key + ggml_row_size(k.type, k.ne[0]), [](char x) { return x == 0; });
}

// Why the CPU backend computes this one; null: it is taken.
//
// Engines decide whether to use flash attention at all by a graph with one token per sequence, and
// switch it off if that lands on another device than the layer's weights. They ask before anything
// was cached: their cache is zeros then. So a cache without keys is refused for few queries, and
// decode steps over a cache with keys are taken. min_queries > 0: fewer are refused, and this alone
// decides.
inline const char* reason_to_refuse(const ggml_tensor& op, Index min_queries) {
  constexpr Index most_asking = 256;  // tokens of a graph that asks; engines' ubatches are larger
  // Over keys without a cache fewer queries do not pay for the change of backends. Over a cache a
  // single query does, for every type: ggml's own kernel takes 2 to 3 times as long over 4-bit and
  // 5-bit types, which are dequantised here.
  constexpr Index least_queries = 32;
  const auto readable = [](const ggml_tensor& t) {
    return t.nb[0] == ggml_type_size(t.type) &&
           (format_of_type(t.type) != nullptr || ggml_get_type_traits(t.type)->to_float != nullptr);
  };
  const Node node(op);
  const ggml_tensor &q = node.q, &k = node.k, &v = node.v;
  if (q.type != GGML_TYPE_F32 || op.type != GGML_TYPE_F32 || q.nb[0] != sizeof(float) ||
      op.nb[0] != sizeof(float))
    return "q or out is not F32";
  if (!readable(k) || !readable(v)) return "a type of K or V";
  if (k.ne[2] == 0 || k.ne[2] != v.ne[2] || q.ne[2] % k.ne[2] != 0 || k.ne[1] != v.ne[1] ||
      k.ne[3] != q.ne[3] || v.ne[3] != q.ne[3])
    return "shapes of K and V";
  if (const ggml_tensor* const mask = node.mask;
      mask != nullptr &&
      (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] != k.ne[1] ||
       mask->ne[1] < q.ne[1] || (mask->ne[2] != 1 && mask->ne[2] != q.ne[2]) || mask->ne[3] == 0))
    return "the mask's shape";
  if (node.sinks != nullptr && (node.sinks->type != GGML_TYPE_F32 || node.sinks->ne[0] != q.ne[2]))
    return "the sinks' shape";
  if (!(std::abs(node.scale) <= 1e30f) || !(node.softcap >= 0 && node.softcap <= 1e30f) ||
      !(node.max_bias >= 0 && (node.max_bias == 0 || node.mask != nullptr)))
    return "scale, soft-cap or ALiBi";
  if (min_queries > 0) return q.ne[1] < min_queries ? "fewer queries than min_queries" : nullptr;
  if (q.ne[1] < least_queries && !node.cached)
    return "few queries over keys that are not in a cache";
  if (node.cached && q.ne[1] * q.ne[3] <= most_asking && empty_cache(k))
    return "few queries over an empty cache";
  return nullptr;
}

}  // namespace quoka_ggml
