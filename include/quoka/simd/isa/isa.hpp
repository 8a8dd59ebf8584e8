// The vector unit that the compiler's flags allow. Each of these files defines the same names; the
// flags are read in abi.hpp.
#pragma once

#include <quoka/base/abi.hpp>

#if QUOKA_ISA_AVX512
#include <quoka/simd/isa/avx512.hpp>
#elif QUOKA_ISA_AVX2
#include <quoka/simd/isa/avx2.hpp>
#elif QUOKA_ISA_SSE
#include <quoka/simd/isa/sse.hpp>
#elif QUOKA_ISA_NEON
#include <quoka/simd/isa/neon.hpp>
#else
#include <quoka/simd/isa/plain.hpp>
#endif
