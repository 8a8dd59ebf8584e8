// Definitions of pre_aggregate.hpp.
#pragma once

#include <quoka/select/steps/pre_aggregate.hpp>
#include <quoka/packing/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC void pre_aggregate_head(const Rows& q, const Position* positions, Index n,
                                   Index kv_heads, GroupMode mode, bool raw, float* q_bar,
                                   Index task, Index begin, Index end, FloatRow& reader) {
  const Index group = q.heads() / kv_heads, dim = q.dim();
  const Index rows = aggregated_rows(n, group, mode);
  const bool apart = mode == GroupMode::per_head;
  const float share = apart ? 1.0f : 1.0f / static_cast<float>(group);
  const Index b = task / kv_heads;
  float* const of_task = q_bar + task * rows * dim;
  for (Index first = 0; first < rows; first += n)
    std::fill_n(of_task + (first + begin) * dim, (end - begin) * dim, 0.0f);
  for (Index r = 0; r < group; ++r) {
    const Index head = task % kv_heads * group + r;
    for (Index m = begin; m < end; ++m) {
      const Index at = positions != nullptr ? positions[(b * q.heads() + head) * n + m] : m;
      const float* const row = reader.read(q, b, head, at);
      const float inverse = inverse_norm_of_row(row, dim);
      if (!is_finite_row(row, dim, inverse)) continue;
      const float factor = (raw ? 1.0f : inverse) * share;
      float* const sum = of_task + (apart ? r * n + m : m) * dim;
      for (Index c = 0; c < dim; ++c) sum[c] += row[c] * factor;
    }
  }
}

QUOKA_FUNC void pre_aggregate_rows(const Rows& q, const Position* positions, Index n,
                                   Index kv_heads, GroupMode mode, bool raw, float* q_bar,
                                   WorkerScratch<FloatRow>& scratch, ExecutorRef executor) {
  scratch.reserve(executor.workers(), q);
  executor.run(q.batch() * kv_heads, [&](Index task, int worker) {
    pre_aggregate_head(q, positions, n, kv_heads, mode, raw, q_bar, task, 0, n, scratch[worker]);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
