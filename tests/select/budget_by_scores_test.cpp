// Budgets by scores, mass and relative: how many keys they keep, by given scores and by every selector
// that takes them, against a plain sort; what refuses them.

#include <quoka/methods/all.hpp>

#include "support/baseline_fixtures.hpp"

#include <numeric>

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::TopKOptions;

// ---- the rule, by a sort ------------------------------------------------------------------------

// Positions in the order in which they are taken: the first ones, the last ones from the end on, then by (score of the
// window descending, position ascending); what is not finite last.
std::vector<Index> order_of(const std::vector<double>& scores, const TopKOptions& options) {
  const Index len = std::ssize(scores), last = len - options.keep_last;
  const std::vector<double> pooled = oracle::window_max({{scores}}, options.window)[0][0];
  std::vector<Index> order;
  for (Index t = 0; t < std::min(options.keep_first, len); ++t) order.push_back(t);
  for (Index t = len - 1; t >= std::max(options.keep_first, last); --t) order.push_back(t);
  std::vector<Index> others;
  std::vector<double> negated;
  for (Index t = 0; t < len; ++t) {
    negated.push_back(std::isfinite(pooled[uz(t)]) ? -pooled[uz(t)] : oracle::infinity);
    if (t >= options.keep_first && t < last) others.push_back(t);
  }
  for (Index t : oracle::ranked(others, negated)) order.push_back(t);
  return order;
}

struct Kept {
  std::vector<Index> keys;
  double margin = oracle::infinity;  // how near a decision was to the threshold
};

Kept kept_by_sort(const std::vector<double>& scores, const Budget& budget,
                  const TopKOptions& options) {
  const std::vector<Index> order = order_of(scores, options);
  const std::vector<double> pooled = oracle::window_max({{scores}}, options.window)[0][0];
  const Index len = std::ssize(scores),
              forced = std::min(options.keep_first + options.keep_last, len);
  double total = 0, best = -oracle::infinity;
  for (double x : scores)
    if (std::isfinite(x)) total += x, best = std::max(best, x);
  Kept kept;
  Index n = 0;
  double sum = 0;
  for (; n < len; ++n) {
    const double x = scores[uz(order[uz(n)])], of_window = pooled[uz(order[uz(n)])];
    if (n >= forced) {
      if (budget.rule() == Budget::Rule::mass) {
        kept.margin = std::min(kept.margin, std::abs(sum - budget.threshold() * total));
        if (sum >= budget.threshold() * total * (1 - 1e-12)) break;
      } else {
        const double bar = best - (1 - budget.threshold()) * std::abs(best);
        kept.margin = std::min(kept.margin, std::abs(of_window - bar));
        if (!(std::isfinite(of_window) && of_window >= bar)) break;
      }
    }
    sum += std::isfinite(x) ? x : 0;
  }
  n = std::clamp(n, budget.least(len), budget.count(len));
  // A ceiling below the forced keys: the first ones stay.
  kept.keys.assign(order.begin(), order.begin() + n);
  std::sort(kept.keys.begin(), kept.keys.end());
  return kept;
}

// ---- given scores -------------------------------------------------------------------------------

// Scores keys by a tensor.
struct GivenScorer {
  struct Options {
    Budget budget = Budget::keys(31);
    TopKOptions top_k = {};
    const Tensor3<float>* scores = nullptr;
  };
  using State = quoka::NoState;
  explicit GivenScorer(const Options& options) : options_(options) {}
  void score(const SelectorInput&, State&, TensorView<float, 3> scores, ExecutorRef) const {
    for (Index b = 0; b < scores.batch(); ++b)
      for (Index head = 0; head < scores.heads(); ++head)
        for (Index t = 0; t < scores.len(); ++t)
          scores.at(b, head, t) = (*options_.scores)(b, head, t);
  }
  bool takes(Budget::Rule) const { return true; }
  Options options_;
};
using GivenSelector = quoka::ScoredSelector<GivenScorer>;

