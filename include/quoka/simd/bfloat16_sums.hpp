// Sums of products of bfloat16 pairs, under the calls of simd.hpp, so that one tile of registers
// serves them as it serves floats: the ISA's own (DotBfloat16Sums, AVX512_BF16), and the same in plain
// C++ for tests and for machines without.
#pragma once

#include <quoka/simd/isa/bfloat16.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

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

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
