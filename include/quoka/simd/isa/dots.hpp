// Dot products of small integers: what the ISA multiplies, and the ISA's own functions where it has
// them (has_code_dots, has_token_codes).
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/simd/code_layout.hpp>
#include <quoka/simd/simd.hpp>

#include <cstdint>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// Sums that are not a packet of floats have these as members (isa/bfloat16.hpp).
template <class P, class Pair>
QUOKA_INLINE P broadcast(const Pair& x) requires requires {
  P::broadcast(x);
}
{ return P::broadcast(x); }
template <class P, class Pair>
QUOKA_INLINE P load(const Pair* p) requires requires {
  P::load(p);
}
{ return P::load(p); }

// A float in [-32768, 32767.5) to the nearest integer, ties to even; 0 for NaN, as the low half of
// what x86 makes of it.
QUOKA_INLINE std::int16_t round_to_int16(float x) {
  return x == x ? static_cast<std::int16_t>(__builtin_nearbyintf(x)) : std::int16_t{0};
}

// best [2 * code_block] takes in dots [rows][2 * code_block]; aligned to 64 bytes.
QUOKA_INLINE void take_dots_in(CodeScores over, const std::int32_t* dots, Index rows,
                               std::int32_t* best) {
  constexpr Index pair = 2 * code_block;
  const bool max = over == CodeScores::max;
#if QUOKA_ISA_AVX512
  __m512i first = _mm512_load_si512(best), second = _mm512_load_si512(best + code_block);
  for (Index m = 0; m < rows; ++m, dots += pair) {
    const __m512i x = _mm512_load_si512(dots), y = _mm512_load_si512(dots + code_block);
    first = max ? _mm512_max_epi32(first, x) : _mm512_add_epi32(first, x);
    second = max ? _mm512_max_epi32(second, y) : _mm512_add_epi32(second, y);
  }
  _mm512_store_si512(best, first), _mm512_store_si512(best + code_block, second);
#else
  for (Index m = 0; m < rows; ++m, dots += pair)
    for (Index i = 0; i < pair; ++i)
      best[i] = max ? (best[i] < dots[i] ? dots[i] : best[i]) : best[i] + dots[i];
#endif
}

// A packet of them as floats, or of what are floats already.
QUOKA_INLINE Packet load_dots(const std::int32_t* dots) {
#if QUOKA_ISA_AVX512
  return _mm512_cvtepi32_ps(_mm512_load_si512(dots));
#else
  alignas(64) float each[lanes];
  for (int i = 0; i < lanes; ++i) each[i] = static_cast<float>(dots[i]);
  return load_packet(each);
#endif
}
QUOKA_INLINE Packet load_dots(const float* dots) { return load_packet(dots); }

// Dot products of 8-bit codes. has_code_dots: code_dots_of is the ISA's own. has_token_codes: so is
// code_token_logits, whose queries take all of 8 bits.
#if QUOKA_ISA_AVX512 || QUOKA_ISA_AVX2 || QUOKA_ISA_NEON
inline constexpr bool has_code_dots = true;
#else
inline constexpr bool has_code_dots = false;
#endif
// code_products_of is the ISA's own.
#if QUOKA_ISA_AVX512 || QUOKA_ISA_AVX2 || QUOKA_ISA_I8MM
inline constexpr bool has_fast_code_products = true;
#else
inline constexpr bool has_fast_code_products = false;
#endif
// Queries whose sums with a block of keys, or with two (8 and fewer), are held in registers at
// once.
#if QUOKA_ISA_VNNI && QUOKA_ISA_AVX512
inline constexpr int most_code_queries = 24;
#else
inline constexpr int most_code_queries = registers >= 32 ? 8 : 4;
#endif
inline constexpr bool has_token_codes = QUOKA_ISA_VNNI && QUOKA_ISA_AVX512;

// Is selection by the keys' sketch faster than in float? Measured for AVX2 and AVX-512, with and
// without VNNI. NEON by counts of instructions: a quarter of float's with dotprod. Without dotprod
// it takes no fewer cycles on cores that start one integer multiplication per cycle and two in
// float (Cortex-A72).
#if QUOKA_ISA_NEON && !QUOKA_ISA_DOTPROD
inline constexpr bool code_dots_beat_float = false;
#else
inline constexpr bool code_dots_beat_float = has_code_dots;
#endif

// The bias that is added to a key's code before it is multiplied: x86 multiplies unsigned keys.
inline constexpr int product_bias = QUOKA_ISA_NEON ? 0 : 128;

// Steps of code_channels channels whose products are added in 16 bits before they are widened; 0:
// none, products are added in 32 bits at once. See code_dots.hpp.
#if (QUOKA_ISA_AVX512 || QUOKA_ISA_AVX2) && !QUOKA_ISA_VNNI
inline constexpr Index code_run = 2;
#else
inline constexpr Index code_run = 0;
#endif

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END

#if QUOKA_ISA_VNNI && QUOKA_ISA_AVX512
#include <quoka/simd/isa/avx512_vnni.hpp>
#elif QUOKA_ISA_AVX512 || QUOKA_ISA_AVX2
#include <quoka/simd/isa/avx_codes.hpp>
#elif QUOKA_ISA_NEON
#include <quoka/simd/isa/neon_codes.hpp>
#endif
