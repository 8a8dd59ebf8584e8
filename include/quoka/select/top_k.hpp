// Top-k (QuoKA, Algorithm 1, last stage) on Eigen tensors: steps/top_k.hpp says in which order.
#pragma once

#include <quoka/select/steps/top_k.hpp>
#include <quoka/views/tensor.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// scores [batch, kv_heads, kv_len] to the k best of each head; all where k >= kv_len. Throws
// std::invalid_argument for a negative k, keep_first or keep_last and for window < 1.
inline Selection top_k(const Tensor<float, 3>& scores, Index k, const TopKOptions& options = {},
                       ExecutorRef executor = SerialExecutor{}) {
  detail::check_top_k(k, options);
  Selection selection;
  WorkerScratch<detail::TopKScratch> scratch;
  scratch.reserve(executor.workers(), scores.dimension(2), options.window);
  detail::select_top_k(scores.data(), scores.dimension(0), scores.dimension(1), scores.dimension(2),
                       k, options, selection, scratch, executor);
  return selection;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
