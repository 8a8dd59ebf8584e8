// Key scoring (QuoKA, Algorithm 1, third stage) on Eigen tensors: steps/score.hpp has the formula.
#pragma once

#include <quoka/select/steps/score.hpp>
#include <quoka/views/tensor.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, kv_len] of keys [batch, kv_heads,
// kv_len, head_dim]. For a caller whose cache is not KvCache: computed once per key and handed to
// the selector with every chunk, they save it a quarter of the scoring time.
template <TensorLike K>
Tensor<float, 3> inverse_norms(const K& keys, ExecutorRef executor = SerialExecutor{}) {
  const auto k = view_of(keys);
  Tensor<float, 3> norms(k.batch(), k.heads(), k.len());
  detail::write_inverse_norms(Rows(k), norms, executor);
  return norms;
}

// q_bar [batch, kv_heads, rows, head_dim] (float), keys [batch, kv_heads, kv_len, head_dim],
// inverse_norms [batch, kv_heads, kv_len] or absent: scores [batch, kv_heads, kv_len]. Throws
// std::invalid_argument when shapes do not fit together.
template <TensorLike K>
Tensor<float, 3> score_keys(const Tensor<float>& q_bar, const K& keys,
                            const ScoreOptions& options = {},
                            TensorView<const float, 3> inverse_norms = {},
                            ExecutorRef executor = SerialExecutor{}) {
  const auto k = view_of(keys);
  detail::require_at_least("q_bar's rows", q_bar.dimension(2), 1);
  detail::require_at_least("head_dim", k.dim(), 1);
  detail::require_sizes("k", k.sizes(),
                        {q_bar.dimension(0), q_bar.dimension(1), k.len(), q_bar.dimension(3)});
  if (!inverse_norms.absent())
    detail::require_sizes("inverse_norms", inverse_norms.sizes(), {k.batch(), k.heads(), k.len()});
  Tensor<float, 3> scores(k.batch(), k.heads(), k.len());
  WorkerScratch<detail::ScoreScratch> scratch;
  detail::score_all_keys(q_bar.data(), q_bar.dimension(2), Rows(k), inverse_norms, options,
                         scores.data(), scratch, executor);
  return scores;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
