// The queries that score (QuoKA, Algorithm 1, first two stages): sub-selected from the chunk, then
// aggregated to those of each KV head.
//
//   mean[h]   = 1/q_len * sum over i of q[h][i]                     raw queries, per query head
//   cos[h][i] = q[h][i] . mean[h] / (|q[h][i]| |mean[h]|)
//   kept[h]   = the n_queries lowest, ordered by (cosine, position)
//   q_bar[kv_head][m] = 1/group * sum over the group's heads h of kept[h][m] / |kept[h][m]|
//
// q_len <= n_queries keeps every query in order: decode drops nothing. Slot m of every head is
// averaged, whatever token it holds. The average is not normalised again, so heads that disagree
// shrink the vector and its vote. By linearity a key's cosine with q_bar is the mean of its cosines
// with the heads, at 1/group of the scoring cost. About 5 * q_heads * q_len * head_dim FLOPs and
// two reads of the chunk's queries, and 4 * q_heads * n_queries * head_dim.
//
// Beyond the paper: a query with a NaN or an infinity is left out of the mean, ranks last and
// counts as zero, so it affects its own row only.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/selector.hpp>

#include <algorithm>

#if QUOKA_DEFINES
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/kernels.hpp>

#include <numeric>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- sub-selection ------------------------------------------------------------------------------

// Scratch of one worker.
struct SubselectScratch {
  SubselectScratch(Arena& arena, const Rows& q)
      : row(arena, q.dim()),
        mean(arena.take<float>(q.dim())),
        inverse(arena.take<float>(q.len())),
        cosines(arena.take<float>(q.len())),
        order(arena.take<Position>(q.len())) {}

  RowReader row;
  float* mean;               // [head_dim]
  float *inverse, *cosines;  // [q_len]
  Position* order;           // [q_len]
};

// For query head task = b * q_heads + q_head alone.
void subselect_head(const Rows& q, Index n_queries, Position* positions, Index task,
                    SubselectScratch& scratch);

// ---- pre-aggregation ----------------------------------------------------------------------------

// Queries, and where they are averaged to.
struct PreAggregation {
  Rows q;                     // [batch, q_heads, q_len, head_dim]
  const Position* positions;  // [batch, q_heads, n] of the queries; null: all q_len = n
  Index n;                    // queries of each head
  Index kv_heads;
  float* q_bar;  // [batch, kv_heads, n, head_dim]
};

// KV head task = b * kv_heads + kv_head alone, the slots [begin, end) of [0, n).
void pre_aggregate_head(const PreAggregation& queries, Index task, Index begin, Index end,
                        RowReader& reader);

// ---- both, of each KV head ----------------------------------------------------------------------

// The first phases of each KV head: its queries to q_bar.
class QueryStages {
 public:
  // Memory for the call in `call`, for each worker in `workers`.
  QueryStages(const SelectorInput& input, Index n_queries, Arenas& call, Arenas& workers,
              ExecutorRef executor)
      : input_(input),
        workers_(workers),
        n_(std::min(n_queries, input.q.len())),
        parts_(HeadPlan(input.k.batch() * input.k.heads(), executor).workers_per_head() == 1
                   ? 1
                   : std::min<Index>(n_, 4)) {
    const Rows &q = input.q, &k = input.k;
    const auto of_call = [&](Arena& arena) {
      positions_ = arena.take<Position>(q.batch() * q.heads() * n_);
      q_bar_ = arena.take<float>(k.batch() * k.heads() * n_ * k.dim());
    };
    call.reserve(1, of_call);
    Arena arena = call[0];
    of_call(arena);
    workers.reserve(executor.workers(), [&](Arena& worker) { SubselectScratch(worker, q); });
  }

  // Rows of each KV head.
  Index rows() const { return n_; }
  const float* q_bar() const { return q_bar_; }  // [batch, kv_heads, rows, head_dim]

