// For tests that look inside: kernels and definitions, in a program that links the compiled
// library.
// They become this program's own inline functions; the library's have the same flags and are the
// same.
#pragma once

#define QUOKA_COMPILING
#define QUOKA_COMPILING_KERNELS
#include <quoka/base/version.hpp>
#undef QUOKA_FUNC
#define QUOKA_FUNC inline
