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
using quoka::SampleAttentionSelector;

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

TEST(SampleAttentionSelects, AllOfAPastWithinTheBudget) {
  Random random(434);
  const auto q = random.tensor<float>(1, 4, 37, 17), k = random.tensor<float>(1, 2, 37, 17);
  for (Index budget : {37, 38})
    EXPECT_EQ(SampleAttentionSelector({.budget = quoka::Budget::keys(budget)}).select(q, k, {}),
              Selection::all(1, 2, 37));
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

TEST(SampleAttention, OfAllQueriesIsTheExactScorer) {  // to the bit
  Random random(436);
  const auto q = random.tensor<Element>(1, 4, 37, 20);
  const auto k = random.tensor<Element>(1, 2, 127, 20);
  const SelectorInput input{q, k, LogitOptions{}};
  const auto exact = scores_by<quoka::OracleScorer>({}, input);
  for (Index n_queries : {37, 1000})
    EXPECT_TRUE(
        same_bits(scores_by<SampleAttentionScorer>({.n_queries = n_queries}, input), exact));
}

// ---- logits -------------------------------------------------------------------------------------

// Of all queries: logits are linear in the query, and a mean of means is a mean, so there is
// nothing but the scale between the two.
TEST(SampleAttention, OfAllLogitsIsQuokaByDotProductAndMeanUpToTheScale) {
  Random random(437);
  for (Index dim : {17, 64})
    for (Index group : {1, 3}) {
      const auto q = random.tensor<Element>(1, 2 * group, 37, dim);
      const auto k = random.tensor<Element>(1, 2, 127, dim);
      const SampleAttentionOptions options{
          .budget = Budget::keys(31), .n_queries = 37, .domain = Domain::logit};
      const QuokaOptions same{.budget = Budget::keys(31),
                              .n_queries = 37,
                              .scoring = Scoring::dot,
                              .aggregation = Aggregation::mean};
      oracle::Scores quokas =
          oracle::scores_of_kept(to_oracle(q), oracle::all_positions(1, 2 * group, 37),
                                 to_oracle(k), to_oracle(same, 127, group));
      expect_same_keys(to_positions(SampleAttentionSelector(options).select(q, k, {})), quokas,
                       {.budget = 31});
      for (auto& head : quokas[0])
        for (double& x : head) x /= std::sqrt(static_cast<double>(dim));
      expect_scores(scores_by<SampleAttentionScorer>(options, SelectorInput{q, k, LogitOptions{}}),
                    quokas, Domain::logit);
      expect_keeps_best(quoka::QuokaSelector(same).select(q, k, {}), quokas, Domain::logit,
                        options);
    }
}

TEST(SampleAttention, OfOneQueryRanksAlikeInBothDomains) {  // softmax keeps the order
  Random random(438);
  const auto q = random.tensor<Element>(1, 2, 37, 20);
  const auto k = random.tensor<Element>(1, 2, 127, 20);
  const auto keep = [&](Domain domain) {
    return SampleAttentionSelector({.budget = Budget::keys(31), .n_queries = 1, .domain = domain})
        .select(q, k, {});
  };
  const SampleAttentionOptions one{.budget = Budget::keys(31), .n_queries = 1};
  const auto logits =
      oracle::sample_scores(to_oracle(q), to_oracle(k), 1, oracle::Domain::logit, 0);
  for (Domain domain : domains) expect_keeps_best(keep(domain), logits, Domain::logit, one);
}

TEST(SampleAttention, ScalingTheQueriesByAPowerOfTwoDoesNotChangeWhatLogitsSelect) {
  Random random(439);
  auto q = random.tensor<Element>(1, 4, 37, 20);
  const auto k = random.tensor<Element>(1, 2, 127, 20);
  const SampleAttentionSelector logit({.budget = Budget::keys(31), .domain = Domain::logit}),
      softmax({.budget = Budget::keys(31)});
  const Selection by_logit = logit.select(q, k, {}), by_softmax = softmax.select(q, k, {});
  for (Index i = 0; i < q.size(); ++i)
    q.data()[i] = stored<Element>(8.0 * static_cast<double>(static_cast<float>(q.data()[i])));
  EXPECT_EQ(logit.select(q, k, {}), by_logit);
  EXPECT_FALSE(softmax.select(q, k, {}) ==
               by_softmax);  // there each row's best keys count for more
}

// ---- refused ------------------------------------------------------------------------------------

TEST(SampleAttentionRefuses, OptionsOutOfRange) {
  expect_refused([] { SampleAttentionSelector({.n_queries = 0}); }, {"n_queries", 0, 1});
  expect_refused([] { SampleAttentionSelector({.top_k = {.window = 0}}); }, {"window", 0, 1});
  expect_refused([] { SampleAttentionSelector({.top_k = {.keep_first = -3}}); },
                 {"keep_first", -3, 0});
  expect_refused([] { SampleAttentionSelector({.top_k = {.keep_last = -4}}); },
                 {"keep_last", -4, 0});
}

}  // namespace
