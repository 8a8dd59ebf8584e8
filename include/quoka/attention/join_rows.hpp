// Rows of attention over parts of their keys, and the result over all of them.
//
// A row that few others share its keys with is cut over the keys, not over the rows: each part leaves its softmax state
// and its sum of weighted values here, unnormalised. Joining them in the order of the keys ends the row. Panels of rows
// join in the same way, a row in each lane (attend_panels.hpp).
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/kernels/softmax_state.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// One state and one row of sums per query row, of one part.
struct PartialRows {
  SoftmaxState<float>* state;  // [rows]
  float* out;                  // [rows, v_dim]
};

// Results of all parts of a call's heads.
struct Partials {
  Partials() = default;
  Partials(Arena& arena, const AttentionCall& call, Index part_count)
      : parts(part_count),
        rows(call.rows()),
        v_dim(call.v_dim),
        states(arena.take<SoftmaxState<float>>(call.heads() * parts * rows)),
        out(arena.take<float>(call.heads() * parts * rows * v_dim)) {}
  PartialRows part(Index head, Index part) const {
    const Index first = (head * parts + part) * rows;
    return {states + first, out + first * v_dim};
  }

  Index parts = 0, rows = 0, v_dim = 0;
  SoftmaxState<float>* states = nullptr;  // [heads, parts, rows]
  float* out = nullptr;                   // [heads, parts, rows, v_dim]
};

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

// Merges what a row has seen of other keys into its state. sums and other_sums [dim].
inline void join_row(SoftmaxState<float>& state, float* sums, const SoftmaxState<float>& other,
                     const float* other_sums, Index dim) {
  const auto [own, factor] = state.merge(other);
  add_weighted(sums, own, other_sums, factor, dim);
}

// The last step: row `row` of a KV head, from its state and its sums [v_dim], which are divided in place, becomes the
// call's output.
inline void write_row(const AttentionCall& call, Index b, Index kv_head, Index row,
                      const SoftmaxState<float>& state, float* sums) {
  const auto [q_head, query] = call.query_row(kv_head, row);
  const float share = state.inverse_sum();
  for (Index c = 0; c < call.v_dim; ++c) sums[c] *= share;
  call.out.format().narrow(sums, call.out.shape(q_head), call.out.row(b, q_head, query));
  if (!call.lse.absent()) call.lse.at(b, q_head, query) = lse_nat(state.max, state.sum);
}

// All parts of head b * kv_heads + kv_head become the call's output.
inline void join_partials(const AttentionCall& call, const Partials& partials, Index head) {
  const PartialRows all = partials.part(head, 0);
  for (Index i = 1; i < partials.parts; ++i) {
    const PartialRows next = partials.part(head, i);
    for (Index row = 0; row < partials.rows; ++row)
      join_row(all.state[row], all.out + row * call.v_dim, next.state[row],
               next.out + row * call.v_dim, call.v_dim);
  }
  for (Index row = 0; row < partials.rows; ++row)
    write_row(call, head / call.kv_heads, head % call.kv_heads, row, all.state[row],
              all.out + row * call.v_dim);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