void expect_kept(const Tensor3<float>& scores, const Budget& budget, const TopKOptions& options,
                 double least_margin) {
  const Index batch = scores.dimension(0), heads = scores.dimension(1), len = scores.dimension(2);
  const Tensor4<float> q(batch, heads, 1, 4), k(batch, heads, len, 4);
  const Selection keep =
      GivenSelector({.budget = budget, .top_k = options, .scores = &scores}).select(q, k, {});
  const oracle::Positions lists = to_positions(keep);
  const oracle::Scores exact = to_oracle_scores(scores);
  for (Index b = 0; b < batch; ++b)
    for (Index head = 0; head < heads; ++head) {
      const Kept expected = kept_by_sort(exact[uz(b)][uz(head)], budget, options);
      if (expected.margin < least_margin) continue;
      EXPECT_EQ(lists[uz(b)][uz(head)], expected.keys)
          << "[" << b << ", " << head << "], threshold " << budget.threshold() << ", len " << len;
    }
}

// As softmax has it: positive, few large ones.
Tensor3<float> masses(Random& random, Index batch, Index heads, Index len) {
  Tensor3<float> x = random.scores(batch, heads, len);
  for (Index i = 0; i < x.size(); ++i) x.data()[i] = std::exp(2.0f * x.data()[i]);
  return x;
}

// Any threshold, floor, ceiling, window and forced keys, of scores of all kinds.
TEST(BudgetByScores, KeepsAsManyAsASortSays) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    const Index len =
        std::array<Index, 5>{2, 3, 37, 300, seed % 20 == 0 ? 5000 : 501}[uz(random.below(5))];
    const auto some = [&](Index most) { return random.below(3) > 0 ? 0 : random.below(most); };
    // Sums of small whole numbers are exact, and so are their ties.
    const Index kind = random.below(4);
    const bool whole = kind == 0, of_mass = kind < 3;
    Tensor3<float> scores = of_mass ? masses(random, 2, 3, len) : random.scores(2, 3, len);
    const float odd = std::array{not_a_number, infinity, -infinity}[uz(random.below(3))];
    const bool spoilt = random.below(4) == 0, nothing = spoilt && random.below(4) == 0;
    for (Index i = 0; i < scores.size(); ++i) {
      if (whole) scores.data()[i] = static_cast<float>(random.below(4));
      if (nothing || (spoilt && i % 7 == 0)) scores.data()[i] = odd;
    }
    const TopKOptions options{.window = 1 + some(8) + some(2) * 1000,
                              .keep_first = some(len + 1),
                              .keep_last = some(len + 1)};
    const double threshold = whole ? std::array{0.125, 0.5, 0.75, 1.0}[uz(random.below(4))]
                                   : 0.01 + 0.98 * random.uniform();
    const Index floor = 1 + some(len + 200), ceiling = floor + (seed % 2 == 0 ? len : some(len));
    // A decision too near to call is another seed's.
    const double margin = whole || nothing ? 0.0 : 1e-9;
    expect_kept(scores, Budget::relative(threshold, floor, ceiling), options, margin);
    if (of_mass) expect_kept(scores, Budget::mass(threshold, floor, ceiling), options, margin);
    if (::testing::Test::HasFailure()) return;
  }
}

// The best score is that of all keys, forced ones too.
TEST(BudgetByScores, IsRelativeToAForcedKeyThatIsTheBest) {
  Tensor3<float> scores(1, 2, 6);
  const float of_heads[2][6] = {{10, 1, 6, 5, 4, 0}, {0, 1, 6, 5, 4, 10}};
  std::copy_n(&of_heads[0][0], 12, scores.data());
  const Tensor4<float> q(1, 2, 1, 4), k(1, 2, 6, 4);
  const Selection keep = GivenSelector({.budget = Budget::relative(0.5),
                                        .top_k = {.keep_first = 1, .keep_last = 1},
                                        .scores = &scores})
                             .select(q, k, {});
  EXPECT_EQ(keep.positions(0, 0), (std::vector<Position>{0, 2, 3, 5}));
  EXPECT_EQ(keep.positions(0, 1), (std::vector<Position>{0, 2, 3, 5}));
}

