// Pre-aggregation (QuoKA, Algorithm 1, second stage) on Eigen tensors: steps/pre_aggregate.hpp has the
// formula.
#pragma once

#include <quoka/select/steps/pre_aggregate.hpp>
#include <quoka/views/tensor.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// kept [batch, q_heads, n, head_dim] to [batch, kv_heads, n, head_dim]; per_head: [batch, kv_heads,
// group * n, head_dim], row r * n + m being slot m of the group's head r. Throws
// std::invalid_argument when q_heads is not a multiple of kv_heads.
template <TensorLike Q>
Tensor<float> pre_aggregate(const Q& kept, Index kv_heads, GroupMode mode = GroupMode::rank,
                            Scoring scoring = Scoring::cosine,
                            ExecutorRef executor = SerialExecutor{}) {
  const Rows q = view_of(kept);
  detail::require_multiple("q_heads", q.heads(), "kv_heads", kv_heads);
  const Index rows = detail::aggregated_rows(q.len(), q.heads() / kv_heads, mode);
  Tensor<float> q_bar(q.batch(), kv_heads, rows, q.dim());
  WorkerScratch<detail::FloatRow> scratch;
  detail::pre_aggregate_rows(q, nullptr, q.len(), kv_heads, mode, scoring, q_bar.data(), scratch,
                             executor);
  return q_bar;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
