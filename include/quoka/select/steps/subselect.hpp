// Query sub-selection (QuoKA, Algorithm 1, first stage): the few queries least like the mean query.
//
//   mean[h]   = 1/q_len * sum over i of q[h][i]                     raw queries, per query head
//   cos[h][i] = q[h][i] . mean[h] / (|q[h][i]| |mean[h]|)
//   keep the n_queries lowest, ordered by (cosine, position)
//
// q_len <= n_queries keeps every query in order: decode drops nothing. About 5 * q_heads * q_len *
// head_dim FLOPs and two reads of the chunk's queries. Beyond the paper: QueryChoice::mixed; and a
// query with a NaN or an infinity is left out of the mean and ranks last, so that it spoils its own
// row only.
//
// QueryChoice::mixed keeps the last ceil(n / 4) tokens, spaces n - ceil(n / 4) - floor(n / 4) = c
// over the rest, head r of a group of g at floor((m g + r) rest / (c g)) for m < c, so that the
// group as a whole looks at every part of the chunk, and adds the floor(n / 4) most dissimilar of
// what is left.
#pragma once

#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/options.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

struct SubselectOptions {
  QueryChoice query_choice = QueryChoice::dissimilar;
  Index group = 1;  // neighbouring query heads whose evenly spaced tokens differ; mixed alone
};

namespace detail {

// Scratch of one worker.
struct SubselectScratch {
  Buffer<float> mean;      // [head_dim]
  Buffer<float> inverse;   // [q_len]
  Buffer<float> cosines;   // [q_len]
  Buffer<Position> order;  // [q_len]
  RowReader row;

  void reserve(const Format* format, Index dim, Index q_len) {
    mean.reserve(dim);
    inverse.reserve(q_len);
    cosines.reserve(q_len);
    order.reserve(q_len);
    row.reserve(*format, dim);
  }
  Index bytes() const { return bytes_of(mean, inverse, cosines, order, row); }
};

// Throws std::invalid_argument for n_queries < 1, an empty chunk, one of more than max_keys, or q_heads not a multiple
// of options.group.
void check_subselect(const Rows& q, Index n_queries, const SubselectOptions& options);

// For query head task = b * q_heads + q_head alone.
void subselect_head(const Rows& q, Index n_queries, const SubselectOptions& options,
                    Position* positions, Index task, SubselectScratch& scratch);

// q [batch, q_heads, q_len, head_dim] to positions [batch, q_heads, min(n_queries, q_len)].
void subselect_positions(const Rows& q, Index n_queries, const SubselectOptions& options,
                         Position* positions, WorkerScratch<SubselectScratch>& scratch,
                         ExecutorRef executor);

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>

#include <algorithm>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// s.cosines[i] = cosine of query i with the head's mean query; infinity for a query that is not
// finite.
inline void take_cosines(const Rows& q, Index b, Index head, SubselectScratch& s) {
  const Index dim = q.dim();
  float *mean = s.mean.data(), *inverse = s.inverse.data(), *cosines = s.cosines.data();
  std::fill_n(mean, dim, 0.0f);
  for (Index i = 0; i < q.len(); ++i) {
    const float* row = s.row.read(q, b, head, i);
    inverse[i] = inverse_norm_of_row(row, dim);
    const bool finite = is_finite_row(row, dim, inverse[i]);
    if (finite) add_row(row, dim, mean);
    cosines[i] = finite ? 0.0f : simd::infinity;
  }
  const float unit = inverse_norm_of_row(mean, dim);
  const float factor = is_finite_row(mean, dim, unit) ? unit : 0.0f;  // the sum may have overflowed
  for (Index c = 0; c < dim; ++c) mean[c] = factor == 0.0f ? 0.0f : mean[c] * factor;
  for (Index i = 0; i < q.len(); ++i)
    if (cosines[i] != simd::infinity)
      cosines[i] = sum_of_products(s.row.read(q, b, head, i), mean, dim) * inverse[i];
}

QUOKA_FUNC void check_subselect(const Rows& q, Index n_queries, const SubselectOptions& options) {
  require_at_least("q_len", q.len(), 1);
  require_keys("q_len", q.len());
  require_at_least("head_dim", q.dim(), 1);
  require_at_least("n_queries", n_queries, 1);
  require_multiple("q_heads", q.heads(), "group", options.group);
}

QUOKA_FUNC void subselect_head(const Rows& q, Index n_queries, const SubselectOptions& options,
                               Position* positions, Index task, SubselectScratch& s) {
  const Index len = q.len(), n = std::min(n_queries, len);
  Position *const dissimilar_ones = positions + task * n, *const kept_end = dissimilar_ones + n;
  if (n == len) return std::iota(dissimilar_ones, kept_end, Position{0});
  const bool mixed = options.query_choice == QueryChoice::mixed;
  const Index dissimilar = mixed ? n / 4 : n, last = mixed ? ceil_div(n, 4) : 0,
              spaced = n - dissimilar - last, rest = len - last;
  Position *const spaced_ones = dissimilar_ones + dissimilar, *const last_ones = kept_end - last;
  const Index group = options.group, member = task % q.heads() % group;
  for (Index m = 0; m < spaced; ++m)
    spaced_ones[m] = static_cast<Position>((m * group + member) * rest / (spaced * group));
  std::iota(last_ones, kept_end, static_cast<Position>(rest));
  if (dissimilar == 0) return;

  take_cosines(q, task / q.heads(), task % q.heads(), s);
  const float* const cosines = s.cosines.data();
  Position *const order = s.order.data(), *end = order;
  const Position* taken = spaced_ones;
  for (Index i = 0; i < rest; ++i) {
    if (taken != last_ones && *taken == i)
      ++taken;
    else
      *end++ = static_cast<Position>(i);
  }
  std::partial_sort(order, order + dissimilar, end, [&](Position x, Position y) {
    return cosines[x] < cosines[y] || (cosines[x] == cosines[y] && x < y);
  });
  std::copy_n(order, dissimilar, dissimilar_ones);
}

QUOKA_FUNC void subselect_positions(const Rows& q, Index n_queries, const SubselectOptions& options,
                                    Position* positions, WorkerScratch<SubselectScratch>& scratch,
                                    ExecutorRef executor) {
  scratch.reserve(executor.workers(), &q.format(), q.dim(), q.len());
  executor.run(q.batch() * q.heads(), [&](Index task, int worker) {
    subselect_head(q, n_queries, options, positions, task, scratch[worker]);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
