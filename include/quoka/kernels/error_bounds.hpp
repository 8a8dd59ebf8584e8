// How far float, bfloat16 and 8-bit integers may be off, for every input: what tests and callers
// compare with.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/base/version.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The relative error of an exponential whose weight is rounded to 8 bits (simd::exp_short).
inline constexpr double short_exponential_error = static_cast<double>(7.7e-5f);

// Channels are padded to whole slabs of 16: quads, and packets of any ISA.
constexpr Index int8_channels(Index dim) { return round_up(dim, Index{tuning::slab_channels}); }
// Slabs that are rotated together, out of `slabs`.
constexpr int slabs_together(Index slabs) {
  return slabs >= 8 ? 8 : slabs >= 4 ? 4 : slabs >= 2 ? 2 : 1;
}
// Channels that one of a row's may come to lie in.
constexpr Index rotated_together(Index padded) {
  return slabs_together(padded / tuning::slab_channels) * (tuning::slab_channels / 4);
}

// By how many 2^-24 float's `value` may be off, see FloatError. in_turn(n): by how many a sum is
// off after n roundings in turn, each of 2^-24 of the sum: by n at most.
template <class InTurn>
double float_value_roundings(Index keys, InTurn&& in_turn) {
  const double n = static_cast<double>(keys) + 1.0;  // a sink is one more
  const double joined = n / 54.0 + 2.0;              // blocks of 96 keys, parts of 128
  return 4.5 + 3.0 * std::max(1.0, std::log(n)) + 2.0 * in_turn(std::min(n, 128.0) + joined) +
         1.75 * in_turn(joined);
}

}  // namespace detail

// Bounds on float's own error, for every input whose logits and outputs are finite. keys: those
// that a row sees, and those that a mask hides from it between them: sums join block by block,
// however few keys of a block the row sees.
//
//   |logit' - logit|  <=  logit * scale * sum over channels of |q| |k|, 7e-7 of the soft-cap, and
//                         2^-24 (|logit| + 3 |biases|) where there are some
//   |out' - out|      <=  (2 tanh(D / 2) + value) * the largest |v| of the channel in sight,
//                         D the largest error of a logit that the row sees
//   |lse' - lse|      <=  D + value + 2^-24 |lse|
//
// Weights that are off by factors of exp(+-D) move a mean of numbers up to |v| by 2 tanh(D / 2) |v|
// at most: the worst are two values, v and -v. n operations in turn are off by n 2^-24 (Higham,
// Accuracy and Stability of Numerical Algorithms, 3.1). `logit` counts the scale's and one for each
// channel. `value` counts, in 2^-24,
//
//   2.5           an exponential: simd::exp_max_error
//   3 ln keys     its argument x: 2 |x| (exp_error_per_x) and 1 |x| for the difference to the
//                 maximum; a softmax's mean of x^2 is at most the square of ln keys
//   2 (128 + b)   the sums of weights and of weighted values: over up to 128 keys, then over b
//                 blocks and parts
//   1.75 b        a maximum that rises: 2.5 for the exponential, 1 for the product. At most half of
//                 that: keys before and behind the rise share the weight
//   2             the division by the sum
//
// With products of bfloat16 up to keys * products terms add up in turn, in place of 128, and their
// reference adds 17 to 3 ln keys. All these are worst cases: sums of equal terms are off by a
// quarter of that, logits and sums of other terms by about its square root.
struct FloatError {
  double logit, value;
};
inline FloatError float_error(Index head_dim, Index keys) {
  const auto in_turn = [](double n) { return n; };
  return {0x1p-24 * (static_cast<double>(head_dim) + 1.0),
          0x1p-24 * detail::float_value_roundings(keys, in_turn)};
}

// Bounds on the error of rounding to bfloat16, beside float's own, for every input whose outputs
// are finite:
//
//   |logit' - logit|  <=  logit * scale * sum over channels of |q| |k|
//   |out' - out|      <=  (2 tanh(D / 2) + value) * the largest |v| of the channel in sight,
//                         D the largest error of a logit that the row sees
//
// and 2^-117 times as many as there are channels, or keys, since denormals are zeros.
//
// They follow from a number rounded to 8 bits being off by 2^-8 of it, one split in two by 2^-16.
struct Bfloat16Error {
  double logit, value;
};

// With 1, 2 or 3 products; cache_is_bfloat16: k and v are exact as they are.
constexpr Bfloat16Error bfloat16_error(int products, bool cache_is_bfloat16) {
  const double cache = products == 3 ? 0x1p-16 : cache_is_bfloat16 ? 0.0 : 0x1p-8;
  const double other = products == 1 ? 0x1p-8 : 0x1p-16;
  const double dropped = products == 3 ? 0x1p-16 : 0.0;
  // Rounded weights have a sum of their own: their error counts twice.
  const double weights = products == 1 ? 2 * (other + detail::short_exponential_error) : other;
  return {cache + other + cache * other + dropped, cache + weights + cache * weights + dropped};
}

// Bounds on the error of products in 8-bit integers, beside float's own, for every input whose
// outputs are finite:
//
//   |logit' - logit|  <=  logit * scale * |q| |k|, of the lengths of query and key
//   |out' - out|      <=  (2 tanh(D / 2) + value) * the largest |v| in sight, of any channel,
//                         D the largest error of a logit that the row sees
//
// where that |v| is above 2^-80. A code is off by at most half a scale, a scale is at most 1/127 of
// the row's length. n channels of a value, 4 to 32, are rotated together, so all of their codes add
// to a channel. They are off by 1/254 of the largest rotated one, which is up to sqrt(n) |v|. A
// weight is off by half of one of 255 steps, or by its own size if that is less. So all weights
// together are off by at most 1. Errors of many channels and keys have any sign: typical ones are
// far smaller (bench/README.md).
struct Int8Error {
  double logit, value;
};
inline Int8Error int8_error(Index head_dim, Index v_dim) {
  const double row_error = std::sqrt(static_cast<double>(detail::int8_channels(head_dim))) / 254.0;
  const auto together = static_cast<double>(detail::rotated_together(detail::int8_channels(v_dim)));
  const double codes = together / 254.0;
  return {2.0 * row_error + row_error * row_error + 1e-5,
          codes + std::min(together * tuning::most_block_keys / 510.0, 1.0 + codes) + 2e-4};
}

}  // namespace QUOKA_ABI
}  // namespace quoka
