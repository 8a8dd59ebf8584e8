// AVX-VNNI: sums of products of 16-bit pairs.
#pragma once

#include <quoka/simd/isa/dots.hpp>

#include <immintrin.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

struct VnniPairSums {
  __m256i x;
  QUOKA_INLINE static VnniPairSums zero() { return {_mm256_setzero_si256()}; }
  QUOKA_INLINE static VnniPairSums broadcast(Int16Pair pair) {
    return {_mm256_set1_epi32(static_cast<int>(pair.bits))};
  }
  QUOKA_INLINE static VnniPairSums load(const Int16Pair* p) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p))};
  }
  QUOKA_INLINE Packet to_float() const { return _mm256_cvtepi32_ps(x); }
};
// GCC 12 spills all sums of a tile around the intrinsics, hence the assembler.
QUOKA_INLINE VnniPairSums fma(const VnniPairSums& a, const VnniPairSums& b,
                              const VnniPairSums& sums) {
#if defined(__clang__)
  return {_mm256_dpwssd_avx_epi32(sums.x, a.x, b.x)};
#else
  __m256i x = sums.x;
  asm("%{vex%} vpdpwssd\t%2, %1, %0" : "+x"(x) : "x"(a.x), "x"(b.x));
  return {x};
#endif
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
