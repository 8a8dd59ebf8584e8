// The best keys by cosine, by way of the keys' sketch: the same Selection as from float scores, for
// a fraction of the work.
//
// A kept query q, as code * s with an error of length e, and a key of direction k = scale * code
// with an error of length `error` satisfy
//
//   q . k - s scale (code_q . code_k) = (q - s code_q) . k + s code_q . (k - scale code_k)
//
// and so differ by at most e + (|q| + e) * error, plus what rounding adds to either side. With Q
// the longest kept query and e the largest error among them,
//
//   bound[t] = e + (Q + e) error[t] + (head_dim + rows + 16) 2^-23 Q
//
// holds for the maximum over the queries, and for their mean (sketched_head.hpp). The keys fall into four sorts, by the
// n-th best sketched score and a level a little above it:
//
//   sure    sketch - bound above the level: kept, never looked at again
//   likely  the others among the n best by the sketch: scored in float; the least of these scores
//           (or the level) is a floor, which n keys reach and so does the n-th best
//   possible  the rest of those with sketch + bound at the floor or above: scored in float
//   out     all others
//
// The best of the likely and the possible ones fill what `sure` leaves. Should so many of them reach the level that a
// sure one might have to go, the sure ones are scored too, and the best of all are taken. Float
// scores come from the same kernel in the same order as without the sketch: bit for bit the same
// numbers decide. With a window, a score is its neighbours' maximum: none is sure, and top_k.hpp
// looks at the float scores of these two sorts, the others being lowest.
//
// Each float score is compared with its sketch: one beyond the bound is of a key that changed behind
// the sketch's back, and throws.
//
// 2 * kv_heads * rows * kv_len * head_dim 8-bit operations, and float scores of some 1.3 n keys;
// reads head_dim + 8 bytes per key.
#pragma once

#include <quoka/select/after_selection.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/views/selection.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Is the sketch the faster way on the ISA this is compiled for?
bool sketch_is_fast();

// Reused memory.
struct SketchedTopKState;

// The Selection that top_k makes of score_all_keys' scores. 0 < wanted < kv_len keys are selected; codes_fit() holds.
// inverse_norms [batch, kv_heads, kv_len] of the keys, or absent. after: what follows; null: nothing.
void sketched_top_k(const SketchedCall& call, const TensorView<const float, 3>& inverse_norms,
                    Index wanted, const TopKOptions& options, Selection& selection,
                    SketchedTopKState& state, AfterSelection* after = nullptr);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/sketch/sketched_top_k_impl.hpp>
#endif
