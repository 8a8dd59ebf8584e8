// NEON of AArch64: 4 floats, 32 registers, fused multiply-add, conversions of half.
#pragma once

#include <quoka/simd/isa/shared.hpp>

#include <arm_neon.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using Packet = float32x4_t;
inline constexpr int lanes = 4;
inline constexpr int registers = 32;
inline constexpr bool has_lane_masks = false;

QUOKA_INLINE Packet broadcast_packet(float x) { return vdupq_n_f32(x); }
QUOKA_INLINE Packet load_packet(const float* p) { return vld1q_f32(p); }
QUOKA_INLINE Packet load_unaligned(const float* p) { return vld1q_f32(p); }
QUOKA_INLINE void store(float* p, Packet x) { vst1q_f32(p, x); }
QUOKA_INLINE void store_unaligned(float* p, Packet x) { vst1q_f32(p, x); }

QUOKA_INLINE Packet add(Packet a, Packet b) { return vaddq_f32(a, b); }
QUOKA_INLINE Packet sub(Packet a, Packet b) { return vsubq_f32(a, b); }
QUOKA_INLINE Packet mul(Packet a, Packet b) { return vmulq_f32(a, b); }
QUOKA_INLINE Packet div(Packet a, Packet b) { return vdivq_f32(a, b); }
QUOKA_INLINE Packet fma(Packet a, Packet b, Packet c) { return vfmaq_f32(c, a, b); }
// NaN where either is NaN.
QUOKA_INLINE Packet max(Packet a, Packet b) { return vmaxq_f32(a, b); }
QUOKA_INLINE Packet min(Packet a, Packet b) { return vminq_f32(a, b); }
QUOKA_INLINE Packet select_less(Packet a, Packet b, Packet yes, Packet no) {
  return vbslq_f32(vcltq_f32(a, b), yes, no);
}
QUOKA_INLINE Packet opaque(Packet x) {
  asm("" : "+w"(x));
  return x;
}
QUOKA_INLINE Packet power_of_rounded_bits(Packet shifted) {
  const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
  return vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(0x3f800000u)));
}

// --- half and bfloat16 ------------------------------------------------------------------------

QUOKA_INLINE Packet load_half(const std::uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
QUOKA_INLINE void store_half(std::uint16_t* p, Packet x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
QUOKA_INLINE Packet load_bfloat16(const std::uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
QUOKA_INLINE void store_bfloat16(std::uint16_t* p, Packet x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1u));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fffu));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000u));
  vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}

// --- 8 bits -----------------------------------------------------------------------------------

QUOKA_INLINE uint8x8_t load_bytes(const void* p) {  // 4 of them
  std::uint32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return vreinterpret_u8_u32(vdup_n_u32(four));
}
QUOKA_INLINE Packet load_int8(const std::int8_t* p) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_bytes(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
QUOKA_INLINE uint32x4_t load_codes(const std::uint8_t* p) {
  return vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(p))));
}
QUOKA_INLINE Packet load_uint8(const std::uint8_t* p) { return vcvtq_f32_u32(load_codes(p)); }
// The steps of e4m3_to_float.
QUOKA_INLINE Packet load_e4m3(const std::uint8_t* p) {
  const uint32x4_t code = load_codes(p), magnitude = vandq_u32(code, vdupq_n_u32(0x7fu));
  const uint32x4_t sign = vshlq_n_u32(veorq_u32(code, magnitude), 24);
  const uint32x4_t normal = vaddq_u32(vshlq_n_u32(magnitude, 20), vdupq_n_u32(120u << 23));
  const uint32x4_t denormal = vreinterpretq_u32_f32(vmulq_n_f32(vcvtq_f32_u32(magnitude), 0x1p-9f));
  const uint32x4_t bits = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(8u)), denormal, normal);
  const uint32x4_t nan =
      vandq_u32(vceqq_u32(magnitude, vdupq_n_u32(0x7fu)), vdupq_n_u32(0x7fc00000u));
  return vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(sign, bits), nan));
}

// --- across lanes -----------------------------------------------------------------------------

QUOKA_INLINE float reduce_max(Packet x) { return vmaxvq_f32(x); }
// (x[0] + x[1]) + (x[2] + x[3]).
QUOKA_INLINE float reduce_add(Packet x) { return vaddvq_f32(x); }

struct Square {
  Packet packet[lanes];
};

// Pairs of lanes, as one element of 64 bits.
QUOKA_INLINE Packet lower_pairs(Packet a, Packet b) {
  return vreinterpretq_f32_u64(vtrn1q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b)));
}
QUOKA_INLINE Packet upper_pairs(Packet a, Packet b) {
  return vreinterpretq_f32_u64(vtrn2q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b)));
}

