// The budget: counts, shares of the past, and refused values.

#include <quoka/select/options.hpp>

#include "support/refused_calls.hpp"

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

// A count of any integer type is that many keys, or all of a shorter past; a share is rounded down, and at least one
// key.
TEST(Budget, IsSoManyKeysOfAPast) {
  const struct {
    Budget budget;
    Index kv_len, count;
  } table[] = {{Budget::keys(1024), 32768, 1024},
               {Budget::keys(1024), 1025, 1024},
               {Budget::keys(1024), 1024, 1024},
               {Budget::keys(1024), 1023, 1023},
               {Budget::keys(1024), 0, 0},
               {Budget::keys(0), 37, 0},
               {Budget::keys(0), 0, 0},
               {Budget::keys(1), 37, 1},
               {Budget::keys(std::int8_t{7}), 37, 7},
               {Budget::keys(std::size_t{7}), 37, 7},
               {Budget::keys(7u), 37, 7},
               {Budget::keys(std::int64_t{1} << 40), 37, 37},
               {Budget::share(0.25), 0, 0},
               {Budget::share(1e-300), 127, 1},
               {Budget::share(std::numeric_limits<double>::denorm_min()), 127, 1},
               {Budget::share(1.0), 0, 0},
               {Budget::share(1.0), 1 << 24, 1 << 24}};
  for (const auto& [budget, kv_len, count] : table)
    EXPECT_EQ(budget.count(kv_len), count) << "of " << kv_len;
}

// floor(p * len / q), at least one key and at most all: of whole numbers alone.
Index exact_share(Index p, Index q, Index len) {
  const Index whole = len / q * p + len % q * p / q;
  return std::min(std::max<Index>(whole, 1), len);
}

constexpr Index lengths[] = {
    1, 7, 37, 999, 1000, 11'001, 65'536, 101'101, 1'000'001, 1 << 30, 1'000'000'000'001};

// Decimals of up to nine digits, floats of up to five, and ratios, though no decimal is one.
TEST(Budget, AShareIsExactlyTheNumberThatWasMeant) {
  EXPECT_EQ(Budget::share(0.999).count(11'001), 10'989);   // 10,989.999
  EXPECT_EQ(Budget::share(0.99).count(101'101), 100'089);  // 100,089.99
  Random random(1);
  const auto expect_share = [](Index p, Index q, Index len, bool in_float) {
    ASSERT_EQ(Budget::share(static_cast<double>(p) / static_cast<double>(q)).count(len),
              exact_share(p, q, len))
        << p << " / " << q << " of " << len;
    if (!in_float) return;
    ASSERT_EQ(Budget::share(static_cast<float>(p) / static_cast<float>(q)).count(len),
              exact_share(p, q, len))
        << p << " / " << q << " of " << len << " in float";
  };
  for (Index q = 10; q <= 1'000'000'000; q *= 10)
    for (int draw = 0; draw < 300; ++draw) {
      const Index p = draw == 0 ? 1 : draw == 1 ? q - 1 : 1 + random.below(q);
      for (const Index len : lengths) expect_share(p, q, len, q <= 100'000);
    }
  for (Index q = 1; q <= 250; ++q)
    for (Index p = 1; p <= q; ++p)
      for (const Index times : {1, 2, 7, 1000})
        expect_share(p, q, q * times, q <= 150 && times <= 7);  // a float has few digits
}

TEST(Budget, AShareJustBelowAllIsNotAll) {
  EXPECT_EQ(Budget::share(std::nextafter(1.0, 0.0)).count(1'000'000), 999'999);
  EXPECT_EQ(Budget::share(std::nextafter(1.0f, 0.0f)).count(1000), 999);
}

TEST(Budget, AShareMayBeSmall) {
  EXPECT_EQ(Budget::share(0x1p-30).count(Index{5} << 40), Index{5} << 10);
  EXPECT_EQ(Budget::share(1e-6f).count(37'999'999), 37);
}

// ---- a bare number is not a budget -------------------------------------------------------------------------

template <class T>
concept MakesABudget = std::is_convertible_v<T, Budget> || std::is_constructible_v<Budget, T>;
template <class T>
concept IsACount = requires(T x) {
  Budget::keys(x);
};
template <class T>
concept IsAShare = requires(T x) {
  Budget::share(x);
};

TEST(Budget, SaysWhatItsNumberIs) {
  static_assert(!MakesABudget<int> && !MakesABudget<Index> && !MakesABudget<unsigned>);
  static_assert(!MakesABudget<double> && !MakesABudget<float> && !MakesABudget<bool>);
  static_assert(!std::is_default_constructible_v<Budget>);
  static_assert(IsACount<int> && IsACount<std::size_t> && IsAShare<double> && IsAShare<float>);
  static_assert(!IsACount<bool> && !IsACount<double> && !IsACount<float>);
  static_assert(!IsAShare<int> && !IsAShare<bool> && !IsAShare<Index>);
  struct Options {
    Budget budget = Budget::keys(1024);
    Index kernel_size = 1;
  };
  EXPECT_EQ((Options{.budget = Budget::share(0.125), .kernel_size = 3}.budget.count(800)), 100);
  EXPECT_EQ(Options{}.budget.count(8000), 1024);
}

TEST(Budget, RefusesWhatIsNoCountAndNoShare) {
  expect_all_refused({
      {[] { Budget::keys(-1); }, {"budget", -1, 0}},
      {[] { Budget::keys(std::int64_t{-1024}); }, {"budget", -1024, 0}},
      {[] { Budget::keys(std::numeric_limits<std::uint64_t>::max()); }, {"budget"}},
      {[] { Budget::share(0.0); }, {"budget", "is 0,", "(0, 1]"}},
      {[] { Budget::share(-0.25); }, {"budget", "-0.25", "(0, 1]"}},
      {[] { Budget::share(1.5); }, {"budget", "1.5", "(0, 1]"}},
      {[] { Budget::share(1024.0); }, {"budget", "1024", "(0, 1]"}},
      {[] { Budget::share(std::nan("")); }, {"budget", "nan"}},
      {[] { Budget::share(std::numeric_limits<double>::infinity()); }, {"budget", "inf"}},
  });
}

}  // namespace
