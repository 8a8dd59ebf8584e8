// Pre-aggregation (QuoKA, Algorithm 1, second stage): the kept queries of a group become those of
// its KV head.
//
//   q_bar[kv_head][m] = 1/group * sum over the group's heads h of q[h][m] / |q[h][m]|
//
// Slot m of every head is averaged whatever token it holds (GroupMode::mean), and the average is
// not normalised again: heads that disagree shrink the vector and so its vote. By linearity a key's
// cosine with q_bar is the mean of its cosines with the heads, at 1/group of the scoring cost.
// Beyond the paper: GroupMode::per_head keeps the group's rows side by side; raw queries are those
// of Domain::softmax; a query with a NaN or an infinity counts as zero. 4 * q_heads * n_queries *
// head_dim FLOPs.
#pragma once

#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/options.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Rows of a KV head after pre-aggregation.
constexpr Index aggregated_rows(Index n_queries, Index group, GroupMode mode) {
  return mode == GroupMode::per_head ? group * n_queries : n_queries;
}

// Queries, and where they are averaged to.
struct PreAggregation {
  Rows q;                     // [batch, q_heads, q_len, head_dim]
  const Position* positions;  // [batch, q_heads, n] of the queries; null: all q_len = n
  Index n;                    // queries of each head
  Index kv_heads;
  GroupMode mode;
  bool raw;      // not normalised
  float* q_bar;  // [batch, kv_heads, aggregated_rows, head_dim]
};

// KV head task = b * kv_heads + kv_head alone, the slots [begin, end) of [0, n).
void pre_aggregate_head(const PreAggregation& queries, Index task, Index begin, Index end,
                        RowReader& reader);
// All of them.
void pre_aggregate_rows(const PreAggregation& queries, WorkerScratch<RowReader>& scratch,
                        ExecutorRef executor);

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC void pre_aggregate_head(const PreAggregation& queries, Index task, Index begin,
                                   Index end, RowReader& reader) {
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

QUOKA_FUNC void pre_aggregate_rows(const PreAggregation& queries, WorkerScratch<RowReader>& scratch,
                                   ExecutorRef executor) {
  scratch.reserve(executor.workers(), queries.q);
  executor.run(queries.q.batch() * queries.kv_heads, [&](Index task, int worker) {
    pre_aggregate_head(queries, task, 0, queries.n, scratch[worker]);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
