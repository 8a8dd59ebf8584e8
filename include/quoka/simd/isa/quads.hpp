// Four 8-bit integers at a time: packets to bytes and quads, and sums of their products by the
// calls of simd.hpp, so that one register tile serves floats and quads. There are `lanes` sums of
// 32 bits, of a signed quad that is broadcast and unsigned ones side by side. QuadSums uses an
// instruction that multiplies four times as much as one in float. PlainQuadSums is the same in
// plain C++, for tests and for machines without the instruction.
//
//   round_to(x, at)             integers of x in the low bytes: floats whose bits hold at + x,
//                               rounded
//   store_bytes(p, x)           the low bytes of a packet
//   store_quads(p, x)           those of four packets side by side, one quad for each lane
//   sums_and_differences<n>(x)  lane i + lane i + n, and in i + n their difference, for n of 4 and
//                               8 below `lanes`
#pragma once

#include <quoka/simd/isa/dots.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// Four integers of 8 bits.
struct Quad {
  std::uint32_t bits;
};

// x + at to the nearest integer, ties to even, in the low bits of a float, for |x + at| < 2^22: of
// a negative one as of two's complement.
template <class P>
QUOKA_INLINE P round_to(const P& x, float at = 0.0f) {
  return opaque(add(x, broadcast<P>(12582912.0f + at)));
}

#if QUOKA_ISA_AVX512
QUOKA_INLINE void store_bytes(std::uint8_t* p, Packet x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_castps_si512(x)));
}
QUOKA_INLINE void store_quads(Quad* p, const Packet (&x)[4]) {
  const auto bits = [](Packet y) QUOKA_INLINE_LAMBDA { return _mm512_castps_si512(y); };
  const __m512i low =
      _mm512_mask_blend_epi8(0x2222222222222222u, bits(x[0]), _mm512_slli_epi32(bits(x[1]), 8));
  const __m512i high = _mm512_mask_blend_epi8(
      0x8888888888888888u, _mm512_slli_epi32(bits(x[2]), 16), _mm512_slli_epi32(bits(x[3]), 24));
  _mm512_store_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
}
#elif QUOKA_ISA_AVX2
QUOKA_INLINE void store_bytes(std::uint8_t* p, Packet x) {
  const __m256i order =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_castps_si256(x), order);
  const std::int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
  __builtin_memcpy(p, &low, 4), __builtin_memcpy(p + 4, &high, 4);
}
QUOKA_INLINE void store_quads(Quad* p, const Packet (&x)[4]) {
  const __m256i byte = _mm256_set1_epi32(0xff), upper = _mm256_set1_epi32(0xff00);
  const auto bits = [](Packet y) QUOKA_INLINE_LAMBDA { return _mm256_castps_si256(y); };
  const __m256i low = _mm256_or_si256(_mm256_and_si256(bits(x[0]), byte),
                                      _mm256_and_si256(_mm256_slli_epi32(bits(x[1]), 8), upper));
  const __m256i high = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(bits(x[2]), byte), 16),
                                       _mm256_slli_epi32(bits(x[3]), 24));
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(low, high));
}
#elif QUOKA_ISA_NEON
QUOKA_INLINE void store_bytes(std::uint8_t* p, Packet x) {
  const uint16x4_t words = vmovn_u32(vreinterpretq_u32_f32(x));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  __builtin_memcpy(p, &four, 4);
}
QUOKA_INLINE void store_quads(Quad* p, const Packet (&x)[4]) {
  uint32x4_t quads = vreinterpretq_u32_f32(x[0]);  // each insertion replaces the bits above
  quads = vsliq_n_u32(quads, vreinterpretq_u32_f32(x[1]), 8);
  quads = vsliq_n_u32(quads, vreinterpretq_u32_f32(x[2]), 16);
  quads = vsliq_n_u32(quads, vreinterpretq_u32_f32(x[3]), 24);
  vst1q_u32(&p->bits, quads);
}
#else
QUOKA_INLINE void store_bytes(std::uint8_t* p, const Packet& x) {
  alignas(64) float each[lanes];
  store(each, x);
  for (int i = 0; i < lanes; ++i) p[i] = static_cast<std::uint8_t>(bits_of(each[i]));
}
QUOKA_INLINE void store_quads(Quad* p, const Packet (&x)[4]) {
  alignas(64) float each[4][lanes];
  for (int byte = 0; byte < 4; ++byte) store(each[byte], x[byte]);
  for (int i = 0; i < lanes; ++i) {
    p[i].bits = 0;
    for (int byte = 0; byte < 4; ++byte) p[i].bits |= (bits_of(each[byte][i]) & 0xffu) << 8 * byte;
  }
}
#endif

#if QUOKA_ISA_AVX512
template <int Span>
QUOKA_INLINE Packet sums_and_differences(Packet x) {
  static_assert(Span == 8 || Span == 4);
  const Packet other = _mm512_shuffle_f32x4(x, x, Span == 8 ? 0x4e : 0xb1);
  const __m512i sign = _mm512_maskz_set1_epi32(Span == 8 ? 0xff00 : 0xf0f0, 1 << 31);
  return _mm512_fmadd_ps(
      x, _mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_set1_epi32(0x3f800000))), other);
}
#elif QUOKA_ISA_AVX2
template <int Span>
QUOKA_INLINE Packet sums_and_differences(Packet x) {
  static_assert(Span == 4);
  const Packet other = _mm256_permute2f128_ps(x, x, 1);
  return fma(x, Packet(_mm256_setr_ps(1.0f, 1.0f, 1.0f, 1.0f, -1.0f, -1.0f, -1.0f, -1.0f)), other);
}
#else
template <int Span>
Packet sums_and_differences(Packet x);  // of no packet
#endif

