// The choice between the ISA levels of one quoka::compiled (CMake: QUOKA_ISA_LEVELS). Its kernels
// are jumps through quoka_entries, which dispatch.cpp, a file that the build makes, defines
// beside each level's addresses. They are taken over as the program starts, before its own globals
// are made.
#include <quoka/base/cpu.hpp>
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
#elif defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
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
// AMX with both of its kinds, a system that saves tiles, and its permission for this process.
bool has_amx() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  return detail::cpu_has("amx-tile") && detail::cpu_has("amx-bf16") &&
         detail::cpu_has("amx-int8") && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

bool runs_here(std::string_view level) {
  if (level == "plain") return true;  // C++ without packets
#if defined(__x86_64__)
  using detail::cpu_has;
  // Processors that have these have the rest of their level: f16c, lzcnt, movbe.
  const bool v2 = cpu_has("ssse3") && cpu_has("sse4.2") && cpu_has("popcnt");
  const bool v3 = v2 && cpu_has("avx2") && cpu_has("fma") && cpu_has("bmi") && cpu_has("bmi2");
  const bool v4 = v3 && cpu_has("avx512f") && cpu_has("avx512bw") && cpu_has("avx512cd") &&
                  cpu_has("avx512dq") && cpu_has("avx512vl");
  if (level == "x86-64-v2") return v2;
  if (level == "x86-64-v3") return v3;
  if (level == "x86-64-v3-vnni") return v3 && cpu_has("avxvnni");
  if (level == "x86-64-v4") return v4;
  const bool vnni = v4 && cpu_has("avx512vnni");
  if (level == "x86-64-v4-vnni") return vnni;
  if (level == "x86-64-v4-bf16") return vnni && cpu_has("avx512bf16");
  if (level == "x86-64-v4-amx") return vnni && cpu_has("avx512bf16") && has_amx();
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
      std::fprintf(stderr, "quoka: QUOKA_ISA=%s is not a level here (there is %s): taking %s\n",
                   wanted, quoka::what_there_is().c_str(), chosen);
  }
  quoka::take_over(chosen);
}
