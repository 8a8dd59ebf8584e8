// The vector unit: one packet of floats, or one float, under the same names.
//
// A Packet holds `lanes` floats: 16 with AVX-512, 8 with AVX2, 4 with SSE and NEON. Elsewhere it is
// plain float (lanes == 1). Every kernel is written once against this file. isa/ has the
// instructions, one file per ISA. Its functions of packets and of single floats:
//   add sub mul div fma max min select_less opaque power_of_rounded_bits
//   less not_less store_compressed (packets: where has_lane_masks)
// and its functions of packets alone:
//   load_unaligned store store_unaligned load_half load_bfloat16 store_half store_bfloat16
//   load_int8 load_uint8 load_e4m3 reduce_max reduce_add Square transpose reduce_each
//
// fma(a, b, c) is a * b + c, rounded once where the ISA can. max and min are as in std: the first
// argument if either is NaN. Packets of NEON become NaN. select_less(a, b, yes, no) is a < b ? yes
// : no; a NaN compares false. div rounds correctly. reduce_add has a fixed order, which
// depends on the ISA. load and store need memory aligned to a packet.
//
// less(a, b) and not_less(a, b) give one bit per lane. store_compressed(p, mask, x) writes the
// lanes of `mask` side by side: it writes `lanes` elements and returns how many of them count.
// store_compressed<Lanes>(p, mask, first) does so with the integers first, first + 1, ...
//
// half and bfloat16 are held as their 16 bits, `lanes` of them, without alignment. Rounding is to
// nearest, ties to even; NaN stays NaN. half_to_float, float_to_half, bfloat16_to_float and
// float_to_bfloat16 are the same for one element.
//
// load_int8 and load_uint8 read `lanes` integers of 8 bits as floats, load_e4m3 as many floats of 8
// bits. All are exact, take any address, and read no byte beyond. e4m3_to_float is the same for one
// element; float_to_e4m3 rounds to nearest, ties to even, and larger numbers to 448; NaN stays NaN.
#pragma once

#include <quoka/base/index.hpp>

// The compiled library's drivers serve all ISA levels (kernels/kernels.hpp).
#if defined(QUOKA_COMPILING) && !QUOKA_DEFINES_KERNELS
#error "quoka: a driver includes packets, which kernels alone have"
#endif

#include <quoka/simd/isa/isa.hpp>

#include <cstddef>
#include <limits>
#include <type_traits>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using detail::infinity;
using detail::log2_e;

template <class P = Packet>
QUOKA_INLINE P broadcast(float x) {
  if constexpr (std::is_same_v<P, float>)
    return x;
  else
    return broadcast_packet(x);
}
template <class P = Packet>
QUOKA_INLINE P zero() {
  return broadcast<P>(0.0f);
}
// Packets: aligned to their size.
template <class P = Packet>
QUOKA_INLINE P load(const float* p) {
  if constexpr (std::is_same_v<P, float>)
    return *p;
  else
    return load_packet(p);
}

// Sums that are not a packet of floats have these as members (isa/isa.hpp).
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

// An address that compilers do not see through: an offset to it stays a constant of the
// instruction.
QUOKA_INLINE const std::byte* opaque(const std::byte* p) {
  asm("" : "+r"(p));
  return p;
}

// x + at to the nearest integer, ties to even, in the low bits of a float, for |x + at| < 2^22: of
// a negative one as of two's complement.
template <class P>
QUOKA_INLINE P round_to(const P& x, float at = 0.0f) {
  return opaque(add(x, broadcast<P>(12582912.0f + at)));
}

// --- exponentials ----------------------------------------------------------------------------

