// Common code of the rivals' tests: drawn calls, a scorer run on its own, and comparisons that allow float rounding and
// nothing else.
#pragma once

#include "support/baseline_oracle.hpp"
#include "support/drawn_rows.hpp"
#include "support/selector_fixtures.hpp"
#include "support/world.hpp"

#include <quoka/select/selector.hpp>

#include <cmath>
#include <iterator>
#include <optional>
#include <vector>

namespace quoka_test {

using oracle::Domain;
using quoka::SelectorInput;

std::string name_of(Domain x);

// ---- scores -------------------------------------------------------------------------------------

// The scores that a scorer writes. [batch, kv_heads, kv_len]
template <class S>
Tensor3<float> scores_by(const typename S::Options& options, const SelectorInput& input,
                         typename S::State& state) {
  Tensor3<float> scores(input.k.batch(), input.k.heads(), input.k.len());
  scores.setConstant(-12345.0f);  // no score: an element left out is seen
  quoka::SerialExecutor serial;
  S(options).score(input, state, scores, serial);
  return scores;
}
template <class S>
Tensor3<float> scores_by(const typename S::Options& options, const SelectorInput& input) {
  typename S::State state;
  return scores_by<S>(options, input, state);
}

// Masses within `tolerance` of themselves, logits within `tolerance` of the largest, and 1e-7
// beside, as means of logits of about 1 may cancel; not finite where the oracle's is not.
void expect_scores(const Tensor3<float>& scores, const oracle::Scores& expected, Domain domain,
                   double tolerance = 1e-5);

// Masses have a relative error, so they are compared by their logarithm.
oracle::Scores comparable(oracle::Scores scores, Domain domain);

// The best keys by these scores, near ties aside. Options have a budget, keep_first and keep_last.
template <class Options>
void expect_keeps_best(const Selection& keep, const oracle::Scores& scores, Domain domain,
                       const Options& options) {
  expect_same_keys(to_positions(keep), comparable(scores, domain),
                   {.budget = options.budget.count(keep.kv_len()),
                    .keep_first = options.keep_first,
                    .keep_last = options.keep_last});
}

// Scores and keys of ScoredSelector<S> are those that the oracle expects.
template <class S>
void expect_scores_and_keys(const typename S::Options& options, const Rows& q, const Rows& k,
                            const oracle::Scores& expected, Domain domain,
                            double tolerance = 1e-5) {
  expect_scores(scores_by<S>(options, SelectorInput{q, k, LogitOptions{}}), expected, domain,
                tolerance);
  expect_keeps_best(quoka::ScoredSelector<S>(options).select(q, k, {}), expected, domain, options);
}

// ---- drawn calls --------------------------------------------------------------------------------

// Queries and keys of a call of odd sizes, in float, half or bfloat16: at times with queries of few values, so that sums are
// equal, with heads that look at other channels than the first ones, with rows of zeros, a head of which all keys are, and with
// one key that is not finite in any head.
struct DrawnCall {
  explicit DrawnCall(Random& random, bool finite = false);

  std::string describe() const;
  Index q_len() const { return q.rows().len(); }
  Index kv_len() const { return k.rows().len(); }
  Index dim() const { return q.rows().dim(); }
  oracle::Tensor exact_q() const { return to_oracle(q.rows()); }
  oracle::Tensor exact_k() const { return to_oracle(k.rows()); }
  // The oracle's scores of the finite keys, and NaN for the other one.
  oracle::Scores expected(
      const std::function<oracle::Scores(const oracle::Tensor& q, const oracle::Tensor& k)>& scores)
      const;

  StoredRows q, k;
  Index odd = -1;  // the key that is not finite
};

}  // namespace quoka_test
