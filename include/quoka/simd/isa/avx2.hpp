// AVX2: 8 floats, 16 registers. FMA and F16C where the flags allow them.
#pragma once

#include <quoka/simd/isa/shared.hpp>

#include <immintrin.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using Packet = __m256;
inline constexpr int lanes = 8;
inline constexpr int registers = 16;

QUOKA_INLINE Packet broadcast_packet(float x) { return _mm256_set1_ps(x); }
QUOKA_INLINE Packet load_packet(const float* p) { return _mm256_load_ps(p); }
QUOKA_INLINE Packet load_unaligned(const float* p) { return _mm256_loadu_ps(p); }
QUOKA_INLINE void store(float* p, Packet x) { _mm256_store_ps(p, x); }
QUOKA_INLINE void store_unaligned(float* p, Packet x) { _mm256_storeu_ps(p, x); }

QUOKA_INLINE Packet add(Packet a, Packet b) { return _mm256_add_ps(a, b); }
QUOKA_INLINE Packet sub(Packet a, Packet b) { return _mm256_sub_ps(a, b); }
QUOKA_INLINE Packet mul(Packet a, Packet b) { return _mm256_mul_ps(a, b); }
QUOKA_INLINE Packet div(Packet a, Packet b) { return _mm256_div_ps(a, b); }
QUOKA_INLINE Packet fma(Packet a, Packet b, Packet c) {
#if QUOKA_ISA_FMA
  return _mm256_fmadd_ps(a, b, c);
#else
  return _mm256_add_ps(_mm256_mul_ps(a, b), c);
#endif
}
// The instruction returns its second operand where either is NaN: hence the order.
QUOKA_INLINE Packet max(Packet a, Packet b) { return _mm256_max_ps(b, a); }
QUOKA_INLINE Packet min(Packet a, Packet b) { return _mm256_min_ps(b, a); }
QUOKA_INLINE Packet select_less(Packet a, Packet b, Packet yes, Packet no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
QUOKA_INLINE Packet opaque(Packet x) {
  asm("" : "+x"(x));
  return x;
}
QUOKA_INLINE Packet power_of_rounded_bits(Packet shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
}

// --- masks ------------------------------------------------------------------------------------

inline constexpr bool has_lane_masks = true;
QUOKA_INLINE unsigned less(Packet a, Packet b) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
QUOKA_INLINE unsigned not_less(Packet a, Packet b) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ)));
}
// For each mask its lanes, the set ones first: a byte each. 2 KiB; pext would make them, but takes
// some hundred cycles on Zen 2.
struct CompressedLanes {
  alignas(8) std::uint8_t order[256][8] = {};
  constexpr CompressedLanes() {
    for (unsigned mask = 0; mask < 256; ++mask)
      for (unsigned lane = 0, at = 0; lane < 8; ++lane)
        if ((mask >> lane & 1u) != 0) order[mask][at++] = static_cast<std::uint8_t>(lane);
  }
};
inline constexpr CompressedLanes compressed_lanes;
QUOKA_INLINE __m256i lanes_of(unsigned mask) {
  const auto* const bytes = reinterpret_cast<const __m128i*>(compressed_lanes.order[mask]);
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes));
}
QUOKA_INLINE int store_compressed(float* p, unsigned mask, Packet x) {
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, lanes_of(mask)));
  return __builtin_popcount(mask);
}
template <int Lanes>
QUOKA_INLINE int store_compressed(std::int32_t* p, unsigned mask,
                                  std::int32_t first) requires(Lanes == lanes) {
  const __m256i x = _mm256_add_epi32(lanes_of(mask), _mm256_set1_epi32(first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  return __builtin_popcount(mask);
}

// --- half and bfloat16 ------------------------------------------------------------------------

// 8 elements of 16 bits, and 8 integers below 2^16 as such elements.
QUOKA_INLINE __m256i load_16_bits(const std::uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUOKA_INLINE void store_16_bits(std::uint16_t* p, __m256i x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

QUOKA_INLINE Packet load_half(const std::uint16_t* p) {
#if QUOKA_ISA_F16C
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  alignas(32) float wide[lanes];
  for (int i = 0; i < lanes; ++i) wide[i] = half_to_float(p[i]);
  return load_packet(wide);
#endif
}
QUOKA_INLINE void store_half(std::uint16_t* p, Packet x) {
#if QUOKA_ISA_F16C
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  alignas(32) float wide[lanes];
  store(wide, x);
  for (int i = 0; i < lanes; ++i) p[i] = float_to_half(wide[i]);
#endif
}
QUOKA_INLINE Packet load_bfloat16(const std::uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(load_16_bits(p), 16));
}
QUOKA_INLINE void store_bfloat16(std::uint16_t* p, Packet x) {
  const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  store_16_bits(p, _mm256_blendv_epi8(rounded, quiet, is_nan));
}

// --- 8 bits -----------------------------------------------------------------------------------

QUOKA_INLINE __m128i load_bytes(const void* p) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}
QUOKA_INLINE Packet load_int8(const std::int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(p)));
}
QUOKA_INLINE Packet load_uint8(const std::uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_bytes(p)));
}
// The steps of e4m3_to_float.
QUOKA_INLINE Packet load_e4m3(const std::uint8_t* p) {
  const __m256i code = _mm256_cvtepu8_epi32(load_bytes(p));
  const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(code, magnitude), 24);
  const __m256i normal =
      _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
  const __m256i denormal =
      _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f)));
  const __m256i is_denormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
  const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
  const __m256i bits = _mm256_blendv_epi8(normal, denormal, is_denormal);
  return _mm256_castsi256_ps(_mm256_or_si256(
      _mm256_or_si256(sign, bits), _mm256_and_si256(is_nan, _mm256_set1_epi32(0x7fc00000))));
}

