// What every ISA's file builds on: unrolled loops, what the ISA has beside packets of floats, and
// the functions of a packet for a single float, for the ends of rows and for CPUs without a vector
// unit.
//
// Only builtins: a function of std that is not inlined would be shared by units built with
// different flags.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/simd/code_layout.hpp>

#include <cstdint>

#if QUOKA_ISA_F16C
#include <immintrin.h>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using detail::prefetch;

// --- loops with constant bounds ---------------------------------------------------------------

// Unrolled by the compiler from -O2 on. One body that it copies, not one instantiation per index:
// those were inlined one by one, before any optimisation, and took a quarter of all compile time.
// Same code either way.

// The constant i as an argument. Not std::integral_constant: without optimisation its conversion is
// a function that units built with different flags would share.
template <int i>
struct Constant {
  static constexpr int value = i;
  QUOKA_INLINE constexpr operator int() const { return i; }
};

// f(0), f(1), ..., f(Count - 1): arrays of packets indexed by the argument live in registers.
template <int Count, class F>
QUOKA_INLINE void unroll(F&& f) {
#pragma GCC unroll 64
  for (int i = 0; i < Count; ++i) f(i);
}

// f(i, j) for all i < Rows, j < Columns.
template <int Rows, int Columns, class F>
QUOKA_INLINE void unroll(F&& f) {
#pragma GCC unroll 64
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 64
    for (int j = 0; j < Columns; ++j) f(i, j);
}

// --- what the ISA has -------------------------------------------------------------------------

// Exponents of floats by one instruction: fraction(), scale(), scale_not_less().
inline constexpr bool has_exponents = QUOKA_ISA_AMX;

// Products of bfloat16: DotBfloat16Sums, Bfloat16Square; of 8-bit integers: QuadSums.
inline constexpr bool has_bfloat16_sums = QUOKA_ISA_BF16_DOTS;
inline constexpr bool has_bfloat16_squares = QUOKA_ISA_BF16_SQUARES;
inline constexpr bool has_quad_sums = QUOKA_ISA_VNNI || QUOKA_ISA_I8MM;

// Products of 8-bit codes (code_dots.hpp): which functions are the ISA's own.
inline constexpr bool has_code_dots = QUOKA_ISA_AVX512 || QUOKA_ISA_AVX2 || QUOKA_ISA_NEON;
inline constexpr bool has_fast_code_products = QUOKA_ISA_AVX512 || QUOKA_ISA_AVX2 || QUOKA_ISA_I8MM;
// code_token_logits, whose queries take all of 8 bits.
inline constexpr bool has_token_codes = QUOKA_ISA_VNNI && QUOKA_ISA_AVX512;

// Is selection by the keys' sketch faster than in float? Measured for AVX2 and AVX-512, with and
// without VNNI. NEON by counts of instructions: a quarter of float's with dotprod. Without dotprod
// it takes no fewer cycles on cores that start one integer multiplication per cycle and two in
// float (Cortex-A72).
inline constexpr bool code_dots_beat_float =
    has_code_dots && !(QUOKA_ISA_NEON && !QUOKA_ISA_DOTPROD);

// Queries whose sums with a block of keys, or with two (8 and fewer), are held in registers at
// once.
inline constexpr int most_code_queries = has_token_codes                      ? 24
                                         : QUOKA_ISA_AVX512 || QUOKA_ISA_NEON ? 8
                                                                              : 4;

// The bias that is added to a key's code before it is multiplied: x86 multiplies unsigned keys.
inline constexpr int product_bias = QUOKA_ISA_NEON ? 0 : 128;

// Steps of code_channels channels whose products are added in 16 bits before they are widened; 0:
// none, products are added in 32 bits at once. See code_dots.hpp.
inline constexpr Index code_run = (QUOKA_ISA_AVX512 || QUOKA_ISA_AVX2) && !QUOKA_ISA_VNNI ? 2 : 0;

// Two bfloat16 side by side, neighbours along the sum of a product; four integers of 8 bits.
struct Bfloat16Pair {
  std::uint32_t bits;
};
struct Quad {
  std::uint32_t bits;
};
// Defined where the ISA has them.
struct DotBfloat16Sums;
struct Bfloat16Square;
struct Bfloat16Eight;
struct QuadSums;

// --- one float --------------------------------------------------------------------------------

QUOKA_INLINE std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
QUOKA_INLINE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

