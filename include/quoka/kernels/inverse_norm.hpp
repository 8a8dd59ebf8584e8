// 1 / |x| of a row of floats: the one place that says what a zero, huge, infinite or NaN vector
// counts as.
//
//   zero vector, or shorter than the least normal float   0     (its cosine with anything is 0)
//   infinite element                                      0     (0 * infinity makes its scores NaN)
//   NaN element                                           NaN
//
// The sum of squares is taken in float, and again in double if float could overflow or underflow.
// So every finite vector of ordinary length has a cosine. Dividing by max(|x|, 1e-6) instead, as
// some implementations do, would shrink the cosines of short vectors; this is invariant to scaling.
// dim multiply-adds.
#pragma once

#include <quoka/base/index.hpp>

#include <cmath>

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/simd.hpp>
#include <limits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC float sum_of_products(const float* a, const float* b, Index dim);

// sum[c] += row[c].
QUOKA_FUNC void add_row(const float* row, Index dim, float* sum);

// to[c] = x[c] * factor. Is none of to NaN or infinite?
QUOKA_FUNC bool scale_row(const float* x, Index dim, float factor, float* to);

// x [dim].
QUOKA_FUNC float inverse_norm_of_row(const float* x, Index dim);

// Whether no element of x [count] is NaN or infinite.
inline bool all_finite(const float* x, Index count) {
  bool finite = true;
  for (Index c = 0; c < count; ++c) finite = finite && std::isfinite(x[c]);
  return finite;
}

// The same of a row [dim]; `inverse` is its inverse norm, which answers at
// once for all but zero and non-finite rows.
inline bool is_finite_row(const float* x, Index dim, float inverse) {
  if (inverse > 0.0f) [[likely]]
    return true;
  return all_finite(x, dim);
}

#if QUOKA_DEFINES_KERNELS

QUOKA_FUNC float sum_of_products(const float* a, const float* b, Index dim) {
  simd::Packet acc = simd::zero();
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes)
    acc = simd::fma(simd::load_unaligned(a + c), simd::load_unaligned(b + c), acc);
  float sum = simd::reduce_add(acc);
  for (; c < dim; ++c) sum = simd::fma(a[c], b[c], sum);
  return sum;
}

QUOKA_FUNC void add_row(const float* row, Index dim, float* sum) {
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes)
    simd::store_unaligned(sum + c,
                          simd::add(simd::load_unaligned(sum + c), simd::load_unaligned(row + c)));
  for (; c < dim; ++c) sum[c] += row[c];
}

QUOKA_FUNC bool scale_row(const float* x, Index dim, float factor, float* to) {
  simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
  float tail = 0.0f;
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet scaled = simd::mul(simd::load_unaligned(x + c), simd::broadcast(factor));
    simd::store_unaligned(to + c, scaled);
    poison = simd::fma(scaled, simd::zero(), poison);
  }
  for (; c < dim; ++c) {
    to[c] = x[c] * factor;
    tail += to[c] * 0.0f;
  }
  return simd::reduce_add(poison) + tail == 0.0f;
}

inline float sum_of_squares(const float* x, Index dim) { return sum_of_products(x, x, dim); }

[[gnu::cold, gnu::noinline]] inline float inverse_norm_in_double(const float* x, Index dim) {
  double sum = 0.0;
  for (Index c = 0; c < dim; ++c) sum += static_cast<double>(x[c]) * static_cast<double>(x[c]);
  const double norm = std::sqrt(sum);
  if (norm < static_cast<double>(std::numeric_limits<float>::min())) return 0.0f;
  return static_cast<float>(1.0 / norm);
}

QUOKA_FUNC float inverse_norm_of_row(const float* x, Index dim) {
  const float sum = sum_of_squares(x, dim);
  if (sum > 1e-30f && sum < 1e30f) [[likely]]
    return 1.0f / std::sqrt(sum);
  return inverse_norm_in_double(x, dim);
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
