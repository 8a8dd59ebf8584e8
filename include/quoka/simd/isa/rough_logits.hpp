// Logits of 16 bits, for a look at many keys that only proposes some of them.
//
//   x = 2^7 (y + 127), rounded, of a logit y in units of log2
//
// The bits of x are those of a bfloat16 between 2^y and 1.0615 * 2^y: 2^e (1 + f) stands for 2^(e + f). So
// a row's sum needs no exponential, and its shares are compared as differences of integers.
#pragma once

#include <quoka/simd/isa/dots.hpp>

#include <algorithm>
#include <cmath>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

inline constexpr bool has_rough_logits = QUOKA_ISA_AVX512;

inline constexpr float rough_logit_scale = 128.0f, rough_logit_zero = 127.0f;
// A difference to the logarithm of the row's sum is off by at most this, in units of log2: of the sum,
// log2(1.0615) = 0.087; of three roundings 1/256 each.
inline constexpr float rough_logit_error = 0.1f;

#if QUOKA_ISA_AVX512
// Of the 32 keys of two blocks with one row: to, and the sum of the bfloat16s to total. logit = product *
// units[key] * unit + shift, at most 127 - rounding; a smaller one than `least` is raised to that. Partial:
// a key whose unit is negative counts for nothing.
template <bool Partial, class Product>
QUOKA_INLINE void store_rough_logits(const Product* products, const float* units, float unit,
                                     float shift, float least, std::uint32_t* to, Packet& total) {
  const float magic = 12582912.0f;
  const __m512 scale = _mm512_set1_ps(unit * rough_logit_scale);
  const __m512 start =
      _mm512_set1_ps(magic + __builtin_nearbyintf((shift + rough_logit_zero) * rough_logit_scale));
  const __m512 floor = _mm512_set1_ps(magic + (least + rough_logit_zero) * rough_logit_scale);
  __m512i x[2];
  unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
    const __m512 of_key = _mm512_load_ps(units + i * code_block);
    const __m512 product = _mm512_mul_ps(load_dots(products + i * code_block), of_key);
    const __m512 logit = _mm512_fmadd_ps(product, scale, start);
    x[i] = _mm512_castps_si512(_mm512_max_ps(logit, floor));
    if constexpr (Partial) {
      const __mmask16 some = _mm512_cmp_ps_mask(of_key, _mm512_setzero_ps(), _CMP_NLT_UQ);
      x[i] = _mm512_maskz_mov_epi32(some, x[i]);
    }
  });
  const __m512i high = _mm512_slli_epi32(x[1], 16);
  // Low halves side by side: high | (x[0] & 0xffff).
  const __m512i both = _mm512_ternarylogic_epi32(high, x[0], _mm512_set1_epi32(0xffff), 0xf8);
  _mm512_store_si512(to, both);
  const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  total = _mm512_add_ps(total, _mm512_add_ps(low, _mm512_castsi512_ps(high)));
}

// best[32] = the largest of rows' logits[row][32 keys] - sums[row], in the units of x.
QUOKA_INLINE void best_rough_logits(const std::uint32_t* logits, const std::int16_t* sums,
                                    Index rows, float* best) {
  __m512i most = _mm512_set1_epi16(-32768);
  for (Index m = 0; m < rows; ++m) {
    const __m512i x =
        _mm512_sub_epi16(_mm512_load_si512(logits + m * code_block), _mm512_set1_epi16(sums[m]));
    most = _mm512_max_epi16(most, x);
  }
  const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(most, 16), 16);
  _mm512_store_ps(best, _mm512_cvtepi32_ps(low));
  _mm512_store_ps(best + code_block, _mm512_cvtepi32_ps(_mm512_srai_epi32(most, 16)));
}
#else
template <bool Partial, class Product>
void store_rough_logits(const Product*, const float*, float, float, float, std::uint32_t*, Packet&);
void best_rough_logits(const std::uint32_t*, const std::int16_t*, Index, float*);
#endif

// What the logits of a row are compared with: the logarithm of the sum of its weights.
inline std::int16_t rough_logit_of_sum(float sum) {
  const float x = (std::log2(sum) + rough_logit_zero) * rough_logit_scale;
  return static_cast<std::int16_t>(std::clamp(__builtin_nearbyintf(x), 0.0f, 32767.0f));
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
