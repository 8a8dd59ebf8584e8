// Query sub-selection (QuoKA, Algorithm 1, first stage): the few queries least like the mean query.
//
//   mean[h]   = 1/q_len * sum over i of q[h][i]                     raw queries, per query head
//   cos[h][i] = q[h][i] . mean[h] / (|q[h][i]| |mean[h]|)
//   keep the n_queries lowest, ordered by (cosine, position)
//
// q_len <= n_queries keeps every query in order: decode drops nothing. About 5 * q_heads * q_len *
// head_dim FLOPs and two reads of the chunk's queries. Beyond the paper: the other choices of
// QueryChoice; one set of tokens for several heads, ranked by the sum of their cosines; and a query
// with a NaN or an infinity is left out of the mean and ranks last, so that it spoils its own row
// only.
//
// QueryChoice::mixed keeps the last ceil(n / 4) tokens, spaces n - ceil(n / 4) - floor(n / 4) = c
// over the rest, head r of a group of g at floor((m g + r) rest / (c g)) for m < c, so that the
// group as a whole looks at every part of the chunk, and adds the floor(n / 4) most dissimilar of
// what is left.
#pragma once

#include <quoka/core/buffer.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/core/inverse_norm.hpp>
#include <quoka/core/view.hpp>
#include <quoka/core/worker_scratch.hpp>
#include <quoka/select/options.hpp>

#include <numeric>
#include <span>

namespace quoka::inline QUOKA_ABI {

struct SubselectOptions {
  QueryChoice query_choice = QueryChoice::dissimilar;
  Index heads_per_set =
      1;            // neighbouring query heads that keep the same tokens: 1 (paper), or the group
  Index group = 1;  // neighbouring query heads whose evenly spaced tokens differ; mixed alone
};

namespace detail {

// Scratch of one worker.
struct SubselectScratch {
  Buffer<float> mean;      // [head_dim]
  Buffer<float> inverse;   // [q_len]
  Buffer<float> cosines;   // [q_len], summed over the heads of a set
  Buffer<Position> order;  // [q_len]

