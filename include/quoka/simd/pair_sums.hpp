// The vector unit's 16-bit dot products. Where a Packet holds `lanes` floats, PairSums hold `lanes`
// 32-bit sums, and fma() adds two products of 16-bit integers to each of them: twice the arithmetic
// per instruction. The calls are those of simd.hpp, so that one tile of registers serves both.
// store_pairs() rounds two packets to pairs.
#pragma once

#include <quoka/simd/isa/dots.hpp>

#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// Sums of products of pairs, in 32-bit integers: `lanes` of them, exact as long as the last one
// fits, because what overflows before wraps around. In plain C++, for tests and for machines
// without the instructions; calls, not inlined: compilers would spend minutes on unrolled tiles of
// these.
struct PlainPairSums {
  std::uint32_t x[lanes];

  QUOKA_INLINE static PlainPairSums zero() { return {}; }
  QUOKA_INLINE static PlainPairSums broadcast(Int16Pair pair) {
    PlainPairSums all;
    for (std::uint32_t& x : all.x) x = pair.bits;
    return all;
  }
  QUOKA_INLINE static PlainPairSums load(const Int16Pair* p) {
    PlainPairSums pairs;
    for (int i = 0; i < lanes; ++i) pairs.x[i] = p[i].bits;
    return pairs;
  }
  QUOKA_INLINE Packet to_float() const {
    alignas(64) float wide[lanes];
    for (int i = 0; i < lanes; ++i) wide[i] = static_cast<float>(static_cast<std::int32_t>(x[i]));
    return simd::load(wide);
  }
};
[[gnu::noinline]] inline PlainPairSums fma(const PlainPairSums& a, const PlainPairSums& b,
                                           const PlainPairSums& sums) {
  const auto low = [](std::uint32_t bits) {
    return std::int32_t{static_cast<std::int16_t>(static_cast<std::uint16_t>(bits))};
  };
  PlainPairSums result;
  for (int i = 0; i < lanes; ++i)
    result.x[i] = sums.x[i] + static_cast<std::uint32_t>(low(a.x[i]) * low(b.x[i])) +
                  static_cast<std::uint32_t>(low(a.x[i] >> 16) * low(b.x[i] >> 16));
  return result;
}

using PairSums = std::conditional_t<has_pair_sums, VnniPairSums, PlainPairSums>;

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
