// Softmax mass by the keys' sketch: what softmax_scores() makes of rows and keys in float, from
// products of their 8-bit codes. For Domain::softmax.
//
//   y[m][t] = unit[m] scale[t] length[t] (code_q[m] . code_k[t])      the sketched logit
//   mass[t] = share * sum over m of exp(y[m][t]) / sum over t' of exp(y[m][t'])
//
// or the maximum over the rows m in place of their sum. Each row has a unit of its own, the largest
// channel / 127, or more where the ISA adds products in 16 bits (simd/code_dots.hpp). No logit is
// computed in float: this is no refinement of near candidates, and the Selection is another one than in
// float, of nearly the same mass.
//
// What is guaranteed. A row q = unit code_q + d_q with |d_q| = e and a key k = length (scale code_k + d_k)
// with |d_k| <= error differ from what stands for them by
//
//   |q.k - y| <= eps = e length + (|q| + e) length error + (2 head_dim + 32) 2^-24 |q| length
//
// the last term for rounding on either side. eps is that of the worst row, with the largest length
// and the largest length * error of all keys. So weights are off by factors within exp(+-eps), sums of a
// row's weights as well, and both by weight_error for what they are rounded to:
//
//   float's mass[t] exp(-a) <= mass[t] <= float's mass[t] exp(a),   a = 2 eps + weight_error
//
// (of masses above 1e-15; a smaller one stays below it). Let S be the best keys in float and S' as many by
// the sketch, M float's mass of a set and M' the sketch's. Then
//
//   M(S') >= exp(-a) M'(S') >= exp(-a) M'(S) >= exp(-2a) M(S)
//
// A head of which eps exceeds most_logit_error, or one with finite keys or rows that codes cannot stand
// for, is done in float. That is the worst case, all errors in one direction. Errors of single channels
// have any sign: on recorded and generated data logits are off by 1/17 to 1/30 of eps (root mean square),
// and S' holds M(S) but for 0.002 points on average and 0.03 in the worst head.
//
// Where FirstLook says so, in two looks. Each of some rows finds the largest of its shares; the keys of the
// largest ones are the candidates; and mass is that of all
// rows among these, as if there were no other keys. Of the others it is 0. The bound above is then that of
// the best of the candidates, and nothing is promised of other keys. Their codes are put together, of 16 keys
// from up to 16 blocks.
//
// 2 * rows * keys * dim 8-bit operations and rows * keys exponentials; reads dim + 12 bytes per key; holds weights of 2 bytes per row and key until the sums are known,
// tuning::mass_weight_bytes of them at a time.
#pragma once

#include <quoka/base/function_ref.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/views/tensor_view.hpp>

#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Is mass by the sketch the faster way on the ISA this is compiled for? With some 64 rows of a KV head, or with
// those of every query. By AVX2, which has no kernel for several rows, 64 take 0.6 of the time in float, 512 take
// 1.4 times as long.
bool sketched_mass_is_fast(bool every_query = false);

// The first look of a cascade: which rows of each KV head, and how many candidates they choose, fewer than
// there are keys. 0: all rows look at all keys.
struct FirstLook {
  std::span<const Index> rows = {};
  Index candidates = 0;
  Index most_candidates = 0;  // as the cache grows: memory for so many is taken
};

// Adds stages to chains.
using StagesRef = FunctionRef<void(Chains& chains)>;

// Reused memory.
struct SketchedMassState;

// scores [batch, kv_heads, kv_len], side by side, of the call's rows times `logit_scale`: their mean share, or their
// largest. A row with a NaN or an infinity is left out; a key with one has no weight and ends with NaN. codes_fit()
// holds. Of keys in a cache that others keep, of each head the one that has most is looked up, too, and one that is not
// what was sketched throws std::invalid_argument. after: adds what follows the scores; null: nothing.
void sketched_softmax_scores(const SketchedCall& call, float logit_scale, const FirstLook& look,
                             TensorView<float, 3> scores, SketchedMassState& state,
                             const StagesRef* after = nullptr);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/sketch/sketched_mass_impl.hpp>
#endif
