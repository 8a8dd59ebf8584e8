// The compiler's flags, read once: the ISA, its options, and the tags that
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

// Not refused, because debugging needs it, but said once in each unit. It is not a warning: -Werror
// allows it. Units that use the compiled library leave the work to it.
#if !defined(__OPTIMIZE__) && (!defined(QUOKA_COMPILED) || defined(QUOKA_COMPILING)) && \
    !defined(QUOKA_ALLOW_UNOPTIMIZED)
#pragma message(                                                                      \
    "quoka is compiled without optimisation and will be very slow: give -O2 (CMake: " \
    "a build type), or -DQUOKA_ALLOW_UNOPTIMIZED if this is meant")
#endif

// --- the ISA ----------------------------------------------------------------------------------

// The ISA level that the compiler may emit. Loops in plain C++ use it too. The AVX-512
// level has all that Skylake's servers have; Knights Landing falls to AVX2.
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define QUOKA_ISA_LEVEL 5
#define QUOKA_TAG_LEVEL _avx512
#elif defined(__AVX2__)
#define QUOKA_ISA_LEVEL 4
#define QUOKA_TAG_LEVEL _avx2
#elif defined(__AVX__)
#define QUOKA_ISA_LEVEL 3
#define QUOKA_TAG_LEVEL _avx
#elif defined(__SSE4_1__)
#define QUOKA_ISA_LEVEL 2
#define QUOKA_TAG_LEVEL _sse4
#elif defined(__SSE2__)
#define QUOKA_ISA_LEVEL 1
#define QUOKA_TAG_LEVEL _sse2
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define QUOKA_ISA_LEVEL 6
#define QUOKA_TAG_LEVEL _neon
#else
#define QUOKA_ISA_LEVEL 0
#define QUOKA_TAG_LEVEL
#endif

// The one of simd/isa/ that is used: exactly one of these holds. EIGEN_DONT_VECTORIZE selects plain
// float, as it does for Eigen.
#if defined(EIGEN_DONT_VECTORIZE) || QUOKA_ISA_LEVEL == 0
#define QUOKA_ISA_PLAIN 1
#else
#define QUOKA_ISA_PLAIN 0
#endif
#define QUOKA_ISA_AVX512 (!QUOKA_ISA_PLAIN && QUOKA_ISA_LEVEL == 5)
#define QUOKA_ISA_AVX2 (!QUOKA_ISA_PLAIN && QUOKA_ISA_LEVEL == 4)
#define QUOKA_ISA_SSE (!QUOKA_ISA_PLAIN && QUOKA_ISA_LEVEL <= 3)
#define QUOKA_ISA_NEON (!QUOKA_ISA_PLAIN && QUOKA_ISA_LEVEL == 6)

// SSE4.1 has a blend; FMA and F16C come with AVX.
#define QUOKA_ISA_SSE4 (QUOKA_ISA_SSE && QUOKA_ISA_LEVEL >= 2)

// a * b + c, rounded once.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF) || QUOKA_ISA_AVX512
#define QUOKA_ISA_FMA 1
#else
#define QUOKA_ISA_FMA 0
#endif

// Conversions of half, for single floats and below AVX-512. Plain code has its own.
#if defined(__F16C__) && !QUOKA_ISA_PLAIN
#define QUOKA_ISA_F16C 1
#else
#define QUOKA_ISA_F16C 0
#endif

// Dot products of small integers, for packets of this ISA's width.
#if (QUOKA_ISA_AVX512 && defined(__AVX512VNNI__)) || (QUOKA_ISA_AVX2 && defined(__AVXVNNI__))
#define QUOKA_ISA_VNNI 1
#else
#define QUOKA_ISA_VNNI 0
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#define QUOKA_ISA_DOTPROD 1
#else
#define QUOKA_ISA_DOTPROD 0
#endif

// Products of bfloat16, for packets of this ISA's width: in pairs, and of 2 x 2.
#if QUOKA_ISA_AVX512 && defined(__AVX512BF16__)
#define QUOKA_ISA_BF16_DOTS 1
#else
#define QUOKA_ISA_BF16_DOTS 0
#endif
#if QUOKA_ISA_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUOKA_ISA_BF16_SQUARES 1
#else
#define QUOKA_ISA_BF16_SQUARES 0
#endif

// Products of small matrices: AMX with both of its kinds (as GCC and as Clang 14 name them), Arm's
// of 8-bit integers. Tests may have others in AMX's place (simd/isa/tiles.hpp).
#if QUOKA_ISA_AVX512 && !defined(QUOKA_EMULATED_TILES) &&                         \
    ((defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)) || \
     (defined(__AMXTILE__) && defined(__AMXBF16__) && defined(__AMXINT8__)))
#define QUOKA_ISA_AMX 1
#else
#define QUOKA_ISA_AMX 0
#endif
#if QUOKA_ISA_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
#define QUOKA_ISA_I8MM 1
#else
#define QUOKA_ISA_I8MM 0
#endif

// Extensions that compilers may use in plain loops, and that some CPUs of a level lack.
#if defined(__AVX512VBMI__) || defined(__AVX512VPOPCNTDQ__) || defined(__AVX512BITALG__)
#define QUOKA_ISA_VBMI 1
#else
#define QUOKA_ISA_VBMI 0
#endif
#if defined(__ARM_FEATURE_SVE)
#define QUOKA_ISA_SVE 1
#else
#define QUOKA_ISA_SVE 0
#endif

// --- the tags ---------------------------------------------------------------------------------

// In the order of the namespace's name. QUOKA_TAG(x, _y) is _y where x is 1, nothing where it is 0.
#define QUOKA_TAG_0(tag)
#define QUOKA_TAG_1(tag) tag
#define QUOKA_TAG_(present, tag) QUOKA_TAG_##present(tag)
#define QUOKA_TAG(present, tag) QUOKA_TAG_(present, tag)
// use(tag, ...) with all of them.
#define QUOKA_WITH_TAGS(use)                                                                \
  use(QUOKA_TAG(QUOKA_ISA_PLAIN, _scalar), QUOKA_TAG_LEVEL, QUOKA_TAG(QUOKA_ISA_FMA, _fma), \
      QUOKA_TAG(QUOKA_ISA_F16C, _f16c), QUOKA_TAG(QUOKA_ISA_VNNI, _vnni),                   \
      QUOKA_TAG(QUOKA_ISA_DOTPROD, _dot), QUOKA_TAG(QUOKA_ISA_BF16_DOTS, _bf16),            \
      QUOKA_TAG(QUOKA_ISA_BF16_SQUARES, _bf16), QUOKA_TAG(QUOKA_ISA_AMX, _amx),             \
      QUOKA_TAG(QUOKA_ISA_I8MM, _i8mm), QUOKA_TAG(QUOKA_ISA_VBMI, _vbmi),                   \
      QUOKA_TAG(QUOKA_ISA_SVE, _sve))

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

// A hint to the core that this thread waits in a loop.
#if defined(__SSE2__) && defined(__GNUC__)
#define QUOKA_SPIN_HINT() __builtin_ia32_pause()
#elif defined(__aarch64__) && defined(__GNUC__)
#define QUOKA_SPIN_HINT() __asm__ volatile("yield")
#else
#define QUOKA_SPIN_HINT() static_cast<void>(0)
#endif
