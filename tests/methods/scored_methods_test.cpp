// Methods that score keys against their oracles, over drawn calls: the control of exact attention, SparQ and Quest, with its
// pages; and by 8-bit codes nearly as in float. Bounds of pages that grow and are cut with the keys: selection_fuzz_test.cpp.

#include <quoka/methods/loki.hpp>
#include <quoka/methods/oracle.hpp>
#include <quoka/methods/quest.hpp>
#include <quoka/methods/sample_attention.hpp>
#include <quoka/methods/sparq.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::QuestOptions;
using quoka::Sketch;

template <class F>
void for_each_call(F&& f) {
  for_each_draw("METHODS", 40, [&](Random& random, std::uint64_t) {
    const DrawnCall x(random);
    SCOPED_TRACE(x.describe());
    f(x, random);
  });
}

TEST(OracleControl, IsTheExactAttentionOfTheChunk) {
  for_each_call([](const DrawnCall& x, Random& random) {
    const Aggregation over = random.one_of(Aggregation::mean, Aggregation::max);
    const auto expected = x.expected([&](const oracle::Tensor& q, const oracle::Tensor& k) {
      return over == Aggregation::mean ? oracle::exact_scores(q, k, Domain::softmax, 0)
                                       : oracle::max_scores(q, k, 0);
    });
    expect_scores_and_keys<quoka::OracleScorer>({.budget = Budget::keys(31), .aggregation = over},
                                                x.q.rows(), x.k.rows(), expected, Domain::softmax);
  });
}

// Of equal channels the first ones count; a row that is zero on the chosen ones has no logits.
TEST(Sparq, AgreesWithTheOracle) {
  for_each_call([](const DrawnCall& x, Random& random) {
    const Index rank = 1 + random.below(x.dim() + 2);
    const auto expected = x.expected([&](const oracle::Tensor& q, const oracle::Tensor& k) {
      return oracle::sparq_scores(q, k, rank, Domain::softmax);
    });
    expect_scores_and_keys<quoka::SparqScorer>({.budget = Budget::keys(31), .rank = rank},
                                               x.q.rows(), x.k.rows(), expected, Domain::softmax);
  });
}

// ---- Quest --------------------------------------------------------------------------------------

// The oracle's keys by its own scores, except swaps of pages that score as the last one kept.
void expect_same_pages(const std::vector<Index>& keep, const std::vector<double>& scores,
                       Index budget, Index page) {
  const Index kv_len = std::ssize(scores), whole = kv_len / page * page;
  double largest = 0;
  for (double x : scores) largest = std::max(largest, std::abs(x));
  expect_near_ties(
      keep, oracle::quest_select(scores, kv_len, budget, page),
      [&](Index t) { return scores[uz(t)]; }, [&](double) { return 2e-6 * largest + 2e-7; },
      [&](Index t) { return t < whole; });
}

// A NaN bounds nothing; a page with an infinity, or without a number in a channel, ranks last.
TEST(Quest, AgreesWithTheOracle) {
  for_each_call([](const DrawnCall& x, Random& random) {
    const Index kv_len = x.kv_len(),
                page = random.one_of<Index>({16, 1, 3, 4, kv_len - 1, kv_len, 1000}),
                whole = kv_len / page * page;
    const QuestOptions options{
        .budget = random.below(2) == 0 ? Budget::keys(31) : Budget::share(0.25), .page = page};
    SCOPED_TRACE("page " + std::to_string(page));
    // The mean is over the queries that are finite; over none it is as of zeros.
    const bool spoils = random.seldom(3);
    const Index odd = random.below(x.q_len());
    const Tensor4<float>& floats = x.q.floats();
    const StoredRows q(spoils ? with_row(floats, odd, not_a_number) : floats, x.q.rows().format());
    const auto exact = oracle::quest_scores(to_oracle(!spoils         ? floats
                                                      : x.q_len() > 1 ? without_row(floats, odd)
                                                                      : with_row(floats, 0, 0.0f)),
                                            x.exact_k(), page, 0);
    const auto scores =
        scores_by<quoka::QuestScorer>(options, SelectorInput{q.rows(), x.k.rows(), LogitOptions{}});
    // The partial page's own score is never asked for.
    auto expected = exact;
    for (auto& heads : expected)
      for (auto& head : heads) head.resize(uz(whole));
    Tensor3<float> of_whole(scores.dimension(0), scores.dimension(1), whole);
    for (Index b = 0; b < scores.dimension(0); ++b)
      for (Index head = 0; head < scores.dimension(1); ++head)
        for (Index t = 0; t < kv_len; ++t) {
          if (t < whole)
            of_whole(b, head, t) = scores(b, head, t);
          else
            EXPECT_EQ(scores(b, head, t), std::numeric_limits<float>::max());
        }
    expect_scores(of_whole, expected, Domain::logit);
    const auto keep = to_positions(quoka::QuestSelector(options).select(q.rows(), x.k.rows(), {}));
    for (std::size_t b = 0; b < exact.size(); ++b)
      for (std::size_t head = 0; head < exact[b].size(); ++head)
        expect_same_pages(keep[b][head], exact[b][head], options.budget.count(kv_len), page);
  });
}

// ---- by 8-bit codes -----------------------------------------------------------------------------

// The largest |ln(x / y)|; not finite in one, not in the other.
double farthest(const Tensor3<float>& x, const Tensor3<float>& y) {
  double most = 0.0;
  for (Index i = 0; i < x.size(); ++i) {
    if (std::isfinite(x.data()[i]) != std::isfinite(y.data()[i])) return 1e30;
    if (!std::isfinite(x.data()[i])) continue;
    if (x.data()[i] == 0.0f && y.data()[i] == 0.0f) continue;
    most = std::max(most, std::abs(std::log(static_cast<double>(x.data()[i]) /
                                            static_cast<double>(y.data()[i]))));
  }
  return most;
}

// By a State with the codes of all keys. Where else codes are used or not: selection_fuzz_test.cpp.
template <class S>
void expect_nearly_as_in_float() {
  Random random(831);
  for (const Index q_len : {1, 5, 37})
    for (const Index kv_len : {90, 333}) {
      const auto q = random.tensor<float>(2, 6, q_len, 40),
                 k = random.tensor<float>(2, 2, kv_len, 40);
      const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}};
      const auto told = [&](Sketch sketch) {
        typename S::Options options{};
        options.budget = Budget::keys(31), options.sketch = sketch;
        if constexpr (requires { options.rank; }) options.rank = 21;
        if constexpr (requires { options.n_queries; }) options.n_queries = 7;
        if constexpr (requires { options.fitted; }) options.fitted = 80;
        typename S::State state;
        S(options).appended(input, state, SerialExecutor{});
        return scores_by<S>(options, input, state);
      };
      const auto by_codes = told(Sketch::on), in_float = told(Sketch::off);
      EXPECT_LT(farthest(by_codes, in_float), 0.06) << q_len << " queries, " << kv_len << " keys";
      EXPECT_FALSE(same_bits(by_codes, in_float));
    }
}
TEST(ByCodes, MethodsScoreNearlyAsInFloat) {
  expect_nearly_as_in_float<quoka::SampleAttentionScorer>();
  expect_nearly_as_in_float<quoka::SparqScorer>();
  expect_nearly_as_in_float<quoka::LokiScorer>();
}

}  // namespace
