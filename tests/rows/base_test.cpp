// base/: memory that grows (buffer.hpp), and its state after a failure and a move; scratch memory in pieces (arena.hpp);
// features read from CPUID (cpu.hpp), compared with the compiler's own helper; a library of one level (runtime/isa.hpp).

#include <quoka/base/arena.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/base/cpu.hpp>
#include <quoka/runtime/isa.hpp>

#include "support/sanitized.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using quoka::Arena;
using quoka::Arenas;
using quoka::Buffer;
using quoka::Index;
using quoka::detail::cpu_has;

constexpr Index most = std::numeric_limits<Index>::max();

TEST(Buffer, IsEmptyAtFirst) {
  Buffer<float> buffer;
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.capacity(), 0);
  EXPECT_EQ(buffer.reserve(0), nullptr);
  EXPECT_EQ(buffer.bytes(), 0);
}

TEST(Buffer, GrowsAndNeverShrinks) {
  Buffer<float> buffer;
  const float* const first = buffer.reserve(37);
  EXPECT_EQ(buffer.capacity(), 37);
  EXPECT_EQ(buffer.bytes(), 37 * 4);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(buffer.reserve(5), first);
  EXPECT_EQ(buffer.capacity(), 37);
  buffer.reserve_amortised(38);
  EXPECT_EQ(buffer.capacity(), 74);
  buffer.reserve_amortised(1000);
  EXPECT_EQ(buffer.capacity(), 1000);
}

// More bytes than any machine has, or than an Index can count.
TEST(Buffer, AfterAFailureIsEmptyAndServesOn) {
  std::vector<Index> counts{most / 8, most / 4, most};
#if !defined(QUOKA_TEST_SANITIZED)
  counts.push_back(most / 64);
#endif
  for (const Index count : counts) {
    Buffer<double> buffer;
    buffer.reserve(100);
    EXPECT_THROW(buffer.reserve(count), std::bad_alloc) << count;
    double* const x = buffer.reserve(50);
    ASSERT_NE(x, nullptr) << count;
    EXPECT_GE(buffer.capacity(), 50);
    for (Index i = 0; i < 50; ++i) x[i] = 1.0;
  }
}

TEST(Buffer, WhatWasMovedFromIsEmptyAndServesOn) {
  Buffer<float> a;
  float* const memory = a.reserve(100);
  Buffer<float> b(std::move(a));
  EXPECT_EQ(b.data(), memory);
  EXPECT_EQ(b.capacity(), 100);
  EXPECT_EQ(a.capacity(), 0);  // NOLINT: what was moved from may be used
  ASSERT_NE(a.reserve(10), nullptr);
  a = std::move(b);
  EXPECT_EQ(a.data(), memory);
  EXPECT_EQ(a.capacity(), 100);
  EXPECT_EQ(b.capacity(), 0);  // NOLINT
  ASSERT_NE(b.reserve(10), nullptr);
  EXPECT_NE(b.data(), memory);
}

// Memory in huge pages, and of cache lines, in either's place.
TEST(Buffer, LargeAndSmallOnesChangePlaces) {
  Buffer<float> large, small;
  large.reserve(Index{1} << 21)[5] = 5.0f;
  small.reserve(10)[5] = 7.0f;
  std::swap(large, small);
  EXPECT_EQ(large.data()[5], 7.0f);
  EXPECT_EQ(small.data()[5], 5.0f);
}

// ---- Arena --------------------------------------------------------------------------------------

struct Scratch {
  Scratch(Arena& arena, Index keys)
      : scores(arena.take<float>(keys)), best(arena.take<std::int64_t>(keys)) {}
  float* scores;
  std::int64_t* best;
};

TEST(Arena, AnEmptyOneOnlyAddsUp) {
  Arena arena;
  const Scratch scratch(arena, 100);
  EXPECT_EQ(scratch.scores, nullptr);
  EXPECT_EQ(scratch.best, nullptr);
  EXPECT_GE(arena.used(), 100 * 4 + 100 * 8);
}

TEST(Arena, PiecesOfAllWorkersLieApartOnCacheLines) {
  for (const Index keys : {1, 3, 16, 17, 1001}) {
    Arenas arenas;
    arenas.reserve(3, [&](Arena& arena) { Scratch(arena, keys); });
    for (int worker = 0; worker < 3; ++worker) {
      Arena arena = arenas[worker];
      const Scratch scratch(arena, keys);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scratch.scores) % 64, 0u);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scratch.best) % 64, 0u);
      for (Index i = 0; i < keys; ++i) scratch.scores[i] = static_cast<float>(worker);
      for (Index i = 0; i < keys; ++i) scratch.best[i] = -1;
      for (Index i = 0; i < keys; ++i) ASSERT_EQ(scratch.scores[i], static_cast<float>(worker));
    }
  }
}

TEST(Arena, ARepeatedOrASmallerCallReservesNothing) {
  Arenas arenas;
  const auto reserve = [&](int workers, Index keys) {
    arenas.reserve(workers, [&](Arena& arena) { Scratch(arena, keys); });
    return arenas.bytes();
  };
  const Index bytes = reserve(2, 1000);
  EXPECT_EQ(reserve(2, 1000), bytes);
  EXPECT_EQ(reserve(1, 10), bytes);
  EXPECT_GT(reserve(3, 10), bytes);
}