// --- across lanes -----------------------------------------------------------------------------

QUOKA_INLINE float reduce_max(Packet x) {
  __m128 y = _mm_max_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
  y = _mm_max_ps(_mm_movehl_ps(y, y), y);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(y), y));
}
// Halves upon each other: lanes i and i + 4, then 2 and 1 apart.
QUOKA_INLINE float reduce_add(Packet x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

struct Square {
  Packet packet[lanes];
};

// Transposes the 4 x 4 blocks that lie in one half of four packets: pairs, then pairs of pairs.
QUOKA_INLINE void transpose_halves(Packet& p, Packet& q, Packet& r, Packet& s) {
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(p, q));
  const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(p, q));
  const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r, s));
  const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r, s));
  p = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
  q = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
  r = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
  s = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}

// In place. 24 shuffles: 4 x 4 blocks, then the 2 x 2 square of these blocks.
QUOKA_INLINE void transpose(Square& square) {
  Packet(&x)[lanes] = square.packet;
  transpose_halves(x[0], x[1], x[2], x[3]);
  transpose_halves(x[4], x[5], x[6], x[7]);
  unroll<4>([&](auto j) QUOKA_INLINE_LAMBDA {
    const Packet upper = x[j], lower = x[4 + j];
    x[j] = _mm256_permute2f128_ps(upper, lower, 0x20);
    x[4 + j] = _mm256_permute2f128_ps(upper, lower, 0x31);
  });
}

// Halves of two packets side by side, then pairs twice: 14 shuffles.
template <class Op>
QUOKA_INLINE Packet reduce_each(const Square& square, Op&& op) {
  Packet half[4];
  unroll<4>([&](auto i) QUOKA_INLINE_LAMBDA {
    const Packet a = square.packet[i], b = square.packet[i + 4];
    half[i] =
        op(Packet(_mm256_permute2f128_ps(a, b, 0x20)), Packet(_mm256_permute2f128_ps(a, b, 0x31)));
  });
  const auto pairs = [&](Packet a, Packet b) QUOKA_INLINE_LAMBDA {
    return op(Packet(_mm256_shuffle_ps(a, b, 0x88)), Packet(_mm256_shuffle_ps(a, b, 0xdd)));
  };
  return pairs(pairs(half[0], half[1]), pairs(half[2], half[3]));
}

// --- pairs of weights ------------------------------------------------------------------------

QUOKA_INLINE void store_weight_pairs(std::uint32_t* p, Packet first, Packet second) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
  _mm256_store_si256(reinterpret_cast<__m256i*>(p),
                     _mm256_blend_epi16(low, _mm256_castps_si256(second), 0xaa));
}
QUOKA_INLINE Packet first_weights(const std::uint32_t* p) {
  const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
QUOKA_INLINE Packet second_weights(const std::uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

// --- bytes and quads -------------------------------------------------------------------------

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
template <int Span>
QUOKA_INLINE Packet sums_and_differences(Packet x) {
  static_assert(Span == 4);
  const Packet other = _mm256_permute2f128_ps(x, x, 1);
  return fma(x, Packet(_mm256_setr_ps(1.0f, 1.0f, 1.0f, 1.0f, -1.0f, -1.0f, -1.0f, -1.0f)), other);
}

#if QUOKA_ISA_VNNI
struct QuadSums {
  static constexpr const char* instruction = "vpdpbusd";
  __m256i x;
  QUOKA_INLINE static QuadSums from(std::int32_t sum) { return {_mm256_set1_epi32(sum)}; }
  QUOKA_INLINE static QuadSums load(const Quad* p) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p))};
  }
  QUOKA_INLINE static QuadSums broadcast(Quad quad) {
    return from(static_cast<std::int32_t>(quad.bits));
  }
  QUOKA_INLINE Packet to_float() const { return _mm256_cvtepi32_ps(x); }
};
// GCC 12 spills all sums of a tile around the intrinsics, hence the assembler.
QUOKA_INLINE QuadSums fma(const QuadSums& a, const QuadSums& b, const QuadSums& sums) {
#if defined(__clang__)
  return {_mm256_dpbusd_avx_epi32(sums.x, b.x, a.x)};
#else
  QuadSums result = sums;
  asm("%{vex%} vpdpbusd\t%2, %1, %0" : "+x"(result.x) : "x"(b.x), "x"(a.x));
  return result;
#endif
}
#endif

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
