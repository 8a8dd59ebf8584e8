// Baseline x86-64, up to AVX without AVX2: 4 floats, 16 registers. FMA and F16C where the flags
// allow them.
#pragma once

#include <quoka/simd/isa/shared.hpp>

#include <immintrin.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using Packet = __m128;
inline constexpr int lanes = 4;
inline constexpr int registers = 16;
inline constexpr bool has_lane_masks = false;

QUOKA_INLINE Packet broadcast_packet(float x) { return _mm_set1_ps(x); }
QUOKA_INLINE Packet load_packet(const float* p) { return _mm_load_ps(p); }
QUOKA_INLINE Packet load_unaligned(const float* p) { return _mm_loadu_ps(p); }
QUOKA_INLINE void store(float* p, Packet x) { _mm_store_ps(p, x); }
QUOKA_INLINE void store_unaligned(float* p, Packet x) { _mm_storeu_ps(p, x); }

QUOKA_INLINE Packet add(Packet a, Packet b) { return _mm_add_ps(a, b); }
QUOKA_INLINE Packet sub(Packet a, Packet b) { return _mm_sub_ps(a, b); }
QUOKA_INLINE Packet mul(Packet a, Packet b) { return _mm_mul_ps(a, b); }
QUOKA_INLINE Packet div(Packet a, Packet b) { return _mm_div_ps(a, b); }
QUOKA_INLINE Packet fma(Packet a, Packet b, Packet c) {
#if QUOKA_ISA_FMA
  return _mm_fmadd_ps(a, b, c);
#else
  return _mm_add_ps(_mm_mul_ps(a, b), c);
#endif
}
// The instruction returns its second operand where either is NaN: hence the order.
QUOKA_INLINE Packet max(Packet a, Packet b) { return _mm_max_ps(b, a); }
QUOKA_INLINE Packet min(Packet a, Packet b) { return _mm_min_ps(b, a); }
// Where `mask` is all ones: yes, where it is zero: no.
QUOKA_INLINE __m128i blend(__m128i mask, __m128i yes, __m128i no) {
#if QUOKA_ISA_SSE4
  return _mm_blendv_epi8(no, yes, mask);
#else
  return _mm_or_si128(_mm_and_si128(mask, yes), _mm_andnot_si128(mask, no));
#endif
}
QUOKA_INLINE Packet select_less(Packet a, Packet b, Packet yes, Packet no) {
  return _mm_castsi128_ps(
      blend(_mm_castps_si128(_mm_cmplt_ps(a, b)), _mm_castps_si128(yes), _mm_castps_si128(no)));
}
QUOKA_INLINE Packet opaque(Packet x) {
  asm("" : "+x"(x));
  return x;
}
QUOKA_INLINE Packet power_of_rounded_bits(Packet shifted) {
  const __m128i exponent = _mm_slli_epi32(_mm_castps_si128(shifted), 23);
  return _mm_castsi128_ps(_mm_add_epi32(exponent, _mm_set1_epi32(0x3f800000)));
}

// --- half and bfloat16 ------------------------------------------------------------------------

// 4 elements of 16 bits, and 4 integers in [-2^15, 2^15) as such elements.
QUOKA_INLINE __m128i load_16_bits(const std::uint16_t* p) {
  return _mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
                            _mm_setzero_si128());
}
QUOKA_INLINE void store_16_bits(std::uint16_t* p, __m128i x) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(x, x));
}

// The steps of half_to_float_in_integers and float_to_half_in_integers.
QUOKA_INLINE Packet load_half(const std::uint16_t* p) {
#if QUOKA_ISA_F16C
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  const __m128i half = load_16_bits(p), rebias = _mm_set1_epi32(112 << 23);
  const __m128i magnitude = _mm_and_si128(half, _mm_set1_epi32(0x7fff));
  const __m128i sign = _mm_slli_epi32(_mm_xor_si128(half, magnitude), 16);
  const __m128i top = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff));
  const __m128i bits = _mm_add_epi32(_mm_add_epi32(_mm_slli_epi32(magnitude, 13), rebias),
                                     _mm_and_si128(top, rebias));
  const __m128i led = _mm_add_epi32(bits, _mm_set1_epi32(1 << 23));
  const __m128 denormal = _mm_sub_ps(_mm_castsi128_ps(led), _mm_set1_ps(0x1p-14f));
  const __m128i is_denormal = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(0x400));
  return _mm_castsi128_ps(_mm_or_si128(sign, blend(is_denormal, _mm_castps_si128(denormal), bits)));