// exp(x) for x <= 0: relative error below exp_max_error + |x| exp_error_per_x for x in [exp_least,
// 0], exactly 1 at 0, exactly 0 for x < exp_least (minus infinity too), NaN for NaN. x log2(e) goes
// into an integer n and a fraction f as they are taken, so that no x overflows. 2^n is an exponent,
// put together from bits; the product with it is exact. 2^f, f in [-1/2, 1/2], is the minimax
// polynomial of degree 6 with a constant of 1. So an unchanged maximum rescales by exactly 1,
// however often. Where the ISA has instructions for exponents, f is in [0, 1), and degree 5 is
// enough. exp_least: softmax weights below it are left out of every sum, and products of larger
// ones with values down to 2^-26 are not denormals. Those take an x86 core some 150 cycles each:
// with the weights of real models, down to 2^-125, attention took up to three times as long. To
// base e, since logits times log2(e) would overflow from 2.36e38 on. That takes 24 instructions in
// place of 23 with AVX-512, while the products of these logits take 128 and more.
//
// exp_short(x): exp(x) by a polynomial of degree 3, for weights that are rounded to 8 bits: e^0 is
// no more exact than others. Relative error: short_exponential_error (kernels/error_bounds.hpp).
inline constexpr float exp_max_error = 1.5e-7f;
inline constexpr float exp_least = -69.3f;
inline constexpr float exp_error_per_x = 0x1p-23f;

// x rounded to an integer, by adding a large number that leaves no bits for the fraction. Compilers
// allowed to reorder sums would cancel that number: opaque() keeps them from it.
template <class P>
struct Rounded {
  P shifted;   // x + magic: its low mantissa bits are the integer
  P fraction;  // x - round(x)
  QUOKA_INLINE Rounded(const P& x, const P& magic)
      : shifted(opaque(add(x, magic))), fraction(sub(x, opaque(sub(shifted, magic)))) {}
  // Rounds x * factor; the product itself is not rounded where the ISA has fused multiply-add.
  QUOKA_INLINE Rounded(const P& x, const P& factor, const P& magic)
      : shifted(opaque(fma(x, factor, magic))),
        fraction(fma(x, factor, opaque(sub(magic, shifted)))) {}
};

// The polynomial of 2^f, from the highest power of f down.
template <class P, std::size_t count>
QUOKA_INLINE P polynomial(const P& f, const float (&coefficients)[count]) {
  P y = broadcast<P>(coefficients[0]);
  unroll<int{count} - 1>(
      [&](auto i) QUOKA_INLINE_LAMBDA { y = fma(y, f, broadcast<P>(coefficients[i + 1])); });
  return y;
}

// e^x for x <= 0, by the coefficients of 2^f for f in [-1/2, 1/2], or in [0, 1).
template <class P, std::size_t centred, std::size_t unit>
QUOKA_INLINE P exponential(const P& x, const float (&centred_polynomial)[centred],
                           const float (&unit_polynomial)[unit]) {
  const P least = broadcast<P>(exp_least), factor = broadcast<P>(log2_e);
  if constexpr (has_exponents) {
    const P y = mul(x, factor);
    return scale_not_less(polynomial(fraction(y), unit_polynomial), y, mul(least, factor));
  } else {
    const Rounded<P> rounded(max(x, least), factor, broadcast<P>(12582912.0f));
    const P y = polynomial(rounded.fraction, centred_polynomial);
    return select_less(x, least, zero<P>(), mul(y, power_of_rounded_bits(rounded.shifted)));
  }
}

// Minimax of degree 6, and of 5, with the constant held at 1.
inline constexpr float exp_centred[] = {1.55946747e-4f,
                                        1.34066438e-3f,
                                        9.61769298e-3f,
                                        5.55031031e-2f,
                                        2.40226528e-1f,
                                        6.93147215e-1f,
                                        1.0f};
inline constexpr float exp_unit[] = {1.86713005e-3f, 9.01703071e-3f, 5.57999127e-2f,
                                     2.40164444e-1f, 6.93151295e-1f, 1.0f};
template <class P>
QUOKA_INLINE P exp(const P& x) {
  return exponential(x, exp_centred, exp_unit);
}
// Minimax of degree 3, constant and all.
inline constexpr float exp_short_centred[] = {5.51716691e-2f, 2.42611122e-1f, 6.93260985e-1f,
                                              9.99928074e-1f};
inline constexpr float exp_short_unit[] = {7.80245215e-2f, 2.26067156e-1f, 6.95833564e-1f,
                                           9.99925196e-1f};
template <class P>
QUOKA_INLINE P exp_short(const P& x) {
  return exponential(x, exp_short_centred, exp_short_unit);
}

