// SampleAttention against the oracle, which samples the same queries.

#include <quoka/methods/oracle.hpp>
#include <quoka/methods/sample_attention.hpp>
#include <quoka/select/quoka.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::SampleAttentionOptions;
using quoka::SampleAttentionScorer;

template <class T>
void expect_agrees_with_oracle(const SampleAttentionOptions& options, const Tensor4<T>& q,
                               const Tensor4<T>& k) {
  SCOPED_TRACE("n_queries " + std::to_string(options.n_queries));
  const auto expected = oracle::sample_scores(to_oracle(q), to_oracle(k), options.n_queries,
                                              oracle::Domain::softmax, 0);
  expect_scores_and_keys<SampleAttentionScorer>(options, q, k, expected, Domain::softmax);
}

TEST(SampleAttention, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(431);
    for (Index group : {1, 3}) {
      const auto q = random.tensor<T>(2, 2 * group, 37, 24);
      const auto k = random.tensor<T>(2, 2, 127, 24);
      for (Index n_queries : {1, 3, 16, 36, 37, 1000})
        expect_agrees_with_oracle({.budget = Budget::keys(31), .n_queries = n_queries}, q, k);
    }
  });
}

TEST(SampleAttentionSelects, AsTheOracleForEveryChunk) {
  Random random(432);
  const auto k = random.tensor<float>(1, 2, 127, 17);
  for (Index q_len : {1, 2, 15, 16, 17, 33, 128}) {
    const auto q = random.tensor<float>(1, 4, q_len, 17);
    expect_agrees_with_oracle({.budget = Budget::keys(31)}, q, k);
  }
}

}  // namespace
