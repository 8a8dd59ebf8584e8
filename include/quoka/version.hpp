// Version of the library and the inline namespace that every name lives in.
//
// The namespace carries the version and what the compiler's ISA flags change (packet width, fused
// multiply-add, half conversion, integer dot products): translation units built with different
// flags then hold different functions under different names, and the linker cannot merge an AVX-512
// body into a program part that was built for baseline x86-64. CMake reads the three numbers from
// this file.
#pragma once

#include <Eigen/Core>

#define QUOKA_VERSION_MAJOR 0
#define QUOKA_VERSION_MINOR 1
#define QUOKA_VERSION_PATCH 0

#if defined(EIGEN_VECTORIZE_AVX512)
#define QUOKA_ABI_SIMD _avx512
#elif defined(EIGEN_VECTORIZE_AVX2)
#define QUOKA_ABI_SIMD _avx2
#elif defined(EIGEN_VECTORIZE_AVX)
#define QUOKA_ABI_SIMD _avx
#elif defined(EIGEN_VECTORIZE_SSE4_1)
#define QUOKA_ABI_SIMD _sse4
#elif defined(EIGEN_VECTORIZE_SSE)
#define QUOKA_ABI_SIMD _sse2
#elif defined(EIGEN_VECTORIZE_NEON)
#define QUOKA_ABI_SIMD _neon
#elif defined(EIGEN_VECTORIZE)
#define QUOKA_ABI_SIMD _simd
#else
#define QUOKA_ABI_SIMD _scalar
#endif

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF)
#define QUOKA_ABI_FMA _fma
#else
#define QUOKA_ABI_FMA
#endif

#if defined(__F16C__)
#define QUOKA_ABI_HALF _f16c
#else
#define QUOKA_ABI_HALF
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define QUOKA_ABI_DOT _vnni
#else
#define QUOKA_ABI_DOT
#endif

#define QUOKA_ABI_JOIN_(major, minor, patch, simd, fma, half, dot) \
  v##major##_##minor##_##patch##simd##fma##half##dot
#define QUOKA_ABI_JOIN(major, minor, patch, simd, fma, half, dot) \
  QUOKA_ABI_JOIN_(major, minor, patch, simd, fma, half, dot)

// Opened as `namespace quoka::inline QUOKA_ABI {`; for example quoka::v0_1_0_avx512_fma_f16c_vnni.
#define QUOKA_ABI                                                                               \
  QUOKA_ABI_JOIN(QUOKA_VERSION_MAJOR, QUOKA_VERSION_MINOR, QUOKA_VERSION_PATCH, QUOKA_ABI_SIMD, \
                 QUOKA_ABI_FMA, QUOKA_ABI_HALF, QUOKA_ABI_DOT)
