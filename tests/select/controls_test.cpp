// The controls: the exact attention as its own selector, chance, and the first and recent keys.

#include <quoka/methods/first_recent.hpp>
#include <quoka/methods/oracle.hpp>
#include <quoka/methods/random.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::FirstRecentSelector;
using quoka::OracleScorer;
using quoka::OracleSelector;
using quoka::RandomSelector;

// ---- oracle -------------------------------------------------------------------------------------

TEST(OracleControl, IsTheExactAttentionOfTheChunk) {
  for_each_storage([]<class T>() {
    Random random(511);
    for (Index group : {1, 3})
      for (Index q_len : {1, 37}) {
        const auto q = random.tensor<T>(2, 2 * group, q_len, 24);
        const auto k = random.tensor<T>(2, 2, 127, 24);
        const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
        expect_scores_and_keys<OracleScorer>(
            {.budget = Budget::keys(31)}, q, k,
            oracle::exact_scores(q_exact, k_exact, oracle::Domain::softmax, 0), Domain::softmax);
        expect_scores_and_keys<OracleScorer>(
            {.budget = Budget::keys(31), .aggregation = Aggregation::max}, q, k,
            oracle::max_scores(q_exact, k_exact, 0), Domain::softmax);
      }
  });
}

TEST(OracleControls, NoOtherKeysKeepMoreOfTheMass) {  // of all 35 sets of 3 of 7
  for (std::uint64_t seed = 513; seed < 523; ++seed) {
    Random random(seed);
    const auto q = random.tensor<float>(1, 3, 5, 8, 3.0), k = random.tensor<float>(1, 1, 7, 8);
    const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
    const double kept = oracle::mass_kept(
        q_exact, k_exact,
        to_positions(OracleSelector({.budget = Budget::keys(3)}).select(q, k, {})));
    int sets = 0;
    for (Index x = 0; x < 7; ++x)
      for (Index y = x + 1; y < 7; ++y)
        for (Index z = y + 1; z < 7; ++z, ++sets)
          EXPECT_LE(oracle::mass_kept(q_exact, k_exact, {{{x, y, z}}}), kept + 1e-6);
    EXPECT_EQ(sets, 35);
  }
}

// One query of 64 wants key 250 and nothing else, the others want key 100 most.
TEST(OracleControls, ByTheMaximumKeepsWhatOneQueryLivesOnByTheMeanWhatMostDo) {
  Random random(524);
  auto q = random.tensor<float>(1, 1, 64, 24), k = random.tensor<float>(1, 1, 501, 24);
  for (Index i = 0; i < 64; ++i) {
    q(0, 0, i, 0) = i == 13 ? 30.0f : -1.0f;
    q(0, 0, i, 1) = i == 13 ? -1.0f : 5.0f;
  }
  k(0, 0, 250, 0) = k(0, 0, 100, 1) = 12.0f;
  const auto kept = [&](Aggregation aggregation) {
    const OracleSelector selector({.budget = Budget::keys(1), .aggregation = aggregation});
    return to_positions(selector.select(q, k, {}))[0][0];
  };
  EXPECT_EQ(kept(Aggregation::max), std::vector<Index>{250});
  EXPECT_EQ(kept(Aggregation::mean), std::vector<Index>{100});
}

// ---- random -------------------------------------------------------------------------------------

std::vector<Index> drawn(std::uint64_t seed, Index kv_len, Index budget = 7) {
  Tensor4<float> q(1, 1, 1, 1), k(1, 1, kv_len, 1);
  q.setConstant(not_a_number);  // it looks at neither
  k.setConstant(not_a_number);
  return to_positions(
      RandomSelector({.budget = Budget::keys(budget), .seed = seed}).select(q, k, {}))[0][0];
}

// By another implementation of the formula; the same on every machine.
TEST(RandomControl, DrawsTheseKeys) {
  EXPECT_EQ(drawn(0, 37), (std::vector<Index>{0, 3, 12, 13, 16, 20, 29}));
  EXPECT_EQ(drawn(7, 37), (std::vector<Index>{1, 6, 14, 17, 18, 31, 33}));
  EXPECT_EQ(drawn(0, 38), (std::vector<Index>{5, 16, 19, 21, 30, 31, 36}));
}

