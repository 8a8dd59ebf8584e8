#include <quoka/base/arena.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <new>

namespace {

using quoka::Arena;
using quoka::Arenas;
using quoka::Index;

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

}  // namespace
