// AVX-512 (F, DQ, BW, VL): 16 floats, 32 registers, masks.
#pragma once

#include <quoka/base/cpu.hpp>
#include <quoka/simd/isa/shared.hpp>

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

// --- exponents -------------------------------------------------------------------------------

// Exponents of floats by one instruction.
//
//   fraction(x)                   x - floor(x); 0 for an infinity
//   scale(y, x)                   y * 2^floor(x)
//   scale_not_less(y, x, least)   y * 2^floor(x), 0 where x < least: no denormal is made on the way
//
// Used if the core also has AMX: there both are as fast as a sum (measured on Emerald Rapids),
// which is not so on every core with AVX-512.
#if QUOKA_ISA_AMX
QUOKA_INLINE Packet fraction(Packet x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
QUOKA_INLINE Packet scale(Packet y, Packet x) { return _mm512_scalef_ps(y, x); }
QUOKA_INLINE Packet scale_not_less(Packet y, Packet x, Packet least) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y, x);
}
QUOKA_INLINE float fraction(float x) {
  const __m128 at = _mm_set_ss(x);
  return _mm_cvtss_f32(_mm_reduce_ss(at, at, _MM_FROUND_TO_NEG_INF));
}
QUOKA_INLINE float scale(float y, float x) {
  return _mm_cvtss_f32(_mm_scalef_ss(_mm_set_ss(y), _mm_set_ss(x)));
}
QUOKA_INLINE float scale_not_less(float y, float x, float least) {
  return x < least ? 0.0f : scale(y, x);
}
#endif

// --- pairs of bfloat16 -----------------------------------------------------------------------

QUOKA_INLINE Packet round_bfloat16(Packet x) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(-0x10000)));
}
QUOKA_INLINE Packet upper_halves(Packet a, Packet b) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(b)));
}
QUOKA_INLINE void store_upper_half(std::uint16_t* p, Packet x) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(low));
}
QUOKA_INLINE Packet firsts(Packet pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
QUOKA_INLINE Packet seconds(Packet pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-0x10000)));
}
QUOKA_INLINE Packet round_neighbours(Packet a, Packet b) {
#if QUOKA_ISA_BF16_DOTS
  return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
  alignas(64) static constexpr std::uint16_t upper[32] = {
      1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i half = _mm512_set1_epi32(0x8000);
  return _mm512_castsi512_ps(_mm512_permutex2var_epi16(
      _mm512_add_epi32(_mm512_castps_si512(a), half), _mm512_load_si512(upper),
      _mm512_add_epi32(_mm512_castps_si512(b), half)));
#endif
}
QUOKA_INLINE Packet load_pairs(const std::uint16_t* p, const std::uint16_t* q) {
  const __m512i first =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i second =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
  return _mm512_castsi512_ps(_mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
}

// AVX512_BF16's own are no faster where there are tiles: 2.3 and 2.4 cycles (measured on Emerald
// Rapids).
#if QUOKA_ISA_BF16_DOTS && !QUOKA_ISA_AMX
QUOKA_INLINE Packet round_pairs(Packet a, Packet b) {
  alignas(64) static constexpr std::uint16_t order[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i in_turn = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(order), in_turn));
}
QUOKA_INLINE Packet add_pairs(Packet sums, Packet pairs) {
  asm("vdpbf16ps\t%2, %1, %0" : "+v"(sums) : "v"(pairs), "v"(_mm512_set1_epi32(0x3f803f80)));
  return sums;
}
#else
QUOKA_INLINE Packet round_pairs(Packet a, Packet b) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(-0x10000);
  const __m512i first = _mm512_add_epi32(_mm512_castps_si512(a), half);
  const __m512i second = _mm512_add_epi32(_mm512_castps_si512(b), half);
  // upper ? second : first >> 16
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(upper, second, _mm512_srli_epi32(first, 16), 0xca));
}
QUOKA_INLINE Packet add_pairs(const Packet& sums, const Packet& pairs) {
  return add(add(sums, firsts(pairs)), seconds(pairs));
}
#endif

#if QUOKA_ISA_BF16_DOTS
// Are they faster than float's? Zen 4 and 5 multiply pairs at the rate of floats, twice the
// products;
// Intel's Emerald Rapids at a quarter of it (measured, all three).
inline bool bfloat16_sums_pay() {
  static const bool amd = detail::cpu_is_amd();
  return amd;
}
struct DotBfloat16Sums {
  __m512 x;
  QUOKA_INLINE static DotBfloat16Sums broadcast(Bfloat16Pair pair) {
    return {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair.bits)))};
  }
  QUOKA_INLINE static DotBfloat16Sums load(const Bfloat16Pair* p) { return {_mm512_load_ps(p)}; }
  QUOKA_INLINE static DotBfloat16Sums of(Packet sums) { return {sums}; }
  QUOKA_INLINE Packet to_float() const { return x; }
};
// GCC 12 copies all sums of a tile around the intrinsic, hence the assembler.
QUOKA_INLINE DotBfloat16Sums fma(const DotBfloat16Sums& a, const DotBfloat16Sums& b,
                                 const DotBfloat16Sums& sums) {
  __m512 x = sums.x;
  asm("vdpbf16ps\t%2, %1, %0" : "+v"(x) : "v"(a.x), "v"(b.x));
  return {x};
}
#endif