TEST(Arena, GrowsByHalfAtLeast) {
  Arenas arenas;
  arenas.reserve(1, [](Arena& arena) { Scratch(arena, 1 << 16); });
  const Index bytes = arenas.bytes();
  arenas.reserve(1, [](Arena& arena) { Scratch(arena, (1 << 16) + 64); });
  EXPECT_GE(arenas.bytes(), bytes + bytes / 2);
}

TEST(Arena, SizesThatOverflowAreOutOfMemoryAndLeaveItUsable) {
  Arenas arenas;
  for (const Index keys :
       {std::numeric_limits<Index>::max(), std::numeric_limits<Index>::max() / 16})
    EXPECT_THROW(arenas.reserve(1, [&](Arena& arena) { Scratch(arena, keys); }), std::bad_alloc);
  arenas.reserve(1, [](Arena& arena) { Scratch(arena, 5); });
  Arena arena = arenas[0];
  Scratch scratch(arena, 5);
  scratch.best[4] = 7;
  EXPECT_EQ(scratch.best[4], 7);
}

#if defined(QUOKA_POISONS)
TEST(ArenaDeathTest, AReadBeyondAPieceIsSeen) {
  Arenas arenas;
  arenas.reserve(1, [](Arena& arena) { Scratch(arena, 16); });
  Arena arena = arenas[0];
  const Scratch scratch(arena, 16);
  volatile Index beyond = 16;
  EXPECT_DEATH(scratch.scores[beyond] = 1.0f, "AddressSanitizer");
}
#endif

// ---- CPUID --------------------------------------------------------------------------------------

TEST(Cpu, IsSeenAsTheCompilerSeesIt) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
#define QUOKA_COMPARE(name) EXPECT_EQ(cpu_has(name), __builtin_cpu_supports(name) != 0) << name
  QUOKA_COMPARE("ssse3");
  QUOKA_COMPARE("sse4.1");
  QUOKA_COMPARE("avx");
  QUOKA_COMPARE("avx512vbmi");
  QUOKA_COMPARE("avx512bitalg");
  QUOKA_COMPARE("avx512vpopcntdq");
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

// Of several: levels/levels_test.cpp.
TEST(Isa, IsTheOnlyLevelOfALibraryThatHasOne) {
  if (quoka::isa_levels().size() > 1) GTEST_SKIP() << "there are several";
  ASSERT_EQ(quoka::isa_levels().size(), 1u);
  EXPECT_STREQ(quoka::isa_levels().front(), quoka::isa());
  quoka::use_isa(quoka::isa());
  EXPECT_THROW(quoka::use_isa(std::string(quoka::isa()) + "x"), std::invalid_argument);
}

#if defined(__x86_64__) && defined(__GNUC__)
// A processor that lacks a feature of a build cannot run it: score 0. The more features a build uses, the higher its
// score.
TEST(Isa, NamesWhatAProcessorMustHave) {
  static std::string_view lacking;
  const std::vector<std::string_view> all{
      "ssse3",    "sse4.1",   "sse4.2",     "avx",        "avx2",           "fma",
      "f16c",     "bmi",      "avx512f",    "avx512dq",   "avx512bw",       "avx512vl",
      "avxvnni",  "amx-tile", "avx512vnni", "avx512bf16", "avx512vbmi",     "avx512bitalg",
      "amx-bf16", "amx-int8", "avx512cd",   "bmi2",       "avx512vpopcntdq"};
  const struct {
    const char* isa;
    std::vector<std::string_view> needs;
  } builds[] = {
      {"sse2", {}},
      {"sse4", {"sse4.1"}},
      {"avx_fma", {"avx", "fma"}},
      {"avx2_fma_f16c", {"avx2", "fma", "f16c"}},
      {"avx2_fma_f16c_vnni", {"avx2", "fma", "f16c", "avxvnni"}},
      {"avx512_fma_f16c_vnni_bf16",
       {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma", "f16c", "avx512vnni", "avx512bf16"}},
      {"avx512_fma_f16c_vnni_bf16_amx_vbmi",
       {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma", "f16c", "avx512vnni", "avx512bf16",
        "avx512vbmi", "avx512bitalg", "avx512vpopcntdq"}}};
  int before = 0;
  for (const auto& [isa, needs] : builds) {
    const auto score = [isa = isa](std::string_view without) {
      lacking = without;
      return quoka::detail::isa_score_of(isa, [](std::string_view x) { return x != lacking; });
    };
    EXPECT_GT(score(""), before) << isa;
    before = score("");
    for (const std::string_view feature : all)
      EXPECT_EQ(score(feature) == 0, std::ranges::count(needs, feature) > 0)
          << isa << " " << feature;
  }
  EXPECT_GT(quoka::isa_score(), 0) << "of this build on this machine";
}
#endif

}  // namespace
