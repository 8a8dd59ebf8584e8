// Float's own errors over drawn numbers, by which tests judge: less than quoka::float_error() states for every input.
// Roundings of a drawn sum have no sign in common, unless its terms are equal:
//
//   products of a drawn query   partial sums of a sum over n channels grow like sqrt(n), so that their roundings
//                               add up to some .4 2^-24 |q| |k| in the mean of squares, whatever n is.
//                               Here: 3 2^-24 |q| |k|
//   sums over n keys            equal terms: while a sum lies below the next power of two, each addition rounds
//                               alike, by up to half of the last place. Half of the terms lie there, so the sum is
//                               off by n / 4 2^-24: in a million sums of up to 128 terms by n / 4 + 1 / 2 at most.
//                               Others: by sqrt(n) / 4 2^-24 in the mean of squares. Here: n / 4 + sqrt(n) / 2
//
// Source of such estimates: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci.
// Comput. 41, 2019. An input that is made for it may exceed them, up to quoka::float_error().
#pragma once

#include <quoka/kernels/error_bounds.hpp>
#include <quoka/kernels/kernels.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace quoka_test {

inline double drawn_in_turn(double n) { return n / 4.0 + std::sqrt(n) / 2.0; }

inline constexpr double drawn_logit_error = 3 * 0x1p-24;  // of scale |q| |k|, of lengths

// FloatError over drawn numbers, but `logit` times |q| |k|, of lengths. Never more than quoka::float_error() states: the
// library's bound is tested with it.
inline quoka::FloatError drawn_float_error(std::ptrdiff_t head_dim, std::ptrdiff_t keys) {
  const quoka::FloatError stated = quoka::float_error(head_dim, keys);
  const double value = 0x1p-24 * quoka::detail::float_value_roundings(keys, drawn_in_turn);
  return {std::min(drawn_logit_error, stated.logit), std::min(value, stated.value)};
}

// The relative error of a score: the sum, or mean, over `masses` masses of a row and a key, of softmaxes over `keys`
// keys. size: the largest scale |q| |k|, of lengths. score: that of a mean. A mass has the error of its logit and the
// mean error of the others'. Roundings: 3 for each argument of its two exponentials, which is at most ln(1 / p) for a
// mass p; 10 for the exponentials; the sum over a block's keys; that over rows, which add up in packets; 10 more
// products and sums.
inline double drawn_mass_error(std::ptrdiff_t keys, std::ptrdiff_t masses, double size,
                               double score) {
  const double n = static_cast<double>(keys) + 1.0;
  const auto packets =
      static_cast<double>(masses) / static_cast<double>(quoka::detail::kernel_sizes().lanes);
  const double arguments = std::log(n) + std::log(1.0 / std::min(score, 1.0));
  const double roundings = 3.0 * arguments + 10.0 + drawn_in_turn(std::min(n, 128.0)) +
                           drawn_in_turn(packets + 8.0) + 10.0;
  return std::expm1(2.0 * drawn_logit_error * size) + 0x1p-24 * roundings;
}

}  // namespace quoka_test
