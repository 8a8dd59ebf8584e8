// Merging partial attention: results over disjoint key sets become the result over their union.
//
//   lse = log(exp(lse_a) + exp(lse_b));   out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
//
// For caches in shards, or a prefix shared by many sequences: call attention() on each part with a
// log-sum-exp output, then merge. Associative up to rounding; a part that saw nothing (lse -inf)
// changes nothing. A sink logit belongs to one of the parts only.
#pragma once

#include <quoka/core/softmax_state.hpp>
#include <quoka/core/view.hpp>

namespace quoka::inline QUOKA_ABI {

// out_a and lse_a take the merged result. out_a, out_b [batch, q_heads, q_len, v_dim], lse_a, lse_b
// [batch, q_heads, q_len]. Throws std::invalid_argument when shapes differ.
template <TensorLike A>
void merge(A& out_a, TensorView<float, 3> lse_a, TensorView<const storage_t<A>> out_b,
           TensorView<const float, 3> lse_b) {
  using T = storage_t<A>;
  const TensorView<T> a = out_a;
  detail::require_sizes("b", out_b.sizes(), a.sizes());
  detail::require_sizes("lse_a", lse_a.sizes(), {a.batch(), a.heads(), a.len()});
  detail::require_sizes("lse_b", lse_b.sizes(), {a.batch(), a.heads(), a.len()});
  for (Index b = 0; b < a.batch(); ++b) {
    for (Index head = 0; head < a.heads(); ++head) {
      for (Index i = 0; i < a.len(); ++i) {
        const float lse = lse_a.at(b, head, i), other = lse_b.at(b, head, i);
        // Differences first: a large lse costs no accuracy. A NaN on either side stays.
        const float top = lse < other || std::isnan(other) ? other : lse;
        if (top == -simd::infinity) continue;
        // A finished part is a state whose sum is 1 at the maximum lse.
        const auto state_of = [top](float part) {
          return SoftmaxState<float>{(part - top) * log2_e, part == -simd::infinity ? 0.0f : 1.0f};
        };
        SoftmaxState<float> state = state_of(lse);
        const auto [factor_a, factor_b] = state.merge(state_of(other));
        const float scale_a = factor_a * state.inverse_sum(),
                    scale_b = factor_b * state.inverse_sum();
        T* to = a.row(b, head, i);
        const T* from = out_b.row(b, head, i);
        for (Index c = 0; c < a.dim(); ++c)
          to[c] = static_cast<T>(static_cast<float>(to[c]) * scale_a +
                                 static_cast<float>(from[c]) * scale_b);
        lse_a.at(b, head, i) = top + lse_nat(state.max, state.sum);
      }
    }
  }
}

}  // namespace quoka::inline QUOKA_ABI
