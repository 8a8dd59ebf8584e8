// Partial results of rows over some of their keys, and their merge: split-KV.
//
// A row whose keys are cut into parts leaves the softmax state and the unnormalised sum of weighted values of each part
// here. They are merged in the order of the keys, and the result is written: for panels, decode and lists alike.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/kernels/softmax_state.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// sums = sums * own + other * factor, [dim] channels.
inline void add_weighted(float* sums, float own, const float* other, float factor, Index dim) {
  const simd::Packet owns = simd::broadcast(own), factors = simd::broadcast(factor);
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet added = simd::mul(simd::load_unaligned(other + c), factors);
    simd::store_unaligned(sums + c, simd::fma(simd::load_unaligned(sums + c), owns, added));
  }
  for (; c < dim; ++c) sums[c] = simd::fma(sums[c], own, other[c] * factor);
}

// A softmax state and a sum of values for each of some rows.
struct RowSums {
  RowSums() = default;
  RowSums(Arena& arena, Index rows, Index row_step)
      : states(arena.take<SoftmaxState<float>>(rows)),
        sums(arena.take<float>(rows * row_step)),
        step(row_step) {}

  float* row(Index i) const { return sums + i * step; }
  // Rows from `first` on.
  RowSums from(Index first) const {
    RowSums rest = *this;
    rest.states += first, rest.sums += first * step;
    return rest;
  }

  SoftmaxState<float>* states = nullptr;  // [rows]
  float* sums = nullptr;                  // [rows][v_dim]
  Index step = 0;                         // from one row to the next, in floats
};

// Merges partial results of `count` rows over other keys into those that they have.
inline void join(const RowSums& to, const RowSums& other, Index count, Index v_dim) {
  for (Index i = 0; i < count; ++i) {
    if (other.states[i].sum == 0.0f) continue;  // nothing
    const auto [own, factor] = to.states[i].merge(other.states[i]);
    add_weighted(to.row(i), own, other.row(i), factor, v_dim);
  }
}
inline void copy(const RowSums& from, Index count, Index v_dim, const RowSums& to) {
  std::copy_n(from.states, count, to.states);
  for (Index i = 0; i < count; ++i) std::copy_n(from.row(i), v_dim, to.row(i));
}

// The last step: sums, which are divided in place, become the call's output.
inline void write(const AttentionCall& call, const HeadQueries& rows, const RowSums& seen) {
  for (Index i = 0; i < rows.count; ++i) {
    const auto [q_head, query] = rows[i];
    const SoftmaxState<float>& state = seen.states[i];
    float* const sums = seen.row(i);
    const float share = state.inverse_sum();
    for (Index c = 0; c < call.v_dim; ++c) sums[c] *= share;
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
