// The vector unit's 16-bit dot products. Where a Packet holds `lanes` floats, PairSums hold `lanes`
// 32-bit sums, and fma() adds two products of 16-bit integers to each of them: twice the arithmetic
// per instruction. The calls are those of simd.hpp, so that one tile of registers serves both.
#pragma once

#include <quoka/core/simd.hpp>

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace quoka::inline QUOKA_ABI {
namespace simd {

// Two 16-bit integers side by side: what the dot-product instructions multiply and add at once, and
// a 32-bit broadcast from memory is free.
struct Int16Pair {
  std::uint32_t bits;
};

QUOKA_INLINE Int16Pair pair_of(std::int16_t low, std::int16_t high) {
  return {static_cast<std::uint16_t>(low) |
          static_cast<std::uint32_t>(static_cast<std::uint16_t>(high)) << 16};
}

// A float in [-32768, 32767.5) to the nearest integer, ties to even; 0 for NaN, as the low half of
// what x86 makes of it.
QUOKA_INLINE std::int16_t round_to_int16(float x) {
  return x == x ? static_cast<std::int16_t>(std::nearbyint(x)) : std::int16_t{0};
}

// `lanes` pairs (low[i], high[i]), rounded, to packet-aligned memory.
QUOKA_INLINE void store_pairs(Int16Pair* p, const Packet& low, const Packet& high) {
#if defined(EIGEN_VECTORIZE_AVX512) && defined(__AVX512BW__)
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtps_epi32(high), 16);
  _mm512_store_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_cvtps_epi32(low), upper));
#elif defined(EIGEN_VECTORIZE_AVX2) && !defined(EIGEN_VECTORIZE_AVX512)
  const __m256i upper = _mm256_slli_epi32(_mm256_cvtps_epi32(high), 16);
  _mm256_store_si256(reinterpret_cast<__m256i*>(p),
                     _mm256_blend_epi16(_mm256_cvtps_epi32(low), upper, 0xaa));
#else
  alignas(64) float a[lanes], b[lanes];
  store(a, low), store(b, high);
  for (int i = 0; i < lanes; ++i) p[i] = pair_of(round_to_int16(a[i]), round_to_int16(b[i]));
#endif
}

// Sums of products of pairs, in 32-bit integers: `lanes` of them, exact as long as the last one
// fits, because what overflows before wraps around. In plain C++, for tests and for machines
// without the instructions; calls, not inlined: compilers would spend minutes on unrolled tiles of
// these.
struct PlainPairSums {
  std::uint32_t x[lanes];

  QUOKA_INLINE static PlainPairSums zero() { return {}; }
  QUOKA_INLINE static PlainPairSums broadcast(Int16Pair pair) {
    PlainPairSums all;
    for (std::uint32_t& x : all.x) x = pair.bits;
    return all;
  }
  QUOKA_INLINE static PlainPairSums load(const Int16Pair* p) {
    PlainPairSums pairs;
    for (int i = 0; i < lanes; ++i) pairs.x[i] = p[i].bits;
    return pairs;
  }
  QUOKA_INLINE Packet to_float() const {
    alignas(64) float wide[lanes];
    for (int i = 0; i < lanes; ++i) wide[i] = static_cast<float>(static_cast<std::int32_t>(x[i]));
    return simd::load(wide);
  }
};
[[gnu::noinline]] inline PlainPairSums fma(const PlainPairSums& a, const PlainPairSums& b,
                                           const PlainPairSums& sums) {
  const auto low = [](std::uint32_t bits) {
    return std::int32_t{static_cast<std::int16_t>(static_cast<std::uint16_t>(bits))};
  };
  PlainPairSums result;
  for (int i = 0; i < lanes; ++i)
    result.x[i] = sums.x[i] + static_cast<std::uint32_t>(low(a.x[i]) * low(b.x[i])) +
                  static_cast<std::uint32_t>(low(a.x[i] >> 16) * low(b.x[i] >> 16));
  return result;
}

// The ISA's own: one instruction for 2 * lanes products, where float has `lanes`. Without it, as two
// instructions, vpmaddwd and vpaddd, it is no faster than float. GCC 12 spills all sums of a tile
// around the intrinsics, hence the assembler.
#if defined(EIGEN_VECTORIZE_AVX512) && defined(__AVX512VNNI__)
inline constexpr bool has_pair_sums = true;
struct PairSums {
  __m512i x;
  QUOKA_INLINE static PairSums zero() { return {_mm512_setzero_si512()}; }
  QUOKA_INLINE static PairSums broadcast(Int16Pair pair) {
    return {_mm512_set1_epi32(static_cast<int>(pair.bits))};
  }
  QUOKA_INLINE static PairSums load(const Int16Pair* p) { return {_mm512_load_si512(p)}; }
  QUOKA_INLINE Packet to_float() const { return _mm512_cvtepi32_ps(x); }
};
QUOKA_INLINE PairSums fma(const PairSums& a, const PairSums& b, const PairSums& sums) {
#if defined(__clang__)
  return {_mm512_dpwssd_epi32(sums.x, a.x, b.x)};
#else
  __m512i x = sums.x;
  asm("vpdpwssd\t%2, %1, %0" : "+v"(x) : "v"(a.x), "v"(b.x));
  return {x};
#endif
}
#elif defined(EIGEN_VECTORIZE_AVX2) && defined(__AVXVNNI__)
inline constexpr bool has_pair_sums = true;
struct PairSums {
  __m256i x;
  QUOKA_INLINE static PairSums zero() { return {_mm256_setzero_si256()}; }
  QUOKA_INLINE static PairSums broadcast(Int16Pair pair) {
    return {_mm256_set1_epi32(static_cast<int>(pair.bits))};
  }
  QUOKA_INLINE static PairSums load(const Int16Pair* p) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p))};
  }
  QUOKA_INLINE Packet to_float() const { return _mm256_cvtepi32_ps(x); }
};
QUOKA_INLINE PairSums fma(const PairSums& a, const PairSums& b, const PairSums& sums) {
#if defined(__clang__)
  return {_mm256_dpwssd_avx_epi32(sums.x, a.x, b.x)};
#else
  __m256i x = sums.x;
  asm("%{vex%} vpdpwssd\t%2, %1, %0" : "+x"(x) : "x"(a.x), "x"(b.x));
  return {x};
#endif
}
#else
inline constexpr bool has_pair_sums = false;
using PairSums = PlainPairSums;
#endif

template <class P>
QUOKA_INLINE P broadcast(Int16Pair x) {
  return P::broadcast(x);
}
template <class P>
QUOKA_INLINE P load(const Int16Pair* p) {
  return P::load(p);
}

}  // namespace simd
}  // namespace quoka::inline QUOKA_ABI
QUOKA_PACKET_ARGUMENTS_END
