// Dot products of 8-bit codes: blocks of 16 keys against some queries, exact in 32-bit integers.
//
//   dot[m][i] = offset[m] + sum over channels of key[i][c] * query[m][c]
//
// of which the maximum, or the sum, over the queries is kept: their codes have one scale, so that
// integers compare as scores do. Keys are unsigned (code + 128, which offset[m] = -128 * sum of
// query[m] takes back), in blocks [channels / 4][16 keys][4 channels], which is what the
// dot-product instructions take: 64 products per instruction with AVX-512 VNNI. Elsewhere plain
// integer loops give the same numbers; int8_dot_is_fast says which it is.
#pragma once

#include <quoka/core/simd.hpp>

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace quoka::inline QUOKA_ABI {
namespace detail {

inline constexpr Index code_block = 16;    // keys side by side
inline constexpr Index code_channels = 4;  // channels of one key side by side

// How the dot products with several queries become one number per key.
enum class CodeScores { max, sum };

// Two blocks of keys against Queries of the `stride` queries that lie side by side in `queries`:
// best[0, 16) of keys[0], best[16, 32) of keys[1] take the dot products in. All of keys and best
// aligned to 64 bytes. Two blocks share each broadcast query: with one, loads and not products were
// the limit. Asks for the blocks that follow at `later`, if any. Not inlined: GCC 12 keeps the
// accumulators in registers only so.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
inline constexpr bool int8_dot_is_fast = true;

template <int Queries, CodeScores Over>
[[gnu::noinline]] void int8_dots(const std::uint8_t* const (&keys)[2], const std::int32_t* queries,
                                 Index stride, Index steps, const std::int32_t* offset,
                                 std::int32_t* best, const std::uint8_t* later) {
  __m512i dot[Queries][2];
  simd::unroll<Queries>(
      [&](auto m) QUOKA_INLINE_LAMBDA { dot[m][0] = dot[m][1] = _mm512_set1_epi32(offset[m]); });
  // With few queries memory is the limit, and its prefetcher follows one block, not two in turns.
  constexpr int together = Queries < 4 ? 1 : 2;
  simd::unroll<2 / together>([&](auto turn) QUOKA_INLINE_LAMBDA {
    const std::int32_t* query = queries;
    for (Index s = 0; s < steps; ++s, query += stride) {
      if (together == 2 && later != nullptr) {
        simd::prefetch(later + 2 * s * code_block * code_channels);
        simd::prefetch(later + (2 * s + 1) * code_block * code_channels);
      }
      __m512i block[together];
      simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
        block[i] = _mm512_load_si512(keys[turn + i] + s * code_block * code_channels);
      });
      simd::unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
        const __m512i x = _mm512_set1_epi32(query[m]);
        simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
          dot[m][turn + i] = _mm512_dpbusd_epi32(dot[m][turn + i], block[i], x);
        });
      });
    }
  });
  simd::unroll<2>([&](auto half) QUOKA_INLINE_LAMBDA {
    __m512i all = _mm512_load_si512(best + half * code_block);
    simd::unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
      all = Over == CodeScores::max ? _mm512_max_epi32(all, dot[m][half])
                                    : _mm512_add_epi32(all, dot[m][half]);
    });
    _mm512_store_si512(best + half * code_block, all);
  });
}
#else
inline constexpr bool int8_dot_is_fast = false;

template <int Queries, CodeScores Over>
void int8_dots(const std::uint8_t* const (&keys)[2], const std::int32_t* queries, Index stride,
               Index steps, const std::int32_t* offset, std::int32_t* best, const std::uint8_t*) {
  for (const std::uint8_t* block : keys) {
    std::int32_t dot[Queries][code_block];
    for (int m = 0; m < Queries; ++m) std::fill_n(dot[m], code_block, offset[m]);
    for (Index s = 0; s < steps; ++s) {
      const std::uint8_t* const key = block + s * code_block * code_channels;
      for (int m = 0; m < Queries; ++m) {
        std::int8_t query[code_channels];
        std::memcpy(query, queries + s * stride + m, sizeof query);
        for (Index i = 0; i < code_block; ++i)
          for (Index c = 0; c < code_channels; ++c)
            dot[m][i] += static_cast<std::int32_t>(key[i * code_channels + c]) * query[c];
      }
    }
    for (int m = 0; m < Queries; ++m)
      for (Index i = 0; i < code_block; ++i)
        best[i] = Over == CodeScores::max ? std::max(best[i], dot[m][i]) : best[i] + dot[m][i];
    best += code_block;
  }
}
#endif

// All `rows` queries, in tiles of 8, 4 and 1.
template <CodeScores Over>
void int8_dots(const std::uint8_t* const (&keys)[2], const std::int32_t* queries, Index rows,
               Index steps, const std::int32_t* offset, std::int32_t* best,
               const std::uint8_t* later) {
  Index m = 0;
  const auto tile = [&](auto height) {
    int8_dots<height, Over>(keys, queries + m, rows, steps, offset + m, best,
                            m == 0 ? later : nullptr);
    m += height;
  };
  while (m + 8 <= rows) tile(std::integral_constant<int, 8>{});
  while (m + 4 <= rows) tile(std::integral_constant<int, 4>{});
  while (m < rows) tile(std::integral_constant<int, 1>{});
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
