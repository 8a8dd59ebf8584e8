// Dot products of 8-bit codes for AVX2 and AVX-512, with and without VNNI: code_dots.hpp.
//
// With VNNI one instruction multiplies 32 or 64 codes. Without, code_run steps are multiplied and
// added in 16 bits, then widened: 5 instructions for 2 steps, 2.5 for each vector of codes. One
// step at a time takes 3, four take 2.25. Measured on a Cascade Lake at head_dim 128, in 10^9
// products per second: 256 bits 51 (1 step), 67 (2), 68 (4), with signs moved from keys to queries
// (vpsignb) in place of the bias 42, float's peak 43; 512 bits 82, 105, 115. Products with several
// queries at once take 0.62 of the time that they take one query at a time (256 bits; Sapphire
// Rapids), with 512 bits 0.69.
#pragma once

#include <quoka/simd/isa/shared.hpp>

#include <immintrin.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// --- one vector of codes: 32 or 64 bytes -------------------------------------------------------

#if QUOKA_ISA_AVX512
using CodeVector = __m512i;
QUOKA_INLINE CodeVector load_code_vector(const void* p) { return _mm512_load_si512(p); }
QUOKA_INLINE void store_code_vector(void* p, CodeVector x) { _mm512_store_si512(p, x); }
QUOKA_INLINE CodeVector broadcast_int32(std::int32_t x) { return _mm512_set1_epi32(x); }
QUOKA_INLINE CodeVector max_int32(CodeVector a, CodeVector b) { return _mm512_max_epi32(a, b); }
QUOKA_INLINE Packet to_floats(CodeVector x) { return _mm512_cvtepi32_ps(x); }
#else
using CodeVector = __m256i;
QUOKA_INLINE CodeVector load_code_vector(const void* p) {
  return _mm256_load_si256(static_cast<const __m256i*>(p));
}
QUOKA_INLINE void store_code_vector(void* p, CodeVector x) {
  _mm256_store_si256(static_cast<__m256i*>(p), x);
}
QUOKA_INLINE CodeVector broadcast_int32(std::int32_t x) { return _mm256_set1_epi32(x); }
QUOKA_INLINE CodeVector max_int32(CodeVector a, CodeVector b) { return _mm256_max_epi32(a, b); }
QUOKA_INLINE Packet to_floats(CodeVector x) { return _mm256_cvtepi32_ps(x); }
#endif