TEST(RandomControl, DrawsAnewForEverySeedSequenceHeadAndLength) {
  EXPECT_EQ(drawn(3, 501), drawn(3, 501));
  EXPECT_NE(drawn(3, 501), drawn(4, 501));
  EXPECT_NE(drawn(3, 501), drawn(3, 502));
  const Tensor4<float> q(2, 4, 1, 1), k(2, 2, 501, 1);
  const auto keep = to_positions(RandomSelector({.budget = Budget::keys(7)}).select(q, k, {}));
  EXPECT_NE(keep[0][0], keep[0][1]);
  EXPECT_NE(keep[0][0], keep[1][0]);
  EXPECT_NE(keep[0][1], keep[1][0]);
}

// 37 keys, 9 of them drawn 4000 times: each 973 times on average, with a standard deviation of 27.
TEST(RandomControl, DrawsEveryKeyAlike) {
  std::vector<int> times(37, 0);
  for (std::uint64_t seed = 0; seed < 4000; ++seed)
    for (Index t : drawn(seed, 37, 9)) ++times[uz(t)];
  for (int n : times) EXPECT_NEAR(n, 4000 * 9 / 37, 5 * 27);
}

TEST(RandomControl, DrawsNeighboursIndependently) {  // both of a pair: 9 * 8 of 37 * 36 times
  int both = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    const auto list = drawn(seed, 37, 9);
    for (std::size_t i = 1; i < list.size(); ++i) both += list[i] == list[i - 1] + 1 ? 1 : 0;
  }
  const double expected = 4000.0 * 36.0 * (9.0 * 8.0) / (37.0 * 36.0);
  EXPECT_NEAR(static_cast<double>(both), expected, 0.05 * expected);
}

// ---- first and recent ---------------------------------------------------------------------------

std::vector<Index> first_and_recent(const quoka::FirstRecentOptions& options, Index kv_len) {
  Tensor4<float> q(1, 1, 1, 1), k(1, 1, kv_len, 1);
  q.setConstant(not_a_number);  // it looks at neither
  k.setConstant(not_a_number);
  return to_positions(FirstRecentSelector(options).select(q, k, {}))[0][0];
}
std::vector<Index> both(Index first, Index last, Index kv_len) {
  std::vector<Index> list = oracle::range(0, first);
  for (Index t = kv_len - last; t < kv_len; ++t) list.push_back(t);
  return list;
}

TEST(FirstRecentControl, KeepsFourSinksAndTheLastOnes) {
  for (Index kv_len : {32, 37, 501}) {
    EXPECT_EQ(first_and_recent({.budget = Budget::keys(31)}, kv_len), both(4, 27, kv_len));
    EXPECT_EQ(first_and_recent({.budget = Budget::keys(5)}, kv_len), both(4, 1, kv_len));
  }
}

TEST(FirstRecentControl, OfASmallBudgetKeepsSinksAlone) {
  for (Index budget : {0, 1, 4})
    EXPECT_EQ(first_and_recent({.budget = Budget::keys(budget)}, 37), oracle::range(0, budget));
}

TEST(FirstRecentControl, WithoutSinksIsASlidingWindow) {
  EXPECT_EQ(first_and_recent({.budget = Budget::keys(7), .keep_first = 0}, 37),
            oracle::range(30, 37));
}

TEST(FirstRecentControl, KeepsAsManySinksAsItIsAskedFor) {
  EXPECT_EQ(first_and_recent({.budget = Budget::keys(31), .keep_first = 9}, 501), both(9, 22, 501));
}

TEST(FirstRecentControl, OfAFractionGrowsWithThePast) {
  for (Index kv_len : {40, 100, 1000})
    EXPECT_EQ(first_and_recent({.budget = Budget::share(0.25)}, kv_len),
              both(4, kv_len / 4 - 4, kv_len));
}

}  // namespace
