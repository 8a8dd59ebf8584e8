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

void expect_uniform(const std::vector<Index>& counts, double each) {
  EXPECT_LT(chi_square(counts, each), chi_square_bound(static_cast<double>(counts.size()) - 1.0));
}

TEST(Draws, AreUniform) {
  Draws draws({1});
  std::vector<Index> below(37), parts(50), choices(20), orders(24);
  for (Index i = 0; i < 37 * 500; ++i) ++below[static_cast<std::size_t>(draws.below(37))];
  expect_uniform(below, 500.0);
  for (int i = 0; i < 50 * 500; ++i) {
    const double x = draws.unit();
    ASSERT_TRUE(x >= 0.0 && x < 1.0) << x;
    ++parts[static_cast<std::size_t>(50.0 * x)];
  }
  expect_uniform(parts, 500.0);
  for (int i = 0; i < 20 * 500; ++i) {  // (first, second) of 5
    const auto two = draws.distinct(5, 2);
    ++choices[static_cast<std::size_t>(two[0] * 4 + two[1] - (two[1] > two[0] ? 1 : 0))];
  }
  expect_uniform(choices, 500.0);
  for (int i = 0; i < 24 * 500; ++i) {
    std::vector<int> values{0, 1, 2, 3}, sorted = values;
    draws.shuffle(values);
    std::size_t order = 0;
    for (; sorted != values; ++order) std::next_permutation(sorted.begin(), sorted.end());
    ++orders[order];
  }
  expect_uniform(orders, 500.0);
  const auto all = draws.distinct(501, 501);
  EXPECT_EQ(std::set<Index>(all.begin(), all.end()).size(), 501u);
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
