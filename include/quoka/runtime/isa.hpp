// Which instructions the library was compiled for, which of several builds it uses, and whether
// this processor can run them.
#pragma once

#include <quoka/base/cpu.hpp>

#include <cstddef>
#include <cstring>
#include <span>
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

namespace detail {

// isa_score() of a build with this isa(), on a processor that has(feature). Static, and without the
// standard library's templates, as cpu_has() is: a linker must not take another unit's.
[[maybe_unused]] static inline int isa_score_of(const char* isa, bool (*has)(std::string_view)) {
  const auto names = [isa](const char* tag) {
    const std::size_t length = std::strlen(tag);
    for (const char* at = std::strstr(isa, tag); at != nullptr; at = std::strstr(at + 1, tag))
      if ((at == isa || at[-1] == '_') && (at[length] == '_' || at[length] == '\0')) return true;
    return false;
  };
  constexpr struct {
    const char* tag;
    const char* features[4];  // null: no more
  } needs[] = {
      {"sse4", {"sse4.1"}},
      {"avx", {"avx"}},
      {"avx2", {"avx2"}},
      {"avx512", {"avx512f", "avx512dq", "avx512bw", "avx512vl"}},
      {"fma", {"fma"}},
      {"f16c", {"f16c"}},
      {"vnni", {}},  // below
      {"bf16", {"avx512bf16"}},
      {"vbmi", {"avx512vbmi", "avx512bitalg", "avx512vpopcntdq"}},
  };
  int score = 1;
  for (const auto& [tag, features] : needs) {
    if (!names(tag)) continue;
    ++score;
    for (const char* const feature : features)
      if (feature != nullptr && !has(feature)) return 0;
  }
  if (names("vnni") && !has(names("avx512") ? "avx512vnni" : "avxvnni")) return 0;
  return score;
}

}  // namespace detail

// Can this processor run what the library was compiled for? For a plug-in's own check, from a file
// that is compiled for any processor, before anything else of the library runs. 0: it lacks
// something that isa() names, AMX excepted, which is used only where the system allows it.
// Otherwise higher for a build that uses more: load the highest.
inline int isa_score() {
#if defined(__x86_64__) && defined(__GNUC__)
  return detail::isa_score_of(isa(), detail::cpu_has);
#else
  return 1;
#endif
}

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES_KERNELS
#include <stdexcept>
#include <string>

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
