// The mean of logits in place of the mean of softmax (support/mean_query.hpp), against the oracle.

#include "support/mean_query.hpp"

#include <quoka/methods/loki.hpp>
#include <quoka/methods/sample_attention.hpp>
#include <quoka/methods/sparq.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka_examples::MeanQueryOptions;
using quoka_examples::MeanQueryScorer;
using quoka_examples::MeanQuerySelector;

// Scores and keys, by these options.
template <class Rows>
void expect_mean_logits(const typename Rows::Options& rows, const Tensor4<float>& q,
                        const Tensor4<float>& k, const oracle::Scores& expected,
                        double tolerance = 1e-5) {
  const MeanQueryOptions<Rows> options{rows};
  expect_scores_and_keys<MeanQueryScorer<Rows>>(options, q, k, expected, Domain::logit, tolerance);
}

TEST(MeanQuery, ScoresByTheMeanOfTheRowsLogits) {
  Random random(441);
  for (Index group : {1, 3}) {
    const auto q = random.tensor<float>(2, 2 * group, 17, 24);
    const auto k = random.tensor<float>(2, 2, 127, 24);
    const oracle::Tensor exact_q = to_oracle(q), exact_k = to_oracle(k);
    for (Index n : {1, 5, 17})
      expect_mean_logits<quoka::SampleAttentionRows>(
          {.budget = Budget::keys(31), .n_queries = n}, q, k,
          oracle::sample_scores(exact_q, exact_k, n, oracle::Domain::logit, 0));
    for (Index rank : {1, 16, 24})
      expect_mean_logits<quoka::SparqRows>(
          {.budget = Budget::keys(31), .rank = rank}, q, k,
          oracle::sparq_scores(exact_q, exact_k, rank, oracle::Domain::logit));
    expect_mean_logits<quoka::LokiRows>(  // too few keys for a basis
        {.budget = Budget::keys(31), .rank = 7}, q, k,
        oracle::exact_scores(exact_q, exact_k, oracle::Domain::logit, 0));
    std::vector<oracle::Basis> bases;
    for (Index head = 0; head < 2; ++head) {
      std::vector<oracle::Row> rows;
      for (Index b = 0; b < 2; ++b)
        for (Index t = 0; t < 60; ++t) rows.push_back(exact_k.row(b, head, t));
      bases.push_back(oracle::pca(rows, 7));
    }
    expect_mean_logits<quoka::LokiRows>(
        {.budget = Budget::keys(31), .rank = 7, .fitted = 60}, q, k,
        oracle::loki_scores(exact_q, exact_k, bases, oracle::Domain::logit, 0), 1e-4);
  }
}

}  // namespace
