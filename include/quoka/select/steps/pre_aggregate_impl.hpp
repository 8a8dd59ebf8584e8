// Definitions of pre_aggregate.hpp.
#pragma once

#include <quoka/select/steps/pre_aggregate.hpp>
#include <quoka/packing/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC void pre_aggregate_head(const PreAggregation& queries, Index task, Index begin,
                                   Index end, FloatRow& reader) {
  const Rows& q = queries.q;
  const Index n = queries.n, kv_heads = queries.kv_heads;
  const Index group = q.heads() / kv_heads, dim = q.dim();
  const Index rows = aggregated_rows(n, group, queries.mode);
  const bool per_head = queries.mode == GroupMode::per_head;
  const float share = per_head ? 1.0f : 1.0f / static_cast<float>(group);
  const Index b = task / kv_heads;
  float* const head_rows = queries.q_bar + task * rows * dim;
  for (Index first = 0; first < rows; first += n)
    std::fill_n(head_rows + (first + begin) * dim, (end - begin) * dim, 0.0f);
  for (Index r = 0; r < group; ++r) {
    const Index head = task % kv_heads * group + r;
    for (Index m = begin; m < end; ++m) {
      const Index at =
          queries.positions != nullptr ? queries.positions[(b * q.heads() + head) * n + m] : m;
      const float* const row = reader.read(q, b, head, at);
      const float inverse = inverse_norm_of_row(row, dim);
      if (!is_finite_row(row, dim, inverse)) continue;
      const float factor = (queries.raw ? 1.0f : inverse) * share;
      float* const sum = head_rows + (per_head ? r * n + m : m) * dim;
      for (Index c = 0; c < dim; ++c) sum[c] += row[c] * factor;
    }
  }
}

QUOKA_FUNC void pre_aggregate_rows(const PreAggregation& queries, WorkerScratch<FloatRow>& scratch,
                                   ExecutorRef executor) {
  scratch.reserve(executor.workers(), queries.q);
  executor.run(queries.q.batch() * queries.kv_heads, [&](Index task, int worker) {
    pre_aggregate_head(queries, task, 0, queries.n, scratch[worker]);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
