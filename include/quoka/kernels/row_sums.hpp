// Query rows one by one: the softmax state and the sum of weighted values of each, and how those
// over some keys are joined with those over others.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/softmax_state.hpp>

#include <algorithm>

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/simd.hpp>
#include <cmath>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

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
  float* sums = nullptr;                  // [rows][v_dim], unnormalised
  Index step = 0;                         // from one row to the next, in floats
};

// The first `count` rows have seen nothing.
inline void clear_rows(const RowSums& rows, Index count) {
  std::fill_n(rows.states, count, empty_row);
  std::fill_n(rows.sums, count * rows.step, 0.0f);
}
// Before anything else a row sees its sink, a logit without a value.
QUOKA_FUNC void add_sink(float sink, SoftmaxState<float>& state);

// Merges partial results of `count` rows over other keys into those that they have.
QUOKA_FUNC void join(const RowSums& to, const RowSums& other, Index count, Index v_dim);
inline void copy(const RowSums& from, Index count, Index v_dim, const RowSums& to) {
  std::copy_n(from.states, count, to.states);
  for (Index i = 0; i < count; ++i) std::copy_n(from.row(i), v_dim, to.row(i));
}

// Last: sums of a row's values are divided by the sum of its weights.
QUOKA_FUNC void normalise(const SoftmaxState<float>& state, Index v_dim, float* sums);

// Normalised rows: a [dim] and its log-sum-exp become those of both. Differences of log-sum-exps
// first: a large one costs no accuracy. A part that saw nothing (-inf) changes nothing, a NaN on
// either side stays.
QUOKA_FUNC void merge_normalised(float* a, float& lse_a, const float* b, float lse_b, Index dim);

#if QUOKA_DEFINES_KERNELS

QUOKA_FUNC void add_sink(float sink, SoftmaxState<float>& state) { state.update(sink); }

// sums = sums * own + other * factor, [dim] channels.
inline void add_weighted(float* sums, float own, const float* other, float factor, Index dim) {
  simd::for_each_lanes(dim, [&](auto lanes) QUOKA_INLINE_LAMBDA {
    const auto added = simd::mul(lanes.load(other), lanes.broadcast(factor));
    lanes.store(sums, simd::fma(lanes.load(sums), lanes.broadcast(own), added));
  });
}

QUOKA_FUNC void join(const RowSums& to, const RowSums& other, Index count, Index v_dim) {
  for (Index i = 0; i < count; ++i) {
    if (other.states[i].sum == 0.0f) continue;  // nothing
    const auto [own, factor] = to.states[i].merge(other.states[i]);
    add_weighted(to.row(i), own, other.row(i), factor, v_dim);
  }
}

QUOKA_FUNC void normalise(const SoftmaxState<float>& state, Index v_dim, float* sums) {
  const float share = state.inverse_sum();
  simd::for_each_lanes(v_dim, [&](auto lanes) QUOKA_INLINE_LAMBDA {
    lanes.store(sums, simd::mul(lanes.load(sums), lanes.broadcast(share)));
  });
}

QUOKA_FUNC void merge_normalised(float* a, float& lse_a, const float* b, float lse_b, Index dim) {
  const float top = lse_a < lse_b || std::isnan(lse_b) ? lse_b : lse_a;
  if (top == -simd::infinity) {  // nothing, or NaN: of a weight of 0 and a value that is not finite
    for (Index c = 0; c < dim; ++c) a[c] += b[c];
    return;
  }
  // A finished part is a state whose sum is 1 at the maximum lse.
  const auto state_of = [top](float part) {
    return SoftmaxState<float>{part - top, part == -simd::infinity ? 0.0f : 1.0f};
  };
  SoftmaxState<float> state = state_of(lse_a);
  const auto [own, factor] = state.merge(state_of(lse_b));
  add_weighted(a, own * state.inverse_sum(), b, factor * state.inverse_sum(), dim);
  lse_a = top + lse_nat(state.max, state.sum);
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
