// What the compiler's flags say, decided once: which ISA, which options of it, and the tags that
// the inline namespace carries. Only predefined macros are read, and EIGEN_DONT_VECTORIZE. Flags
// that cannot work are refused here.
#pragma once

// A refusal is one sentence. The #include after it names no file: it ends the compilation, so that
// no other message follows.
#if __cplusplus < 202002L
#error "quoka needs C++20: compile with -std=c++20"
#include "stopped by the error above"
#endif

#if !defined(__GNUC__) && !defined(__clang__)
#error "quoka needs GCC or Clang: on Windows clang-cl or MinGW-w64"
#include "stopped by the error above"
#endif

#if !defined(__cpp_exceptions)
#error "quoka reports bad input by exceptions: compile without -fno-exceptions"
#include "stopped by the error above"
#endif

// NaN and infinity have a meaning here, and sums have an order.
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0)
#error "quoka needs NaN, infinity and the order of sums: compile without -ffast-math (and -Ofast)"
#include "stopped by the error above"
#endif

// 1, 2 and -1 (unknown): float is computed in a wider type. 16 concerns _Float16 only.
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16 && \
    !(defined(QUOKA_COMPILED) && __FLT_EVAL_METHOD__ == -1)
#error "quoka needs float arithmetic in float, not in x87: compile with -msse2 -mfpmath=sse"
#include "stopped by the error above"
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "quoka needs a little-endian target"
#include "stopped by the error above"
#endif

#if defined(__SIZEOF_POINTER__) && __SIZEOF_POINTER__ != 8
#error "quoka needs a 64-bit target: caches are larger than 32 bits can count"
#include "stopped by the error above"
#endif

// Not refused, for debugging wants it, but said once in each unit. No warning: -Werror lets it pass. Units that use the
// compiled library leave the work to it.
#if !defined(__OPTIMIZE__) && (!defined(QUOKA_COMPILED) || defined(QUOKA_COMPILING)) && \
    !defined(QUOKA_ALLOW_UNOPTIMIZED)
#pragma message( \
    "quoka is compiled without optimisation and will be very slow: give -O2 (CMake: a build type), or -DQUOKA_ALLOW_UNOPTIMIZED if this is meant")
#endif

// --- the ISA ----------------------------------------------------------------------------------

// What the compiler may emit, the level of its flags. Loops in plain C++ use it too. The AVX-512
// level has all that Skylake's servers have; Knights Landing falls to AVX2.
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define QUOKA_ISA_LEVEL _avx512
#elif defined(__AVX2__)
#define QUOKA_ISA_LEVEL _avx2
#elif defined(__AVX__)
#define QUOKA_ISA_LEVEL _avx
#elif defined(__SSE4_1__)
#define QUOKA_ISA_LEVEL _sse4
#elif defined(__SSE2__)
#define QUOKA_ISA_LEVEL _sse2
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define QUOKA_ISA_LEVEL _neon
#else
#define QUOKA_ISA_LEVEL
#endif

// The one of simd/isa/ that is used: exactly one of these is 1. EIGEN_DONT_VECTORIZE selects plain
// float, as it does for Eigen.
#define QUOKA_ISA_AVX512 0
#define QUOKA_ISA_AVX2 0
#define QUOKA_ISA_SSE 0
#define QUOKA_ISA_NEON 0
#define QUOKA_ISA_PLAIN 0
#if defined(EIGEN_DONT_VECTORIZE)
#undef QUOKA_ISA_PLAIN
#define QUOKA_ISA_PLAIN 1
#elif defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__)
#undef QUOKA_ISA_AVX512
#define QUOKA_ISA_AVX512 1
#elif defined(__AVX2__)
#undef QUOKA_ISA_AVX2
#define QUOKA_ISA_AVX2 1
#elif defined(__SSE2__)
#undef QUOKA_ISA_SSE
#define QUOKA_ISA_SSE 1
#elif defined(__aarch64__) && defined(__ARM_NEON)
#undef QUOKA_ISA_NEON
#define QUOKA_ISA_NEON 1
#else
#undef QUOKA_ISA_PLAIN
#define QUOKA_ISA_PLAIN 1
#endif

// a * b + c, rounded once.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF) || QUOKA_ISA_AVX512
#define QUOKA_ISA_FMA 1
#define QUOKA_ABI_FMA _fma
#else
#define QUOKA_ISA_FMA 0
#define QUOKA_ABI_FMA
#endif

// Conversions of half, for single floats and below AVX-512. Plain code has its own.
#if defined(__F16C__) && !QUOKA_ISA_PLAIN
#define QUOKA_ISA_F16C 1
#define QUOKA_ABI_HALF _f16c
#else
#define QUOKA_ISA_F16C 0
#define QUOKA_ABI_HALF
#endif

