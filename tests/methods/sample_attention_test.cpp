// SampleAttention against the oracle, which samples the same queries.

#include <quoka/methods/sample_attention.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;

TEST(SampleAttention, AgreesWithTheOracle) {
  for_each_draw("METHODS", 36, [](Random& random, std::uint64_t) {
    const DrawnCall x(random);
    SCOPED_TRACE(x.describe());
    const Index n_queries = 1 + random.below(x.q_len() + 3);
    const auto expected = x.expected([&](const oracle::Tensor& q, const oracle::Tensor& k) {
      return oracle::sample_scores(q, k, n_queries, Domain::softmax, 0);
    });
    expect_scores_and_keys<quoka::SampleAttentionScorer>(
        {.budget = Budget::keys(31), .n_queries = n_queries}, x.q.rows(), x.k.rows(), expected,
        Domain::softmax);
  });
}

}  // namespace
