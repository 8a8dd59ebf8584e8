// SparQ against the oracle, and the channels it chooses.

#include <quoka/methods/sparq.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::SparqOptions;
using quoka::SparqScorer;

// Of equal channels the first ones count.
TEST(Sparq, AgreesWithTheOracle) {
  for_each_drawn_call(16, []<class T>(Random& random, const DrawnCall<T>& x) {
    const SparqOptions options{.budget = Budget::keys(31),
                               .rank = 1 + random.below(x.q.dimension(3) + 2)};
    const auto expected = x.expected([&](const oracle::Tensor& q, const oracle::Tensor& k) {
      return oracle::sparq_scores(q, k, options.rank, Domain::softmax);
    });
    expect_scores_and_keys<SparqScorer>(options, x.q, x.k, expected, Domain::softmax);
  });
}

TEST(Sparq, ARowThatIsZeroOnTheChosenChannelsHasNoLogits) {  // 0 / 0 counts as 1
  Random random(450);
  auto q = random.tensor<Element>(1, 2, 17, 24, 8.0);  // head 0 chooses
  for (Index i = 0; i < 17; ++i)
    for (Index c = 0; c < 24; ++c) {
      if (c >= 4) q(0, 0, i, c) = stored<Element>(0.0);
      q(0, 1, i, c) = stored<Element>(c < 4 ? 0.0 : 0.125);
    }
  const auto k = random.tensor<Element>(1, 1, 127, 24);
  expect_scores_and_keys<SparqScorer>(
      {.budget = Budget::keys(31), .rank = 4}, q, k,
      oracle::sparq_scores(to_oracle(q), to_oracle(k), 4, Domain::softmax), Domain::softmax);
}

}  // namespace