// Dot products of small integers, for packets of this ISA's width.
#if (QUOKA_ISA_AVX512 && defined(__AVX512VNNI__)) || (QUOKA_ISA_AVX2 && defined(__AVXVNNI__))
#define QUOKA_ISA_VNNI 1
#define QUOKA_ABI_DOT _vnni
#else
#define QUOKA_ISA_VNNI 0
#if defined(__ARM_FEATURE_DOTPROD)
#define QUOKA_ABI_DOT _dot
#else
#define QUOKA_ABI_DOT
#endif
#endif
#if QUOKA_ISA_NEON && defined(__ARM_FEATURE_DOTPROD)
#define QUOKA_ISA_DOTPROD 1
#else
#define QUOKA_ISA_DOTPROD 0
#endif

// Products of bfloat16, for packets of this ISA's width.
#if QUOKA_ISA_AVX512 && defined(__AVX512BF16__)
#define QUOKA_ISA_BF16_DOTS 1
#define QUOKA_ABI_BF16 _bf16
#else
#define QUOKA_ISA_BF16_DOTS 0
#if QUOKA_ISA_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUOKA_ABI_BF16 _bf16
#else
#define QUOKA_ABI_BF16
#endif
#endif
#if QUOKA_ISA_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUOKA_ISA_BF16_SQUARES 1
#else
#define QUOKA_ISA_BF16_SQUARES 0
#endif

// Products of small matrices: AMX with both of its kinds, Arm's of 8-bit integers. Tests may have others in AMX's
// place (simd/isa/tiles.hpp).
#if defined(QUOKA_EMULATED_TILES)
#define QUOKA_ISA_AMX 0
#define QUOKA_ISA_I8MM 0
#define QUOKA_ABI_MATRIX _emulated_tiles
#elif QUOKA_ISA_AVX512 &&                                                                   \
    ((defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)) || /* GCC */ \
     (defined(__AMXTILE__) && defined(__AMXBF16__) && defined(__AMXINT8__)))      /* Clang 14 */
#define QUOKA_ISA_AMX 1
#define QUOKA_ISA_I8MM 0
#define QUOKA_ABI_MATRIX _amx
#elif QUOKA_ISA_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
#define QUOKA_ISA_AMX 0
#define QUOKA_ISA_I8MM 1
#define QUOKA_ABI_MATRIX _i8mm
#else
#define QUOKA_ISA_AMX 0
#define QUOKA_ISA_I8MM 0
#define QUOKA_ABI_MATRIX
#endif

// SSE4.1 has a blend; FMA and F16C come with AVX.
#if defined(__SSE4_1__) && QUOKA_ISA_SSE
#define QUOKA_ISA_SSE4 1
#else
#define QUOKA_ISA_SSE4 0
#endif

// --- the tags ---------------------------------------------------------------------------------

#if QUOKA_ISA_PLAIN
#define QUOKA_ABI_SIMD _scalar
#else
#define QUOKA_ABI_SIMD QUOKA_ISA_LEVEL
#endif

// What compilers may put into plain loops besides: the level below plain float, and later
// extensions that some CPUs of a level lack.
#if defined(__AVX512VBMI__) || defined(__AVX512VPOPCNTDQ__) || defined(__AVX512BITALG__)
#define QUOKA_ABI_LATER _vbmi
#elif defined(__ARM_FEATURE_SVE)
#define QUOKA_ABI_LATER _sve
#else
#define QUOKA_ABI_LATER
#endif
#if QUOKA_ISA_PLAIN
#define QUOKA_ABI_LOOPS QUOKA_ISA_LEVEL
#else
#define QUOKA_ABI_LOOPS
#endif

// --- the compiler -----------------------------------------------------------------------------

// Inlined at every optimisation level: packets stay in registers.
#define QUOKA_INLINE inline __attribute__((always_inline))
#define QUOKA_INLINE_LAMBDA __attribute__((always_inline))

// Around code of packets. GCC remarks that a packet loses its alignment attribute as a template
// argument; it keeps its size and alignment all the same.
#define QUOKA_PACKET_ARGUMENTS_BEGIN \
  _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wignored-attributes\"")
#define QUOKA_PACKET_ARGUMENTS_END _Pragma("GCC diagnostic pop")

// Around code with intrinsics. GCC 12 takes the undefined operands inside AVX-512 intrinsics, and
// without optimisation the masks in their macros, for mistakes of their caller.
#if defined(__clang__)
#define QUOKA_INTRINSICS_BEGIN QUOKA_PACKET_ARGUMENTS_BEGIN
#else
#define QUOKA_INTRINSICS_BEGIN                                    \
  QUOKA_PACKET_ARGUMENTS_BEGIN                                    \
  _Pragma("GCC diagnostic ignored \"-Wuninitialized\"")           \
      _Pragma("GCC diagnostic ignored \"-Wmaybe-uninitialized\"") \
          _Pragma("GCC diagnostic ignored \"-Wsign-conversion\"")
#endif
#define QUOKA_INTRINSICS_END QUOKA_PACKET_ARGUMENTS_END

// What a thread that waits in a loop says to its core.
#if defined(__SSE2__) && defined(__GNUC__)
#define QUOKA_SPIN_HINT() __builtin_ia32_pause()
#elif defined(__aarch64__) && defined(__GNUC__)
#define QUOKA_SPIN_HINT() __asm__ volatile("yield")
#else
#define QUOKA_SPIN_HINT() static_cast<void>(0)
#endif
