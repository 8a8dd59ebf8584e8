// Draws that are the same everywhere.
#include "support/draws.hpp"

#include "support/chi_square.hpp"
#include "support/fixtures.hpp"

#include <algorithm>
#include <array>
#include <set>

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

// `draw` gives one of `outcomes` numbers, 500 times as often as there are numbers.
template <class Draw>
void expect_uniform(Index outcomes, Draw draw) {
  std::vector<Index> counts(static_cast<std::size_t>(outcomes));
  for (Index i = 0; i < outcomes * 500; ++i) ++counts.at(static_cast<std::size_t>(draw()));
  EXPECT_LT(chi_square(counts, 500.0), chi_square_bound(static_cast<double>(outcomes) - 1.0));
}

TEST(Draws, AreUniform) {
  Draws draws({1});
  expect_uniform(37, [&] { return draws.below(37); });
  expect_uniform(50, [&] { return static_cast<Index>(50.0 * draws.unit()); });
  expect_uniform(20, [&] {  // (first, second) of 5
    const auto two = draws.distinct(5, 2);
    return two[0] * 4 + two[1] - (two[1] > two[0] ? 1 : 0);
  });
  expect_uniform(24, [&] {
    std::vector<int> values{0, 1, 2, 3}, sorted = values;
    draws.shuffle(values);
    Index order = 0;
    for (; sorted != values; ++order) std::next_permutation(sorted.begin(), sorted.end());
    return order;
  });
  const auto all = draws.distinct(501, 501);
  EXPECT_EQ(std::set<Index>(all.begin(), all.end()).size(), 501u);
}

TEST(Draws, RefuseWhatCannotBeDrawn) {
  Draws draws({1});
  quoka_test::expect_refused([&] { (void)draws.below(0); }, {0, 1});
  quoka_test::expect_refused([&] { (void)draws.distinct(3, 4); }, {3, 4});
}

}  // namespace
}  // namespace quoka_examples
