// The features that this processor has and the system lets a process use. Read from CPUID itself:
// compilers name features differently, and not every compiler's library has such helpers. The
// functions are static: a translation unit that calls them may be compiled for a lesser processor
// than others.
#pragma once

#include <quoka/base/version.hpp>

#include <cstring>
#include <string_view>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

#if defined(__x86_64__) && defined(__GNUC__)

// "avx2", "avx512vnni" and the others of the table below, as GCC calls them. False for another
// name.
static inline bool cpu_has(std::string_view name) {
  enum Register { eax, ebx, ecx, edx };
  // Register state that the system must save for a thread: bits of XCR0.
  constexpr unsigned nothing = 0, ymm = 0x6, zmm = 0xe6, tiles = 0x60000;
  struct Feature {
    std::string_view name;
    unsigned leaf, part;
    Register in;
    int bit;
    unsigned saved;
  };
  constexpr Feature features[] = {
      {"ssse3", 1, 0, ecx, 9, nothing},
      {"fma", 1, 0, ecx, 12, ymm},
      {"sse4.1", 1, 0, ecx, 19, nothing},
      {"sse4.2", 1, 0, ecx, 20, nothing},
      {"popcnt", 1, 0, ecx, 23, nothing},
      {"avx", 1, 0, ecx, 28, ymm},
      {"f16c", 1, 0, ecx, 29, ymm},
      {"bmi", 7, 0, ebx, 3, nothing},
      {"avx2", 7, 0, ebx, 5, ymm},
      {"bmi2", 7, 0, ebx, 8, nothing},
      {"avx512f", 7, 0, ebx, 16, zmm},
      {"avx512dq", 7, 0, ebx, 17, zmm},
      {"avx512cd", 7, 0, ebx, 28, zmm},
      {"avx512bw", 7, 0, ebx, 30, zmm},
      {"avx512vl", 7, 0, ebx, 31, zmm},
      {"avx512vbmi", 7, 0, ecx, 1, zmm},
      {"avx512vnni", 7, 0, ecx, 11, zmm},
      {"avx512bitalg", 7, 0, ecx, 12, zmm},
      {"avx512vpopcntdq", 7, 0, ecx, 14, zmm},
      {"amx-bf16", 7, 0, edx, 22, tiles},
      {"amx-tile", 7, 0, edx, 24, tiles},
      {"amx-int8", 7, 0, edx, 25, tiles},
      {"avxvnni", 7, 1, eax, 4, ymm},
      {"avx512bf16", 7, 1, eax, 5, zmm},
  };
  for (const Feature& x : features) {
    if (x.name != name) continue;
    unsigned r[4] = {}, saved = 0;
    if (x.saved != nothing) {
      constexpr unsigned xgetbv_may_be_used = 1u << 27;
      if (__get_cpuid(1, &r[eax], &r[ebx], &r[ecx], &r[edx]) == 0 ||
          (r[ecx] & xgetbv_may_be_used) == 0)
        return false;
      unsigned high;
      asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    }
    return (saved & x.saved) == x.saved &&
           __get_cpuid_count(x.leaf, x.part, &r[eax], &r[ebx], &r[ecx], &r[edx]) != 0 &&
           (r[x.in] >> x.bit & 1) != 0;
  }
  return false;
}

static inline bool cpu_is_amd() {
  unsigned leaves, name[3];
  return __get_cpuid(0, &leaves, &name[0], &name[2], &name[1]) != 0 &&
         std::memcmp(name, "AuthenticAMD", sizeof name) == 0;
}

#else

static inline bool cpu_has(std::string_view) { return false; }
static inline bool cpu_is_amd() { return false; }

#endif

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
