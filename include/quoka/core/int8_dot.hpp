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
// the limit. Not inlined: GCC 12 keeps the accumulators in registers only so.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
inline constexpr bool int8_dot_is_fast = true;

template <int Queries, CodeScores Over>
[[gnu::noinline]] void int8_dots(const std::uint8_t* const (&keys)[2], const std::int32_t* queries,
                                 Index stride, Index steps, const std::int32_t* offset,
                                 std::int32_t* best) {
  __m512i dot[Queries][2];
  simd::unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
    dot[m][0] = dot[m][1] = _mm512_set1_epi32(offset[m]);
  });
  const std::uint8_t *a = keys[0], *b = keys[1];
  for (Index s = 0; s < steps; ++s, queries += stride) {
    const __m512i of_a = _mm512_load_si512(a + s * code_block * code_channels);
    const __m512i of_b = _mm512_load_si512(b + s * code_block * code_channels);
    simd::unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
      const __m512i query = _mm512_set1_epi32(queries[m]);
      dot[m][0] = _mm512_dpbusd_epi32(dot[m][0], of_a, query);
      dot[m][1] = _mm512_dpbusd_epi32(dot[m][1], of_b, query);
    });
  }
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
               Index steps, const std::int32_t* offset, std::int32_t* best) {
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
               Index steps, const std::int32_t* offset, std::int32_t* best) {
  Index m = 0;
  for (; m + 8 <= rows; m += 8)
    int8_dots<8, Over>(keys, queries + m, rows, steps, offset + m, best);
  for (; m + 4 <= rows; m += 4)
    int8_dots<4, Over>(keys, queries + m, rows, steps, offset + m, best);
  for (; m < rows; ++m) int8_dots<1, Over>(keys, queries + m, rows, steps, offset + m, best);
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