// In place. 8 shuffles.
QUOKA_INLINE void transpose(Square& square) {
  Packet(&x)[lanes] = square.packet;
  const Packet a = vtrn1q_f32(x[0], x[1]), b = vtrn2q_f32(x[0], x[1]);
  const Packet c = vtrn1q_f32(x[2], x[3]), d = vtrn2q_f32(x[2], x[3]);
  x[0] = lower_pairs(a, c), x[1] = lower_pairs(b, d);
  x[2] = upper_pairs(a, c), x[3] = upper_pairs(b, d);
}

// Pairs twice: 6 shuffles.
template <class Op>
QUOKA_INLINE Packet reduce_each(const Square& square, Op&& op) {
  const Packet(&x)[lanes] = square.packet;
  const auto pairs = [&](Packet a, Packet b) QUOKA_INLINE_LAMBDA {
    return op(Packet(vuzp1q_f32(a, b)), Packet(vuzp2q_f32(a, b)));
  };
  return pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
}

// --- pairs of bfloat16 -----------------------------------------------------------------------

QUOKA_INLINE Packet round_bfloat16(Packet x) {
  const uint32x4_t up = vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000u));
  return vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(0xffff0000u)));
}
QUOKA_INLINE Packet upper_halves(Packet a, Packet b) {
  return vreinterpretq_f32_u32(vsriq_n_u32(vreinterpretq_u32_f32(b), vreinterpretq_u32_f32(a), 16));
}
QUOKA_INLINE void store_upper_half(std::uint16_t* p, Packet x) {
  vst1_u16(p, vshrn_n_u32(vreinterpretq_u32_f32(x), 16));
}
QUOKA_INLINE Packet firsts(Packet pairs) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs), 16));
}
QUOKA_INLINE Packet seconds(Packet pairs) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xffff0000u)));
}
QUOKA_INLINE void store_zipped(float* p, Packet a, Packet b) {
  const float32x4x2_t both{{a, b}};  // with a name: vst2q_f32 may be a macro
  vst2q_f32(p, both);
}

#if QUOKA_ISA_BF16_SQUARES
// Rows 2 i and 2 i + 1 of a, 4 numbers of each, times rows 2 j and 2 j + 1 of b: four sums.
struct Bfloat16Eight {
  bfloat16x8_t x;
  QUOKA_INLINE static Bfloat16Eight load(const std::uint16_t* p) {
    return {vreinterpretq_bf16_u16(vld1q_u16(p))};
  }
};
struct Bfloat16Square {
  float32x4_t sums;  // (0, 0), (0, 1), (1, 0), (1, 1)
  QUOKA_INLINE static Bfloat16Square zero() { return {vdupq_n_f32(0.0f)}; }
  QUOKA_INLINE static Bfloat16Square load(const float* first, const float* second) {
    return {vcombine_f32(vld1_f32(first), vld1_f32(second))};
  }
  QUOKA_INLINE void store(float* first, float* second) const {
    vst1_f32(first, vget_low_f32(sums)), vst1_f32(second, vget_high_f32(sums));
  }
  QUOKA_INLINE void add(const Bfloat16Eight& a, const Bfloat16Eight& b) {
    sums = vbfmmlaq_f32(sums, a.x, b.x);
  }
};
#endif

// --- bytes and quads -------------------------------------------------------------------------

QUOKA_INLINE void store_bytes(std::uint8_t* p, Packet x) {
  const uint16x4_t words = vmovn_u32(vreinterpretq_u32_f32(x));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  __builtin_memcpy(p, &four, 4);
}
QUOKA_INLINE void store_quads(Quad* p, const Packet (&x)[4]) {
  uint32x4_t quads = vreinterpretq_u32_f32(x[0]);  // each insertion replaces the bits above
  quads = vsliq_n_u32(quads, vreinterpretq_u32_f32(x[1]), 8);
  quads = vsliq_n_u32(quads, vreinterpretq_u32_f32(x[2]), 16);
  quads = vsliq_n_u32(quads, vreinterpretq_u32_f32(x[3]), 24);
  vst1q_u32(&p->bits, quads);
}