QUOKA_INLINE float add(float a, float b) { return a + b; }
QUOKA_INLINE float sub(float a, float b) { return a - b; }
QUOKA_INLINE float mul(float a, float b) { return a * b; }
QUOKA_INLINE float div(float a, float b) { return a / b; }
// a * b + c, rounded once where the ISA can. Explicit, so that results do not depend on the
// compiler's contraction.
QUOKA_INLINE float fma(float a, float b, float c) {
#if QUOKA_ISA_FMA
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
// As std::max and std::min: a where either is NaN, and where both are equal.
QUOKA_INLINE float max(float a, float b) { return a < b ? b : a; }
QUOKA_INLINE float min(float a, float b) { return b < a ? b : a; }
QUOKA_INLINE float select_less(float a, float b, float yes, float no) { return a < b ? yes : no; }

QUOKA_INLINE unsigned less(float a, float b) { return a < b ? 1u : 0u; }
QUOKA_INLINE unsigned not_less(float a, float b) { return a < b ? 0u : 1u; }
QUOKA_INLINE int store_compressed(float* p, unsigned mask, float x) {
  *p = x;
  return static_cast<int>(mask);
}
template <int Lanes>
QUOKA_INLINE int store_compressed(std::int32_t* p, unsigned mask,
                                  std::int32_t first) requires(Lanes == 1) {
  *p = first;
  return static_cast<int>(mask);
}

// x. The compiler cannot see through the result: it cannot move arithmetic across, whatever its
// flags allow. Free: an empty instruction.
QUOKA_INLINE float opaque(float x) {
#if defined(__x86_64__) || defined(__SSE__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// 2^round(x), from `shifted` = x + 1.5 * 2^23, whose low mantissa bits are round(x).
QUOKA_INLINE float power_of_rounded_bits(float shifted) {
  return float_of((bits_of(shifted) << 23) + 0x3f800000u);
}

// --- half and bfloat16 ------------------------------------------------------------------------

// Widening is exact. Rounding is to nearest, ties to even; NaN stays NaN, its payload may change.

// In integers, for ISAs without the instruction; isa/sse.hpp has the same for packets.
QUOKA_INLINE float half_to_float_in_integers(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffu;
  std::uint32_t bits = (magnitude << 13) + (112u << 23);  // the exponent's bias: 127 rather than 15
  if (magnitude > 0x7bffu) bits += 112u << 23;            // infinity, NaN
  // Denormal or zero: made normal by a leading 1 that is taken away again.
  if (magnitude < 0x0400u) bits = bits_of(float_of(bits + (1u << 23)) - 0x1p-14f);
  return float_of(bits | static_cast<std::uint32_t>(half & 0x8000u) << 16);
}
QUOKA_INLINE std::uint16_t float_to_half_in_integers(float x) {
  const std::uint32_t sign = bits_of(x) & 0x80000000u;
  std::uint32_t bits = bits_of(x) ^ sign;
  if (bits >= 0x47800000u)  // 2^16 and beyond, infinity, NaN
    bits = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  else if (bits < 0x38800000u)  // below 2^-14: the addition rounds
    bits = bits_of(opaque(float_of(bits) + 0.5f)) - 0x3f000000u;
  else  // what rounds up to 2^16 becomes infinity
    bits = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
  return static_cast<std::uint16_t>(bits | sign >> 16);
}

QUOKA_INLINE float half_to_float(std::uint16_t half) {
#if QUOKA_ISA_F16C
  return _cvtsh_ss(half);
#elif QUOKA_ISA_NEON
  return static_cast<float>(__builtin_bit_cast(__fp16, half));
#else
  return half_to_float_in_integers(half);
#endif
}
QUOKA_INLINE std::uint16_t float_to_half(float x) {
#if QUOKA_ISA_F16C
  return static_cast<std::uint16_t>(
      _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
#elif QUOKA_ISA_NEON
  return __builtin_bit_cast(std::uint16_t, static_cast<__fp16>(x));
#else
  return float_to_half_in_integers(x);
#endif
}
QUOKA_INLINE float bfloat16_to_float(std::uint16_t x) {
  return float_of(static_cast<std::uint32_t>(x) << 16);
}
QUOKA_INLINE std::uint16_t float_to_bfloat16(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(is_nan ? (bits >> 16 | 0x40u) : rounded);
}

// --- e4m3 -------------------------------------------------------------------------------------

// Floats of 8 bits without infinity (OCP's E4M3, "e4m3fn"): 4 bits of exponent, its bias 7, and 3
// of mantissa. 0x7f and 0xff are NaN; the largest is 448.
QUOKA_INLINE float e4m3_to_float(std::uint8_t x) {
  const std::uint32_t magnitude = x & 0x7fu;
  std::uint32_t bits = (magnitude << 20) + (120u << 23);  // the exponent's bias: 127 rather than 7
  if (magnitude == 0x7fu) bits = 0x7fc00000u;
  if (magnitude < 0x08u) bits = bits_of(static_cast<float>(magnitude) * 0x1p-9f);  // denormal, zero
  return float_of(bits | static_cast<std::uint32_t>(x & 0x80u) << 24);
}
QUOKA_INLINE std::uint8_t float_to_e4m3(float x) {
  const std::uint32_t sign = bits_of(x) & 0x80000000u;
  std::uint32_t bits = bits_of(x) ^ sign;
  if (bits >= 0x43e00000u)  // 448 and beyond, infinity, NaN
    bits = bits > 0x7f800000u ? 0x7fu : 0x7eu;
  else if (bits < 0x3c800000u)  // below 2^-6: the addition rounds
    bits = bits_of(opaque(float_of(bits) + 0x1p14f)) - 0x46800000u;
  else
    bits = (bits - (120u << 23) + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
  return static_cast<std::uint8_t>(bits | sign >> 24);
}

// --- integers ---------------------------------------------------------------------------------

// A float in [-32768, 32767.5) to the nearest integer, ties to even; 0 for NaN, as the low half of
// what x86 makes of it.
QUOKA_INLINE std::int16_t round_to_int16(float x) {
  return x == x ? static_cast<std::int16_t>(__builtin_nearbyintf(x)) : std::int16_t{0};
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
