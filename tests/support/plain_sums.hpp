// The sums of products of bfloat16 and of 8-bit integers (simd/isa/isa.hpp) in plain C++: what the
// instructions are compared with, and what runs where there are none.
#pragma once

#include <quoka/simd/simd.hpp>

#include "flushed_fma.hpp"

#include <cstdint>
#include <type_traits>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

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
    return load_packet(each);
  }
};
// The second of each pair, then the first.
QUOKA_TEST_VECTORIZED [[gnu::noinline]] inline PlainBfloat16Sums fma(
    const PlainBfloat16Sums& a, const PlainBfloat16Sums& b, const PlainBfloat16Sums& sums) {
  PlainBfloat16Sums result;
  for (int i = 0; i < lanes; ++i) {
    const std::uint32_t x = bits_of(a.x[i]), y = bits_of(b.x[i]);
    const float second =
        flushed_fma(float_of(x & 0xffff0000u), float_of(y & 0xffff0000u), sums.x[i]);
    result.x[i] = flushed_fma(float_of(x << 16), float_of(y << 16), second);
  }
  return result;
}

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
    return load_packet(each);
  }
};
// a signed, b unsigned.
QUOKA_TEST_VECTORIZED [[gnu::noinline]] inline PlainQuadSums fma(const PlainQuadSums& a,
                                                                 const PlainQuadSums& b,
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

// The ISA's own, or else those.
using OwnQuadSums = std::conditional_t<has_quad_sums, QuadSums, PlainQuadSums>;

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_PACKET_ARGUMENTS_END
