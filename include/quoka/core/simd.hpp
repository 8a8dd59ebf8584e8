// The vector unit, seen through Eigen's packets: the only file that names Eigen's packet functions.
//
// A Packet holds `lanes` floats: 16 with AVX-512, 8 with AVX, 4 with SSE and NEON, and it is plain
// float (lanes == 1) where Eigen does not vectorize; every kernel is written once against this
// file. exp2 is ours: for the range softmax uses, exactly 1 at 0, exactly 0 where the result would
// be denormal. Sums of 16-bit products are in pair_sums.hpp.
#pragma once

#include <quoka/core/types.hpp>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

// GCC remarks that a packet loses its alignment attribute as a template argument; it keeps its size
// and alignment all the same. Eigen silences this inside its own headers.
#define QUOKA_PACKET_ARGUMENTS_BEGIN \
  _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wignored-attributes\"")
#define QUOKA_PACKET_ARGUMENTS_END _Pragma("GCC diagnostic pop")

#define QUOKA_INLINE EIGEN_ALWAYS_INLINE
#define QUOKA_INLINE_LAMBDA __attribute__((always_inline))

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace quoka::inline QUOKA_ABI {
namespace simd {

namespace ei = Eigen::internal;

using Packet = ei::packet_traits<float>::type;
inline constexpr int lanes = ei::unpacket_traits<Packet>::size;
inline constexpr int registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS;
inline constexpr float infinity = std::numeric_limits<float>::infinity();

// f(0), f(1), ..., f(Count - 1) with constant arguments: unrolled at every optimisation level, so
// that arrays of packets indexed by it live in registers.
template <int Count, class F>
QUOKA_INLINE void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) QUOKA_INLINE_LAMBDA {
    (f(std::integral_constant<int, i>{}), ...);
  }
  (std::make_integer_sequence<int, Count>{});
}

// f(i, j) for all i < Rows, j < Columns.
template <int Rows, int Columns, class F>
QUOKA_INLINE void unroll(F&& f) {
  unroll<Rows>([&](auto i) QUOKA_INLINE_LAMBDA {
    unroll<Columns>([&](auto j) QUOKA_INLINE_LAMBDA { f(i, j); });
  });
}

// The arithmetic below works on packets and on plain float alike.
template <class P = Packet>
QUOKA_INLINE P broadcast(float x) {
  return ei::pset1<P>(x);
}
template <class P = Packet>
QUOKA_INLINE P zero() {
  return broadcast<P>(0.0f);
}
template <class P>
QUOKA_INLINE P add(const P& a, const P& b) {
  return ei::padd(a, b);
}
template <class P>
QUOKA_INLINE P sub(const P& a, const P& b) {
  return ei::psub(a, b);
}
template <class P>
QUOKA_INLINE P mul(const P& a, const P& b) {
  return ei::pmul(a, b);
}
template <class P>
QUOKA_INLINE P div(const P& a, const P& b) {
  return ei::pdiv(a, b);
}
// a * b + c, rounded once where the ISA can: said so, lest a compiler decide it place by place.
template <class P>
QUOKA_INLINE P fma(const P& a, const P& b, const P& c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF)
  if constexpr (std::is_same_v<P, float>) return std::fma(a, b, c);
#endif
  return ei::pmadd(a, b, c);
}
// As std::max: a where either is NaN, except on ISAs whose maximum propagates NaN.
template <class P>
QUOKA_INLINE P max(const P& a, const P& b) {
  return ei::pmax(a, b);
}
template <class P>
QUOKA_INLINE P min(const P& a, const P& b) {
  return ei::pmin(a, b);
}
template <class P>
QUOKA_INLINE P sqrt(const P& x) {
  return ei::psqrt(x);
}
// Lane by lane: a < b ? yes : no. A NaN compares false.
template <class P>
QUOKA_INLINE P select_less(const P& a, const P& b, const P& yes, const P& no) {
  return ei::pselect(ei::pcmp_lt(a, b), yes, no);
}
// Where lanes fit into a mask register, comparisons also come as bits, and packets can be written
// without the lanes that a mask lacks; kernels that cannot use this walk float by float.
#if defined(EIGEN_VECTORIZE_AVX512)
inline constexpr bool has_lane_masks = true;
// Bit i: a < b, or its negation, in lane i.
QUOKA_INLINE unsigned less(const Packet& a, const Packet& b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
QUOKA_INLINE unsigned not_less(const Packet& a, const Packet& b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ);
}
// The lanes of `mask` side by side; writes `lanes` elements, returns how many of them count.
QUOKA_INLINE int store_compressed(float* p, unsigned mask, const Packet& x) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), x));
  return std::popcount(mask);
}
#else
inline constexpr bool has_lane_masks = false;
#endif
QUOKA_INLINE unsigned less(float a, float b) { return a < b ? 1u : 0u; }
QUOKA_INLINE unsigned not_less(float a, float b) { return a < b ? 0u : 1u; }
QUOKA_INLINE int store_compressed(float* p, unsigned mask, float x) {
  *p = x;
  return static_cast<int>(mask);
}
// The same of the integers first, first + 1, ..., for a mask of Lanes bits.
template <int Lanes>
QUOKA_INLINE int store_compressed(std::int32_t* p, unsigned mask, std::int32_t first) {
#if defined(EIGEN_VECTORIZE_AVX512)
  if constexpr (Lanes == lanes) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i x = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x));
    return std::popcount(mask);
  }
