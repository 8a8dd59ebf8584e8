// The choice between the ISA levels of one quoka::compiled (CMake: QUOKA_ISA_LEVELS). The public
// functions are jumps through quoka_entries, which dispatch.cpp, a file that the build makes, defines
// beside each level's addresses. They are taken over as the program starts, before its own globals
// are made.
#include <quoka/runtime/isa.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

extern "C" {
using QuokaEntry = void (*)();
extern QuokaEntry quoka_entries[];              // [entry]: in use
extern const QuokaEntry quoka_level_entries[];  // [level][entry]
extern const char* const quoka_level_names[];
extern const std::size_t quoka_level_count, quoka_entry_count;
void quoka_choose_level();
}

namespace quoka {
inline namespace QUOKA_ABI {
namespace {

#if defined(__x86_64__)
// Leaf 7 of CPUID, where the compilers at hand do not all know the names.
struct Leaf7 {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  explicit Leaf7(unsigned part) {
    if (__get_cpuid_count(7, part, &eax, &ebx, &ecx, &edx) == 0) eax = edx = 0;
  }
};

bool has_bf16() { return (Leaf7(1).eax >> 5 & 1) != 0; }

// AMX with both of its kinds, a system that saves tiles, and its permission for this process.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, all = bf16 | tile | int8;
  if ((Leaf7(0).edx & all) != all) return false;
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned tiles = 3u << 17;
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  return (low & tiles) == tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

bool runs_here(std::string_view level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Processors that have these have the rest of their level: f16c, lzcnt, movbe.
  const bool v2 = __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.2") &&
                  __builtin_cpu_supports("popcnt");
  const bool v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (level == "x86-64-v2") return v2;
  if (level == "x86-64-v3") return v3;
#if defined(__GNUC__) && !defined(__clang__)  // clang 14 cannot tell
  if (level == "x86-64-v3-vnni") return v3 && __builtin_cpu_supports("avxvnni");
#endif
  if (level == "x86-64-v4") return v4;
  const bool vnni = v4 && __builtin_cpu_supports("avx512vnni");
  if (level == "x86-64-v4-vnni") return vnni;
  if (level == "x86-64-v4-bf16") return vnni && has_bf16();
  if (level == "x86-64-v4-amx") return vnni && has_bf16() && has_amx();
#elif defined(__aarch64__)
  constexpr unsigned long dot_products = 1ul << 20;  // HWCAP_ASIMDDP
  if (level == "armv8-a") return true;
  constexpr unsigned long bf16_and_i8mm = 1ul << 14 | 1ul << 13;  // HWCAP2_BF16, HWCAP2_I8MM
  const bool dots = (getauxval(AT_HWCAP) & dot_products) != 0;
  if (level == "armv8.2-a-dotprod") return dots;
  if (level == "armv8.6-a") return dots && (getauxval(AT_HWCAP2) & bf16_and_i8mm) == bf16_and_i8mm;
#endif
  return false;
}

void take_over(const char* level) {
  const auto* const end = quoka_level_names + quoka_level_count;
  const std::ptrdiff_t at = std::find(quoka_level_names, end, level) - quoka_level_names;
  std::copy_n(quoka_level_entries + at * static_cast<std::ptrdiff_t>(quoka_entry_count),
              quoka_entry_count, quoka_entries);
}

const char* find_level(std::string_view level) {
  for (const char* const name : isa_levels())
    if (level == name) return name;
  return nullptr;
}

std::string what_there_is() {
  std::string text;
  for (const char* const name : isa_levels())
    text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

}  // namespace

std::span<const char* const> isa_levels() {
  static const std::vector<const char*> levels = [] {
    std::vector<const char*> found;
    for (std::size_t i = 0; i < quoka_level_count; ++i)
      if (runs_here(quoka_level_names[i])) found.push_back(quoka_level_names[i]);
    return found;
  }();
  return levels;
}

void use_isa(std::string_view level) {
  const char* const found = find_level(level);
  if (found == nullptr)
    throw std::invalid_argument("quoka: no level " + std::string(level) + " here; there is " +
                                what_there_is());
  take_over(found);
}

}  // namespace QUOKA_ABI
}  // namespace quoka

void quoka_choose_level() {
  const auto levels = quoka::isa_levels();
  if (levels.empty()) {
    std::fprintf(stderr, "quoka: needs %s, which this processor lacks\n", quoka_level_names[0]);
    std::abort();
  }
  const char* chosen = levels.back();
  if (const char* const wanted = std::getenv("QUOKA_ISA"); wanted != nullptr && *wanted != 0) {
    if (const char* const found = quoka::find_level(wanted); found != nullptr)
      chosen = found;
    else
      std::fprintf(stderr, "quoka: QUOKA_ISA=%s is no level here (there is %s): taking %s\n",
                   wanted, quoka::what_there_is().c_str(), chosen);
  }
  quoka::take_over(chosen);
}
