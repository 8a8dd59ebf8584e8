// 1 / |x| of a row: the one place that says what a zero, huge, infinite or NaN vector counts as.
//
//   zero vector, or shorter than the least normal float   0     (its cosine with anything is 0)
//   infinite element                                      0     (0 * infinity makes its scores NaN)
//   NaN element                                           NaN
//
// The sum of squares is taken in float, and again in double where float could overflow or
// underflow, so every finite vector of ordinary length has a cosine. Dividing by max(|x|, 1e-6)
// instead, as some implementations do, would shrink the cosines of short vectors; this is invariant
// to scaling. dim multiply-adds.
#pragma once

#include <quoka/core/simd.hpp>

#include <cmath>

namespace quoka::inline QUOKA_ABI {
namespace detail {

template <class T>
QUOKA_INLINE float sum_of_products(const T* a, const float* b, Index dim) {
  simd::Packet acc = simd::zero();
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes)
    acc = simd::fma(simd::load_as_float(a + c), simd::load_unaligned(b + c), acc);
  float sum = simd::reduce_add(acc);
  for (; c < dim; ++c) sum = simd::fma(static_cast<float>(a[c]), b[c], sum);
  return sum;
}

template <class T>
QUOKA_INLINE float sum_of_squares(const T* x, Index dim) {
  simd::Packet acc = simd::zero();
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet v = simd::load_as_float(x + c);
    acc = simd::fma(v, v, acc);
  }
  float sum = simd::reduce_add(acc);
  for (; c < dim; ++c) sum = simd::fma(static_cast<float>(x[c]), static_cast<float>(x[c]), sum);
  return sum;
}

template <class T>
[[gnu::cold, gnu::noinline]] float inverse_norm_in_double(const T* x, Index dim) {
  double sum = 0.0;
  for (Index c = 0; c < dim; ++c) sum += static_cast<double>(x[c]) * static_cast<double>(x[c]);
  const double norm = std::sqrt(sum);
  if (norm < static_cast<double>(std::numeric_limits<float>::min())) return 0.0f;
  return static_cast<float>(1.0 / norm);
}

}  // namespace detail

// x [dim], contiguous.
template <Storage T>
QUOKA_INLINE float inverse_norm(const T* x, Index dim) {
  const float sum = detail::sum_of_squares(x, dim);
  if (sum > 1e-30f && sum < 1e30f) [[likely]]
    return 1.0f / std::sqrt(sum);
  return detail::inverse_norm_in_double(x, dim);
}

// Whether no element of x [dim] is NaN or infinite; `inverse` is its inverse_norm, which answers at
// once for all but zero and non-finite rows.
template <Storage T>
QUOKA_INLINE bool is_finite_row(const T* x, Index dim, float inverse) {
  if (inverse > 0.0f) [[likely]]
    return true;
  bool finite = true;
  for (Index c = 0; c < dim; ++c) finite = finite && std::isfinite(static_cast<float>(x[c]));
  return finite;
}

}  // namespace quoka::inline QUOKA_ABI
