// The controls: exact attention as a selector, random keys, and the first and recent keys.

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

// One query of 64 attends to key 250 alone, the others mostly to key 100.
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

std::vector<Index> drawn(std::uint64_t seed, Index kv_len) {
  Tensor4<float> q(1, 1, 1, 1), k(1, 1, kv_len, 1);
  q.setConstant(not_a_number);  // it looks at neither
  k.setConstant(not_a_number);
  return to_positions(
      RandomSelector({.budget = Budget::keys(7), .seed = seed}).select(q, k, {}))[0][0];
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

TEST(FirstRecentControl, KeepsSinksAndTheLastOnes) {
  const Budget quarter = Budget::share(0.25);
  const struct {
    quoka::FirstRecentOptions options;
    Index kv_len, first, last;
  } all[] = {
      {{.budget = Budget::keys(31)}, 32, 4, 27},
      {{.budget = Budget::keys(31)}, 501, 4, 27},
      {{.budget = Budget::keys(5)}, 37, 4, 1},
      {{.budget = Budget::keys(4)}, 37, 4, 0},  // a small one: sinks alone
      {{.budget = Budget::keys(1)}, 37, 1, 0},
      {{.budget = Budget::keys(0)}, 37, 0, 0},
      {{.budget = Budget::keys(7), .keep_first = 0}, 37, 0, 7},  // a sliding window
      {{.budget = Budget::keys(31), .keep_first = 9}, 501, 9, 22},
      {{.budget = quarter}, 40, 4, 6},
      {{.budget = quarter}, 1000, 4, 246},
  };
  for (const auto& [options, kv_len, first, last] : all)
    EXPECT_EQ(first_and_recent(options, kv_len), both(first, last, kv_len))
        << options.budget.count(kv_len) << " of " << kv_len;
}

}  // namespace
