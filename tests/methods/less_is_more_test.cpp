// LessIsMore against the oracle: one set for all heads, of first keys, recent keys, and the union
// of each head's best keys.

#include <quoka/methods/less_is_more.hpp>
#include <quoka/methods/oracle.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::LessIsMoreOptions;
using quoka::LessIsMoreSelector;

Selection selected(const LessIsMoreOptions& options, const Rows& q, const Rows& k) {
  return Stack<LessIsMoreSelector>(options, 32).select(2, q, k);
}

// The oracle's set. One key may stand for another where a head has two keys that get the same mass,
// to within 1e-5 of it: which of them comes first decides who is last in the union.
void expect_same_set(const std::vector<Index>& keep, const std::vector<Index>& expected,
                     const oracle::Tensor& q, const oracle::Tensor& k, Index b) {
  if (keep == expected) return;
  std::vector<Index> swapped;
  std::set_symmetric_difference(keep.begin(), keep.end(), expected.begin(), expected.end(),
                                std::back_inserter(swapped));
  ASSERT_EQ(keep.size(), expected.size());
  ASSERT_EQ(swapped.size(), 2u) << ::testing::PrintToString(keep) << " for "
                                << ::testing::PrintToString(expected);
  bool tied = false;
  for (Index h = 0; h < q.heads; ++h) {
    const auto masses =
        oracle::aggregate(oracle::scaled_dots(oracle::rows_of(q, b, h),
                                              oracle::rows_of(k, b, h / (q.heads / k.heads)), 0),
                          oracle::Domain::softmax);
    for (Index t : swapped)
      for (Index other = 0; other < k.len; ++other)
        tied = tied ||
               (other != t && std::abs(masses[uz(other)] - masses[uz(t)]) <= 1e-5 * masses[uz(t)]);
  }
  EXPECT_TRUE(tied) << "keys " << swapped[0] << " and " << swapped[1];
}

void expect_agrees_with_oracle(const LessIsMoreOptions& options, const Rows& q, const Rows& k) {
  const Index kv_len = k.len(), budget = options.budget.count(kv_len);
  SCOPED_TRACE("budget " + std::to_string(budget) + " of " + std::to_string(kv_len) +
               ", keep_first " + std::to_string(options.keep_first));
  const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
  const auto keep = to_positions(selected(options, q, k));
  for (Index b = 0; b < k_exact.batch; ++b) {
    const auto expected = oracle::less_is_more(q_exact, k_exact, b, budget, options.keep_first);
    for (Index head = 0; head < k_exact.heads; ++head)
      expect_same_set(keep[uz(b)][uz(head)], expected, q_exact, k_exact, b);
  }
}

// ---- against the oracle -------------------------------------------------------------------------

// Also for more heads than keys are chosen, and for a head that all keys are alike to: then the earlier ones.
TEST(LessIsMore, AgreesWithTheOracle) {
  for_each_draw("METHODS", 36, [](Random& random, std::uint64_t) {
    const DrawnCall x(random, true);
    SCOPED_TRACE(x.describe());
    expect_agrees_with_oracle({.budget = Budget::keys(random.one_of(1, 4, 5, 7, 15, 31)),
                               .keep_first = random.below(2) * 4},
                              x.q.rows(), x.k.rows());
  });
  Random random(553);
  const auto q = random.tensor<float>(1, 40, 3, 20), k = random.tensor<float>(1, 4, 127, 20);
  expect_agrees_with_oracle({.budget = Budget::keys(15)}, q, k);
}

// ---- the parts of the set -----------------------------------------------------------------------

TEST(LessIsMore, OfOneHeadIsTheSortedTopK) {  // to the bit, as one head needs no union
  Random random(554);
  const auto q = random.tensor<Element>(1, 1, 17, 24);
  const auto k = random.tensor<Element>(1, 1, 127, 24);
  for (Index budget : {1, 7, 31, 126})
    for (Index sinks : {0, 4, 12}) {
      const Index first = budget > sinks ? sinks : 0;
      const Index recent = std::max<Index>(0, budget - budget * 3 / 4 - first);
      EXPECT_EQ(
          selected({.budget = quoka::Budget::keys(budget), .keep_first = sinks}, q, k),
          quoka::OracleSelector(
              {.budget = quoka::Budget::keys(budget), .keep_first = first, .keep_last = recent})
              .select(q, k, {}));
    }
}

// ---- NaN and infinity ---------------------------------------------------------------------------

TEST(LessIsMore, AKeyThatIsNotFiniteRanksLast) {
  Random random(560);
  const auto q = random.tensor<Element>(1, 2, 17, 17);
  for (float odd : {not_a_number, infinity, -infinity}) {
    auto k = random.tensor<Element>(1, 1, 37, 17);
    k(0, 0, 20, 3) = stored<Element>(odd);
    auto others = oracle::range(0, 37);
    others.erase(others.begin() + 20);
    EXPECT_EQ(to_positions(selected({.budget = Budget::keys(36)}, q, k))[0][0], others);
  }
}

}  // namespace
