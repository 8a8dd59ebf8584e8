// The presets, the least there is to select, and what Algorithm 1 is for, by example. Against the oracle, under every switch,
// whatever is stored where: selection_fuzz_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/cache/kv_cache.hpp>

#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::QuokaSelector;

// ---- presets -----------------------------------------------------------------------------------

TEST(Quoka, PresetsAreWhatTheySay) {
  using quoka::Domain;
  const auto paper = QuokaOptions::paper(Budget::keys(77)),
             defaults = QuokaOptions{.budget = Budget::keys(77)};
  EXPECT_EQ(name_of(paper), name_of(defaults));
  EXPECT_EQ(paper.budget.count(1000), 77);
  const auto balanced = QuokaOptions::balanced(Budget::share(0.25));
  EXPECT_EQ(balanced.budget.count(1000), 250);
  EXPECT_EQ(balanced.domain, Domain::softmax);
  EXPECT_EQ(balanced.top_k.window, 3);
  const std::pair<Index, Index> whole[] = {{1, 64}, {2, 32}, {4, 16}, {7, 9},
                                           {8, 8},  {16, 4}, {32, 4}};
  for (const auto& [group, n] : whole)
    EXPECT_EQ(balanced.n_queries.per_head(group), n) << "group " << group;
  auto recommended = QuokaOptions::recommended();
  EXPECT_EQ(recommended.budget.count(1000), 250);
  EXPECT_EQ(recommended.n_queries, quoka::QueryCount::per_kv_head(256));
  recommended.n_queries = balanced.n_queries;
  EXPECT_EQ(name_of(recommended), name_of(balanced));
  const auto by_name = [](const char* name) {
    return name_of(QuokaOptions::preset(name, Budget::share(0.25)));
  };
  EXPECT_EQ(by_name("paper"), name_of(paper));
  EXPECT_EQ(by_name("balanced"), name_of(balanced));
  EXPECT_EQ(by_name("recommended"), name_of(QuokaOptions::recommended()));
  EXPECT_EQ(QuokaOptions::preset("recommended").budget.count(1000), 250);
  EXPECT_EQ(QuokaOptions::preset("recommended", Budget::keys(7)).budget.count(1000), 7);
  EXPECT_EQ(QuokaOptions::preset("balanced").budget.count(9000), 1024);
  EXPECT_EQ(QuokaOptions::preset("paper").budget.count(9000), 1024);
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
  EXPECT_EQ(state.bytes(), 0);
}

// ---- the outlier query finds its key ------------------------------------------------------------

// Queries along one direction u, but for one along w, whose cosine with u is -0.5. Keys at random,
// but for one whose cosine with w is about 0.9. (Theorem 1 of the paper: large beta and negative
// alpha give a key a high score.)
template <class T>
struct Planted {
  Planted(Random& random, Index group, Index q_len, Index kv_len)
      : q(random.tensor<T>(1, 2 * group, q_len, dim, 0.5)), k(random.tensor<T>(1, 2, kv_len, dim)) {
    for (Index kv_head = 0; kv_head < 2; ++kv_head) {
      std::vector<double> u = direction(random), r = direction(random), w(dim);
      const double overlap = oracle::dot(u, r);
      for (std::size_t c = 0; c < w.size(); ++c) w[c] = r[c] - overlap * u[c];
      const double length = oracle::norm(w);
      for (std::size_t c = 0; c < w.size(); ++c)
        w[c] = -0.5 * u[c] + std::sqrt(0.75) * w[c] / length;

      outlier.push_back(random.below(q_len / 2));
      key.push_back(random.below(kv_len));
      for (Index head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (Index i = 0; i < q_len; ++i)
          for (Index c = 0; c < dim; ++c)
            q(0, head, i, c) += stored<T>(20.0 * (i == outlier.back() ? w : u)[uz(c)]);
      for (Index c = 0; c < dim; ++c)
        k(0, kv_head, key.back(), c) = stored<T>(16.0 * w[uz(c)]) + k(0, kv_head, key.back(), c);
    }
  }
  static std::vector<double> direction(Random& random) {
    std::vector<double> x(dim);
    for (double& value : x) value = random.normal();
    const double length = oracle::norm(x);
    for (double& value : x) value /= length;
    return x;
  }
  bool is_in(const Selection& selection, Index kv_head) const {
    const auto list = selection.positions(0, kv_head);
    return std::binary_search(list.begin(), list.end(), static_cast<Position>(key[uz(kv_head)]));
  }

  static constexpr Index dim = 64;
  Tensor4<T> q, k;
  std::vector<Index> outlier, key;  // positions, per KV head
};

TEST(Quoka, AlwaysKeepsTheKeyOfAnOutlierQuery) {
  for (std::uint64_t seed = 170; seed < 180; ++seed) {
    Random random(seed);
    const Planted<Element> planted(random, 4, 128, 501);
    for (GroupMode mode : group_modes) {
      const Selection keep = QuokaSelector({.budget = Budget::keys(7), .group_mode = mode})
                                 .select(planted.q, planted.k, {});
      EXPECT_TRUE(planted.is_in(keep, 0));
      EXPECT_TRUE(planted.is_in(keep, 1));
    }
  }
}

// ---- how many queries score ---------------------------------------------------------------------

TEST(QueryCount, OfAKvHeadIsSharedAmongItsQueryHeads) {
  using quoka::QueryCount;
  EXPECT_EQ(QueryCount(16).per_head(1), 16);
  EXPECT_EQ(QueryCount(16).per_head(8), 16);
  EXPECT_EQ(QueryCount::per_kv_head(64).per_head(1), 64);
  EXPECT_EQ(QueryCount::per_kv_head(64).per_head(7), 9);
  EXPECT_EQ(QueryCount::per_kv_head(64).per_head(16), 4);
  EXPECT_EQ(QueryCount::per_kv_head(64).per_head(17), 4);  // at least
  EXPECT_FALSE(QueryCount(64) == QueryCount::per_kv_head(64));
}

}  // namespace
