// Examples: the presets, the smallest selections, and the purpose of Algorithm 1. selection_fuzz_test.cpp compares with
// the oracle, under every option, format and layout.

#include <quoka/attention/attention.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/any_selector.hpp>

#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::QuokaSelector;

// ---- presets -----------------------------------------------------------------------------------

TEST(Presets, AreWhatTheySay) {
  const auto balanced = MassOptions::balanced(Budget::share(0.25));
  EXPECT_EQ(balanced.budget.count(1000), 250);
  EXPECT_EQ(balanced.kernel_size, 3);
  const std::pair<Index, Index> whole[] = {{1, 128}, {2, 64}, {4, 32}, {7, 18},
                                           {8, 16},  {16, 8}, {64, 4}};
  for (const auto& [group, n] : whole)
    EXPECT_EQ(balanced.queries_per_head(group), n) << "group " << group;
  const auto recommended = MassOptions::recommended();
  EXPECT_EQ(name_of(recommended), name_of(MassOptions()));
  EXPECT_EQ(recommended.queries, 256);
  EXPECT_TRUE(recommended.by_threshold());
  EXPECT_EQ(recommended.least_keys(900), 900);  // a short past is kept whole
  EXPECT_EQ(recommended.least_keys(9000), 1024);
  EXPECT_EQ(recommended.budget.count(9000), 9000);
  EXPECT_FALSE(balanced.by_threshold());
  EXPECT_EQ(balanced.least_keys(1000), 250);

  using quoka::budget_of, quoka::selection_preset;
  EXPECT_EQ(name_of(std::get<QuokaOptions>(selection_preset("paper"))), name_of(QuokaOptions()));
  EXPECT_EQ(name_of(std::get<MassOptions>(selection_preset("balanced"))),
            name_of(MassOptions::balanced()));
  EXPECT_EQ(name_of(std::get<MassOptions>(selection_preset("recommended"))),
            name_of(MassOptions()));
  EXPECT_EQ(budget_of(selection_preset("recommended")).count(1000), 1000);
  EXPECT_EQ(budget_of(selection_preset("recommended", Budget::keys(7))).count(1000), 7);
  EXPECT_EQ(budget_of(selection_preset("balanced")).count(9000), 9000);
  using quoka::keeps_all;
  EXPECT_TRUE(keeps_all(selection_preset("recommended"), 1024));
  EXPECT_FALSE(keeps_all(selection_preset("recommended"), 1025));
  EXPECT_TRUE(keeps_all(selection_preset("recommended", Budget::keys(7)), 7));
  EXPECT_FALSE(keeps_all(selection_preset("paper", Budget::keys(7)), 8));
  EXPECT_EQ(budget_of(selection_preset("paper")).count(9000), 1024);
}

TEST(Presets, QueriesAreOfAKvHeadOrOfAQueryHead) {
  quoka::SelectionOptions options;
  quoka::set_queries(options, 40);
  EXPECT_EQ(std::get<MassOptions>(options).queries, 40);
  options = QuokaOptions();
  quoka::set_queries(options, 40);
  EXPECT_EQ(std::get<QuokaOptions>(options).n_queries, 40);
}

// A selector by its options is that selector, with a State of its own for each.
TEST(AnySelector, IsTheSelectorOfItsOptions) {
  Random random(171);
  const auto q = random.tensor<float>(1, 4, 37, 24), k = random.tensor<float>(1, 2, 300, 24);
  const quoka::SelectorInput input{q, k, LogitOptions{}};
  const QuokaOptions paper{.budget = Budget::keys(20), .sketch = quoka::Sketch::on};
  MassOptions mass = MassOptions::balanced(Budget::keys(20));
  mass.sketch = quoka::Sketch::on;
  quoka::AnySelector::State state;
  const auto by = [&](const auto& selector, auto& of) {
    Selection keep;
    selector.appended(input, of, quoka::SerialExecutor{});
    selector.select(input, of, keep, quoka::SerialExecutor{});
    return keep;
  };
  QuokaSelector::State of_paper;
  quoka::MassSelector::State of_mass;
  EXPECT_EQ(by(quoka::AnySelector(paper), state), by(QuokaSelector(paper), of_paper));
  EXPECT_EQ(state.mass.kept_bytes(), 0);
  EXPECT_EQ(state.kept_bytes(), of_paper.kept_bytes());
  EXPECT_EQ(state.kept_len(), 300);
  state.truncate(0);
  EXPECT_EQ(state.kept_len(), 0);
  EXPECT_EQ(by(quoka::AnySelector(mass), state), by(quoka::MassSelector(mass), of_mass));
  EXPECT_EQ(state.kept_bytes(), state.quoka.kept_bytes() + of_mass.kept_bytes());
}

// ---- all, none, fractions -----------------------------------------------------------------------

TEST(Quoka, DoesNotScoreAPastWithinTheBudget) {  // NaN everywhere, and no scratch used
  Tensor4<float> q(1, 2, 7, 17), k(1, 2, 37, 17);
  q.setConstant(not_a_number);
  k.setConstant(not_a_number);
  QuokaSelector::State state;
  Selection selection;
  QuokaSelector({.budget = Budget::keys(37)})
      .select(quoka::SelectorInput{q, k, LogitOptions{}}, state, selection,
              quoka::SerialExecutor{});
  EXPECT_TRUE(selection.is_all());
  EXPECT_EQ(state.scorer.scores.scores.bytes(), 0);
}

// ---- the outlier query finds its key ------------------------------------------------------------

// Theorem 1 of the paper: large beta and negative alpha give a key a high score. All queries but one lie along the first
// axis; of the keys one lies along the outlier, and so turns away from all others.
TEST(Quoka, KeepsTheKeyOfAnOutlierQuery) {
  constexpr Index q_len = 128, outlier = 70, kv_len = 501, wanted = 333;
  Tensor4<Element> q(1, 1, q_len, 3), k(1, 1, kv_len, 3);
  q.setZero(), k.setZero();
  const auto point = [](Tensor4<Element>& x, Index i, double along, double across) {
    x(0, 0, i, 0) = stored<Element>(along), x(0, 0, i, 1) = stored<Element>(across);
  };
  for (Index i = 0; i < q_len; ++i) point(q, i, 20.0, 0.0);
  for (Index t = 0; t < kv_len; ++t) k(0, 0, t, 2) = stored<Element>(1.0);
  point(q, outlier, -10.0, 17.3), point(k, wanted, -0.5, 0.9);
  const Selection keep = QuokaSelector({.budget = Budget::keys(1)}).select(q, k, {});
  EXPECT_EQ(keep.positions(0, 0), std::vector<Position>{wanted});
}

}  // namespace