// 2^x for x in [-126, 126], which is not checked: relative error below exp2_rough_max_error, for
// weights of which 2^-7 is cut off. Minimax of degree 2, constant and all.
inline constexpr float exp2_rough_max_error = 1.73e-3f;
inline constexpr float exp2_rough_centred[] = {2.38428861e-1f, 7.03448236e-1f, 1.00044322f};
inline constexpr float exp2_rough_unit[] = {3.37189317e-1f, 6.57636702e-1f, 1.00172460f};
template <class P>
QUOKA_INLINE P exp2_rough(const P& x) {
  if constexpr (has_exponents) {
    return scale(polynomial(fraction(x), exp2_rough_unit), x);
  } else {
    const Rounded<P> rounded(x, broadcast<P>(12582912.0f));
    return mul(polynomial(rounded.fraction, exp2_rough_centred),
               power_of_rounded_bits(rounded.shifted));
  }
}

// --- tanh -------------------------------------------------------------------------------------

// tanh(x): relative error below tanh_max_error unless x is denormal, odd, never beyond 1, exactly 1
// and -1 from tanh_saturated on, NaN for NaN. x P(x^2) / Q(x^2), both of degree 4, fitted to end
// slightly above 1, where min cuts it off. All coefficients are positive: nothing cancels.
// Measured: 3.2e-7 with fused multiply-add, 4.1e-7 without.
inline constexpr float tanh_saturated = 9.1f;
inline constexpr float tanh_max_error = 5e-7f;
template <class P>
QUOKA_INLINE P tanh(const P& x) {
  const P bound = broadcast<P>(tanh_saturated), one = broadcast<P>(1.0f);
  const P clamped = max(min(x, bound), sub(zero<P>(), bound));
  const P u = mul(clamped, clamped);
  P p = broadcast<P>(1.286546892e-8f);
  p = fma(p, u, broadcast<P>(2.02214568e-5f));
  p = fma(p, u, broadcast<P>(3.4708791e-3f));
  p = fma(p, u, broadcast<P>(1.335991748e-1f));
  p = fma(p, u, broadcast<P>(9.999999679e-1f));
  P q = broadcast<P>(7.565456827e-7f);
  q = fma(q, u, broadcast<P>(3.24597775e-4f));
  q = fma(q, u, broadcast<P>(2.57820025e-2f));
  q = fma(q, u, broadcast<P>(4.669322389e-1f));
  q = fma(q, u, one);
  return max(min(div(mul(clamped, p), q), one), broadcast<P>(-1.0f));
}

// --- across lanes -----------------------------------------------------------------------------

// Lane i: the sum, or the maximum, of the lanes of packet i. reduce_each(square, op) does so with
// any op(packet, packet), in an order of its own.
QUOKA_INLINE Packet sums(const Square& square) {
  return reduce_each(square, [](Packet a, Packet b) QUOKA_INLINE_LAMBDA { return add(a, b); });
}
QUOKA_INLINE Packet maxima(const Square& square) {
  return reduce_each(square, [](Packet a, Packet b) QUOKA_INLINE_LAMBDA { return max(a, b); });
}

// --- arrays of floats ------------------------------------------------------------------------

// Some elements of arrays of floats, from i on: a packet of them, or a single one.
template <class P>
struct Lanes {
  static constexpr int count = std::is_same_v<P, float> ? 1 : lanes;
  Index i;
  QUOKA_INLINE P load(const float* x) const {
    if constexpr (std::is_same_v<P, float>)
      return x[i];
    else
      return load_unaligned(x + i);
  }
  QUOKA_INLINE void store(float* x, const P& value) const {
    if constexpr (std::is_same_v<P, float>)
      x[i] = value;
    else
      store_unaligned(x + i, value);
  }
  QUOKA_INLINE static P broadcast(float x) { return simd::broadcast<P>(x); }
};

// f(Lanes) over [0, n): by packets, then one by one.
template <bool packets = (lanes > 1), class F>
QUOKA_INLINE void for_each_lanes(Index n, F&& f) {
  Index i = 0;
  if constexpr (packets)
    for (; i + lanes <= n; i += lanes) f(Lanes<Packet>{i});
  for (; i < n; ++i) f(Lanes<float>{i});
}

// for_each_lanes(), by packets only where their comparisons give masks.
template <class F>
QUOKA_INLINE void for_each_compared(Index n, F&& f) {
  for_each_lanes<has_lane_masks>(n, f);
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_PACKET_ARGUMENTS_END
