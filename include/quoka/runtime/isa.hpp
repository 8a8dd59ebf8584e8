// Which instructions the library was compiled for, which of several builds it uses, and whether
// this processor can run them.
#pragma once

#include <quoka/base/cpu.hpp>

#include <span>
#include <string>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {

// The level and its extensions: "avx512_fma_f16c_vnni", "avx2_fma_f16c", "sse2", "scalar".
const char* isa();

// quoka::compiled may be built for several levels (CMake: QUOKA_ISA_LEVELS). At program start it
// takes the best one that this machine runs, or the one that the environment variable QUOKA_ISA
// names. These are the names of those that it runs, the most common first: "x86-64-v2",
// "x86-64-v3". Otherwise isa() alone.
std::span<const char* const> isa_levels();

// Takes that level from now on, in the whole program. Not while another thread is in a call, and
// not with anything made before: formats, caches, states and workspaces are laid out for their
// level. Throws std::invalid_argument for a name that is not in isa_levels().
void use_isa(std::string_view level);

// Can this processor run what the library was compiled for? For a plug-in's own check, from a file
// that is compiled for any processor, before anything else of the library runs. 0: it lacks
// something that isa() names. Otherwise higher for a build that uses more: load the highest.
inline int isa_score() {
  int score = 1;
#if defined(__x86_64__) && defined(__GNUC__)
  const std::string_view isa = quoka::isa();
  const auto needs = [&](std::string_view name, bool there) {
    if (!isa.starts_with(name) && isa.find("_" + std::string(name)) == isa.npos) return true;
    ++score;
    return there;
  };
  const bool wide = isa.starts_with("avx512");
  if (!needs("avx2", detail::cpu_has("avx2")) ||
      !needs("avx512", detail::cpu_has("avx512f") && detail::cpu_has("avx512bw") &&
                           detail::cpu_has("avx512dq") && detail::cpu_has("avx512vl")) ||
      !needs("fma", detail::cpu_has("fma")) || !needs("f16c", detail::cpu_has("f16c")) ||
      !needs("vnni", wide ? detail::cpu_has("avx512vnni") : detail::cpu_has("avxvnni")))
    return 0;
#endif
  return score;
}

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES_KERNELS
#include <stdexcept>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC const char* isa() {
  return &QUOKA_TEXT(QUOKA_WITH_TAGS(QUOKA_JOIN_TAGS))[1];  // behind the underscore
}

#if !defined(QUOKA_COMPILED_LEVELS)  // of several: compiled_levels.cpp
QUOKA_FUNC std::span<const char* const> isa_levels() {
  static const char* const only = isa();
  return {&only, 1};
}

QUOKA_FUNC void use_isa(std::string_view level) {
  if (level != isa())
    throw std::invalid_argument("quoka: no level " + std::string(level) + " here; there is " +
                                isa());
}
#endif

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES_KERNELS
