// Definitions of isa.hpp.
#pragma once

#include <quoka/runtime/isa.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC const char* isa() {
#define QUOKA_ISA_TEXT_(simd, fma, half, dot) #simd #fma #half #dot
#define QUOKA_ISA_TEXT(simd, fma, half, dot) QUOKA_ISA_TEXT_(simd, fma, half, dot)
  return &QUOKA_ISA_TEXT(QUOKA_ABI_SIMD, QUOKA_ABI_FMA, QUOKA_ABI_HALF,
                         QUOKA_ABI_DOT)[1];  // behind the underscore
#undef QUOKA_ISA_TEXT
#undef QUOKA_ISA_TEXT_
}

}  // namespace QUOKA_ABI
}  // namespace quoka