QUOKA_INLINE void store_weight_pairs(std::uint32_t* p, Packet first, Packet second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  _mm512_store_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(second)));
}
QUOKA_INLINE Packet first_weights(const std::uint32_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(p), 16));
}
QUOKA_INLINE Packet second_weights(const std::uint32_t* p) {
  return _mm512_castsi512_ps(_mm512_load_si512(p));
}

// --- bytes and quads -------------------------------------------------------------------------

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
template <int Span>
QUOKA_INLINE Packet sums_and_differences(Packet x) {
  static_assert(Span == 8 || Span == 4);
  const Packet other = _mm512_shuffle_f32x4(x, x, Span == 8 ? 0x4e : 0xb1);
  const __m512i sign = _mm512_maskz_set1_epi32(Span == 8 ? 0xff00 : 0xf0f0, 1 << 31);
  return _mm512_fmadd_ps(
      x, _mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_set1_epi32(0x3f800000))), other);
}

#if QUOKA_ISA_VNNI
struct QuadSums {
  static constexpr const char* instruction = "vpdpbusd";
  __m512i x;
  QUOKA_INLINE static QuadSums from(std::int32_t sum) { return {_mm512_set1_epi32(sum)}; }
  QUOKA_INLINE static QuadSums load(const Quad* p) { return {_mm512_load_si512(p)}; }
  QUOKA_INLINE static QuadSums broadcast(Quad quad) {
    return from(static_cast<std::int32_t>(quad.bits));
  }
  QUOKA_INLINE Packet to_float() const { return _mm512_cvtepi32_ps(x); }
};
// GCC 12 spills all sums of a tile around the intrinsics, hence the assembler.
QUOKA_INLINE QuadSums fma(const QuadSums& a, const QuadSums& b, const QuadSums& sums) {
#if defined(__clang__)
  return {_mm512_dpbusd_epi32(sums.x, b.x, a.x)};
#else
  QuadSums result = sums;
  asm("vpdpbusd\t%2, %1, %0" : "+v"(result.x) : "v"(b.x), "v"(a.x));
  return result;
#endif
}
#endif

// --- products of codes -----------------------------------------------------------------------

QUOKA_INLINE void take_dots_in(const std::int32_t* dots, Index rows, std::int32_t* best) {
  __m512i first = _mm512_load_si512(best), second = _mm512_load_si512(best + code_block);
  for (Index m = 0; m < rows; ++m, dots += code_pair) {
    first = _mm512_max_epi32(first, _mm512_load_si512(dots));
    second = _mm512_max_epi32(second, _mm512_load_si512(dots + code_block));
  }
  _mm512_store_si512(best, first), _mm512_store_si512(best + code_block, second);
}
QUOKA_INLINE Packet load_dots(const std::int32_t* dots) {
  return _mm512_cvtepi32_ps(_mm512_load_si512(dots));
}

#if QUOKA_ISA_VNNI
// See kernels/token_codes.hpp: x[key][4 queries] of four keys. A group's sums have four lanes for
// each query, which are added up at the end.
template <class Group, class Queries>
QUOKA_INLINE void code_token_logits(const std::byte* const (&rows)[4], const Queries* queries,
                                    Index groups, const float* units, float* x) {
  const __m512i bias = _mm512_set1_epi8(-128);
  __m512 sum[4];
  unroll<4>([&](auto k) QUOKA_INLINE_LAMBDA { sum[k] = _mm512_setzero_ps(); });
  unroll<4>([&](auto k) QUOKA_INLINE_LAMBDA {
    for (Index g = 0; g < groups; ++g) {
      const Queries& query = queries[g];
      const Group group(rows[k], g * code_group);
      __m512i key[2], dot = _mm512_load_si512(query.start);
      unroll<2>([&](auto half) QUOKA_INLINE_LAMBDA {
        const auto* const codes = reinterpret_cast<const __m128i*>(group.codes) + half;
        key[half] = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(codes)), bias);
        dot = _mm512_dpbusd_epi32(dot, key[half], _mm512_load_si512(query.high[half]));
      });
      dot = _mm512_slli_epi32(dot, 7);
      unroll<2>([&](auto half) QUOKA_INLINE_LAMBDA {
        dot = _mm512_dpbusd_epi32(dot, key[half], _mm512_load_si512(query.low[half]));
      });
      sum[k] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), group.scale, sum[k]);
    }
  });
  const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(sum[0], sum[1]),
                                     _mm512_unpackhi_ps(sum[0], sum[1])),
               second = _mm512_add_ps(_mm512_unpacklo_ps(sum[2], sum[3]),
                                      _mm512_unpackhi_ps(sum[2], sum[3]));
  // [query][key]
  const __m512 all =
      _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
  const __m512i by_keys = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_ps(x, _mm512_mul_ps(_mm512_permutexvar_ps(by_keys, all), _mm512_load_ps(units)));
}
#endif

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
