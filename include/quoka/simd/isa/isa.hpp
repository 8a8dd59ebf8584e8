// The vector unit that the compiler's flags allow (base/abi.hpp reads them), and numbers of 16 and
// 8 bits as products of matrices take them. Each ISA's file defines the packets of simd.hpp, and
// those of the functions below that its instructions make fast. The others are here, lane by lane
// in plain C++.
//
// bfloat16:
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
// Integers of 8 bits:
//   store_bytes(p, x)      the low bytes of a packet, as round_to() leaves integers there
//   store_quads(p, x)      those of four packets side by side, one quad for each lane
//   sums_and_differences<n>(x)  lane i + lane i + n, and in i + n their difference, for n of 4 and
//                          8 below `lanes`
//
// Sums of products are types with the calls of simd.hpp, so that one register tile serves them and
// floats: `lanes` sums each. DotBfloat16Sums (AVX512_BF16) are of floats, and fma() adds two
// products to each. QuadSums (VNNI, Arm's i8mm) are of 32 bits, and fma() adds the products of a
// signed quad, which is broadcast, and unsigned ones side by side. tests/support/plain_sums.hpp has
// both in plain C++.
//
// Instructions for bfloat16 read denormals as zeros and write none: each of their products and sums
// may be off by 2^-126 besides being rounded to float.
#pragma once

#include <quoka/base/abi.hpp>

#if QUOKA_ISA_AVX512
#include <quoka/simd/isa/avx512.hpp>
#elif QUOKA_ISA_AVX2
#include <quoka/simd/isa/avx2.hpp>
#elif QUOKA_ISA_SSE
#include <quoka/simd/isa/sse.hpp>
#elif QUOKA_ISA_NEON
#include <quoka/simd/isa/neon.hpp>
#else
#include <quoka/simd/isa/plain.hpp>
#endif
#if QUOKA_ISA_AVX2 || QUOKA_ISA_AVX512
#include <quoka/simd/isa/avx_codes.hpp>
#endif

#include <cstdint>

QUOKA_INTRINSICS_BEGIN

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// --- pairs of bfloat16 -----------------------------------------------------------------------

#if !QUOKA_ISA_AVX512 && !QUOKA_ISA_NEON
// f(x) of each lane.
template <class F>
QUOKA_INLINE Packet each_lane(const Packet& x, F&& f) {
  alignas(64) float each[lanes];
  store(each, x);
  for (float& one : each) one = f(one);
  return load_packet(each);
}
QUOKA_INLINE Packet round_bfloat16(const Packet& x) {
  return each_lane(x, [](float one) QUOKA_INLINE_LAMBDA {
    return float_of((bits_of(one) + 0x8000u) & 0xffff0000u);
  });
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
QUOKA_INLINE Packet firsts(const Packet& pairs) {
  return each_lane(pairs,
                   [](float one) QUOKA_INLINE_LAMBDA { return float_of(bits_of(one) << 16); });
}
QUOKA_INLINE Packet seconds(const Packet& pairs) {
  return each_lane(
      pairs, [](float one) QUOKA_INLINE_LAMBDA { return float_of(bits_of(one) & 0xffff0000u); });
}
#endif
#if !QUOKA_ISA_AVX512
QUOKA_INLINE Packet round_pairs(const Packet& a, const Packet& b) {
  return upper_halves(round_bfloat16(a), round_bfloat16(b));
}
QUOKA_INLINE Packet add_pairs(const Packet& sums, const Packet& pairs) {
  return add(add(sums, firsts(pairs)), seconds(pairs));
}
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
#if !QUOKA_ISA_NEON
QUOKA_INLINE void store_zipped(float* p, const Packet& a, const Packet& b) {
  alignas(64) float first[lanes], second[lanes];
  store(first, a), store(second, b);
  for (int i = 0; i < lanes; ++i) p[2 * i] = first[i], p[2 * i + 1] = second[i];
}
#endif
QUOKA_INLINE void store_rounded(std::uint16_t* p, const Packet& a, const Packet& b) {
  store_unaligned(reinterpret_cast<float*>(p), round_neighbours(a, b));
}

#if !QUOKA_ISA_BF16_DOTS
inline bool bfloat16_sums_pay() { return false; }
#endif

// --- pairs of weights ------------------------------------------------------------------------

// Two positive floats in 32 bits, the upper half of each: half the memory where three digits are
// enough.

// The largest relative error of a weight that is read back: the first of a pair is truncated, the
// second has the first in place of its lower half.
inline constexpr float weight_pair_max_error = 0x1p-7f;

// store_weight_pairs: `lanes` pairs to packet-aligned memory.
#if !QUOKA_ISA_AVX512 && !QUOKA_ISA_AVX2
QUOKA_INLINE void store_weight_pairs(std::uint32_t* p, const Packet& first, const Packet& second) {
  alignas(64) float a[lanes], b[lanes];
  store(a, first), store(b, second);
  for (int i = 0; i < lanes; ++i) p[i] = (bits_of(a[i]) >> 16) | (bits_of(b[i]) & 0xffff0000u);
}
QUOKA_INLINE Packet first_weights(const std::uint32_t* p) {
  alignas(64) float x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = float_of(p[i] << 16);
  return load_packet(x);
}
QUOKA_INLINE Packet second_weights(const std::uint32_t* p) {
  alignas(64) float x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = float_of(p[i]);
  return load_packet(x);
}
#endif

// --- bytes and quads -------------------------------------------------------------------------

#if QUOKA_ISA_SSE || QUOKA_ISA_PLAIN
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
#if !QUOKA_ISA_AVX512 && !QUOKA_ISA_AVX2
template <int Span>
Packet sums_and_differences(Packet x);  // of no packet
#endif

// --- products of codes -----------------------------------------------------------------------

// take_dots_in: best [code_pair] is raised to dots [rows][code_pair]; aligned to 64 bytes.
// load_dots: a packet of them as floats, or of what are floats already.
#if !QUOKA_ISA_AVX512
QUOKA_INLINE void take_dots_in(const std::int32_t* dots, Index rows, std::int32_t* best) {
  for (Index m = 0; m < rows; ++m, dots += code_pair)
    for (Index i = 0; i < code_pair; ++i) best[i] = best[i] < dots[i] ? dots[i] : best[i];
}
QUOKA_INLINE Packet load_dots(const std::int32_t* dots) {
  alignas(64) float each[lanes];
  for (int i = 0; i < lanes; ++i) each[i] = static_cast<float>(dots[i]);
  return load_packet(each);
}
#endif
QUOKA_INLINE Packet load_dots(const float* dots) { return load_packet(dots); }

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
