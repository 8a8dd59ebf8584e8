// bfloat16 as matrix instructions take it, and the ISA's own products of it. Bfloat16Sums hold
// `lanes` float sums, and fma() adds two products to each of them: DotBfloat16Sums by AVX512_BF16,
// PlainBfloat16Sums in plain C++, for tests and for machines without it.
//
//   round_bfloat16(x)      x as a float of 8 significant bits: to nearest, ties away from zero.
//                          |x| < 2^127; what becomes of NaN and infinity is not said
//   upper_halves(a, b)     of two such packets, the pairs (a[i], b[i]) as `lanes` words of 32 bits
//   round_pairs(a, b)      the pairs (a[i], b[i]) rounded; ties, denormals as is fastest
//   round_neighbours(a, b) the same of a[0], a[1], ..., b[0], b[1], ...: pairs of neighbours
//   load_pairs(p, q)       the pairs (p[i], q[i]) of 16 bits
//   firsts(p), seconds(p)  of such pairs, as floats; add_pairs(x, p) adds both to x
//   store_upper_half(p, a) of one such packet, its `lanes` numbers of 16 bits
//   store_rounded(p, a, b) 2 lanes numbers: round_neighbours(a, b)
//   store_zipped(p, a, b)  words a[0], b[0], a[1], b[1] ...: aligned to a packet
//
// The instructions read denormals as zeros and write none: each of their products and sums may be
// off by 2^-126 besides being rounded to float.
#pragma once

#include <quoka/base/cpu.hpp>
#include <quoka/simd/isa/dots.hpp>

#include <bit>
#include <cstdint>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// Two bfloat16 side by side: neighbours along the sum of a product.
struct Bfloat16Pair {
  std::uint32_t bits;
};

#if QUOKA_ISA_AVX512
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
#elif QUOKA_ISA_NEON
QUOKA_INLINE Packet round_bfloat16(Packet x) {
  const uint32x4_t up = vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000u));
  return vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(0xffff0000u)));
}
QUOKA_INLINE Packet upper_halves(Packet a, Packet b) {
  return vreinterpretq_f32_u32(vsriq_n_u32(vreinterpretq_u32_f32(b), vreinterpretq_u32_f32(a), 16));
}
QUOKA_INLINE void store_upper_half(std::uint16_t* p, Packet x) {
  vst1_u16(p, vshrn_n_u32(vreinterpretq_u32_f32(x), 16));
}
#else
QUOKA_INLINE Packet round_bfloat16(const Packet& x) {
  alignas(64) float each[lanes];
  store(each, x);
  for (float& one : each) one = float_of((bits_of(one) + 0x8000u) & 0xffff0000u);
  return load_packet(each);
}
QUOKA_INLINE Packet upper_halves(const Packet& a, const Packet& b) {
  alignas(64) float low[lanes], high[lanes];
  store(low, a), store(high, b);
  for (int i = 0; i < lanes; ++i) low[i] = float_of(bits_of(low[i]) >> 16 | bits_of(high[i]));
  return load_packet(low);
}
QUOKA_INLINE void store_upper_half(std::uint16_t* p, const Packet& x) {
  alignas(64) float each[lanes];
  store(each, x);
  for (int i = 0; i < lanes; ++i) p[i] = static_cast<std::uint16_t>(bits_of(each[i]) >> 16);
}
#endif

#if QUOKA_ISA_NEON
QUOKA_INLINE void store_zipped(float* p, Packet a, Packet b) {
  const float32x4x2_t both{{a, b}};  // with a name: vst2q_f32 may be a macro
  vst2q_f32(p, both);
}
#else
QUOKA_INLINE void store_zipped(float* p, const Packet& a, const Packet& b) {
  alignas(64) float first[lanes], second[lanes];
  store(first, a), store(second, b);
  for (int i = 0; i < lanes; ++i) p[2 * i] = first[i], p[2 * i + 1] = second[i];
}
#endif

