// Which instructions the library was compiled for, and which of several it uses.
#pragma once

#include <quoka/base/version.hpp>

#include <span>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {

// The level and what it has besides: "avx512_fma_f16c_vnni", "avx2_fma_f16c", "sse2", "scalar".
const char* isa();

// quoka::compiled built for several levels (CMake: QUOKA_ISA_LEVELS) takes the best that this machine
// runs as the program starts, or the one that the environment variable QUOKA_ISA names. These are the
// names of those that it runs, the most common first: "x86-64-v2", "x86-64-v3". Otherwise isa() alone.
std::span<const char* const> isa_levels();

// Takes that level from now on, in the whole program. Not while another thread is in a call, and not
// with anything made before: formats, caches, states and workspaces are laid out as their level likes
// it. Throws std::invalid_argument for a name that is not in isa_levels().
void use_isa(std::string_view level);

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/runtime/isa_impl.hpp>
#endif
