// Pre-aggregation against the oracle: groups of any size, zero and non-finite queries.

#include <quoka/select/stages.hpp>

#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::pre_aggregate;

// Element by element, within 1e-6 of the longest row.
template <class T>
void expect_as_oracle(const Tensor4<T>& kept, Index kv_heads) {
  const oracle::Tensor expected =
      oracle::pre_aggregate(to_oracle(kept), kv_heads, oracle::Group::mean);
  const oracle::Tensor q_bar = to_oracle(pre_aggregate(kept, kv_heads));
  ASSERT_EQ(q_bar.batch, expected.batch);
  ASSERT_EQ(q_bar.heads, expected.heads);
  ASSERT_EQ(q_bar.len, expected.len);
  ASSERT_EQ(q_bar.dim, expected.dim);
  double largest = 0;
  for (double x : expected.data) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < expected.data.size(); ++i)
    ASSERT_NEAR(q_bar.data[i], expected.data[i], 1e-6 * largest) << i;
}

TEST(PreAggregate, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(91);
    for (Index group : {1, 4, 5, 7, 8})
      for (Index dim : {1, 17, 56, 100, 128}) {
        SCOPED_TRACE("group " + std::to_string(group) + ", dim " + std::to_string(dim));
        expect_as_oracle(random.tensor<T>(2, 2 * group, 3, dim), 2);
      }
  });
}

TEST(PreAggregate, QueriesThatAreZeroOrNotFiniteCountAsZero) {
  Random random(95);
  for (float odd : {0.0f, not_a_number, infinity, -infinity})
    for (Index kv_heads : {2, 4}) {
      auto kept = random.tensor<Element>(1, 4, 3, 17);
      for (Index c = odd == 0.0f ? 0 : 16; c < 17; ++c) kept(0, 1, 2, c) = stored<Element>(odd);
      expect_as_oracle(kept, kv_heads);
      const auto before = pre_aggregate(kept, kv_heads);
      for (Index c = 0; c < 17; ++c) kept(0, 1, 2, c) = stored<Element>(0.0);
      EXPECT_TRUE(same_bits(pre_aggregate(kept, kv_heads), before));
    }
}

}  // namespace
