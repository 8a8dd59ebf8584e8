// Draws that are the same everywhere.
#include "support/draws.hpp"

#include "support/chi_square.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <stdexcept>

namespace quoka_examples {
namespace {

// The standard fixes the engine and its seeding.
TEST(Draws, AreThoseOfTheStandardsEngine) {
  std::array<std::uint32_t, 4> words{1, 2, 3, 4};
  std::seed_seq seeds(words.begin(), words.end());
  std::mt19937_64 engine(seeds);
  Draws draws({1, 2, 3, 4});
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(draws.unit(), static_cast<double>(engine() >> 11) * 0x1.0p-53);
}

TEST(Draws, AreTheSameForASeedAndOthersForAnother) {
  Draws a({1, 7}), b({1, 7}), c({7, 1});
  const auto first = a.distinct(1000, 20);
  EXPECT_EQ(first, b.distinct(1000, 20));
  EXPECT_NE(first, c.distinct(1000, 20));
}

TEST(Draws, BelowIsUniform) {
  Draws draws({1});
  constexpr Index n = 37, each = 500;
  std::vector<Index> counts(n);
  for (Index i = 0; i < n * each; ++i) ++counts[static_cast<std::size_t>(draws.below(n))];
  EXPECT_LT(chi_square(counts, static_cast<double>(each)), chi_square_bound(n - 1));
}

TEST(Draws, UnitIsUniformInZeroToOne) {
  Draws draws({2});
  std::vector<Index> counts(50);
  for (int i = 0; i < 25000; ++i) {
    const double x = draws.unit();
    ASSERT_GE(x, 0.0);
    ASSERT_LT(x, 1.0);
    ++counts[static_cast<std::size_t>(50.0 * x)];
  }
  EXPECT_LT(chi_square(counts, 500.0), chi_square_bound(49.0));
}

TEST(Draws, DistinctAreDistinctAndEveryOrderedChoiceIsEquallyLikely) {
  Draws draws({3});
  const auto all = draws.distinct(501, 501);
  EXPECT_EQ(std::set<Index>(all.begin(), all.end()).size(), 501u);
  std::vector<Index> counts(20);  // (first, second) of 5
  for (int i = 0; i < 10000; ++i) {
    const auto two = draws.distinct(5, 2);
    ++counts[static_cast<std::size_t>(two[0] * 4 + two[1] - (two[1] > two[0] ? 1 : 0))];
  }
  EXPECT_LT(chi_square(counts, 500.0), chi_square_bound(19.0));
}

TEST(Draws, ShufflesIntoEveryOrderAlike) {
  Draws draws({4});
  std::vector<Index> counts(24);
  for (int i = 0; i < 12000; ++i) {
    std::vector<int> values{0, 1, 2, 3}, sorted = values;
    draws.shuffle(values);
    std::size_t order = 0;
    for (; sorted != values; ++order) std::next_permutation(sorted.begin(), sorted.end());
    ++counts[order];
  }
  EXPECT_LT(chi_square(counts, 500.0), chi_square_bound(23.0));
}

TEST(Draws, RefuseWhatCannotBeDrawn) {
  Draws draws({1});
  EXPECT_THROW((void)draws.below(0), std::invalid_argument);
  try {
    (void)draws.distinct(3, 4);
    FAIL() << "4 of 3 were drawn";
  } catch (const std::invalid_argument& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find('3'), std::string::npos) << what;
    EXPECT_NE(what.find('4'), std::string::npos) << what;
  }
}

}  // namespace
}  // namespace quoka_examples
