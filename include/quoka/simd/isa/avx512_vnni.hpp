// AVX-512 VNNI: sums of products of 16-bit pairs, and dot products of blocks of 8-bit codes.
#pragma once

#include <quoka/simd/isa/dots.hpp>

#include <immintrin.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

struct VnniPairSums {
  __m512i x;
  QUOKA_INLINE static VnniPairSums zero() { return {_mm512_setzero_si512()}; }
  QUOKA_INLINE static VnniPairSums broadcast(Int16Pair pair) {
    return {_mm512_set1_epi32(static_cast<int>(pair.bits))};
  }
  QUOKA_INLINE static VnniPairSums load(const Int16Pair* p) { return {_mm512_load_si512(p)}; }
  QUOKA_INLINE Packet to_float() const { return _mm512_cvtepi32_ps(x); }
};
// GCC 12 spills all sums of a tile around the intrinsics, hence the assembler.
QUOKA_INLINE VnniPairSums fma(const VnniPairSums& a, const VnniPairSums& b,
                              const VnniPairSums& sums) {
#if defined(__clang__)
  return {_mm512_dpwssd_epi32(sums.x, a.x, b.x)};
#else
  __m512i x = sums.x;
  asm("vpdpwssd\t%2, %1, %0" : "+v"(x) : "v"(a.x), "v"(b.x));
  return {x};
#endif
}

// See code_dots.hpp. 64 products per instruction. Two blocks share each broadcast query: with one,
// loads and not products were the limit. Not inlined: GCC 12 keeps the accumulators in registers
// only so.
template <int Queries, CodeScores Over>
[[gnu::noinline]] void code_dots_of(const std::uint8_t* const (&keys)[2],
                                    const std::int32_t* queries, Index stride, Index steps,
                                    const std::int32_t* offset, std::int32_t* best,
                                    const std::uint8_t* later) {
  __m512i dot[static_cast<std::size_t>(Queries)][2];
  unroll<Queries>(
      [&](auto m) QUOKA_INLINE_LAMBDA { dot[m][0] = dot[m][1] = _mm512_set1_epi32(offset[m]); });
  // With few queries memory is the limit, and its prefetcher follows one block, not two in turns.
  constexpr int together = Queries < 4 ? 1 : 2;
  unroll<2 / together>([&](auto turn) QUOKA_INLINE_LAMBDA {
    const std::int32_t* query = queries;
    for (Index s = 0; s < steps; ++s, query += stride) {
      if (together == 2 && later != nullptr) {
        prefetch(later + 2 * s * code_block * code_channels);
        prefetch(later + (2 * s + 1) * code_block * code_channels);
      }
      __m512i block[static_cast<std::size_t>(together)];
      unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
        block[i] = _mm512_load_si512(keys[turn + i] + s * code_block * code_channels);
      });
      unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
        const __m512i x = _mm512_set1_epi32(query[m]);
        unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
          dot[m][turn + i] = _mm512_dpbusd_epi32(dot[m][turn + i], block[i], x);
        });
      });
    }
  });
  unroll<2>([&](auto half) QUOKA_INLINE_LAMBDA {
    __m512i all = _mm512_load_si512(best + half * code_block);
    unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
      all = Over == CodeScores::max ? _mm512_max_epi32(all, dot[m][half])
                                    : _mm512_add_epi32(all, dot[m][half]);
    });
    _mm512_store_si512(best + half * code_block, all);
  });
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
