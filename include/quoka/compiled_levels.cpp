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
  if (level == "x86-64-v4-vnni") return v4 && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
  constexpr unsigned long dot_products = 1ul << 20;  // HWCAP_ASIMDDP
  if (level == "armv8-a") return true;
  if (level == "armv8.2-a-dotprod") return (getauxval(AT_HWCAP) & dot_products) != 0;
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
