// Query sub-selection (QuoKA, Algorithm 1, first stage) on Eigen tensors: steps/subselect.hpp has the
// formula.
#pragma once

#include <quoka/select/steps/subselect.hpp>
#include <quoka/views/tensor.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

// Positions in the chunk of the queries kept: [batch, q_heads, min(n_queries, q_len)], most
// dissimilar first. Throws std::invalid_argument for n_queries < 1, an empty chunk, or q_heads not
// a multiple of options.heads_per_set and options.group.
template <TensorLike Q>
Tensor<Position, 3> subselect_query_positions(const Q& q, Index n_queries,
                                              const SubselectOptions& options = {},
                                              ExecutorRef executor = SerialExecutor{}) {
  const auto view = view_of(q);  // [batch, q_heads, q_len, head_dim]
  detail::check_subselect(Rows(view), n_queries, options);
  Tensor<Position, 3> positions(view.batch(), view.heads(), std::min(n_queries, view.len()));
  WorkerScratch<detail::SubselectScratch> scratch;
  detail::subselect_positions(Rows(view), n_queries, options, positions.data(), scratch, executor);
  return positions;
}

// The queries kept, as they are: [batch, q_heads, min(n_queries, q_len), head_dim], most dissimilar
// first. Throws as subselect_query_positions.
template <TensorLike Q>
Tensor<storage_t<Q>> subselect_queries(const Q& q, Index n_queries,
                                       const SubselectOptions& options = {},
                                       ExecutorRef executor = SerialExecutor{}) {
  const auto positions = subselect_query_positions(q, n_queries, options, executor);
  const auto view = view_of(q);
  const Index n = positions.dimension(2);
  Tensor<storage_t<Q>> kept(view.batch(), view.heads(), n, view.dim());
  for (Index b = 0; b < view.batch(); ++b)
    for (Index head = 0; head < view.heads(); ++head)
      for (Index m = 0; m < n; ++m)
        std::copy_n(view.row(b, head, positions(b, head, m)), view.dim(), &kept(b, head, m, 0));
  return kept;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
