// Quest against the oracle: bounds, pages, the partial page at the end. Forced keys, and bounds that grow, are cut and
// grow again with the keys: selection_fuzz_test.cpp.

#include <quoka/methods/quest.hpp>
#include <quoka/select/scored_selector.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::QuestOptions;
using quoka::QuestScorer;
using quoka::QuestSelector;

// The oracle's keys by its own scores, except swaps of pages that score as the last one kept.
void expect_same_pages(const std::vector<Index>& keep, const std::vector<double>& scores,
                       Index budget, Index page) {
  const Index kv_len = std::ssize(scores), whole = kv_len / page * page;
  const std::vector<Index> expected = oracle::quest_select(scores, kv_len, budget, page);
  ASSERT_EQ(keep.size(), expected.size());
  double threshold = oracle::infinity, largest = 0;
  for (Index t : expected)
    if (t < whole) threshold = std::min(threshold, scores[uz(t)]);
  for (double x : scores) largest = std::max(largest, std::abs(x));
  std::vector<Index> swapped;
  std::set_symmetric_difference(keep.begin(), keep.end(), expected.begin(), expected.end(),
                                std::back_inserter(swapped));
  for (Index t : swapped) {
    EXPECT_LT(t, whole) << "of the partial page";
    EXPECT_LE(std::abs(scores[uz(t)] - threshold), 2e-6 * largest) << "key " << t;
  }
}

template <class T>
void expect_agrees_with_oracle(const QuestOptions& options, const Tensor4<T>& q,
                               const Tensor4<T>& k) {
  SCOPED_TRACE("page " + std::to_string(options.page) + ", kv_len " +
               std::to_string(k.dimension(2)));
  const auto exact = oracle::quest_scores(to_oracle(q), to_oracle(k), options.page, 0);
  const auto scores = scores_by<QuestScorer>(options, SelectorInput{q, k, LogitOptions{}});
  const Index kv_len = k.dimension(2), whole = kv_len / options.page * options.page;
  // The partial page's own score is never asked for.
  auto expected = exact;
  for (auto& heads : expected)
    for (auto& head : heads) head.resize(uz(whole));
  Tensor3<float> of_whole(k.dimension(0), k.dimension(1), whole);
  for (Index b = 0; b < k.dimension(0); ++b)
    for (Index head = 0; head < k.dimension(1); ++head)
      for (Index t = 0; t < kv_len; ++t) {
        if (t < whole)
          of_whole(b, head, t) = scores(b, head, t);
        else
          EXPECT_EQ(scores(b, head, t), std::numeric_limits<float>::max());
      }
  expect_scores(of_whole, expected, Domain::logit);

  const auto keep = to_positions(QuestSelector(options).select(q, k, {}));
  const Index budget = options.budget.count(kv_len);
  for (std::size_t b = 0; b < exact.size(); ++b)
    for (std::size_t head = 0; head < exact[b].size(); ++head)
      expect_same_pages(keep[b][head], exact[b][head], budget, options.page);
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(Quest, AgreesWithTheOracle) {
  for_each_drawn_call(12, []<class T>(Random& random, DrawnCall<T> x) {
    if (x.odd >= 0) x.k = with_row(std::move(x.k), x.odd, 1.0f);
    const Index pages[] = {1, 3, 4, 16, x.k.dimension(2) - 1, x.k.dimension(2), 1000};
    const Budget budget = random.below(2) == 0 ? Budget::keys(31) : Budget::share(0.25);
    expect_agrees_with_oracle({.budget = budget, .page = pages[random.below(7)]}, x.q, x.k);
  });
}

// ---- NaN and infinity ---------------------------------------------------------------------------

TEST(Quest,
     ANanBoundsNothing) {  // wherever in its page it is: as its neighbour's value there
  Random random(502);
  const auto q = random.tensor<Element>(1, 2, 17, 20);
  const auto finite = random.tensor<Element>(1, 1, 128, 20);
  for (Index t : {32, 33, 40, 47}) {
    auto k = finite, repeated = finite;
    k(0, 0, t, 3) = stored<Element>(std::nan(""));
    repeated(0, 0, t, 3) = repeated(0, 0, t == 40 ? 41 : 40, 3);
    EXPECT_TRUE(same_bits(scores_by<QuestScorer>({}, SelectorInput{q, k, LogitOptions{}}),
                          scores_by<QuestScorer>({}, SelectorInput{q, repeated, LogitOptions{}})))
        << "key " << t;
  }
}

TEST(Quest, APageWithoutBoundsOrWithAnInfinityRanksLastAndSpoilsNoOther) {
  Random random(503);
  const auto q = random.tensor<Element>(1, 2, 17, 20);
  const auto finite = random.tensor<Element>(1, 1, 127, 20);
  Tensor4<Element> rest = finite;  // without the page
  for (int i = 0; i < 16; ++i) rest = without_row(rest, 32);
  auto expected = oracle::quest_scores(to_oracle(q), to_oracle(rest), 16, 0);
  expected[0][0].insert(expected[0][0].begin() + 32, 16, oracle::not_a_number);
  for (float odd : {not_a_number, infinity, -infinity}) {
    auto k = finite;
    for (Index t = 32; t < 48; ++t)
      if (std::isnan(odd) || t == 40) k(0, 0, t, 3) = stored<Element>(odd);
    const auto scores = scores_by<QuestScorer>({}, SelectorInput{q, k, LogitOptions{}});
    for (Index t = 0; t < 112; ++t) {
      if (t / 16 == 2)
        EXPECT_FALSE(std::isfinite(scores(0, 0, t))) << "key " << t << " for " << odd;
      else
        EXPECT_NEAR(static_cast<double>(scores(0, 0, t)), expected[0][0][uz(t)], 2e-5);
    }
    auto others = oracle::range(0, 127);
    others.erase(others.begin() + 32, others.begin() + 48);
    EXPECT_EQ(to_positions(QuestSelector({.budget = Budget::keys(111)}).select(q, k, {}))[0][0],
              others);
  }
}

}  // namespace
