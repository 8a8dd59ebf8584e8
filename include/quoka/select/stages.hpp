// The stages of QuoKA's Algorithm 1, one by one, on Eigen tensors.
//
//   kept      = subselect_queries(q, 16)        [b, q_heads, 16, head_dim], most dissimilar first
//   q_bar     = pre_aggregate(kept, kv_heads)   [b, kv_heads, 16, head_dim]
//   scores    = score_keys(q_bar, past_k)       [b, kv_heads, kv_len], maximum over the 16
//   selection = top_k(scores, 1024)             Selection
//   k_star    = gather(past_k, selection)       [b, kv_heads, 1024, head_dim]
//
// QuokaSelector does the same without the tensors in between. Not included by quoka.hpp: Eigen's
// Tensor takes a compiler longer to read than the rest of the library.
#pragma once

#include <quoka/rows/selection.hpp>
#include <quoka/rows/tensor.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/key_scores.hpp>
#include <quoka/select/queries.hpp>
#include <quoka/select/query_rows.hpp>
#include <quoka/select/top_k.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

// ---- query sub-selection: the formula is in queries.hpp --------------------------------

// Positions in the chunk of the queries kept: [batch, q_heads, min(n_queries, q_len)], most
// dissimilar first. Throws std::invalid_argument for n_queries < 1 and an empty chunk.
template <TensorLike Q>
Tensor<Position, 3> subselect_query_positions(const Q& q, Index n_queries,
                                              ExecutorRef executor = SerialExecutor{}) {
  const Rows rows = view_of(q);  // [batch, q_heads, q_len, head_dim]
  detail::require_at_least("q_len", rows.len(), 1);
  detail::require_keys("q_len", rows.len());
  detail::require_at_least("head_dim", rows.dim(), 1);
  detail::require_at_least("n_queries", n_queries, 1);
  Tensor<Position, 3> positions(rows.batch(), rows.heads(), std::min(n_queries, rows.len()));
  Arenas workers;
  workers.reserve(executor.workers(), [&](Arena& arena) { detail::SubselectScratch(arena, rows); });
  executor.run(rows.batch() * rows.heads(), [&](Index head, int worker) {
    Arena arena = workers[worker];
    detail::SubselectScratch scratch(arena, rows);
    detail::subselect_head(rows, n_queries, positions.data(), head, scratch);
  });
  return positions;
}

// The queries kept, as they are: [batch, q_heads, min(n_queries, q_len), head_dim], most dissimilar
// first. Throws as subselect_query_positions.
template <TensorLike Q>
Tensor<storage_t<Q>> subselect_queries(const Q& q, Index n_queries,
                                       ExecutorRef executor = SerialExecutor{}) {
  const auto positions = subselect_query_positions(q, n_queries, executor);
  const auto view = view_of(q);
  const Index n = positions.dimension(2);
  Tensor<storage_t<Q>> kept(view.batch(), view.heads(), n, view.dim());
  for (Index b = 0; b < view.batch(); ++b)
    for (Index head = 0; head < view.heads(); ++head)
      for (Index m = 0; m < n; ++m)
        std::copy_n(view.row(b, head, positions(b, head, m)), view.dim(), &kept(b, head, m, 0));
  return kept;
}

// ---- pre-aggregation: queries.hpp --------------------------------------------------

// kept [batch, q_heads, n, head_dim] to [batch, kv_heads, n, head_dim]. With kv_heads = q_heads
// each query is normalised, and nothing is averaged. Throws std::invalid_argument when q_heads is
// not a multiple of kv_heads.
template <TensorLike Q>
Tensor<float> pre_aggregate(const Q& kept, Index kv_heads,
                            ExecutorRef executor = SerialExecutor{}) {
  const Rows q = view_of(kept);
  detail::require_multiple("q_heads", q.heads(), "kv_heads", kv_heads);
  Tensor<float> q_bar(q.batch(), kv_heads, q.len(), q.dim());
  executor.run(q.batch() * kv_heads, [&](Index head, int) {
    RowReader reader;
    detail::pre_aggregate_head({q, nullptr, q.len(), kv_heads, q_bar.data()}, head, 0, q.len(),
                               reader);
  });
  return q_bar;
}

// ---- scores: key_scores.hpp ----------------------------------------------------------------