#if QUOKA_ISA_I8MM
struct QuadSums {
  static constexpr const char* instruction = "usdot";
  int32x4_t x;
  QUOKA_INLINE static QuadSums from(std::int32_t sum) { return {vdupq_n_s32(sum)}; }
  QUOKA_INLINE static QuadSums load(const Quad* p) {
    return {vreinterpretq_s32_u32(vld1q_u32(&p->bits))};
  }
  QUOKA_INLINE static QuadSums broadcast(Quad quad) {
    return from(static_cast<std::int32_t>(quad.bits));
  }
  QUOKA_INLINE Packet to_float() const { return vcvtq_f32_s32(x); }
};
QUOKA_INLINE QuadSums fma(const QuadSums& a, const QuadSums& b, const QuadSums& sums) {
  return {vusdotq_s32(sums.x, vreinterpretq_u8_s32(b.x), vreinterpretq_s8_s32(a.x))};
}
#endif

// --- products of codes -----------------------------------------------------------------------

// With dotprod one instruction multiplies 16 signed codes and adds four products to each of four
// sums; float takes four. Without dotprod two steps are multiplied and added in 16 bits (2 * 127 *
// 127 = 32,258 fits) and then added in pairs to 32 bits. That is three instructions for 16
// products, and older cores start half as many of them per cycle as of float's. i8mm has twice the
// products of dotprod in an instruction: two keys with two queries, 8 channels each. Two steps of
// four keys make two such pairs.

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

  // key: of four keys, the other four 16 bytes on. ahead: prefetched on the way, unless it is null.
  QUOKA_INLINE void multiply(const std::uint8_t* key, const std::uint8_t* ahead,
                             const QueryCodes& queries) {
    const std::int32_t* query = queries.codes;
    const Index stride = queries.stride, steps = queries.steps;
    unroll<pairs, 4>([&](auto m, auto i) QUOKA_INLINE_LAMBDA {
      const int32x2_t pair_offset = vld1_s32(queries.offsets + 2 * m);
      x[m][i] = vcombine_s32(pair_offset, pair_offset);
    });
    Index s = 0;
    for (; s + 2 <= steps; s += 2, key += 128, query += 2 * stride) {
      if (ahead != nullptr) prefetch(ahead + s * 64), prefetch(ahead + s * 64 + 64);
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
QUOKA_INLINE void for_each_square(const KeyPair& keys, const QueryCodes& queries, Use&& use) {
  for (Index part = 0; part < 4; ++part) {
    CodeSquares<Queries> squares;
    squares.multiply(keys.codes[part / 2] + part % 2 * 32,
                     part % 2 == 0 ? keys.ahead[part / 2] : nullptr, queries);
    use(part, squares);
  }
}

template <int Queries>
[[gnu::noinline]] void code_square_dots(const KeyPair& keys, const QueryCodes& queries,
                                        std::int32_t* best) {
  for_each_square<Queries>(
      keys, queries, [&](Index part, const CodeSquares<Queries>& squares) QUOKA_INLINE_LAMBDA {
        unroll<2>([&](auto v) QUOKA_INLINE_LAMBDA {
          std::int32_t* const to = best + part * 8 + v * 4;
          int32x4_t all = vld1q_s32(to);
          unroll<Queries / 2>([&](auto m) QUOKA_INLINE_LAMBDA {
            const int32x4_t a = squares.x[m][2 * v], b = squares.x[m][2 * v + 1];
            all = vmaxq_s32(all, vpmaxq_s32(a, b));
          });
          vst1q_s32(to, all);
        });
      });
}

// See code_dots.hpp.
template <int Queries>
[[gnu::noinline]] void code_products_of(const KeyPair& keys, const QueryCodes& queries,
                                        float* products) {
  for_each_square<Queries>(
      keys, queries, [&](Index part, const CodeSquares<Queries>& squares) QUOKA_INLINE_LAMBDA {
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
[[gnu::noinline]] void code_dots_of(const KeyPair& keys, const QueryCodes& queries,
                                    std::int32_t* best) {
#if QUOKA_ISA_I8MM
  if constexpr (Queries % 4 == 0) return code_square_dots<Queries>(keys, queries, best);
#endif
  constexpr int vectors = code_steps_together == 1 ? 2 : 1;
  for (Index part = 0; part < 8; part += vectors) {
    const std::uint8_t *key = keys.codes[part / 4] + part % 4 * 16, *next = keys.ahead[part / 4];
    CodeSums dot[static_cast<std::size_t>(Queries)][vectors];
    unroll<Queries, vectors>([&](auto m, auto v)
                                 QUOKA_INLINE_LAMBDA { dot[m][v] = CodeSums::zero(); });
    const std::int32_t* query = queries.codes;
    const Index stride = queries.stride, steps = queries.steps;
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
        all = vmaxq_s32(all, vaddq_s32(dot[m][v].four(), vdupq_n_s32(queries.offsets[m])));
      });
      vst1q_s32(to, all);
    });
  }
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