#endif
  *p = first;
  return static_cast<int>(mask);
}

// NaN stays NaN: Eigen's rational approximation clamps it away where it vectorizes.
template <class P>
QUOKA_INLINE P tanh(const P& x) {
  return ei::pselect(ei::pcmp_eq(x, x), ei::ptanh(x), x);
}

template <class P = Packet>
QUOKA_INLINE P load(const float* p) {  // packet-aligned
  return ei::pload<P>(p);
}
QUOKA_INLINE Packet load_unaligned(const float* p) { return ei::ploadu<Packet>(p); }
QUOKA_INLINE void store(float* p, const Packet& x) { ei::pstore(p, x); }
QUOKA_INLINE void store_unaligned(float* p, const Packet& x) { ei::pstoreu(p, x); }
QUOKA_INLINE float reduce_max(const Packet& x) { return ei::predux_max(x); }
QUOKA_INLINE float reduce_add(const Packet& x) { return ei::predux(x); }
// Asks for a cache line, into L2. Not Eigen's: GCC takes that function for one without effect and
// drops the calls.
QUOKA_INLINE void prefetch(const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 2);
#else
  ei::prefetch(static_cast<const float*>(p));
#endif
}

// --- exp2 -------------------------------------------------------------------------------------

// exp2(x) for x <= 0: relative error below exp2_max_error for x in [exp2_least, 0], exactly 1 at 0,
// exactly 0 for x < exp2_least (minus infinity too), NaN for NaN. 2^round(x) goes straight into the
// exponent; 2^f, f in [-1/2, 1/2], is the minimax polynomial of degree 6 with its constant held at
// 1, so that an unchanged maximum rescales by exactly 1 however often it is applied.
inline constexpr float exp2_least = -125.0f;
inline constexpr float exp2_max_error = 1.5e-7f;

// 2^round(x), from `shifted` = x + 1.5 * 2^23, whose low mantissa bits are round(x).
template <class P>
QUOKA_INLINE P power_of_rounded_bits(const P& shifted) {
  if constexpr (std::is_same_v<P, float>) {
    return std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000u);
  } else {
    using Integers = typename ei::unpacket_traits<P>::integer_packet;
    const Integers exponent = ei::plogical_shift_left<23>(ei::preinterpret<Integers>(shifted));
    return ei::preinterpret<P>(ei::padd(exponent, ei::pset1<Integers>(0x3f800000)));
  }
}

template <class P>
QUOKA_INLINE P exp2(const P& x) {
  const P magic = broadcast<P>(12582912.0f);
  const P clamped = max(x, broadcast<P>(exp2_least));
  const P shifted = add(clamped, magic);
  const P f = sub(clamped, sub(shifted, magic));
  P y = broadcast<P>(1.55946747e-4f);
  y = fma(y, f, broadcast<P>(1.34066438e-3f));
  y = fma(y, f, broadcast<P>(9.61769298e-3f));
  y = fma(y, f, broadcast<P>(5.55031031e-2f));
  y = fma(y, f, broadcast<P>(2.40226528e-1f));
  y = fma(y, f, broadcast<P>(6.93147215e-1f));
  const P scale = power_of_rounded_bits(shifted);
  return select_less(x, broadcast<P>(exp2_least), zero<P>(), fma(mul(y, f), scale, scale));
}

// 2^(x + bits) for x <= 0, to be rounded to an integer: relative error below exp2_scaled_max_error,
// exactly 2^bits at 0, below 1/4 for x < -bits - 2 (minus infinity too), NaN for NaN. As exp2(),
// with a polynomial of degree 4 and nothing to select at the end.
inline constexpr float exp2_scaled_max_error = 3e-6f;
template <int bits, class P>
QUOKA_INLINE P exp2_scaled(const P& x) {
  const P magic = broadcast<P>(12582912.0f + static_cast<float>(bits));
  const P clamped = max(x, broadcast<P>(-static_cast<float>(bits) - 4.0f));
  const P shifted = add(clamped, magic);
  const P f = sub(clamped, sub(shifted, magic));
  P y = broadcast<P>(9.58538239e-3f);
  y = fma(y, f, broadcast<P>(5.59066283e-2f));
  y = fma(y, f, broadcast<P>(2.40240382e-1f));
  y = fma(y, f, broadcast<P>(6.93124184e-1f));
  const P scale = power_of_rounded_bits(shifted);
  return fma(mul(y, f), scale, scale);
}

