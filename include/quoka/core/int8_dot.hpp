// Dot products of 8-bit codes: 16 keys at a time against some queries, exact in 32-bit integers.
//
//   acc[m][i] = sum over channels of (key[i][c] - 128) * query[m][c]
//
// Keys are unsigned (code + 128), in blocks [channels / 4][16 keys][4 channels], which is what the
// dot-product instructions take: 64 products per instruction with AVX-512 VNNI. Elsewhere plain
// integer loops give the same numbers; int8_dot_is_fast says which it is.
#pragma once

#include <quoka/core/simd.hpp>

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace quoka::inline QUOKA_ABI {
namespace detail {

inline constexpr Index code_block = 16;    // keys side by side
inline constexpr Index code_channels = 4;  // channels of one key side by side

// How scores of several queries become one per key.
enum class CodeScores { max, sum };

// best[i] takes, over m < Queries, scales[m] * (offset[m] + the dot product of key i + 128 with
// query m): its maximum, or its sum added. `stride` queries lie side by side in `queries`. best and
// keys are aligned to 64 bytes. Not inlined: GCC 12 keeps the accumulators in registers only so.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
inline constexpr bool int8_dot_is_fast = true;

template <int Queries, CodeScores Over>
[[gnu::noinline]] void int8_scores(const std::uint8_t* keys, const std::int32_t* queries,
                                   Index stride, Index steps, const std::int32_t* offset,
                                   const float* scales, float* best) {
  __m512i sum[Queries];
  simd::unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA { sum[m] = _mm512_set1_epi32(offset[m]); });
  for (Index s = 0; s < steps; ++s, keys += code_block * code_channels, queries += stride) {
    const __m512i block = _mm512_load_si512(keys);
    simd::unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
      sum[m] = _mm512_dpbusd_epi32(sum[m], block, _mm512_set1_epi32(queries[m]));
    });
  }
  __m512 all = _mm512_load_ps(best);
  simd::unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
    const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[m]), _mm512_set1_ps(scales[m]));
    all = Over == CodeScores::max ? _mm512_max_ps(all, x) : _mm512_add_ps(all, x);
  });
  _mm512_store_ps(best, all);
}
#else
inline constexpr bool int8_dot_is_fast = false;

template <int Queries, CodeScores Over>
[[gnu::noinline]] void int8_scores(const std::uint8_t* keys, const std::int32_t* queries,
                                   Index stride, Index steps, const std::int32_t* offset,
                                   const float* scales, float* best) {
  std::int32_t sum[Queries][code_block];
  for (int m = 0; m < Queries; ++m)
    for (Index i = 0; i < code_block; ++i) sum[m][i] = offset[m];
  for (Index s = 0; s < steps; ++s, keys += code_block * code_channels, queries += stride) {
    for (int m = 0; m < Queries; ++m) {
      std::int8_t q[code_channels];
      std::memcpy(q, queries + m, sizeof q);
      for (Index i = 0; i < code_block; ++i)
        for (Index c = 0; c < code_channels; ++c)
          sum[m][i] += static_cast<std::int32_t>(keys[i * code_channels + c]) * q[c];
    }
  }
  for (int m = 0; m < Queries; ++m) {
    for (Index i = 0; i < code_block; ++i) {
      const float x = static_cast<float>(sum[m][i]) * scales[m];
      best[i] = Over == CodeScores::max ? (best[i] > x ? best[i] : x) : best[i] + x;
    }
  }
}
#endif

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