#if QUOKA_ISA_VNNI
inline constexpr bool has_quad_sums = true;
#if QUOKA_ISA_AVX512
#define QUOKA_QUADS __m512i
#else
#define QUOKA_QUADS __m256i
#endif
struct NativeQuadSums {
  static constexpr const char* instruction = "vpdpbusd";
  QUOKA_QUADS x;
#if QUOKA_ISA_AVX512
  QUOKA_INLINE static NativeQuadSums from(std::int32_t sum) { return {_mm512_set1_epi32(sum)}; }
  QUOKA_INLINE static NativeQuadSums load(const Quad* p) { return {_mm512_load_si512(p)}; }
  QUOKA_INLINE Packet to_float() const { return _mm512_cvtepi32_ps(x); }
#else
  QUOKA_INLINE static NativeQuadSums from(std::int32_t sum) { return {_mm256_set1_epi32(sum)}; }
  QUOKA_INLINE static NativeQuadSums load(const Quad* p) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p))};
  }
  QUOKA_INLINE Packet to_float() const { return _mm256_cvtepi32_ps(x); }
#endif
  QUOKA_INLINE static NativeQuadSums broadcast(Quad quad) {
    return from(static_cast<std::int32_t>(quad.bits));
  }
};
#undef QUOKA_QUADS
// GCC 12 spills all sums of a tile around the intrinsics, hence the assembler.
QUOKA_INLINE NativeQuadSums fma(const NativeQuadSums& a, const NativeQuadSums& b,
                                const NativeQuadSums& sums) {
#if defined(__clang__) && QUOKA_ISA_AVX512
  return {_mm512_dpbusd_epi32(sums.x, b.x, a.x)};
#elif defined(__clang__)
  return {_mm256_dpbusd_avx_epi32(sums.x, b.x, a.x)};
#elif QUOKA_ISA_AVX512
  NativeQuadSums result = sums;
  asm("vpdpbusd\t%2, %1, %0" : "+v"(result.x) : "v"(b.x), "v"(a.x));
  return result;
#else
  NativeQuadSums result = sums;
  asm("%{vex%} vpdpbusd\t%2, %1, %0" : "+x"(result.x) : "x"(b.x), "x"(a.x));
  return result;
#endif
}
#elif QUOKA_ISA_I8MM
inline constexpr bool has_quad_sums = true;
struct NativeQuadSums {
  static constexpr const char* instruction = "usdot";
  int32x4_t x;
  QUOKA_INLINE static NativeQuadSums from(std::int32_t sum) { return {vdupq_n_s32(sum)}; }
  QUOKA_INLINE static NativeQuadSums load(const Quad* p) {
    return {vreinterpretq_s32_u32(vld1q_u32(&p->bits))};
  }
  QUOKA_INLINE static NativeQuadSums broadcast(Quad quad) {
    return from(static_cast<std::int32_t>(quad.bits));
  }
  QUOKA_INLINE Packet to_float() const { return vcvtq_f32_s32(x); }
};
QUOKA_INLINE NativeQuadSums fma(const NativeQuadSums& a, const NativeQuadSums& b,
                                const NativeQuadSums& sums) {
  return {vusdotq_s32(sums.x, vreinterpretq_u8_s32(b.x), vreinterpretq_s8_s32(a.x))};
}
#else
inline constexpr bool has_quad_sums = false;
struct NativeQuadSums;
#endif

// Calls, not inlined: compilers would spend minutes on unrolled tiles of these.
struct PlainQuadSums {
  static constexpr const char* instruction = "none";
  std::uint32_t x[lanes];

  // The same in every lane: where sums begin.
  QUOKA_INLINE static PlainQuadSums from(std::int32_t sum) {
    PlainQuadSums all;
    for (std::uint32_t& x : all.x) x = static_cast<std::uint32_t>(sum);
    return all;
  }
  QUOKA_INLINE static PlainQuadSums broadcast(Quad quad) {
    PlainQuadSums all;
    for (std::uint32_t& x : all.x) x = quad.bits;
    return all;
  }
  QUOKA_INLINE static PlainQuadSums load(const Quad* p) {
    PlainQuadSums quads;
    for (int i = 0; i < lanes; ++i) quads.x[i] = p[i].bits;
    return quads;
  }
  QUOKA_INLINE Packet to_float() const {
    alignas(64) float each[lanes];
    for (int i = 0; i < lanes; ++i) each[i] = static_cast<float>(static_cast<std::int32_t>(x[i]));
    return simd::load(each);
  }
};
// a signed, b unsigned.
[[gnu::noinline]] inline PlainQuadSums fma(const PlainQuadSums& a, const PlainQuadSums& b,
                                           const PlainQuadSums& sums) {
  PlainQuadSums result;
  for (int i = 0; i < lanes; ++i) {
    std::int32_t sum = 0;
    for (int bit = 0; bit < 32; bit += 8)
      sum += std::int32_t{static_cast<std::int8_t>(static_cast<std::uint8_t>(a.x[i] >> bit))} *
             std::int32_t{static_cast<std::uint8_t>(b.x[i] >> bit)};
    result.x[i] = sums.x[i] + static_cast<std::uint32_t>(sum);
  }
  return result;
}

using QuadSums = std::conditional_t<has_quad_sums, NativeQuadSums, PlainQuadSums>;

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