#if QUOKA_ISA_AVX512
QUOKA_INLINE Packet firsts(Packet pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
QUOKA_INLINE Packet seconds(Packet pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-0x10000)));
}
#elif QUOKA_ISA_NEON
QUOKA_INLINE Packet firsts(Packet pairs) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs), 16));
}
QUOKA_INLINE Packet seconds(Packet pairs) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xffff0000u)));
}
#else
QUOKA_INLINE Packet firsts(const Packet& pairs) {
  alignas(64) float each[lanes];
  store(each, pairs);
  for (float& one : each) one = float_of(bits_of(one) << 16);
  return load_packet(each);
}
QUOKA_INLINE Packet seconds(const Packet& pairs) {
  alignas(64) float each[lanes];
  store(each, pairs);
  for (float& one : each) one = float_of(bits_of(one) & 0xffff0000u);
  return load_packet(each);
}
#endif

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
#elif QUOKA_ISA_AVX512
QUOKA_INLINE Packet round_pairs(Packet a, Packet b) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(-0x10000);
  const __m512i first = _mm512_add_epi32(_mm512_castps_si512(a), half);
  const __m512i second = _mm512_add_epi32(_mm512_castps_si512(b), half);
  // upper ? second : first >> 16
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(upper, second, _mm512_srli_epi32(first, 16), 0xca));
}
#else
QUOKA_INLINE Packet round_pairs(const Packet& a, const Packet& b) {
  return upper_halves(round_bfloat16(a), round_bfloat16(b));
}
#endif
#if !QUOKA_ISA_BF16_DOTS || QUOKA_ISA_AMX
QUOKA_INLINE Packet add_pairs(const Packet& sums, const Packet& pairs) {
  return add(add(sums, firsts(pairs)), seconds(pairs));
}
#endif

#if QUOKA_ISA_AVX512
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
#else
QUOKA_INLINE Packet round_neighbours(const Packet& a, const Packet& b) {
  alignas(64) std::uint16_t each[2 * lanes];
  store_upper_half(each, round_bfloat16(a)), store_upper_half(each + lanes, round_bfloat16(b));
  return load_unaligned(reinterpret_cast<const float*>(each));
}
QUOKA_INLINE Packet load_pairs(const std::uint16_t* p, const std::uint16_t* q) {
  alignas(64) std::uint16_t each[2 * lanes];
  for (int i = 0; i < lanes; ++i) each[2 * i] = p[i], each[2 * i + 1] = q[i];
  return load_unaligned(reinterpret_cast<const float*>(each));
}
#endif
QUOKA_INLINE void store_rounded(std::uint16_t* p, const Packet& a, const Packet& b) {
  store_unaligned(reinterpret_cast<float*>(p), round_neighbours(a, b));
}

// --- AVX512_BF16 ------------------------------------------------------------------------------

#if QUOKA_ISA_BF16_DOTS
inline constexpr bool has_bfloat16_sums = true;
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
#else
inline constexpr bool has_bfloat16_sums = false;
inline bool bfloat16_sums_pay() { return false; }
struct DotBfloat16Sums;
#endif

// --- Armv8.6: BFMMLA --------------------------------------------------------------------------

// Rows 2 i and 2 i + 1 of a, 4 numbers of each, times rows 2 j and 2 j + 1 of b: four sums.
#if QUOKA_ISA_BF16_SQUARES
inline constexpr bool has_bfloat16_squares = true;
struct Bfloat16Eight {
  bfloat16x8_t x;
  QUOKA_INLINE static Bfloat16Eight load(const std::uint16_t* p) {
    return {vreinterpretq_bf16_u16(vld1q_u16(p))};
  }
};
struct Bfloat16Square {
  float32x4_t sums;  // (0, 0), (0, 1), (1, 0), (1, 1)
  QUOKA_INLINE static Bfloat16Square zero() { return {vdupq_n_f32(0.0f)}; }
  QUOKA_INLINE static Bfloat16Square load(const float* first, const float* second) {
    return {vcombine_f32(vld1_f32(first), vld1_f32(second))};
  }
  QUOKA_INLINE void store(float* first, float* second) const {
    vst1_f32(first, vget_low_f32(sums)), vst1_f32(second, vget_high_f32(sums));
  }
  QUOKA_INLINE void add(const Bfloat16Eight& a, const Bfloat16Eight& b) {
    sums = vbfmmlaq_f32(sums, a.x, b.x);
  }
};
#else
inline constexpr bool has_bfloat16_squares = false;
struct Bfloat16Square;
struct Bfloat16Eight;
#endif

