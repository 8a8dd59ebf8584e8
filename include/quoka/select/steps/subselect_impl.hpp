// Definitions of subselect.hpp.
#pragma once

#include <quoka/select/steps/subselect.hpp>
#include <quoka/packing/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>

#include <algorithm>
#include <numeric>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline void add_row(const float* row, Index dim, float* sum) {
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes)
    simd::store_unaligned(sum + c,
                          simd::add(simd::load_unaligned(sum + c), simd::load_unaligned(row + c)));
  for (; c < dim; ++c) sum[c] += row[c];
}

// s.cosines[i] += cosine of query i with the head's mean query; infinity for a query that is not
// finite.
inline void add_cosines(const Rows& q, Index b, Index head, SubselectScratch& s) {
  const Index dim = q.dim();
  float *mean = s.mean.data(), *inverse = s.inverse.data(), *cosines = s.cosines.data();
  std::fill_n(mean, dim, 0.0f);
  for (Index i = 0; i < q.len(); ++i) {
    const float* row = s.row.read(q, b, head, i);
    inverse[i] = inverse_norm_of_row(row, dim);
    if (is_finite_row(row, dim, inverse[i]))
      add_row(row, dim, mean);
    else
      cosines[i] = simd::infinity;
  }
  const float unit = inverse_norm_of_row(mean, dim);
  const float factor = is_finite_row(mean, dim, unit) ? unit : 0.0f;  // the sum may have overflowed
  for (Index c = 0; c < dim; ++c) mean[c] = factor == 0.0f ? 0.0f : mean[c] * factor;
  for (Index i = 0; i < q.len(); ++i)
    if (cosines[i] != simd::infinity)
      cosines[i] += sum_of_products(s.row.read(q, b, head, i), mean, dim) * inverse[i];
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
inline void subselect_set(const Rows& q, Index b, Index first_head, Index heads, QueryChoice choice,
                          Index member, Index members, std::span<Position> kept,
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

QUOKA_FUNC void check_subselect(const Rows& q, Index n_queries, const SubselectOptions& options) {
  require_at_least("q_len", q.len(), 1);
  require_keys("q_len", q.len());
  require_at_least("head_dim", q.dim(), 1);
  require_at_least("n_queries", n_queries, 1);
  require_multiple("q_heads", q.heads(), "heads_per_set", options.heads_per_set);
  require_multiple("q_heads", q.heads(), "group", options.group);
}

QUOKA_FUNC void subselect_set(const Rows& q, Index n_queries, const SubselectOptions& options,
                              Position* positions, Index set, SubselectScratch& scratch) {
  const Index n = std::min(n_queries, q.len()), heads = options.heads_per_set;
  const Index sets = q.heads() / heads, members = std::max<Index>(1, options.group / heads);
  const Index b = set / sets, head = set % sets * heads;
  Position* first = positions + (b * q.heads() + head) * n;
  subselect_set(q, b, head, heads, options.query_choice, set % sets % members, members,
                {first, static_cast<std::size_t>(n)}, scratch);
  for (Index other = 1; other < heads; ++other) std::copy_n(first, n, first + other * n);
}

QUOKA_FUNC void subselect_positions(const Rows& q, Index n_queries, const SubselectOptions& options,
                                    Position* positions, WorkerScratch<SubselectScratch>& scratch,
                                    ExecutorRef executor) {
  scratch.reserve(executor.workers(), &q.format(), q.dim(), q.len());
  executor.run(subselect_sets(q, options), [&](Index set, int worker) {
    subselect_set(q, n_queries, options, positions, set, scratch[worker]);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