#endif
}
QUOKA_INLINE void store_half(std::uint16_t* p, Packet x) {
#if QUOKA_ISA_F16C
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const __m128i all = _mm_castps_si128(x);
  const __m128i bits = _mm_and_si128(all, _mm_set1_epi32(0x7fffffff));
  const __m128i sign = _mm_slli_epi32(_mm_srai_epi32(all, 31), 15);
  const __m128i is_nan = _mm_cmpgt_epi32(bits, _mm_set1_epi32(0x7f800000));
  const __m128i top = blend(is_nan, _mm_set1_epi32(0x7e00), _mm_set1_epi32(0x7c00));
  const __m128 led = opaque(_mm_add_ps(_mm_castsi128_ps(bits), _mm_set1_ps(0.5f)));
  const __m128i denormal = _mm_sub_epi32(_mm_castps_si128(led), _mm_set1_epi32(0x3f000000));
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 13), _mm_set1_epi32(1));
  const __m128i bias = _mm_add_epi32(odd, _mm_set1_epi32(0xfff - (112 << 23)));
  const __m128i normal = _mm_srli_epi32(_mm_add_epi32(bits, bias), 13);
  const __m128i is_denormal = _mm_cmplt_epi32(bits, _mm_set1_epi32(0x38800000));
  const __m128i is_top = _mm_cmpgt_epi32(bits, _mm_set1_epi32(0x477fffff));
  const __m128i magnitude = blend(is_top, top, blend(is_denormal, denormal, normal));
  store_16_bits(p, _mm_or_si128(sign, magnitude));
#endif
}
QUOKA_INLINE Packet load_bfloat16(const std::uint16_t* p) {
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(),
                                             _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
QUOKA_INLINE void store_bfloat16(std::uint16_t* p, Packet x) {
  const __m128i bits = _mm_castps_si128(x);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i bias = _mm_add_epi32(odd, _mm_set1_epi32(0x7fff));
  const __m128i rounded = _mm_add_epi32(bits, bias);
  const __m128i quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
  const __m128i is_nan = _mm_castps_si128(_mm_cmpunord_ps(x, x));
  store_16_bits(p, _mm_srai_epi32(blend(is_nan, quiet, rounded), 16));
}

// --- 8 bits -----------------------------------------------------------------------------------

// 4 bytes, the upper ones of 32 bits.
QUOKA_INLINE __m128i load_upper_bytes(const void* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  const __m128i bytes = _mm_cvtsi32_si128(four), zeros = _mm_setzero_si128();
  return _mm_unpacklo_epi16(zeros, _mm_unpacklo_epi8(zeros, bytes));
}
QUOKA_INLINE Packet load_int8(const std::int8_t* p) {
  return _mm_cvtepi32_ps(_mm_srai_epi32(load_upper_bytes(p), 24));
}
QUOKA_INLINE Packet load_uint8(const std::uint8_t* p) {
  return _mm_cvtepi32_ps(_mm_srli_epi32(load_upper_bytes(p), 24));
}
// The steps of e4m3_to_float.
QUOKA_INLINE Packet load_e4m3(const std::uint8_t* p) {
  const __m128i upper = load_upper_bytes(p), sign_bit = _mm_set1_epi32(1 << 31);
  const __m128i sign = _mm_and_si128(upper, sign_bit);
  const __m128i magnitude = _mm_srli_epi32(_mm_xor_si128(upper, sign), 24);
  const __m128i normal = _mm_add_epi32(_mm_slli_epi32(magnitude, 20), _mm_set1_epi32(120 << 23));
  const __m128i denormal =
      _mm_castps_si128(_mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(0x1p-9f)));
  const __m128i is_denormal = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(8));
  const __m128i is_nan = _mm_cmpeq_epi32(magnitude, _mm_set1_epi32(0x7f));
  return _mm_castsi128_ps(_mm_or_si128(_mm_or_si128(sign, blend(is_denormal, denormal, normal)),
                                       _mm_and_si128(is_nan, _mm_set1_epi32(0x7fc00000))));
}

// --- across lanes -----------------------------------------------------------------------------

QUOKA_INLINE float reduce_max(Packet x) {
  const __m128 y = _mm_max_ps(_mm_movehl_ps(x, x), x);
  return _mm_cvtss_f32(_mm_max_ss(_mm_shuffle_ps(y, y, 1), y));
}
// (x[0] + x[2]) + (x[1] + x[3]).
QUOKA_INLINE float reduce_add(Packet x) {
  const __m128 y = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}

struct Square {
  Packet packet[lanes];
};

// In place. 8 shuffles.
QUOKA_INLINE void transpose(Square& square) {
  Packet(&x)[lanes] = square.packet;
  const Packet a = _mm_unpacklo_ps(x[0], x[1]), b = _mm_unpackhi_ps(x[0], x[1]);
  const Packet c = _mm_unpacklo_ps(x[2], x[3]), d = _mm_unpackhi_ps(x[2], x[3]);
  x[0] = _mm_movelh_ps(a, c), x[1] = _mm_movehl_ps(c, a);
  x[2] = _mm_movelh_ps(b, d), x[3] = _mm_movehl_ps(d, b);
}

// Pairs twice: 6 shuffles.
template <class Op>
QUOKA_INLINE Packet reduce_each(const Square& square, Op&& op) {
  const Packet(&x)[lanes] = square.packet;
  const auto pairs = [&](Packet a, Packet b) QUOKA_INLINE_LAMBDA {
    return op(Packet(_mm_shuffle_ps(a, b, 0x88)), Packet(_mm_shuffle_ps(a, b, 0xdd)));
  };
  return pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
