// Can this processor run what the library was compiled for? To be asked from a file that is compiled for
// any processor, before anything else of the library runs: a plug-in's own check.
#pragma once

#include <quoka/base/cpu.hpp>
#include <quoka/runtime/isa.hpp>

#include <string>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {

// 0: it lacks something that isa() names. Otherwise the higher the more is used: of several builds the one
// with the highest score is the one to load.
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
