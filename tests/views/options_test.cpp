// The budget: counts, fractions of the past, and what is neither.

#include <quoka/select/options.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::Budget;

// ---- refusals ------------------------------------------------------------------------------------

template <class F>
std::string message_of(F&& refuse) {
  try {
    refuse();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Refusals, NameWhatIsWrongAndBothNumbers) {
  namespace detail = quoka::detail;
  EXPECT_EQ(message_of([] { detail::require_equal("a", 3, "b", 4); }),
            "quoka: a is 3, but must equal b, which is 4");
  EXPECT_EQ(message_of([] { detail::require_at_least("a", 1, 2); }),
            "quoka: a is 1, but must be at least 2");
  EXPECT_EQ(message_of([] { detail::require_at_most("a", 9, "b", 7); }),
            "quoka: a is 9, but must be at most b, which is 7");
  EXPECT_EQ(message_of([] { detail::require_multiple("a", 9, "b", 4); }),
            "quoka: a is 9, but must be a positive multiple of b, which is 4");
  EXPECT_EQ(message_of([] {
              detail::require_sizes("k", std::array<Index, 3>{1, 2, 3}, {1, 2, 5});
            }),
            "quoka: k's len is 3, but must be 5");
}

// ---- budgets -------------------------------------------------------------------------------------

TEST(Budget, ACountIsThatManyKeys) {
  for (Index kv_len : {1024, 1025, 32768}) EXPECT_EQ(Budget(1024).keys(kv_len), 1024);
}

TEST(Budget, ACountIsAllOfAShorterPast) {
  for (Index kv_len : {0, 1, 37, 1023, 1024}) EXPECT_EQ(Budget(1024).keys(kv_len), kv_len);
}

TEST(Budget, OfZeroIsNone) {
  for (Index kv_len : {0, 1, 37}) EXPECT_EQ(Budget(0).keys(kv_len), 0);
}

TEST(Budget, ACountMayHaveAnyIntegerType) {
  EXPECT_EQ(Budget(std::int8_t{7}).keys(37), 7);
  EXPECT_EQ(Budget(std::size_t{7}).keys(37), 7);
  EXPECT_EQ(Budget(7u).keys(37), 7);
  EXPECT_EQ(Budget(std::int64_t{1} << 40).keys(37), 37);
}

TEST(Budget, AFractionIsRoundedDown) {
  EXPECT_EQ(Budget(0.25).keys(100), 25);
  EXPECT_EQ(Budget(0.25).keys(103), 25);
  EXPECT_EQ(Budget(0.25).keys(104), 26);
  EXPECT_EQ(Budget(0.5).keys(501), 250);
  EXPECT_EQ(Budget(0.999).keys(37), 36);
}

TEST(Budget, AFractionAgreesWithTheFormula) {
  for (double fraction : {0.001, 0.03, 0.1, 0.25, 1.0 / 3.0, 0.5, 0.7, 0.9, 1.0})
    for (Index kv_len = 0; kv_len <= 501; ++kv_len)
      ASSERT_EQ(Budget(fraction).keys(kv_len), oracle::resolve_budget(fraction, kv_len))
          << fraction << " of " << kv_len;
}

TEST(Budget, AFractionIsAtLeastOneKey) {
  EXPECT_EQ(Budget(0.25).keys(1), 1);
  EXPECT_EQ(Budget(0.25).keys(3), 1);
  EXPECT_EQ(Budget(1e-300).keys(127), 1);
  EXPECT_EQ(Budget(std::numeric_limits<double>::denorm_min()).keys(127), 1);
}

TEST(Budget, AFractionOfAnEmptyPastIsNone) { EXPECT_EQ(Budget(0.25).keys(0), 0); }

TEST(Budget, TheWholeFractionIsAll) {
  for (Index kv_len : {0, 1, 37, 501, 1 << 24}) EXPECT_EQ(Budget(1.0).keys(kv_len), kv_len);
}

TEST(Budget, AFractionMayBeAFloat) { EXPECT_EQ(Budget(0.25f).keys(100), 25); }

TEST(Budget, OfOneIsOneKeyAndOfOnePointZeroIsAll) {
  EXPECT_EQ(Budget(1).keys(37), 1);
  EXPECT_EQ(Budget(1.0).keys(37), 37);
}

TEST(Budget, ConvertsImplicitlyInOptions) {
  const auto keys = [](Budget budget) { return budget.keys(1000); };
  EXPECT_EQ(keys(7), 7);
  EXPECT_EQ(keys(0.25), 250);
}

TEST(Budget, RefusesANegativeCount) {
  expect_refused([] { Budget(-1); }, {"budget", -1, 0});
  expect_refused([] { Budget(std::int64_t{-1024}); }, {"budget", -1024, 0});
}

TEST(Budget, RefusesACountBeyondIndex) {
  expect_refused([] { Budget{std::numeric_limits<std::uint64_t>::max()}; }, {"budget"});
}

TEST(Budget, RefusesAFractionOutsideItsRange) {
  expect_refused([] { Budget(0.0); }, {"budget", "is 0,", "(0, 1]"});
  expect_refused([] { Budget(-0.25); }, {"budget", "-0.25", "(0, 1]"});
  expect_refused([] { Budget(1.5); }, {"budget", "1.5", "(0, 1]"});
  expect_refused([] { Budget(1024.0); }, {"budget", "1024", "(0, 1]"});
}

TEST(Budget, RefusesAFractionThatIsNoNumber) {
  expect_refused([] { Budget(std::nan("")); }, {"budget", "nan"});
  expect_refused([] { Budget{std::numeric_limits<double>::infinity()}; }, {"budget", "inf"});
}

// ---- by scores ----------------------------------------------------------------------------------

TEST(BudgetByScores, HasAFloorAndACeiling) {
  for (const Budget& budget : {Budget::mass(0.9, 100, 1000), Budget::relative(0.1, 100, 1000)}) {
    EXPECT_TRUE(budget.by_scores());
    for (Index kv_len : {0, 1, 100, 101, 999, 1000, 1001, 1 << 24}) {
      EXPECT_EQ(budget.least(kv_len), std::min<Index>(kv_len, 100));
      EXPECT_EQ(budget.keys(kv_len), std::min<Index>(kv_len, 1000));
    }
  }
}

TEST(BudgetByScores, IsOneKeyAtLeastAndAllAtMost) {
  for (const Budget& budget : {Budget::mass(1.0), Budget::relative(1e-9)}) {
    EXPECT_EQ(budget.least(501), 1);
    EXPECT_EQ(budget.keys(501), 501);
  }
}

TEST(BudgetByScores, SaysItsRule) {
  EXPECT_EQ(Budget::mass(0.75).rule(), Budget::Rule::mass);
  EXPECT_EQ(Budget::relative(0.25).rule(), Budget::Rule::relative);
  EXPECT_EQ(Budget(7).rule(), Budget::Rule::size);
  EXPECT_EQ(Budget::mass(0.75).threshold(), 0.75);
  EXPECT_EQ(Budget::relative(0.25).threshold(), 0.25);
}

TEST(BudgetOfASize, IsItsLeastToo) {
  for (const Budget& budget : {Budget(37), Budget(0.25)}) {
    EXPECT_FALSE(budget.by_scores());
    for (Index kv_len : {0, 1, 37, 501}) EXPECT_EQ(budget.least(kv_len), budget.keys(kv_len));
  }
}

TEST(BudgetByScoresRefuses, WhatIsOutOfRange) {
  for (const double bad : {0.0, -0.5, 1.5, std::nan("")}) {
    expect_refused([&] { Budget::mass(bad); }, {"mass", "(0, 1]"});
    expect_refused([&] { Budget::relative(bad); }, {"best score", "(0, 1]"});
  }
  expect_refused([] { Budget::mass(0.5, 0); }, {"floor", 0, 1});
  expect_refused([] { Budget::relative(0.5, 20, 10); }, {"floor", 20, "ceiling", 10});
}

}  // namespace
