#include "support.hpp"

#include "node.hpp"

#include <ggml-backend.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace quoka_ggml {
namespace {

// A graph that asks has a token for each sequence, at most this many; and engines' ubatches are larger.
constexpr Index most_asking = 256;
// Fewer queries are not worth the change of backends over keys that are no cache's, nor, anywhere, to
// dequantise keys for.
constexpr Index least = 32;

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

const char* reason_to_refuse(const ggml_tensor& op, const Settings& settings) {
  const ggml_tensor *const q = op.src[0], *const k = op.src[1], *const v = op.src[2],
                           *const mask = op.src[3], *const sinks = op.src[4];
  if (q->type != GGML_TYPE_F32 || op.type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) ||
      op.nb[0] != sizeof(float))
    return "q or out is not F32";
  if (!readable(*k) || !readable(*v)) return "a type of K or V";
  if (k->ne[2] == 0 || k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2] != 0 || k->ne[1] != v->ne[1] ||
      k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3])
    return "shapes of K and V";
  if (mask != nullptr &&
      (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] != k->ne[1] ||
       mask->ne[1] < q->ne[1] || (mask->ne[2] != 1 && mask->ne[2] != q->ne[2]) || mask->ne[3] == 0))
    return "the mask's shape";
  if (sinks != nullptr && (sinks->type != GGML_TYPE_F32 || sinks->ne[0] != q->ne[2]))
    return "the sinks' shape";
  float params[3];
  std::memcpy(params, op.op_params, sizeof params);
  if (!(std::abs(params[0]) <= 1e30f) || !(params[2] >= 0 && params[2] <= 1e30f) ||
      !(params[1] >= 0 && (params[1] == 0 || mask != nullptr)))
    return "scale, soft-cap or ALiBi";
  const Index queries = q->ne[1];
  if (settings.min_queries > 0)
    return queries < settings.min_queries ? "fewer queries than QUOKA_MIN_QUERIES" : nullptr;
  if (layer_of(*k) < 0 || k->view_src == nullptr)
    return queries < least ? "few queries over keys that are no cache's" : nullptr;
  if (queries < least && (format_of_type(k->type) == nullptr || format_of_type(v->type) == nullptr))
    return "few queries over a type that is dequantised";
  if (queries * q->ne[3] <= most_asking && empty_cache(*k))
    return "few queries over an empty cache";
  return nullptr;
}

}  // namespace quoka_ggml