// --- storage to float and back ----------------------------------------------------------------

// `lanes` stored elements from unaligned memory, widened to float.
QUOKA_INLINE Packet load_as_float(const float* p) { return load_unaligned(p); }

template <class T>
QUOKA_INLINE Packet load_as_float(const T* p) {
  if constexpr (lanes == 1) {
    return Packet(static_cast<float>(*p));
#if defined(EIGEN_VECTORIZE_AVX512)
  } else if constexpr (std::is_same_v<T, Eigen::half>) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  } else if constexpr (std::is_same_v<T, Eigen::bfloat16>) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(EIGEN_VECTORIZE_AVX2) && defined(__F16C__)
  } else if constexpr (std::is_same_v<T, Eigen::half>) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else if constexpr (std::is_same_v<T, Eigen::bfloat16>) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#endif
  } else {
    alignas(64) float widened[lanes];
    for (int i = 0; i < lanes; ++i) widened[i] = static_cast<float>(p[i]);
    return load(widened);
  }
}

// `lanes` floats rounded to nearest even into unaligned storage.
QUOKA_INLINE void store_from_float(float* p, const Packet& x) { store_unaligned(p, x); }

template <class T>
QUOKA_INLINE void store_from_float(T* p, const Packet& x) {
#if defined(EIGEN_VECTORIZE_AVX512)
  if constexpr (std::is_same_v<T, Eigen::half>) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#elif defined(EIGEN_VECTORIZE_AVX2) && defined(__F16C__)
  if constexpr (std::is_same_v<T, Eigen::half>) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#endif
  alignas(64) float wide[lanes];
  store(wide, x);
  for (int i = 0; i < lanes; ++i) p[i] = static_cast<T>(wide[i]);
}

// --- across lanes -----------------------------------------------------------------------------

// A square of `lanes` packets, transposed in place.
using Square = ei::PacketBlock<Packet, lanes>;
QUOKA_INLINE void transpose(Square& square) { ei::ptranspose(square); }

// Lane i: the lanes of packet i, combined by op(packet, packet), which may take them in any order.
template <class Op>
QUOKA_INLINE Packet reduce_each(const Square& square, Op&& op) {
#if defined(EIGEN_VECTORIZE_AVX512)
  // Halves of two packets side by side, quarters of four, then pairs twice: 30 shuffles, where a
  // transposition takes 64 and more.
  Packet half[8], quarter[4], pair[2];
  unroll<8>([&](auto i) QUOKA_INLINE_LAMBDA {
    const Packet &a = square.packet[i % 4 + i / 4 * 8], &b = square.packet[i % 4 + i / 4 * 8 + 4];
    half[i] =
        op(Packet(_mm512_shuffle_f32x4(a, b, 0x44)), Packet(_mm512_shuffle_f32x4(a, b, 0xee)));
  });
  unroll<4>([&](auto i) QUOKA_INLINE_LAMBDA {
    quarter[i] = op(Packet(_mm512_shuffle_f32x4(half[i], half[i + 4], 0x88)),
                    Packet(_mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd)));
  });
  const auto pairs = [&](const Packet& a, const Packet& b) QUOKA_INLINE_LAMBDA {
    return op(Packet(_mm512_shuffle_ps(a, b, 0x88)), Packet(_mm512_shuffle_ps(a, b, 0xdd)));
  };
  unroll<2>([&](auto i)
                QUOKA_INLINE_LAMBDA { pair[i] = pairs(quarter[2 * i], quarter[2 * i + 1]); });
  return pairs(pair[0], pair[1]);
#else
  Square columns = square;
  transpose(columns);
  Packet all = columns.packet[0];
  for (int i = 1; i < lanes; ++i) all = op(all, columns.packet[i]);
  return all;
#endif
}
QUOKA_INLINE Packet sums(const Square& square) {
  return reduce_each(
      square, [](const Packet& a, const Packet& b) QUOKA_INLINE_LAMBDA { return add(a, b); });
}
QUOKA_INLINE Packet maxima(const Square& square) {
  return reduce_each(
      square, [](const Packet& a, const Packet& b) QUOKA_INLINE_LAMBDA { return max(a, b); });
}

}  // namespace simd
}  // namespace quoka::inline QUOKA_ABI
QUOKA_PACKET_ARGUMENTS_END
