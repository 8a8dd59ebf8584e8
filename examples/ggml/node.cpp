#include "node.hpp"

#include <quoka/formats/byte_formats.hpp>

#include <cstdio>
#include <cstring>

namespace quoka_ggml {
namespace {

const std::byte* row_at(const ggml_tensor& t, Index i1, Index i2, Index i3) {
  const auto step = [&](Index i, int axis) { return i * static_cast<Index>(t.nb[axis]); };
  return static_cast<const std::byte*>(t.data) + step(i1, 1) + step(i2, 2) + step(i3, 3);
}

Index stride(const ggml_tensor& t, int axis) { return static_cast<Index>(t.nb[axis]); }

}  // namespace

Node::Node(const ggml_tensor& op)
    : op_(op),
      q_(op.src[0]),
      k_(op.src[1]),
      v_(op.src[2]),
      mask_(op.src[3]),
      layer_(layer_of(*op.src[1])) {}

float Node::param(int i) const {
  float value;
  std::memcpy(&value, op_.op_params + i, sizeof value);
  return value;
}

const float* Node::sinks() const {
  return op_.src[4] != nullptr ? static_cast<const float*>(op_.src[4]->data) : nullptr;
}

quoka::Rows Node::q(Index stream, Index first, Index count) const {
  return {row_at(*q_, first, 0, stream),
          quoka::format_of<float>(),
          {1, q_heads(), count, head_dim()},
          {0, stride(*q_, 2), stride(*q_, 1)}};
}

quoka::OutputRows Node::out(Index stream, Index first, Index count) const {
  return {const_cast<std::byte*>(row_at(op_, 0, first, stream)),
          quoka::format_of<float>(),
          {1, q_heads(), count, op_.ne[0]},
          {0, stride(op_, 1), stride(op_, 2)}};
}

quoka::Rows Node::rows(const ggml_tensor& t, Index stream, const float* floats) {
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

const std::uint16_t* Node::mask_row(Index stream, Index query) const {
  return reinterpret_cast<const std::uint16_t*>(row_at(*mask_, query, 0, stream % mask_->ne[3]));
}

quoka::Mask Node::mask(Index stream, Index first, Index count) const {
  return quoka::Rows(reinterpret_cast<const std::byte*>(mask_row(stream, first)),
                     quoka::format_of<Eigen::half>(), {1, mask_->ne[2], count, cells()},
                     {0, stride(*mask_, 2), stride(*mask_, 1)});
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

int layer_of(const ggml_tensor& k) {
  const ggml_tensor& cache = k.view_src != nullptr ? *k.view_src : k;
  int layer = -1;
  return std::sscanf(cache.name, "cache_k_l%d", &layer) == 1 ? layer : -1;
}

}  // namespace quoka_ggml