TEST(BudgetByScores, GivesEachHeadANumberOfItsOwn) {
  Tensor3<float> scores(1, 3, 100);
  scores.setConstant(1.0f);
  scores(0, 0, 50) = 1000.0f;                           // one key of .91
  for (Index t = 0; t < 10; ++t) scores(0, 1, t) = 90;  // ten of .909
  const Tensor4<float> q(1, 3, 1, 4), k(1, 3, 100, 4);
  const Selection keep =
      GivenSelector({.budget = Budget::mass(0.9), .scores = &scores}).select(q, k, {});
  EXPECT_EQ(keep.positions(0, 0), std::vector<Position>{50});
  EXPECT_EQ(keep.count(0, 1), 10);
  EXPECT_EQ(keep.count(0, 2), 90);
}

TEST(BudgetByScores, OfAllTheMassLeavesOutWhatHasNone) {
  Random random(706);
  auto scores = masses(random, 1, 2, 5000);
  for (Index t = 0; t < 5000; t += 3) scores(0, 1, t) = 0.0f;
  const Tensor4<float> q(1, 2, 1, 4), k(1, 2, 5000, 4);
  const Selection keep =
      GivenSelector({.budget = Budget::mass(1.0), .scores = &scores}).select(q, k, {});
  EXPECT_GT(keep.count(0, 0), 4990);
  EXPECT_LE(keep.count(0, 1), 3333);
  EXPECT_GT(keep.count(0, 1), 3323);
}

TEST(BudgetByScores, OfScoresBelowZeroCountsFromTheBest) {  // best -2: alpha 0.5 reaches to -3
  Tensor3<float> scores(1, 1, 5);
  const std::array values{-2.0f, -2.9f, -3.0f, -3.1f, -9.0f};
  std::copy(values.begin(), values.end(), scores.data());
  const Tensor4<float> q(1, 1, 1, 4), k(1, 1, 5, 4);
  const auto count = [&](double alpha) {
    return GivenSelector({.budget = Budget::relative(alpha), .scores = &scores})
        .select(q, k, {})
        .count(0, 0);
  };
  EXPECT_EQ(count(0.5), 3);
  EXPECT_EQ(count(1.0), 1);
  EXPECT_EQ(count(0.0001), 4);
}

// ---- every selector that takes them -------------------------------------------------------------

// By the scorer's own scores.
template <class S, class T>
void expect_kept_by(const typename S::Options& options, const Tensor4<T>& q, const Tensor4<T>& k) {
  const Tensor3<float> of_scorer = scores_by<S>(options, SelectorInput{q, k, LogitOptions{}});
  const oracle::Scores scores = to_oracle_scores(of_scorer);
  const oracle::Positions keep = to_positions(quoka::ScoredSelector<S>(options).select(q, k, {}));
  for (std::size_t b = 0; b < scores.size(); ++b)
    for (std::size_t head = 0; head < scores[b].size(); ++head)
      EXPECT_EQ(keep[b][head], kept_by_sort(scores[b][head], options.budget, options.top_k).keys);
}

TEST(BudgetByScoresOf, SoftmaxScorers) {
  Random random(708);
  const auto q = random.tensor<Element>(2, 6, 17, 24, 1.5);
  const auto k = random.tensor<Element>(2, 2, 301, 24, 1.5);
  for (const Budget& budget :
       {Budget::mass(0.7), Budget::mass(0.95, 20, 100), Budget::relative(0.1)}) {
    const TopKOptions top_k{.keep_first = 4, .keep_last = 3};
    expect_kept_by<quoka::SampleAttentionScorer>({.budget = budget, .top_k = top_k}, q, k);
    expect_kept_by<quoka::SparqScorer>(
        {.budget = budget, .rank = 7, .domain = Domain::softmax, .top_k = top_k}, q, k);
    expect_kept_by<quoka::OracleScorer>({.budget = budget, .top_k = top_k}, q, k);
    auto softmax = softmax_options(budget);
    softmax.top_k = top_k;
    expect_kept_by<quoka::QuokaScorer>(softmax, q, k);
  }
}

}  // namespace
