// AVX-512 (F, DQ, BW, VL): 16 floats, 32 registers, masks.
#pragma once

#include <quoka/simd/isa/floats.hpp>

#include <immintrin.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using Packet = __m512;
inline constexpr int lanes = 16;
inline constexpr int registers = 32;

QUOKA_INLINE Packet broadcast_packet(float x) { return _mm512_set1_ps(x); }
QUOKA_INLINE Packet load_packet(const float* p) { return _mm512_load_ps(p); }
QUOKA_INLINE Packet load_unaligned(const float* p) { return _mm512_loadu_ps(p); }
QUOKA_INLINE void store(float* p, Packet x) { _mm512_store_ps(p, x); }
QUOKA_INLINE void store_unaligned(float* p, Packet x) { _mm512_storeu_ps(p, x); }

QUOKA_INLINE Packet add(Packet a, Packet b) { return _mm512_add_ps(a, b); }
QUOKA_INLINE Packet sub(Packet a, Packet b) { return _mm512_sub_ps(a, b); }
QUOKA_INLINE Packet mul(Packet a, Packet b) { return _mm512_mul_ps(a, b); }
QUOKA_INLINE Packet div(Packet a, Packet b) { return _mm512_div_ps(a, b); }
QUOKA_INLINE Packet fma(Packet a, Packet b, Packet c) { return _mm512_fmadd_ps(a, b, c); }
// The instruction returns its second operand where either is NaN: hence the order.
QUOKA_INLINE Packet max(Packet a, Packet b) { return _mm512_max_ps(b, a); }
QUOKA_INLINE Packet min(Packet a, Packet b) { return _mm512_min_ps(b, a); }
QUOKA_INLINE Packet sqrt(Packet x) { return _mm512_sqrt_ps(x); }
QUOKA_INLINE Packet select_less(Packet a, Packet b, Packet yes, Packet no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
QUOKA_INLINE Packet opaque(Packet x) {
  asm("" : "+v"(x));
  return x;
}
QUOKA_INLINE Packet power_of_rounded_bits(Packet shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
}

// --- masks ------------------------------------------------------------------------------------

inline constexpr bool has_lane_masks = true;
QUOKA_INLINE unsigned less(Packet a, Packet b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
QUOKA_INLINE unsigned not_less(Packet a, Packet b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
// Into a register and then to memory: compressing straight into memory is slow on Zen 4.
QUOKA_INLINE int store_compressed(float* p, unsigned mask, Packet x) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), x));
  return __builtin_popcount(mask);
}
template <int Lanes>
QUOKA_INLINE int store_compressed(std::int32_t* p, unsigned mask,
                                  std::int32_t first) requires(Lanes == lanes) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i x = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x));
  return __builtin_popcount(mask);
}
template <int Lanes>
QUOKA_INLINE int store_compressed(std::int32_t* p, unsigned mask,
                                  const std::int32_t* from) requires(Lanes == lanes) {
  const __m512i x = _mm512_loadu_si512(from);
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x));
  return __builtin_popcount(mask);
}

// --- half and bfloat16 ------------------------------------------------------------------------

QUOKA_INLINE Packet load_half(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QUOKA_INLINE void store_half(std::uint16_t* p, Packet x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
QUOKA_INLINE Packet load_bfloat16(const std::uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
// In integers: the instruction of AVX512_BF16 turns denormals into zero.
QUOKA_INLINE void store_bfloat16(std::uint16_t* p, Packet x) {
  const __m512i bits = _mm512_castps_si512(x), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __m512i both = _mm512_mask_or_epi32(rounded, _mm512_fpclass_ps_mask(x, 0x81), upper,
                                            _mm512_set1_epi32(0x40));  // 0x81: quiet or signalling
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(both));
}

// --- 8 bits -----------------------------------------------------------------------------------

QUOKA_INLINE __m128i load_bytes(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
QUOKA_INLINE Packet load_int8(const std::int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p)));
}
QUOKA_INLINE Packet load_uint8(const std::uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(p)));
}
// As half, which has one bit more of exponent: 2^-8 times the number. The code for 480 becomes NaN.
QUOKA_INLINE Packet load_e4m3(const std::uint8_t* p) {
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 7);
  const __m256i magnitude = _mm256_and_si256(shifted, _mm256_set1_epi16(0x3f80));
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi16(0x7fff), shifted);
  const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, magnitude),
                                       _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

