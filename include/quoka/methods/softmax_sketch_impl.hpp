// Definitions of softmax_sketch.hpp.
#pragma once

#include <quoka/select/sketch/sketched_mass.hpp>
#include <quoka/methods/softmax_sketch.hpp>

#include <algorithm>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC SoftmaxSketch::SoftmaxSketch() = default;
QUOKA_FUNC SoftmaxSketch::SoftmaxSketch(SoftmaxSketch&&) noexcept = default;
QUOKA_FUNC SoftmaxSketch& SoftmaxSketch::operator=(SoftmaxSketch&&) noexcept = default;
QUOKA_FUNC SoftmaxSketch::~SoftmaxSketch() = default;
QUOKA_FUNC Index SoftmaxSketch::bytes() const {
  return keys_.bytes() + rows_.bytes() + readers_.bytes() + (mass_ != nullptr ? mass_->bytes() : 0);
}

QUOKA_FUNC bool SoftmaxSketch::score(const QueryRows& shape, FillRows fill, const Rows& keys,
                                     const KeySketch* cache, Index capacity, Aggregation over,
                                     TensorView<float, 3> scores, ExecutorRef executor) {
  if ((cache == nullptr && keys_.len() != keys.len()) ||
      !detail::codes_fit(shape.max_rows, keys.dim(), Aggregation::max))
    return false;
  const Index head_size = shape.max_rows * shape.dim;
  float* const rows = rows_.reserve(keys.batch() * keys.heads() * head_size);
  readers_.reserve(executor.workers(), shape.read.empty() ? keys : shape.read);
  for_each_kv_head(keys, executor, [&](Index b, Index kv_head, int worker) {
    float* const to = rows + (b * keys.heads() + kv_head) * head_size;
    RowWriter writer(to, shape.dim, readers_[worker]);
    fill(b, kv_head, writer);
    // Rows that were left out are no rows below either.
    std::fill(to + writer.count() * shape.dim, to + head_size,
              std::numeric_limits<float>::quiet_NaN());
  });
  if (mass_ == nullptr) mass_ = std::make_unique<detail::SketchedMassState>();
  const detail::SketchedKeys sketched(keys, keys_, cache);
  detail::sketched_softmax_scores({sketched, rows, shape.max_rows, over, capacity, executor}, 1.0f,
                                  {}, scores, *mass_);
  return true;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
