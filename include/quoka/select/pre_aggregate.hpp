// Pre-aggregation (QuoKA, Algorithm 1, second stage): the kept queries of a group become those of
// its KV head.
//
//   q_bar[kv_head][m] = 1/group * sum over the group's heads h of q[h][m] / |q[h][m]|
//
// Slot m of every head is averaged whatever token it holds (GroupMode::rank), and the average is
// not normalised again: heads that disagree shrink the vector and so its vote. By linearity a key's
// cosine with q_bar is the mean of its cosines with the heads, at 1/group of the scoring cost.
// Beyond the paper: GroupMode::per_head keeps the group's rows side by side; dot scoring leaves
// them unnormalised; a query with a NaN or an infinity counts as zero. 4 * q_heads * n_queries *
// head_dim FLOPs.
#pragma once

#include <quoka/core/executor.hpp>
#include <quoka/core/inverse_norm.hpp>
#include <quoka/core/view.hpp>
#include <quoka/select/options.hpp>

namespace quoka::inline QUOKA_ABI {
namespace detail {

constexpr Index aggregated_rows(Index n_queries, Index group, GroupMode mode) {
  return mode == GroupMode::per_head ? group * n_queries : n_queries;
}

template <class T>
void add_scaled(const T* row, Index dim, float factor, float* sum) {
  for (Index c = 0; c < dim; ++c) sum[c] += static_cast<float>(row[c]) * factor;
}

// q_bar [aggregated_rows, head_dim] of one KV head; row_of(r, m) is slot m of the group's head r.
template <class RowOf>
void pre_aggregate_head(RowOf&& row_of, Index n_queries, Index group, Index dim, GroupMode mode,
                        Scoring scoring, float* q_bar) {
  const bool apart = mode == GroupMode::per_head;
  std::fill_n(q_bar, aggregated_rows(n_queries, group, mode) * dim, 0.0f);
  for (Index r = 0; r < group; ++r) {
    for (Index m = 0; m < n_queries; ++m) {
      const auto* row = row_of(r, m);
      const float inverse = inverse_norm(row, dim);
      if (!is_finite_row(row, dim, inverse)) continue;
      const float length = scoring == Scoring::cosine ? inverse : 1.0f;
      const float share = apart ? 1.0f : 1.0f / static_cast<float>(group);
      add_scaled(row, dim, length * share, q_bar + (apart ? r * n_queries + m : m) * dim);
    }
  }
}

}  // namespace detail

// kept [batch, q_heads, n, head_dim] to [batch, kv_heads, n, head_dim]; per_head: [batch, kv_heads,
// group * n, head_dim], row r * n + m being slot m of the group's head r. Throws
// std::invalid_argument when q_heads is not a multiple of kv_heads.
template <TensorLike Q>
Tensor<float> pre_aggregate(const Q& kept, Index kv_heads, GroupMode mode = GroupMode::rank,
                            Scoring scoring = Scoring::cosine,
                            ExecutorRef executor = SerialExecutor{}) {
  const auto view = view_of(kept);
  detail::require_multiple("q_heads", view.heads(), "kv_heads", kv_heads);
  const Index group = view.heads() / kv_heads, n = view.len();
  const Index rows = detail::aggregated_rows(n, group, mode);
  Tensor<float> q_bar(view.batch(), kv_heads, rows, view.dim());
  executor.run(view.batch() * kv_heads, [&](Index task, int) {
    const Index b = task / kv_heads, kv_head = task % kv_heads;
    const auto row_of = [&](Index r, Index m) { return view.row(b, kv_head * group + r, m); };
    detail::pre_aggregate_head(row_of, n, group, view.dim(), mode, scoring,
                               q_bar.data() + task * rows * view.dim());
  });
  return q_bar;
}

}  // namespace quoka::inline QUOKA_ABI
