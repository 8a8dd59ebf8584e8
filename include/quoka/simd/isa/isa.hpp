// The vector unit that the compiler's flags allow. Each of these files defines the same names; the
// flags are read in abi.hpp.
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

// Exponents of floats by one instruction.
//
//   fraction(x)                   x - floor(x); 0 for an infinity
//   scale(y, x)                   y * 2^floor(x)
//   scale_not_less(y, x, least)   y * 2^floor(x), 0 where x < least: no denormal is made on the way
//
// Used if the core also has AMX: there both are as fast as a sum (measured on Emerald Rapids),
// which is not so on every core with AVX-512.
QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

#if QUOKA_ISA_AMX
inline constexpr bool has_exponents = true;
QUOKA_INLINE Packet fraction(Packet x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
QUOKA_INLINE Packet scale(Packet y, Packet x) { return _mm512_scalef_ps(y, x); }
QUOKA_INLINE Packet scale_not_less(Packet y, Packet x, Packet least) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y, x);
}
QUOKA_INLINE float fraction(float x) {
  const __m128 at = _mm_set_ss(x);
  return _mm_cvtss_f32(_mm_reduce_ss(at, at, _MM_FROUND_TO_NEG_INF));
}
QUOKA_INLINE float scale(float y, float x) {
  return _mm_cvtss_f32(_mm_scalef_ss(_mm_set_ss(y), _mm_set_ss(x)));
}
QUOKA_INLINE float scale_not_less(float y, float x, float least) {
  return x < least ? 0.0f : scale(y, x);
}
#else
inline constexpr bool has_exponents = false;
#endif

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
