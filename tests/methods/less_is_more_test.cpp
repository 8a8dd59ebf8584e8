// LessIsMore against the oracle: one set for all heads, of first keys, recent keys, and the union of each head's best
// keys. How layers share it: tidal_decode_test.cpp.

#include <quoka/methods/less_is_more.hpp>
#include <quoka/methods/oracle.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::LessIsMoreOptions;

Selection selected(const LessIsMoreOptions& options, const Rows& q, const Rows& k) {
  const quoka::LessIsMoreSelector selector(options);  // of a layer that chooses
  quoka::LessIsMoreSelector::State state;
  Selection keep;
  selector.select({q, k, LogitOptions{}}, state, keep, SerialExecutor{});
  return keep;
}

// The oracle's set. One key may stand for another where a head has two keys that get the same mass, to within 1e-5 of
// it: which of them comes first decides who is last in the union.
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

// Also for more heads than keys are chosen, and for a head that all keys are alike to: then the earlier ones.
TEST(LessIsMore, AgreesWithTheOracle) {
  for_each_draw("METHODS", 40, [](Random& random, std::uint64_t) {
    const DrawnCall x(random, true);
    StoredRows many(random.tensor<float>(x.k.rows().batch(), 20 * x.k.rows().heads(), 3, x.dim()),
                    quoka::float_format());
    const Rows q = random.seldom(6) ? many.rows() : x.q.rows(), k = x.k.rows();
    const LessIsMoreOptions options{.budget = Budget::keys(random.one_of(1, 4, 5, 7, 15, 31)),
                                    .keep_first = random.below(2) * 4};
    SCOPED_TRACE(x.describe() + ", budget " + std::to_string(options.budget.count(k.len())));
    const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
    const auto keep = to_positions(selected(options, q, k));
    for (Index b = 0; b < k.batch(); ++b) {
      const auto expected = oracle::less_is_more(q_exact, k_exact, b, options.budget.count(k.len()),
                                                 options.keep_first);
      for (const auto& list : keep[uz(b)]) expect_same_set(list, expected, q_exact, k_exact, b);
    }
  });
}

TEST(LessIsMore, OfOneHeadIsTheSortedTopK) {  // to the bit, as one head needs no union
  for_each_draw("METHODS", 12, [](Random& random, std::uint64_t) {
    auto k = random.tensor<float>(1, 1, 127, 24);
    if (random.seldom(2)) k(0, 0, 20, 3) = random.one_of(not_a_number, infinity, -infinity);
    const auto q = random.tensor<float>(1, 1, 17, 24);
    const Index budget = random.one_of(1, 7, 31, 126), sinks = random.one_of(0, 4, 12);
    const Index first = budget > sinks ? sinks : 0;
    const Index recent = std::max<Index>(0, budget - budget * 3 / 4 - first);
    EXPECT_EQ(selected({.budget = Budget::keys(budget), .keep_first = sinks}, q, k),
              quoka::OracleSelector(
                  {.budget = Budget::keys(budget), .keep_first = first, .keep_last = recent})
                  .select(q, k, {}));
  });
}

}  // namespace
