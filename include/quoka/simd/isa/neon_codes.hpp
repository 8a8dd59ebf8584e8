// Dot products of 8-bit codes for NEON: code_dots.hpp.
//
// With dotprod one instruction multiplies 16 signed codes and adds four products to each of four
// sums; float takes four. Without dotprod two steps are multiplied and added in 16 bits (2 * 127 *
// 127 = 32,258 fits) and then added in pairs to 32 bits. That is three instructions for 16
// products, and older cores start half as many of them per cycle as of float's. i8mm has twice the
// products of dotprod in an instruction: two keys with two queries, 8 channels each. Two steps of
// four keys make two such pairs.
#pragma once

#include <quoka/simd/isa/dots.hpp>

#include <arm_neon.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// 16 codes as they are stored, without their bias.
QUOKA_INLINE int8x16_t load_signed_codes(const std::uint8_t* p) {
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)));
}
// Four bytes, again and again.
QUOKA_INLINE int8x16_t broadcast_channels(const void* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

// Sums of the products of four keys, or queries, of four channels each. A step is one vector of
// either; four() of the sums is four numbers.
#if QUOKA_ISA_DOTPROD
inline constexpr int code_steps_together = 1;
struct CodeSums {
  int32x4_t x;
  QUOKA_INLINE static CodeSums zero() { return {vdupq_n_s32(0)}; }
  QUOKA_INLINE void add(const int8x16_t (&a)[1], const int8x16_t (&b)[1]) {
    x = vdotq_s32(x, a[0], b[0]);
  }
  QUOKA_INLINE int32x4_t four() const { return x; }
};
#else
inline constexpr int code_steps_together = 2;
struct CodeSums {
  int32x4_t low, high;  // of two keys each, in two parts
  QUOKA_INLINE static CodeSums zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  template <int Steps>
  QUOKA_INLINE void add(const int8x16_t (&a)[Steps], const int8x16_t (&b)[Steps]) {
    int16x8_t first = vmull_s8(vget_low_s8(a[0]), vget_low_s8(b[0])),
              second = vmull_high_s8(a[0], b[0]);
    if constexpr (Steps > 1) {
      first = vmlal_s8(first, vget_low_s8(a[1]), vget_low_s8(b[1]));
      second = vmlal_high_s8(second, a[1], b[1]);
    }
    low = vpadalq_s16(low, first);
    high = vpadalq_s16(high, second);
  }
  QUOKA_INLINE int32x4_t four() const { return vpaddq_s32(low, high); }
};
#endif

// --- blocks of keys ----------------------------------------------------------------------------

#if QUOKA_ISA_I8MM
// Sums of the products of 8 keys with Queries, an even number: squares[pair of queries][pair of
// keys] has the first key with both queries, then the second one.
template <int Queries>
struct CodeSquares {
  static constexpr int pairs = Queries / 2, turn = Queries < 4 ? 1 : 2;  // pairs of a load
  int32x4_t x[static_cast<std::size_t>(pairs)][4];

  // key: of four keys, the other four 16 bytes on. later: prefetched on the way, unless it is null.
  QUOKA_INLINE void multiply(const std::uint8_t* key, const std::int32_t* query, Index stride,
                             Index steps, const std::int32_t* offset, const std::uint8_t* later) {
    unroll<pairs, 4>([&](auto m, auto i) QUOKA_INLINE_LAMBDA {
      const int32x2_t pair_offset = vld1_s32(offset + 2 * m);
      x[m][i] = vcombine_s32(pair_offset, pair_offset);
    });
    Index s = 0;
    for (; s + 2 <= steps; s += 2, key += 128, query += 2 * stride) {
      if (later != nullptr) prefetch(later + s * 64), prefetch(later + s * 64 + 64);
      add(
          key, query, [&](auto* p, Index second) QUOKA_INLINE_LAMBDA { return p + second; },
          stride);
    }
    if (s == steps) return;
    // The step without a second one: products with zeros.
    alignas(16) std::int32_t last[2 * static_cast<std::size_t>(Queries)] = {};
    __builtin_memcpy(last, query, sizeof last / 2);
    add(
        key, last, [&](auto* p, Index) QUOKA_INLINE_LAMBDA { return p; }, Queries);
  }

 private:
  template <class Next>
  QUOKA_INLINE void add(const std::uint8_t* key, const std::int32_t* query, Next&& next,
                        Index stride) {
    int8x16_t keys[4];
    unroll<2>([&](auto v) QUOKA_INLINE_LAMBDA {
      const int32x4_t first = vreinterpretq_s32_s8(load_signed_codes(key + v * 16)),
                      second = vreinterpretq_s32_s8(load_signed_codes(next(key, 64) + v * 16));
      keys[2 * v] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      keys[2 * v + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
    });
    unroll<pairs / turn>([&](auto m) QUOKA_INLINE_LAMBDA {
      const int32x4_t first = load_queries(query + m * 4),
                      second = load_queries(query + stride + m * 4);
      unroll<turn>([&](auto half) QUOKA_INLINE_LAMBDA {
        const int8x16_t both =
            vreinterpretq_s8_s32(half == 0 ? vzip1q_s32(first, second) : vzip2q_s32(first, second));
        unroll<4>([&](auto i) QUOKA_INLINE_LAMBDA {
          x[m * turn + half][i] = vmmlaq_s32(x[m * turn + half][i], keys[i], both);
        });
      });
    });
  }
  QUOKA_INLINE static int32x4_t load_queries(const std::int32_t* p) {
    if constexpr (Queries < 4)
      return vcombine_s32(vld1_s32(p), vdup_n_s32(0));
    else
      return vld1q_s32(p);
  }
};

// use(part, squares) of the 8 keys from 8 * part on, of two blocks.
template <int Queries, class Use>
QUOKA_INLINE void for_each_square(const std::uint8_t* const (&keys)[2], const std::int32_t* queries,
                                  Index stride, Index steps, const std::int32_t* offset,
                                  const LaterBlocks& later, Use&& use) {
  const std::uint8_t* const upcoming[2] = {later.first, later.second};
  for (Index part = 0; part < 4; ++part) {
    CodeSquares<Queries> squares;
    squares.multiply(keys[part / 2] + part % 2 * 32, queries, stride, steps, offset,
                     part % 2 == 0 ? upcoming[part / 2] : nullptr);
    use(part, squares);
  }
}

template <int Queries>
[[gnu::noinline]] void code_square_dots(CodeScores over, const std::uint8_t* const (&keys)[2],
                                        const std::int32_t* queries, Index stride, Index steps,
                                        const std::int32_t* offset, std::int32_t* best,
                                        const LaterBlocks& later) {
  for_each_square<Queries>(
      keys, queries, stride, steps, offset, later,
      [&](Index part, const CodeSquares<Queries>& squares) QUOKA_INLINE_LAMBDA {
        unroll<2>([&](auto v) QUOKA_INLINE_LAMBDA {
          std::int32_t* const to = best + part * 8 + v * 4;
          int32x4_t all = vld1q_s32(to);
          unroll<Queries / 2>([&](auto m) QUOKA_INLINE_LAMBDA {
            const int32x4_t a = squares.x[m][2 * v], b = squares.x[m][2 * v + 1];
            all = over == CodeScores::max ? vmaxq_s32(all, vpmaxq_s32(a, b))
                                          : vaddq_s32(all, vpaddq_s32(a, b));
          });
          vst1q_s32(to, all);
        });
      });
}

// See code_dots.hpp.
template <int Queries>
[[gnu::noinline]] void code_products_of(const std::uint8_t* const (&keys)[2],
                                        const std::int32_t* queries, Index stride, Index steps,
                                        const std::int32_t* offset, float* products,
                                        const LaterBlocks& later) {
  for_each_square<Queries>(
      keys, queries, stride, steps, offset, later,
      [&](Index part, const CodeSquares<Queries>& squares) QUOKA_INLINE_LAMBDA {
        unroll<Queries / 2, 2>([&](auto m, auto v) QUOKA_INLINE_LAMBDA {
          const int32x4_t a = squares.x[m][2 * v], b = squares.x[m][2 * v + 1];
          float* const to = products + 2 * m * 2 * code_block + part * 8 + v * 4;
          vst1q_f32(to, vcvtq_f32_s32(vuzp1q_s32(a, b)));
          vst1q_f32(to + 2 * code_block, vcvtq_f32_s32(vuzp2q_s32(a, b)));
        });
      });
}
#endif

// See code_dots.hpp. Two vectors of a block's four at a time share each broadcast query.
template <int Queries>
[[gnu::noinline]] void code_dots_of(CodeScores over, const std::uint8_t* const (&keys)[2],
                                    const std::int32_t* queries, Index stride, Index steps,
                                    const std::int32_t* offset, std::int32_t* best,
                                    const LaterBlocks& later) {
#if QUOKA_ISA_I8MM
  if constexpr (Queries % 4 == 0)
    return code_square_dots<Queries>(over, keys, queries, stride, steps, offset, best, later);
#endif
  constexpr int vectors = code_steps_together == 1 ? 2 : 1;
  const std::uint8_t* const upcoming[2] = {later.first, later.second};
  for (Index part = 0; part < 8; part += vectors) {
    const std::uint8_t *key = keys[part / 4] + part % 4 * 16, *next = upcoming[part / 4];
    CodeSums dot[static_cast<std::size_t>(Queries)][vectors];
    unroll<Queries, vectors>([&](auto m, auto v)
                                 QUOKA_INLINE_LAMBDA { dot[m][v] = CodeSums::zero(); });
    const std::int32_t* query = queries;
    Index s = 0;
    const auto run = [&](auto length) QUOKA_INLINE_LAMBDA {
      constexpr int count = decltype(length)::value;
      int8x16_t block[vectors][static_cast<std::size_t>(count)];
      unroll<vectors, count>([&](auto v, auto i) QUOKA_INLINE_LAMBDA {
        block[v][i] = load_signed_codes(key + i * 64 + v * 16);
      });
      if (part % 4 == 0 && next != nullptr)
        unroll<count>([&](auto i) QUOKA_INLINE_LAMBDA { prefetch(next + (s + i) * 64); });
      unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
        int8x16_t x[static_cast<std::size_t>(count)];
        unroll<count>(
            [&](auto i) QUOKA_INLINE_LAMBDA { x[i] = broadcast_channels(query + i * stride + m); });
        unroll<vectors>([&](auto v) QUOKA_INLINE_LAMBDA { dot[m][v].add(block[v], x); });
      });
      s += count, query += count * stride, key += count * 64;
    };
    while (s + code_steps_together <= steps) run(Constant<code_steps_together>{});
    while (s < steps) run(Constant<1>{});
    unroll<vectors>([&](auto v) QUOKA_INLINE_LAMBDA {
      std::int32_t* const to = best + (part + v) * 4;
      int32x4_t all = vld1q_s32(to);
      unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA {
        const int32x4_t x = vaddq_s32(dot[m][v].four(), vdupq_n_s32(offset[m]));
        all = over == CodeScores::max ? vmaxq_s32(all, x) : vaddq_s32(all, x);
      });
      vst1q_s32(to, all);
    });
  }
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
