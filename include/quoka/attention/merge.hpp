// Merging partial attention: results over disjoint key sets become the result over their union.
//
//   lse = log(exp(lse_a) + exp(lse_b));   out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
//
// For caches in shards, or a prefix shared by many sequences: call attention() on each part with a
// log-sum-exp output, then merge. With a window also give Past::first_position and q_offset.
// Associative up to rounding; a part that saw nothing (lse -inf, out 0) changes nothing. A sink
// logit belongs to one of the parts only.
#pragma once

#include <quoka/rows/rows.hpp>

#if QUOKA_DEFINES
#include <quoka/base/buffer.hpp>
#include <quoka/kernels/row_sums.hpp>
#include <quoka/rows/overlap.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// out_a and lse_a take the merged result. out_a, out_b [batch, q_heads, q_len, v_dim], of any
// formats, lse_a, lse_b [batch, q_heads, q_len]. Throws std::invalid_argument when shapes differ,
// and when out_a or lse_a shares memory with itself or with another of the four.
void merge(const OutputRows& out_a, TensorView<float, 3> lse_a, const Rows& out_b,
           TensorView<const float, 3> lse_b);

#if QUOKA_DEFINES

QUOKA_FUNC void merge(const OutputRows& out_a, TensorView<float, 3> lse_a, const Rows& out_b,
                      TensorView<const float, 3> lse_b) {
  detail::require_sizes("out_b", out_b.sizes(), out_a.sizes());
  detail::require_sizes("lse_a", lse_a.sizes(), {out_a.batch(), out_a.heads(), out_a.len()});
  detail::require_sizes("lse_b", lse_b.sizes(), {out_a.batch(), out_a.heads(), out_a.len()});
  if (out_a.empty()) return;
  const Rows merged = out_a;
  detail::require_rows_apart(merged, "out_a");
  detail::require_rows_apart(lse_a, "lse_a");
  detail::require_no_overlap(merged, lse_a, "lse_a shares memory with out_a");
  detail::require_no_overlap(merged, out_b, "out_b shares memory with out_a");
  detail::require_no_overlap(merged, lse_b, "lse_b shares memory with out_a");
  detail::require_no_overlap(lse_a, out_b, "out_b shares memory with lse_a");
  detail::require_no_overlap(lse_a, lse_b, "lse_b shares memory with lse_a");
  const Index dim = out_a.dim();
  Buffer<float> rows;
  float* const to = rows.reserve(2 * dim);
  float* const from = to + dim;
  for (Index b = 0; b < out_a.batch(); ++b) {
    for (Index head = 0; head < out_a.heads(); ++head) {
      for (Index i = 0; i < out_a.len(); ++i) {
        out_a.format().widen(out_a.row(b, head, i), out_a.shape(head), to);
        out_b.format().widen(out_b.row(b, head, i), out_b.shape(head), from);
        detail::merge_normalised(to, lse_a.at(b, head, i), from, lse_b.at(b, head, i), dim);
        out_a.format().narrow(to, out_a.shape(head), out_a.row(b, head, i));
      }
    }
  }
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
