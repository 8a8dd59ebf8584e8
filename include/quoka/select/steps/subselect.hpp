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

#include <quoka/views/float_rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/options.hpp>
#include <quoka/views/rows.hpp>

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
  FloatRow row;

  void reserve(const Format* format, Index dim, Index q_len) {
    mean.reserve(dim);
    inverse.reserve(q_len);
    cosines.reserve(q_len);
    order.reserve(q_len);
    row.reserve(*format, dim);
  }
  Index bytes() const { return bytes_of(mean, inverse, cosines, order, row); }
};

// Throws std::invalid_argument for n_queries < 1, an empty chunk, one of more than max_keys, or q_heads not a multiple of
// options.group.
void check_subselect(const Rows& q, Index n_queries, const SubselectOptions& options);

// Of query head task = b * q_heads + q_head alone.
void subselect_head(const Rows& q, Index n_queries, const SubselectOptions& options,
                    Position* positions, Index task, SubselectScratch& scratch);

// q [batch, q_heads, q_len, head_dim] to positions [batch, q_heads, min(n_queries, q_len)].
void subselect_positions(const Rows& q, Index n_queries, const SubselectOptions& options,
                         Position* positions, WorkerScratch<SubselectScratch>& scratch,
                         ExecutorRef executor);

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/steps/subselect_impl.hpp>
#endif
