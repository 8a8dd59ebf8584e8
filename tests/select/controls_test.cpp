// The controls: exact attention as a selector, random keys, and the first and recent keys.

#include <quoka/methods/first_recent.hpp>
#include <quoka/methods/oracle.hpp>
#include <quoka/methods/random.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::FirstRecentSelector;
using quoka::OracleScorer;
using quoka::RandomSelector;

// ---- oracle -------------------------------------------------------------------------------------

TEST(OracleControl, IsTheExactAttentionOfTheChunk) {
  for_each_drawn_call(12, []<class T>(Random& random, const DrawnCall<T>& x) {
    const bool by_mean = random.below(2) == 0;
    const auto expected = x.expected([&](const oracle::Tensor& q, const oracle::Tensor& k) {
      return by_mean ? oracle::exact_scores(q, k, Domain::softmax, 0) : oracle::max_scores(q, k, 0);
    });
    expect_scores_and_keys<OracleScorer>(
        {.budget = Budget::keys(31), .aggregation = by_mean ? Aggregation::mean : Aggregation::max},
        x.q, x.k, expected, Domain::softmax);
  });
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