// 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, kv_len] of keys [batch, kv_heads,
// kv_len, head_dim]. For a caller whose cache is not KvCache. Computed once per key and passed to
// the selector with every chunk, they save a quarter of the scoring time.
template <TensorLike K>
Tensor<float, 3> inverse_norms(const K& keys, ExecutorRef executor = SerialExecutor{}) {
  const Rows k = view_of(keys);
  Tensor<float, 3> norms(k.batch(), k.heads(), k.len());
  executor.run(k.batch() * k.heads(), [&](Index task, int) {
    const Index b = task / k.heads(), head = task % k.heads();
    RowReader reader;
    for (Index t = 0; t < k.len(); ++t)
      norms(b, head, t) = inverse_norm(reader.read(k, b, head, t), k.dim());
  });
  return norms;
}

// q_bar [batch, kv_heads, rows, head_dim] (float), keys [batch, kv_heads, kv_len, head_dim],
// inverse_norms [batch, kv_heads, kv_len] or absent: scores [batch, kv_heads, kv_len]. Throws
// std::invalid_argument when shapes do not fit together.
template <TensorLike K>
Tensor<float, 3> score_keys(const Tensor<float>& q_bar, const K& keys,
                            Aggregation aggregation = Aggregation::max,
                            TensorView<const float, 3> inverse_norms = {},
                            ExecutorRef executor = SerialExecutor{}) {
  const auto k = view_of(keys);
  detail::require_keys("kv_len", k.len());
  detail::require_at_least("q_bar's rows", q_bar.dimension(2), 1);
  detail::require_at_least("head_dim", k.dim(), 1);
  detail::require_sizes("k", k.sizes(),
                        {q_bar.dimension(0), q_bar.dimension(1), k.len(), q_bar.dimension(3)});
  if (!inverse_norms.absent())
    detail::require_sizes("inverse_norms", inverse_norms.sizes(), {k.batch(), k.heads(), k.len()});
  Tensor<float, 3> scores(k.batch(), k.heads(), k.len());
  Arenas workers;
  detail::score_all_keys({q_bar.data(), q_bar.dimension(2), Rows(k), &inverse_norms, aggregation},
                         scores.data(), workers, executor);
  return scores;
}

// ---- top-k: top_k.hpp says in which order ------------------------------------------------

// scores [batch, kv_heads, kv_len] to the k best of each head; all where k >= kv_len. Throws
// std::invalid_argument for a negative k, keep_first or keep_last and for kernel_size < 1.
inline Selection top_k(const Tensor<float, 3>& scores, Index k, const TopKOptions& options = {},
                       ExecutorRef executor = SerialExecutor{}) {
  detail::check_top_k(k, options);
  detail::require_keys("kv_len", scores.dimension(2));
  Selection selection;
  Arenas workers;
  detail::select_top_k(TensorView<const float, 3>(scores), k, options, selection, workers,
                       executor);
  return selection;
}

// ---- gather, for those who feed another attention kernel: quoka::attention packs selected rows
// from the cache

// past [batch, kv_heads, kv_len, dim] (keys or values) to [batch, kv_heads, most, dim], positions
// ascending; `most` is selection.max_count(), and a KV head that keeps fewer ends in rows of zeros.
// Throws std::invalid_argument when the selection was made for another shape.
template <TensorLike K>
Tensor<storage_t<K>> gather(const K& past, const Selection& selection,
                            ExecutorRef executor = SerialExecutor{}) {
  using T = storage_t<K>;
  const auto view = view_of(past);
  selection.require_shape(view.batch(), view.heads(), view.len());
  const Index most = selection.max_count();
  Tensor<T> rows(view.batch(), view.heads(), most, view.dim());
  executor.run(view.batch() * view.heads(), [&](Index task, int) {
    const Index b = task / view.heads(), kv_head = task % view.heads();
    const auto positions = selection.row(b, kv_head);
    const Index count = selection.count(b, kv_head);
    T* to = rows.data() + task * most * view.dim();
    for (Index i = 0; i < count; ++i, to += view.dim())
      std::copy_n(
          view.row(b, kv_head, selection.is_all() ? i : positions[static_cast<std::size_t>(i)]),
          view.dim(), to);
    std::fill_n(to, (most - count) * view.dim(), T(0.0f));
  });
  return rows;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
