// Which instructions the library was compiled for.
#pragma once

#include <quoka/version.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// The level and what it has besides: "avx512_fma_f16c_vnni", "avx2_fma_f16c", "sse2", "scalar".
const char* isa();

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/runtime/isa_impl.hpp>
#endif
