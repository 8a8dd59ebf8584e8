// Asked before anything else in this library runs: can this processor execute it? Compiled for any
// processor, unlike the rest.
#include <quoka/runtime/isa.hpp>

#include <string>
#include <string_view>

extern "C" __attribute__((visibility("default"))) int ggml_backend_score() {
  const std::string_view isa = quoka::isa();
  int score = 1;
#if defined(__x86_64__)
  const auto needs = [&](std::string_view name, bool there) {
    if (!isa.starts_with(name) && isa.find("_" + std::string(name)) == isa.npos) return true;
    ++score;
    return there;
  };
  const bool wide = isa.starts_with("avx512");
  if (!needs("avx2", __builtin_cpu_supports("avx2")) ||
      !needs("avx512", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vl")) ||
      !needs("fma", __builtin_cpu_supports("fma")) ||
      !needs("f16c", __builtin_cpu_supports("f16c")) ||
      !needs("vnni",
             wide ? __builtin_cpu_supports("avx512vnni") : __builtin_cpu_supports("avxvnni")))
    return 0;
#endif
  return score;
}
