// SparQ against the oracle, and the channels it chooses.

#include <quoka/methods/oracle.hpp>
#include <quoka/methods/sparq.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::SparqOptions;
using quoka::SparqScorer;
using quoka::SparqSelector;

constexpr Index block = quoka::tuning::block_keys;

template <class T>
void expect_agrees_with_oracle(const SparqOptions& options, const Tensor4<T>& q,
                               const Tensor4<T>& k) {
  SCOPED_TRACE("rank " + std::to_string(options.rank));
  const auto expected =
      oracle::sparq_scores(to_oracle(q), to_oracle(k), options.rank, oracle::Domain::softmax);
  expect_scores_and_keys<SparqScorer>(options, q, k, expected, Domain::softmax);
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(Sparq, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(441);
    for (Index group : {1, 3}) {
      const auto q = random.tensor<T>(2, 2 * group, 17, 24);
      const auto k = random.tensor<T>(2, 2, 127, 24);
      for (Index rank : {1, 3, 16, 23, 24, 1000})
        expect_agrees_with_oracle({.budget = Budget::keys(31), .rank = rank}, q, k);
    }
  });
}

TEST(SparqSelects, AsTheOracleForAnyNumberOfKeys) {
  Random random(442);
  const auto q = random.tensor<float>(1, 4, 7, 20);
  for (Index kv_len : {Index{32}, block - 1, block, block + 1, 2 * block + 3, Index{501}}) {
    const auto k = random.tensor<float>(1, 2, kv_len, 20);
    expect_agrees_with_oracle({.budget = Budget::keys(31), .rank = 7}, q, k);
  }
}

// ---- channels -----------------------------------------------------------------------------------

TEST(Sparq, ChoosesTheFirstOfEqualChannels) {
  Random random(449);
  Tensor4<Element> q(1, 2, 17, 24);
  for (Index i = 0; i < q.size(); ++i)
    q.data()[i] = stored<Element>(random.bits() % 2 == 0 ? 0.5 : -0.5);
  auto k = random.tensor<Element>(1, 1, 127, 24);
  const auto expected = scores_by<SparqScorer>({.rank = 7}, SelectorInput{q, k, LogitOptions{}});
  for (Index t = 0; t < 127; ++t)
    for (Index c = 7; c < 24; ++c) k(0, 0, t, c) = stored<Element>(random.normal());
  EXPECT_TRUE(same_bits(scores_by<SparqScorer>({.rank = 7}, SelectorInput{q, k, LogitOptions{}}),
                        expected));
  for (Index t = 0; t < 127; ++t) k(0, 0, t, 6) = stored<Element>(random.normal());
  EXPECT_FALSE(same_bits(scores_by<SparqScorer>({.rank = 7}, SelectorInput{q, k, LogitOptions{}}),
                         expected));
}

TEST(Sparq, ARowThatIsZeroOnTheChosenChannelsHasNoLogits) {  // 0 / 0 counts as 1
  Random random(450);
  auto q = random.tensor<Element>(1, 2, 17, 24, 8.0);  // head 0 chooses
  for (Index i = 0; i < 17; ++i)
    for (Index c = 0; c < 24; ++c) {
      if (c >= 4) q(0, 0, i, c) = stored<Element>(0.0);
      q(0, 1, i, c) = stored<Element>(c < 4 ? 0.0 : 0.125);
    }
  for (Index c = 0; c < 24; ++c) q(0, 0, 3, c) = stored<Element>(0.0);  // zero everywhere
  const auto k = random.tensor<Element>(1, 1, 127, 24);
  expect_agrees_with_oracle({.budget = Budget::keys(31), .rank = 4}, q, k);
}

// ---- NaN and infinity ---------------------------------------------------------------------------

TEST(Sparq, AKeyThatIsNotFiniteSpoilsItsOwnScoreOnly) {
  Random random(454);
  const auto q = random.tensor<Element>(1, 2, 17, 24);
  const auto finite = random.tensor<Element>(1, 1, block + 3, 24);
  const Index chosen = oracle::sparq_channels(to_oracle(q), 0, 0, 1, 7).back();
  for (float odd : {not_a_number, infinity, -infinity})
    for (Index t : {Index{0}, Index{20}, block - 1, block + 2}) {
      auto k = finite;
      k(0, 0, t, chosen) = stored<Element>(odd);
      auto expected = oracle::sparq_scores(to_oracle(q), to_oracle(without_row(finite, t)), 7,
                                           oracle::Domain::softmax);
      expected[0][0].insert(expected[0][0].begin() + t, oracle::not_a_number);
      expect_scores_and_keys<SparqScorer>({.budget = Budget::keys(31), .rank = 7}, q, k, expected,
                                          Domain::softmax);
    }
}

}  // namespace
