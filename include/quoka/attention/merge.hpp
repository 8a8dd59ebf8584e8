// Merging partial attention: results over disjoint key sets become the result over their union.
//
//   lse = log(exp(lse_a) + exp(lse_b));   out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
//
// For caches in shards, or a prefix shared by many sequences: call attention() on each part with a
// log-sum-exp output (and, where a window is used, with Past::first_position and q_offset), then
// merge. Associative up to rounding; a part that saw nothing (lse -inf, out 0)
// changes nothing. A sink logit belongs to one of the parts only.
#pragma once

#include <quoka/rows/rows.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// out_a and lse_a take the merged result. out_a, out_b [batch, q_heads, q_len, v_dim], of any
// formats, lse_a, lse_b [batch, q_heads, q_len]. Throws std::invalid_argument when shapes differ, and
// when a and b share memory.
void merge(const OutputRows& out_a, TensorView<float, 3> lse_a, const Rows& out_b,
           TensorView<const float, 3> lse_b);

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/attention/merge_impl.hpp>
#endif