  void reserve(Index q_len, Index dim) {
    mean.reserve(dim);
    inverse.reserve(q_len);
    cosines.reserve(q_len);
    order.reserve(q_len);
  }
  Index bytes() const { return mean.bytes() + inverse.bytes() + cosines.bytes() + order.bytes(); }
};

template <class T>
QUOKA_INLINE void add_row(const T* row, Index dim, float* sum) {
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes)
    simd::store_unaligned(sum + c,
                          simd::add(simd::load_unaligned(sum + c), simd::load_as_float(row + c)));
  for (; c < dim; ++c) sum[c] += static_cast<float>(row[c]);
}

// s.cosines[i] += cosine of query i with the head's mean query; infinity for a query that is not
// finite.
template <class T>
void add_cosines(const TensorView<const T>& q, Index b, Index head, SubselectScratch& s) {
  const Index dim = q.dim();
  float *mean = s.mean.data(), *inverse = s.inverse.data(), *cosines = s.cosines.data();
  std::fill_n(mean, dim, 0.0f);
  for (Index i = 0; i < q.len(); ++i) {
    const T* row = q.row(b, head, i);
    inverse[i] = inverse_norm(row, dim);
    if (is_finite_row(row, dim, inverse[i]))
      add_row(row, dim, mean);
    else
      cosines[i] = simd::infinity;
  }
  const float unit = inverse_norm(mean, dim);
  const float factor = is_finite_row(mean, dim, unit) ? unit : 0.0f;  // the sum may have overflowed
  for (Index c = 0; c < dim; ++c) mean[c] = factor == 0.0f ? 0.0f : mean[c] * factor;
  for (Index i = 0; i < q.len(); ++i)
    if (cosines[i] != simd::infinity)
      cosines[i] += sum_of_products(q.row(b, head, i), mean, dim) * inverse[i];
}

// Which of n queries is what.
struct QueryShares {
  Index dissimilar, spaced, last;  // in slot order
};
constexpr QueryShares query_shares(QueryChoice choice, Index n) {
  if (choice == QueryChoice::uniform) return {0, n, 0};
  if (choice == QueryChoice::last) return {0, 0, n};
  if (choice == QueryChoice::dissimilar_and_last) return {n - n / 2, 0, n / 2};
  if (choice == QueryChoice::mixed) return {n / 4, n - n / 4 - ceil_div(n, 4), ceil_div(n, 4)};
  return {n, 0, 0};
}

// kept[m] for one set of heads, the member-th of a group of `members`: positions in the chunk, in
// slot order.
template <class T>
void subselect_set(const TensorView<const T>& q, Index b, Index first_head, Index heads,
                   QueryChoice choice, Index member, Index members, std::span<Position> kept,
                   SubselectScratch& s) {
  const Index len = q.len(), n = std::ssize(kept);
  if (n == len) return std::iota(kept.begin(), kept.end(), Position{0});
  const auto [dissimilar, spaced, last] = query_shares(choice, n);
  const auto spaced_ones = kept.begin() + dissimilar, last_ones = spaced_ones + spaced;
  const Index rest = len - last;
  for (Index m = 0; m < spaced; ++m)
    spaced_ones[m] = static_cast<Position>(
        choice == QueryChoice::uniform ? (m + 1) * len / n - 1
                                       : (m * members + member) * rest / (spaced * members));
  std::iota(last_ones, kept.end(), static_cast<Position>(rest));
  if (dissimilar == 0) return;

  float* cosines = s.cosines.data();
  std::fill_n(cosines, len, 0.0f);
  for (Index head = first_head; head < first_head + heads; ++head) add_cosines(q, b, head, s);
  Position *const order = s.order.data(), *end = order;
  auto taken = spaced_ones;
  for (Index i = 0; i < rest; ++i) {
    if (taken != last_ones && *taken == i)
      ++taken;
    else
      *end++ = static_cast<Position>(i);
  }
  std::partial_sort(order, order + dissimilar, end, [&](Position x, Position y) {
    return cosines[x] < cosines[y] || (cosines[x] == cosines[y] && x < y);
  });
  std::copy_n(order, dissimilar, kept.begin());
}

template <class T>
void check_subselect(const TensorView<const T>& q, Index n_queries,
                     const SubselectOptions& options) {
  require_at_least("q_len", q.len(), 1);
  require_at_least("head_dim", q.dim(), 1);
  require_at_least("n_queries", n_queries, 1);
  require_multiple("q_heads", q.heads(), "heads_per_set", options.heads_per_set);
  require_multiple("q_heads", q.heads(), "group", options.group);
}

// positions [batch, q_heads, min(n_queries, q_len)].
template <class T>
void subselect_positions(const TensorView<const T>& q, Index n_queries,
                         const SubselectOptions& options, Position* positions,
                         WorkerScratch<SubselectScratch>& scratch, ExecutorRef executor) {
  const Index n = std::min(n_queries, q.len()), heads = options.heads_per_set;
  const Index sets = q.heads() / heads, members = std::max<Index>(1, options.group / heads);
  scratch.reserve(executor.workers(), q.len(), q.dim());
  executor.run(q.batch() * sets, [&](Index task, int worker) {
    const Index b = task / sets, head = task % sets * heads;
    Position* first = positions + (b * q.heads() + head) * n;
    subselect_set(q, b, head, heads, options.query_choice, task % sets % members, members,
                  {first, static_cast<std::size_t>(n)}, scratch[worker]);
    for (Index other = 1; other < heads; ++other) std::copy_n(first, n, first + other * n);
  });
}

}  // namespace detail

// Positions in the chunk of the queries kept: [batch, q_heads, min(n_queries, q_len)], most
// dissimilar first. Throws std::invalid_argument for n_queries < 1, an empty chunk, or q_heads not
// a multiple of options.heads_per_set and options.group.
template <TensorLike Q>
Tensor<Position, 3> subselect_query_positions(const Q& q, Index n_queries,
                                              const SubselectOptions& options = {},
                                              ExecutorRef executor = SerialExecutor{}) {
  const auto view = view_of(q);  // [batch, q_heads, q_len, head_dim]
  detail::check_subselect(view, n_queries, options);
  Tensor<Position, 3> positions(view.batch(), view.heads(), std::min(n_queries, view.len()));
  WorkerScratch<detail::SubselectScratch> scratch;
  detail::subselect_positions(view, n_queries, options, positions.data(), scratch, executor);
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

}  // namespace quoka::inline QUOKA_ABI
