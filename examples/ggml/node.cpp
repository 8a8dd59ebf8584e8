#include "node.hpp"

#include <quoka/packing/byte_formats.hpp>

#include <ggml-backend.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace quoka_ggml {
namespace {

// A graph that asks has a token for each sequence, at most this many; and engines' ubatches are larger.
constexpr Index most_asking = 256;
// Fewer queries are not worth the change of backends over keys that are no cache's, nor, anywhere, to
// dequantise keys for.
constexpr Index least_queries = 32;

Index stride(const ggml_tensor& t, int axis) { return static_cast<Index>(t.nb[axis]); }

const std::byte* row_at(const ggml_tensor& t, Index i1, Index i2, Index i3) {
  return static_cast<const std::byte*>(t.data) + i1 * stride(t, 1) + i2 * stride(t, 2) +
         i3 * stride(t, 3);
}

float parameter(const ggml_tensor& op, int i) {
  float value;
  std::memcpy(&value, op.op_params + i, sizeof value);
  return value;
}

// What the engine calls the cache that k is a view of: "cache_k_l3" gives 3, others -1.
int layer_of(const ggml_tensor& k) {
  int layer = -1;
  const char* const name = k.view_src != nullptr ? k.view_src->name : "";
  return std::sscanf(name, "cache_k_l%d", &layer) == 1 ? layer : -1;
}

bool readable(const ggml_tensor& t) {
  if (t.nb[0] != ggml_type_size(t.type)) return false;
  return format_of_type(t.type) != nullptr || ggml_get_type_traits(t.type)->to_float != nullptr;
}

// Does the first cell hold nothing but zeros, or cannot be looked at?
bool empty_cache(const ggml_tensor& k) {
  const ggml_backend_buffer_t buffer = k.view_src->buffer;
  if (k.data == nullptr || buffer == nullptr || !ggml_backend_buffer_is_host(buffer)) return true;
  const auto* const key = static_cast<const char*>(k.data);
  const std::size_t bytes = ggml_row_size(k.type, k.ne[0]);
  return std::all_of(key, key + bytes, [](char x) { return x == 0; });
}

}  // namespace

Node::Node(const ggml_tensor& op)
    : q(*op.src[0]),
      k(*op.src[1]),
      v(*op.src[2]),
      out(op),
      mask(op.src[3]),
      sinks(op.src[4]),
      scale(parameter(op, 0)),
      max_bias(parameter(op, 1)),
      softcap(parameter(op, 2)),
      layer(layer_of(*op.src[1])) {}

quoka::Rows Node::queries(Index stream, Index first, Index count) const {
  return {row_at(q, first, 0, stream),
          quoka::format_of<float>(),
          {1, q_heads(), count, head_dim()},
          {0, stride(q, 2), stride(q, 1)}};
}

quoka::OutputRows Node::results(Index stream, Index first, Index count) const {
  return {const_cast<std::byte*>(row_at(out, 0, first, stream)),
          quoka::format_of<float>(),
          {1, q_heads(), count, out.ne[0]},
          {0, stride(out, 1), stride(out, 2)}};
}

const std::uint16_t* Node::mask_row(Index stream, Index query) const {
  return reinterpret_cast<const std::uint16_t*>(row_at(*mask, query, 0, stream % mask->ne[3]));
}

quoka::Mask Node::mask_of(Index stream, Index first, Index count) const {
  return quoka::Rows(reinterpret_cast<const std::byte*>(mask_row(stream, first)),
                     quoka::format_of<Eigen::half>(), {1, mask->ne[2], count, cells()},
                     {0, stride(*mask, 2), stride(*mask, 1)});
}

quoka::Rows cache_rows(const ggml_tensor& t, Index stream, const float* floats) {
  const quoka::Rows::Sizes sizes{1, t.ne[2], t.ne[1], t.ne[0]};
  if (floats == nullptr)
    return {
        row_at(t, 0, 0, stream), *format_of_type(t.type), sizes, {0, stride(t, 2), stride(t, 1)}};
  const Index row = t.ne[0] * static_cast<Index>(sizeof(float)), head = t.ne[1] * row;
  return {reinterpret_cast<const std::byte*>(floats) + stream * t.ne[2] * head,
          quoka::format_of<float>(),
          sizes,
          {0, head, row}};
}

const quoka::Format* format_of_type(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return &quoka::format_of<float>();
    case GGML_TYPE_F16:
      return &quoka::format_of<Eigen::half>();
    case GGML_TYPE_BF16:
      return &quoka::format_of<Eigen::bfloat16>();
    case GGML_TYPE_Q8_0:
      return &quoka::q8_0_format();
    default:
      return nullptr;
  }
}

void dequantise(const ggml_tensor& t, float* to, quoka::ExecutorRef executor) {
  const ggml_to_float_t to_float = ggml_get_type_traits(t.type)->to_float;
  constexpr Index step = 64;
  const Index parts = quoka::ceil_div(t.ne[1], step);
  executor.run(parts * t.ne[2] * t.ne[3], [&](Index task, int) {
    const Index head = task / parts, begin = task % parts * step;
    for (Index i = begin; i < std::min(begin + step, t.ne[1]); ++i)
      to_float(row_at(t, i, head % t.ne[2], head / t.ne[2]), to + (head * t.ne[1] + i) * t.ne[0],
               t.ne[0]);
  });
}

const char* reason_to_refuse(const ggml_tensor& op, Index min_queries) {
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
  if (q.ne[1] < least_queries && node.layer < 0) return "few queries over keys that are no cache's";
  if (q.ne[1] < least_queries && (!format_of_type(k.type) || !format_of_type(v.type)))
    return "few queries over a type that is dequantised";
  if (node.layer >= 0 && q.ne[1] * q.ne[3] <= most_asking && empty_cache(k))
    return "few queries over an empty cache";
  return nullptr;
}

}  // namespace quoka_ggml