// A product and a sum of the instructions: denormals are zeros before and after, rounded once.
inline float flushed(float x) {
  return (bits_of(x) & 0x7f800000u) == 0 ? float_of(bits_of(x) & 0x80000000u) : x;
}
inline float flushed_fma(float a, float b, float c) {
  return flushed(__builtin_fmaf(flushed(a), flushed(b), flushed(c)));
}

// Calls, not inlined: compilers would spend minutes on unrolled tiles of these.
struct PlainBfloat16Sums {
  float x[lanes];

  QUOKA_INLINE static PlainBfloat16Sums broadcast(Bfloat16Pair pair) {
    PlainBfloat16Sums all;
    for (float& x : all.x) x = float_of(pair.bits);
    return all;
  }
  QUOKA_INLINE static PlainBfloat16Sums load(const Bfloat16Pair* p) {
    PlainBfloat16Sums pairs;
    for (int i = 0; i < lanes; ++i) pairs.x[i] = float_of(p[i].bits);
    return pairs;
  }
  QUOKA_INLINE static PlainBfloat16Sums of(const Packet& sums) {
    alignas(64) float each[lanes];
    store(each, sums);
    PlainBfloat16Sums result;
    for (int i = 0; i < lanes; ++i) result.x[i] = each[i];
    return result;
  }
  QUOKA_INLINE Packet to_float() const {
    alignas(64) float each[lanes];
    for (int i = 0; i < lanes; ++i) each[i] = x[i];
    return simd::load(each);
  }
};
// The second of each pair, then the first.
[[gnu::noinline]] inline PlainBfloat16Sums fma(const PlainBfloat16Sums& a,
                                               const PlainBfloat16Sums& b,
                                               const PlainBfloat16Sums& sums) {
  PlainBfloat16Sums result;
  for (int i = 0; i < lanes; ++i) {
    const std::uint32_t x = bits_of(a.x[i]), y = bits_of(b.x[i]);
    const float second =
        flushed_fma(float_of(x & 0xffff0000u), float_of(y & 0xffff0000u), sums.x[i]);
    result.x[i] = flushed_fma(float_of(x << 16), float_of(y << 16), second);
  }
  return result;
}

// --- pairs of weights -------------------------------------------------------------------------

// Two positive floats in 32 bits, the upper half of each: half the memory where three digits are
// enough.

// The largest relative error of a weight that is read back: the first of a pair is truncated, the
// second has the first in place of its lower half.
inline constexpr float weight_pair_max_error = 0x1p-7f;

// `lanes` pairs to packet-aligned memory.
QUOKA_INLINE void store_weight_pairs(std::uint32_t* p, const Packet& first, const Packet& second) {
#if QUOKA_ISA_AVX512
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  _mm512_store_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(second)));
#elif QUOKA_ISA_AVX2
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
  _mm256_store_si256(reinterpret_cast<__m256i*>(p),
                     _mm256_blend_epi16(low, _mm256_castps_si256(second), 0xaa));
#else
  alignas(64) float a[lanes], b[lanes];
  store(a, first), store(b, second);
  for (int i = 0; i < lanes; ++i)
    p[i] = (std::bit_cast<std::uint32_t>(a[i]) >> 16) |
           (std::bit_cast<std::uint32_t>(b[i]) & 0xffff0000u);
#endif
}

QUOKA_INLINE Packet first_weights(const std::uint32_t* p) {
#if QUOKA_ISA_AVX512
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(p), 16));
#elif QUOKA_ISA_AVX2
  const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
#else
  alignas(64) float x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = std::bit_cast<float>(p[i] << 16);
  return load(x);
#endif
}

QUOKA_INLINE Packet second_weights(const std::uint32_t* p) {
#if QUOKA_ISA_AVX512
  return _mm512_castsi512_ps(_mm512_load_si512(p));
#elif QUOKA_ISA_AVX2
  return _mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
#else
  alignas(64) float x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = std::bit_cast<float>(p[i]);
  return load(x);
#endif
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