// dot + the products of unsigned codes and a query's signed ones in Steps steps, at most
// code_steps_together. Four codes of the query lie at `query`, those of the next step `stride` on.
#if QUOKA_ISA_VNNI
inline constexpr int code_steps_together = 1;
template <int Steps>
QUOKA_INLINE CodeVector add_products(CodeVector dot, const CodeVector (&u)[Steps],
                                     const std::int32_t* query, Index) {
  static_assert(Steps == 1);
#if !QUOKA_ISA_AVX512
  return _mm256_dpbusd_avx_epi32(dot, u[0], broadcast_int32(*query));
#elif defined(__clang__)
  return _mm512_dpbusd_epi32(dot, u[0], broadcast_int32(*query));
#else
  // The instruction broadcasts. Assembler: GCC 12 copies the sums around the intrinsic.
  asm("vpdpbusd\t%2%{1to16%}, %1, %0" : "+v"(dot) : "v"(u[0]), "m"(*query));
  return dot;
#endif
}
#else
inline constexpr int code_steps_together = code_run;
template <int Steps>
QUOKA_INLINE CodeVector add_products(CodeVector dot, const CodeVector (&u)[Steps],
                                     const std::int32_t* query, Index stride) {
  const auto products = [&](int i) QUOKA_INLINE_LAMBDA {
#if QUOKA_ISA_AVX512
    return _mm512_maddubs_epi16(u[i], broadcast_int32(query[i * stride]));
#else
    return _mm256_maddubs_epi16(u[i], broadcast_int32(query[i * stride]));
#endif
  };
  CodeVector sum = products(0);
#if QUOKA_ISA_AVX512
  for (int i = 1; i < Steps; ++i) sum = _mm512_add_epi16(sum, products(i));
  return _mm512_add_epi32(dot, _mm512_madd_epi16(sum, _mm512_set1_epi16(1)));
#else
  for (int i = 1; i < Steps; ++i) sum = _mm256_add_epi16(sum, products(i));
  return _mm256_add_epi32(dot, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
#endif
}
#endif

// --- blocks of keys ----------------------------------------------------------------------------

inline constexpr int code_parts = 64 / sizeof(CodeVector);  // vectors of a block's step
// VNNI of 512 bits reads a query from memory for each product, up to 24 queries for a block.
inline constexpr bool code_queries_in_memory = QUOKA_ISA_AVX512 && QUOKA_ISA_VNNI;
// Blocks whose vectors share each broadcast query: both, or one of which the halves do. A query
// alone takes one block after the other: memory is the limit, and its prefetcher follows one block.
// So do queries in memory: with two blocks side by side, and 12 queries, 16 took a fifth longer on
// a Sapphire Rapids.
template <int Queries>
inline constexpr int code_blocks_together =
    code_parts == 1 && Queries >= 4 && !code_queries_in_memory ? 2 : 1;

// dot[m] of some blocks at `keys` with Queries of the queries. Prefetches the blocks `ahead`,
// unless null.
template <int Queries, int Blocks>
QUOKA_INLINE void code_sums(const std::uint8_t* const* keys, const std::uint8_t* const* ahead,
                            const QueryCodes& queries,
                            CodeVector (&dot)[static_cast<std::size_t>(Queries)]
                                             [static_cast<std::size_t>(Blocks * code_parts)]) {
  constexpr int vectors = Blocks * code_parts;
  unroll<Queries, vectors>(
      [&](auto m, auto v) QUOKA_INLINE_LAMBDA { dot[m][v] = broadcast_int32(queries.offsets[m]); });
  const std::int32_t* query = queries.codes;
  const Index stride = queries.stride, steps = queries.steps;
  Index s = 0;
  const auto run = [&](auto length) QUOKA_INLINE_LAMBDA {
    constexpr int count = decltype(length)::value;
    CodeVector key[vectors][static_cast<std::size_t>(count)];
    unroll<vectors, count>([&](auto v, auto i) QUOKA_INLINE_LAMBDA {
      key[v][i] = load_code_vector(keys[v / code_parts] + (s + i) * 64 +
                                   v % code_parts * Index{sizeof(CodeVector)});
    });
    if (ahead[0] != nullptr)
      unroll<Blocks, count>([&](auto block, auto i)
                                QUOKA_INLINE_LAMBDA { prefetch(ahead[block] + (s + i) * 64); });
    unroll<Queries, vectors>([&](auto m, auto v) QUOKA_INLINE_LAMBDA {
      dot[m][v] = add_products<count>(dot[m][v], key[v], query + m, stride);
    });
    s += count, query += count * stride;
  };
  while (s + code_steps_together <= steps) run(Constant<code_steps_together>{});
  while (s < steps) run(Constant<1>{});
}

// See code_dots.hpp. Not inlined: GCC 12 keeps the accumulators in registers only so.
template <int Queries>
[[gnu::noinline]] void code_dots_of(const KeyPair& keys, const QueryCodes& queries,
                                    std::int32_t* best) {
  constexpr int blocks = code_blocks_together<Queries>, vectors = blocks * code_parts;
  static constexpr const std::uint8_t* none[2] = {};
  const std::uint8_t* const* const ahead =
      Queries >= 4 || code_queries_in_memory ? keys.ahead : none;
  unroll<2 / blocks>([&](auto turn) QUOKA_INLINE_LAMBDA {
    CodeVector dot[static_cast<std::size_t>(Queries)][vectors];
    code_sums<Queries, blocks>(keys.codes + turn, ahead + turn, queries, dot);
    unroll<vectors>([&](auto v) QUOKA_INLINE_LAMBDA {
      std::int32_t* const to = best + (turn * vectors + v) * lanes;
      CodeVector all = load_code_vector(to);
      unroll<Queries>([&](auto m) QUOKA_INLINE_LAMBDA { all = max_int32(all, dot[m][v]); });
      store_code_vector(to, all);
    });
  });
}

// See code_dots.hpp.
template <int Queries>
[[gnu::noinline]] void code_products_of(const KeyPair& keys, const QueryCodes& queries,
                                        float* products) {
  constexpr int blocks = code_blocks_together<Queries>, vectors = blocks * code_parts;
  unroll<2 / blocks>([&](auto turn) QUOKA_INLINE_LAMBDA {
    CodeVector dot[static_cast<std::size_t>(Queries)][vectors];
    code_sums<Queries, blocks>(keys.codes + turn, keys.ahead + turn, queries, dot);
    unroll<Queries, vectors>([&](auto m, auto v) QUOKA_INLINE_LAMBDA {
      store(products + m * 2 * code_block + (turn * vectors + v) * lanes, to_floats(dot[m][v]));
    });
  });
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
