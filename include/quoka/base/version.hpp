// Version of the library and the inline namespace that every name lives in.
//
// The namespace carries the version and tags of the compiler's ISA flags (packet width, fused
// multiply-add, half conversion, integer dot products). So translation units built with different
// flags have different names for their functions. The linker cannot merge an AVX-512 body into a
// part of the program that was built for baseline x86-64. Templates of std and Eigen that the
// library instantiates have types of the library among their arguments, so their names differ as
// well. That holds for optimised builds; without optimisation, small functions of std (std::max of
// floats) are shared by all units, whoever calls them. The compiled library and its users share one
// name without these tags: their units share inline functions, so compile them for one baseline.
// CMake reads the three numbers from this file.
#pragma once

#include <quoka/base/abi.hpp>

#define QUOKA_VERSION_MAJOR 0
#define QUOKA_VERSION_MINOR 2
#define QUOKA_VERSION_PATCH 0
// "0.2.0"
#define QUOKA_TEXT_(x) #x
#define QUOKA_TEXT(x) QUOKA_TEXT_(x)
#define QUOKA_VERSION_STRING      \
  QUOKA_TEXT(QUOKA_VERSION_MAJOR) \
  "." QUOKA_TEXT(QUOKA_VERSION_MINOR) "." QUOKA_TEXT(QUOKA_VERSION_PATCH)

#define QUOKA_JOIN_TAGS_(scalar, level, fma, f16c, vnni, dot, pairs, squares, amx, i8mm, vbmi, \
                         sve)                                                                  \
  scalar##level##fma##f16c##vnni##dot##pairs##squares##amx##i8mm##vbmi##sve
#define QUOKA_JOIN_TAGS(...) QUOKA_JOIN_TAGS_(__VA_ARGS__)
#define QUOKA_JOIN_ABI_(major, minor, patch, tags) v##major##_##minor##_##patch##tags
#define QUOKA_JOIN_ABI(...) QUOKA_JOIN_ABI_(__VA_ARGS__)

// Opened as `inline namespace QUOKA_ABI {`; for example quoka::v0_2_0_avx512_fma_f16c_vnni, or
// quoka::v0_2_0_compiled.
#if defined(QUOKA_COMPILED)
#define QUOKA_ABI_TAGS _compiled
#else
#define QUOKA_ABI_TAGS QUOKA_WITH_TAGS(QUOKA_JOIN_TAGS)
#endif
#define QUOKA_ABI \
  QUOKA_JOIN_ABI(QUOKA_VERSION_MAJOR, QUOKA_VERSION_MINOR, QUOKA_VERSION_PATCH, QUOKA_ABI_TAGS)

// Header-only is the default: a header that declares functions includes their definitions at its
// end. With QUOKA_COMPILED the definitions are in the library that compiled.cpp makes, and the
// headers are light. The two never mix: their names differ. QUOKA_DEFINES: does this unit define
// the functions that its headers declare?
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
#define QUOKA_DEFINES 0
#else
#define QUOKA_DEFINES 1
#endif
// The same for the kernels (kernels/kernels.hpp).
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING_KERNELS)
#define QUOKA_DEFINES_KERNELS 0
#else
#define QUOKA_DEFINES_KERNELS 1
#endif
#if defined(QUOKA_COMPILED)
#define QUOKA_FUNC
#else
#define QUOKA_FUNC inline
#endif
