// SampleAttention against the oracle, which queries it samples, and what it becomes when it samples
// all of them.

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
  SCOPED_TRACE(name_of(options.domain) + ", n_queries " + std::to_string(options.n_queries));
  const auto expected = oracle::sample_scores(to_oracle(q), to_oracle(k), options.n_queries,
                                              to_oracle(options.domain), 0);
  expect_scores_and_keys<SampleAttentionScorer>(options, q, k, expected, options.domain);
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(SampleAttention, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(431);
    for (Index group : {1, 3}) {
      const auto q = random.tensor<T>(2, 2 * group, 37, 24);
      const auto k = random.tensor<T>(2, 2, 127, 24);
      for (Domain domain : domains)
        for (Index n_queries : {1, 3, 16, 36, 37, 1000})
          expect_agrees_with_oracle(
              {.budget = Budget::keys(31), .n_queries = n_queries, .domain = domain}, q, k);
    }
  });
}

TEST(SampleAttentionSelects, AsTheOracleForEveryChunk) {
  Random random(432);
  const auto k = random.tensor<float>(1, 2, 127, 17);
  for (Index q_len : {1, 2, 15, 16, 17, 33, 128}) {
    const auto q = random.tensor<float>(1, 4, q_len, 17);
    for (Domain domain : domains)
      expect_agrees_with_oracle({.budget = Budget::keys(31), .domain = domain}, q, k);
  }
}

TEST(SampleAttentionSelects, AsTheOracleWithWindowsAndForcedKeys) {
  Random random(433);
  const auto q = random.tensor<float>(1, 4, 37, 64), k = random.tensor<float>(1, 2, 127, 64);
  for (Index window : {1, 3})
    for (Index keep_first : {0, 4, 40})
      for (Index keep_last : {0, 7})
        for (Domain domain : domains)
          expect_agrees_with_oracle(
              {.budget = Budget::keys(31),
               .domain = domain,
               .top_k = {.window = window, .keep_first = keep_first, .keep_last = keep_last}},
              q, k);
}

// ---- which queries ------------------------------------------------------------------------------

TEST(SampleAttention, LooksAtTheSampledQueriesAlone) {  // to the bit
  Random random(435);
  const auto q = random.tensor<Element>(1, 4, 37, 20);
  const auto k = random.tensor<Element>(1, 2, 127, 20);
  for (Domain domain : domains)
    for (Index n_queries : {1, 5, 16, 36}) {
      const SampleAttentionOptions options{.n_queries = n_queries, .domain = domain};
      const auto expected =
          scores_by<SampleAttentionScorer>(options, SelectorInput{q, k, LogitOptions{}});
      const std::vector<Index> sampled = oracle::sample_positions(37, n_queries);
      ASSERT_EQ(sampled.back(), 36);  // the last one is
      auto others = q;
      for (Index i = 0; i < 37; ++i)
        if (!std::binary_search(sampled.begin(), sampled.end(), i)) others = with_row(others, i, 7);
      EXPECT_TRUE(same_bits(
          scores_by<SampleAttentionScorer>(options, SelectorInput{others, k, LogitOptions{}}),
          expected));
      for (Index i : sampled) {
        const auto without = with_row(q, i, 7);
        EXPECT_FALSE(same_bits(
            scores_by<SampleAttentionScorer>(options, SelectorInput{without, k, LogitOptions{}}),
            expected))
            << "query " << i;
      }
    }
}

}  // namespace
