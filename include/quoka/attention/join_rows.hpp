// Partial results of rows over some of their keys, and their merge: split-KV.
//
// A row whose keys are cut into parts leaves the softmax state and the unnormalised sum of weighted values of each part
// here. They are merged in the order of the keys, and the result is written: for panels, decode and lists alike.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/kernels/row_sums.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The last step: sums, which are divided in place, become the call's output.
inline void write(const AttentionCall& call, const HeadQueries& rows, const RowSums& seen) {
  for (Index i = 0; i < rows.count; ++i) {
    const auto [q_head, query] = rows[i];
    const SoftmaxState<float>& state = seen.states[i];
    float* const sums = seen.row(i);
    normalise(state, call.v_dim, sums);
    call.out.format().narrow(sums, call.out.shape(q_head), call.out.row(rows.b, q_head, query));
    if (!call.lse.absent()) call.lse.at(rows.b, q_head, query) = lse_nat(state.max, state.sum);
  }
}

// Partial results of all rows of a call's heads, part by part of their keys.
struct Partials {
  Partials() = default;
  Partials(Arena& arena, const AttentionCall& call, Index part_count)
      : parts(part_count), rows(call.rows()), all(arena, call.heads() * parts * rows, call.v_dim) {}

  RowSums part(Index head, Index part) const { return all.from((head * parts + part) * rows); }

  Index parts = 1, rows = 0;
  RowSums all;  // [heads, parts, rows]; of one part there are none
};

// All parts of rows [first, first + count) of a head become the call's output.
inline void join_parts(const AttentionCall& call, const Partials& partials, Index head, Index first,
                       Index count) {
  const HeadQueries rows = call.rows_of(head, first, count);
  const RowSums seen = partials.part(head, 0).from(first);
  for (Index i = 1; i < partials.parts; ++i)
    join(seen, partials.part(head, i).from(first), rows.count, call.v_dim);
  write(call, rows, seen);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
