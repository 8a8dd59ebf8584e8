// A product and a sum as bfloat16's instructions compute them: denormals are zeros before and after,
// rounded once.
#pragma once

#include <quoka/simd/isa/shared.hpp>

// For instructions in plain C++, which take most of the time of tests that are compiled with -O1.
#if defined(__GNUC__) && !defined(__clang__)
#define QUOKA_TEST_VECTORIZED [[gnu::optimize("O3")]]
#else
#define QUOKA_TEST_VECTORIZED
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

QUOKA_INLINE float flushed(float x) {
  return (bits_of(x) & 0x7f800000u) == 0 ? float_of(bits_of(x) & 0x80000000u) : x;
}
QUOKA_INLINE float flushed_fma(float a, float b, float c) {
  return flushed(__builtin_fmaf(flushed(a), flushed(b), flushed(c)));
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
