// One row of attention over two disjoint sets of keys, from its two parts (attention/merge.hpp).
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/kernels/softmax_state.hpp>

#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// a [dim] and its log-sum-exp become those of both. Differences of log-sum-exps first: a large one costs no accuracy.
// A part that saw nothing (-inf) changes nothing, a NaN on either side stays.
inline void merge_row(float* a, float& lse_a, const float* b, float lse_b, Index dim) {
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
  const auto [factor_a, factor_b] = state.merge(state_of(lse_b));
  const float scale_a = factor_a * state.inverse_sum(), scale_b = factor_b * state.inverse_sum();
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet weighted_a =
        simd::mul(simd::load_unaligned(a + c), simd::broadcast(scale_a));
    simd::store_unaligned(
        a + c, simd::fma(simd::load_unaligned(b + c), simd::broadcast(scale_b), weighted_a));
  }
  for (; c < dim; ++c) a[c] = simd::fma(b[c], scale_b, a[c] * scale_a);
  lse_a = top + lse_nat(state.max, state.sum);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
