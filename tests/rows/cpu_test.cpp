// Features read from CPUID, compared with the compiler's own helper.

#include <quoka/base/cpu.hpp>

#include <gtest/gtest.h>

namespace {

using quoka::detail::cpu_has;

TEST(Cpu, IsSeenAsTheCompilerSeesIt) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
#define QUOKA_COMPARE(name) EXPECT_EQ(cpu_has(name), __builtin_cpu_supports(name) != 0) << name
  QUOKA_COMPARE("ssse3");
  QUOKA_COMPARE("sse4.2");
  QUOKA_COMPARE("popcnt");
  QUOKA_COMPARE("fma");
  QUOKA_COMPARE("f16c");
  QUOKA_COMPARE("bmi");
  QUOKA_COMPARE("bmi2");
  QUOKA_COMPARE("avx2");
  QUOKA_COMPARE("avx512f");
  QUOKA_COMPARE("avx512dq");
  QUOKA_COMPARE("avx512cd");
  QUOKA_COMPARE("avx512bw");
  QUOKA_COMPARE("avx512vl");
  QUOKA_COMPARE("avx512vnni");
  QUOKA_COMPARE("avxvnni");
  QUOKA_COMPARE("avx512bf16");
  QUOKA_COMPARE("amx-tile");
  QUOKA_COMPARE("amx-bf16");
  QUOKA_COMPARE("amx-int8");
#undef QUOKA_COMPARE
  EXPECT_EQ(quoka::detail::cpu_is_amd(), __builtin_cpu_is("amd") != 0);
#endif
  EXPECT_FALSE(cpu_has("x87"));
}

}  // namespace