  void operator()(const HeadLoops& on) const {
    const bool some = n_ < input_.q.len();  // a token, or a chunk of few, keeps all in order
    if (some)
      on.each(input_.group(), [&](Index task, Index member, int worker) {
        Arena arena = workers_[worker];
        SubselectScratch scratch(arena, input_.q);
        subselect_head(input_.q, n_, positions_, task * input_.group() + member, scratch);
      });
    on.each(parts_, [&](Index task, Index part, int worker) {
      Arena arena = workers_[worker];
      RowReader reader(arena, input_.q.dim());
      pre_aggregate_head({input_.q, some ? positions_ : nullptr, n_, input_.k.heads(), q_bar_},
                         task, part * n_ / parts_, (part + 1) * n_ / parts_, reader);
    });
  }

 private:
  const SelectorInput& input_;
  Arenas& workers_;
  Position* positions_;  // [batch, q_heads, n_queries]
  float* q_bar_;
  Index n_, parts_;  // of a head: queries that are kept, and tasks
};

#if QUOKA_DEFINES

// s.cosines[i] = cosine of query i with the head's mean query; infinity for a query that is not
// finite.
inline void take_cosines(const Rows& q, Index b, Index head, SubselectScratch& s) {
  const Index dim = q.dim();
  float *const mean = s.mean, *const inverse = s.inverse, *const cosines = s.cosines;
  std::fill_n(mean, dim, 0.0f);
  for (Index i = 0; i < q.len(); ++i) {
    const float* row = s.row.read(q, b, head, i);
    inverse[i] = inverse_norm_of_row(row, dim);
    const bool finite = is_finite_row(row, dim, inverse[i]);
    if (finite) add_row(row, dim, mean);
    cosines[i] = finite ? 0.0f : infinity;
  }
  const float unit = inverse_norm_of_row(mean, dim);
  const float factor = is_finite_row(mean, dim, unit) ? unit : 0.0f;  // the sum may have overflowed
  for (Index c = 0; c < dim; ++c) mean[c] = factor == 0.0f ? 0.0f : mean[c] * factor;
  for (Index i = 0; i < q.len(); ++i)
    if (cosines[i] != infinity)
      cosines[i] = sum_of_products(s.row.read(q, b, head, i), mean, dim) * inverse[i];
}

QUOKA_FUNC void subselect_head(const Rows& q, Index n_queries, Position* positions, Index task,
                               SubselectScratch& s) {
  const Index n = std::min(n_queries, q.len());
  Position* const kept = positions + task * n;
  if (n == q.len()) return std::iota(kept, kept + n, Position{0});
  take_cosines(q, task / q.heads(), task % q.heads(), s);
  std::iota(s.order, s.order + q.len(), Position{0});
  std::partial_sort(s.order, s.order + n, s.order + q.len(), [&](Position x, Position y) {
    return s.cosines[x] < s.cosines[y] || (s.cosines[x] == s.cosines[y] && x < y);
  });
  std::copy_n(s.order, n, kept);
}

QUOKA_FUNC void pre_aggregate_head(const PreAggregation& queries, Index task, Index begin,
                                   Index end, RowReader& reader) {
  const Rows& q = queries.q;
  const Index n = queries.n, kv_heads = queries.kv_heads;
  const Index group = q.heads() / kv_heads, dim = q.dim(), b = task / kv_heads;
  const float share = 1.0f / static_cast<float>(group);
  float* const rows = queries.q_bar + task * n * dim;
  std::fill_n(rows + begin * dim, (end - begin) * dim, 0.0f);
  for (Index r = 0; r < group; ++r) {
    const Index head = task % kv_heads * group + r;
    for (Index m = begin; m < end; ++m) {
      const Index at =
          queries.positions != nullptr ? queries.positions[(b * q.heads() + head) * n + m] : m;
      const float* const row = reader.read(q, b, head, at);
      const float inverse = inverse_norm_of_row(row, dim);
      if (!is_finite_row(row, dim, inverse)) continue;
      const float factor = inverse * share;
      for (Index c = 0; c < dim; ++c) rows[m * dim + c] += row[c] * factor;
    }
  }
}

#endif  // QUOKA_DEFINES

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
