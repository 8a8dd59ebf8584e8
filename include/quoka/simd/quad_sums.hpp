// Sums of products of four 8-bit integers, under the calls of simd.hpp, so that one tile of registers serves them as it
// serves floats: `lanes` sums of 32 bits, of a signed quad that is broadcast and unsigned ones side by side. QuadSums
// uses an instruction, which multiplies four times as much as one in float; PlainQuadSums is the same in plain C++, for
// tests and for machines without such an instruction.
//
//   round_to(x, at)          integers of x in the low bytes: floats whose bits hold at + x, rounded
//   store_bytes(p, x)        the low bytes of a packet
//   store_quads(p, x)        those of four packets side by side, one quad for each lane
//   sums_and_differences<n>(x)  lane i + lane i + n, and in i + n their difference, for n of 4 and 8 below `lanes`
#pragma once

#include <quoka/simd/isa/quads.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// Calls, not inlined: compilers would spend minutes on unrolled tiles of these.
struct PlainQuadSums {
  static constexpr const char* instruction = "none";
  std::uint32_t x[lanes];

  // The same in every lane: where sums begin.
  QUOKA_INLINE static PlainQuadSums from(std::int32_t sum) {
    PlainQuadSums all;
    for (std::uint32_t& x : all.x) x = static_cast<std::uint32_t>(sum);
    return all;
  }
  QUOKA_INLINE static PlainQuadSums broadcast(Quad quad) {
    PlainQuadSums all;
    for (std::uint32_t& x : all.x) x = quad.bits;
    return all;
  }
  QUOKA_INLINE static PlainQuadSums load(const Quad* p) {
    PlainQuadSums quads;
    for (int i = 0; i < lanes; ++i) quads.x[i] = p[i].bits;
    return quads;
  }
  QUOKA_INLINE Packet to_float() const {
    alignas(64) float each[lanes];
    for (int i = 0; i < lanes; ++i) each[i] = static_cast<float>(static_cast<std::int32_t>(x[i]));
    return simd::load(each);
  }
};
// a signed, b unsigned.
[[gnu::noinline]] inline PlainQuadSums fma(const PlainQuadSums& a, const PlainQuadSums& b,
                                           const PlainQuadSums& sums) {
  PlainQuadSums result;
  for (int i = 0; i < lanes; ++i) {
    std::int32_t sum = 0;
    for (int bit = 0; bit < 32; bit += 8)
      sum += std::int32_t{static_cast<std::int8_t>(static_cast<std::uint8_t>(a.x[i] >> bit))} *
             std::int32_t{static_cast<std::uint8_t>(b.x[i] >> bit)};
    result.x[i] = sums.x[i] + static_cast<std::uint32_t>(sum);
  }
  return result;
}

using QuadSums = std::conditional_t<has_quad_sums, NativeQuadSums, PlainQuadSums>;

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
