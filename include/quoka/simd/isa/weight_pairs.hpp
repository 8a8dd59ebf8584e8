// Two positive floats in 32 bits, the upper half of each: half the memory where three digits are enough.
#pragma once

#include <quoka/simd/simd.hpp>

#include <bit>
#include <cstdint>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// The largest relative error of a weight that is read back: the first of a pair is truncated, the second
// has the first in place of its lower half.
inline constexpr float weight_pair_max_error = 0x1p-7f;

// `lanes` pairs to packet-aligned memory.
QUOKA_INLINE void store_weight_pairs(std::uint32_t* p, const Packet& first, const Packet& second) {
#if QUOKA_ISA_AVX512
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  _mm512_store_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(second)));
#elif QUOKA_ISA_AVX2
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
  _mm256_store_si256(reinterpret_cast<__m256i*>(p),
                     _mm256_blend_epi16(low, _mm256_castps_si256(second), 0xaa));
#else
  alignas(64) float a[lanes], b[lanes];
  store(a, first), store(b, second);
  for (int i = 0; i < lanes; ++i)
    p[i] = (std::bit_cast<std::uint32_t>(a[i]) >> 16) |
           (std::bit_cast<std::uint32_t>(b[i]) & 0xffff0000u);
#endif
}

QUOKA_INLINE Packet first_weights(const std::uint32_t* p) {
#if QUOKA_ISA_AVX512
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(p), 16));
#elif QUOKA_ISA_AVX2
  const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
#else
  alignas(64) float x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = std::bit_cast<float>(p[i] << 16);
  return load(x);
#endif
}

QUOKA_INLINE Packet second_weights(const std::uint32_t* p) {
#if QUOKA_ISA_AVX512
  return _mm512_castsi512_ps(_mm512_load_si512(p));
#elif QUOKA_ISA_AVX2
  return _mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
#else
  alignas(64) float x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = std::bit_cast<float>(p[i]);
  return load(x);
#endif
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