// --- across lanes -----------------------------------------------------------------------------

QUOKA_INLINE __m256 lower_half(Packet x) { return _mm512_castps512_ps256(x); }
QUOKA_INLINE __m256 upper_half(Packet x) { return _mm512_extractf32x8_ps(x, 1); }

QUOKA_INLINE float reduce_max(Packet x) {
  const __m256 eight = _mm256_max_ps(upper_half(x), lower_half(x));
  __m128 y = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  y = _mm_max_ps(_mm_movehl_ps(y, y), y);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(y), y));
}
// Halves upon each other: lanes i and i + 8, then 4, 2 and 1 apart.
QUOKA_INLINE float reduce_add(Packet x) {
  const __m256 eight = _mm256_add_ps(lower_half(x), upper_half(x));
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

struct Square {
  Packet packet[lanes];
};

// Transposes the 4 x 4 blocks that lie in one quarter of four packets: pairs, then pairs of pairs.
QUOKA_INLINE void transpose_quarters(Packet (&x)[4]) {
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
  x[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  x[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  x[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  x[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

// In place. 64 shuffles: 4 x 4 blocks, then the 4 x 4 square of these blocks.
QUOKA_INLINE void transpose(Square& square) {
  Packet x[4][4];
  unroll<4>([&](auto i) QUOKA_INLINE_LAMBDA {
    unroll<4>([&](auto j) QUOKA_INLINE_LAMBDA { x[i][j] = square.packet[4 * i + j]; });
    transpose_quarters(x[i]);
  });
  // x[i][j]: column 4 q + j of rows 4 i ... 4 i + 3 in quarter q.
  unroll<4>([&](auto j) QUOKA_INLINE_LAMBDA {
    const Packet a = _mm512_shuffle_f32x4(x[0][j], x[1][j], 0x88);
    const Packet b = _mm512_shuffle_f32x4(x[0][j], x[1][j], 0xdd);
    const Packet c = _mm512_shuffle_f32x4(x[2][j], x[3][j], 0x88);
    const Packet d = _mm512_shuffle_f32x4(x[2][j], x[3][j], 0xdd);
    square.packet[j] = _mm512_shuffle_f32x4(a, c, 0x88);
    square.packet[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
    square.packet[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
    square.packet[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
  });
}

// Halves of two packets side by side, quarters of four, then pairs twice: 30 shuffles.
template <class Op>
QUOKA_INLINE Packet reduce_each(const Square& square, Op&& op) {
  Packet half[8], quarter[4], pair[2];
  unroll<8>([&](auto i) QUOKA_INLINE_LAMBDA {
    const Packet a = square.packet[i % 4 + i / 4 * 8], b = square.packet[i % 4 + i / 4 * 8 + 4];
    half[i] =
        op(Packet(_mm512_shuffle_f32x4(a, b, 0x44)), Packet(_mm512_shuffle_f32x4(a, b, 0xee)));
  });
  unroll<4>([&](auto i) QUOKA_INLINE_LAMBDA {
    quarter[i] = op(Packet(_mm512_shuffle_f32x4(half[i], half[i + 4], 0x88)),
                    Packet(_mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd)));
  });
  const auto pairs = [&](Packet a, Packet b) QUOKA_INLINE_LAMBDA {
    return op(Packet(_mm512_shuffle_ps(a, b, 0x88)), Packet(_mm512_shuffle_ps(a, b, 0xdd)));
  };
  unroll<2>([&](auto i)
                QUOKA_INLINE_LAMBDA { pair[i] = pairs(quarter[2 * i], quarter[2 * i + 1]); });
  return pairs(pair[0], pair[1]);
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
