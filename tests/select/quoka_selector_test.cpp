// Algorithm 1 by example: the presets against the oracle, and what must not change it. Every switch, and whatever is
// stored where: selection_fuzz_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/cache/kv_cache.hpp>

#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::QuokaSelector;

template <class T>
T times(T x, double factor) {
  return stored<T>(factor * static_cast<double>(static_cast<float>(x)));
}

// ---- against the oracle -------------------------------------------------------------------------

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
  EXPECT_FALSE(recommended.rest)
      << "a model that counts loses by it (bench/results/real_models.md)";
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
  for (const char* other : {"quoka", "Paper", ""})
    expect_refused([&] { QuokaOptions::preset(other); },
                   {other, "paper", "balanced", "recommended"});
  Random random(158);
  for (Index group : {1, 4, 7})
    for (const QuokaOptions& preset :
         {softmax_options(Budget::keys(63)), QuokaOptions::balanced(Budget::keys(63))})
      expect_agrees_with_oracle(preset, random.tensor<float>(2, 2 * group, 37, 64),
                                random.tensor<float>(2, 2, 501, 64));
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

// ---- invariances --------------------------------------------------------------------------------

TEST(Quoka, ScalingAHeadsQueriesByAPowerOfTwoChangesNothing) {
  Random random(162);
  for (double factor : {0.125, 16.0}) {
    auto q = random.tensor<Element>(1, 4, 37, 17);
    const auto k = random.tensor<Element>(1, 2, 127, 17);
    std::vector<Selection> before;
    const auto selections = [&] {
      std::vector<Selection> list;
      for (const QuokaOptions& options : every_switch())
        if (options.domain == quoka::Domain::logit)
          list.push_back(QuokaSelector(options).select(q, k, {}));
      return list;
    };
    before = selections();
    for (Index i = 0; i < 37; ++i)
      for (Index c = 0; c < 17; ++c) q(0, 1, i, c) = times(q(0, 1, i, c), factor);
    EXPECT_EQ(selections(), before) << factor;
  }
}

TEST(Quoka, PermutingTheKeysPermutesTheSelection) {
  Random random(165);
  for (const QuokaOptions& options : every_switch()) {
    const auto q = random.tensor<Element>(1, 4, 17, 20);
    const auto k = random.tensor<Element>(1, 2, 127, 20);
    const std::vector<Index> from = random.permutation(127);
    Tensor4<Element> permuted(1, 2, 127, 20);
    for (Index t = 0; t < 127; ++t) permuted.chip(t, 2) = k.chip(from[uz(t)], 2);
    auto keep = to_positions(QuokaSelector(options).select(q, permuted, {}));
    for (auto& list : keep[0]) {
      for (Index& t : list) t = from[uz(t)];
      std::sort(list.begin(), list.end());
    }
    EXPECT_EQ(keep, to_positions(QuokaSelector(options).select(q, k, {}))) << name_of(options);
  }
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

// Theorem 1 of the paper, as geometry: alpha the cosine of a key with the mean query, beta its
// cosine with a query q. Then q's dissimilarity S_q = -cos(q, mean) is at least -alpha beta -
// sqrt((1 - alpha^2) (1 - beta^2)): a query that wants a key the mean query does not want is
// dissimilar. So wherever that bound lies above every other query's S, q is kept, whatever the
// directions.
TEST(Quoka, KeepsEveryQueryThatTheoremOneSaysItMust) {
  constexpr Index dim = 32, q_len = 64;
  Random random(192);
  const auto unit = [&] { return Planted<float>::direction(random); };
  const auto mix = [](double a, const std::vector<double>& x, double b,
                      const std::vector<double>& y) {
    std::vector<double> sum(x.size());
    for (std::size_t c = 0; c < x.size(); ++c) sum[c] = a * x[c] + b * y[c];
    return sum;
  };
  // The part of x that is orthogonal to the unit vector y, of length 1.
  const auto orthogonal = [&](const std::vector<double>& x, const std::vector<double>& y) {
    const auto rest = mix(1.0, x, -oracle::dot(x, y), y);
    return mix(1.0 / oracle::norm(rest), rest, 0.0, y);
  };
  int bound_decides = 0;
  for (const double alpha : {-0.9, -0.7, -0.5, -0.3, 0.0, 0.3})
    for (const double beta : {0.5, 0.7, 0.9, 0.99})
      for (int round = 0; round < 5; ++round) {
        auto m = unit(), r = unit(), s = unit();
        m.resize(dim), r.resize(dim), s.resize(dim);
        m = mix(1.0 / oracle::norm(m), m, 0.0, m);
        const auto key = mix(alpha, m, std::sqrt(1.0 - alpha * alpha), orthogonal(r, m));
        const auto wanting = mix(beta, key, std::sqrt(1.0 - beta * beta), orthogonal(s, key));
        Tensor4<float> q(1, 1, q_len, dim);
        const Index at = random.below(q_len);
        for (Index i = 0; i < q_len; ++i)
          for (Index c = 0; c < dim; ++c)
            q(0, 0, i, c) = static_cast<float>(9.0 * (i == at ? wanting : m)[uz(c)] +
                                               (i == at ? 0.0 : 0.3 * random.normal()));

        const oracle::Tensor exact = to_oracle(q);
        std::vector<double> mean(dim);
        for (Index i = 0; i < q_len; ++i)
          for (Index c = 0; c < dim; ++c) mean[uz(c)] += exact.at(0, 0, i, c) / q_len;
        const auto dissimilarity = [&](Index i) {
          return -oracle::cosine(exact.row(0, 0, i), mean);
        };
        const double a = oracle::cosine(key, mean), b = oracle::cosine(key, exact.row(0, 0, at));
        const double bound = -a * b - std::sqrt((1.0 - a * a) * (1.0 - b * b));
        EXPECT_GE(dissimilarity(at), bound - 1e-12);
        double others = -1.0;
        for (Index i = 0; i < q_len; ++i)
          if (i != at) others = std::max(others, dissimilarity(i));
        if (bound <= others) continue;
        ++bound_decides;
        EXPECT_EQ(quoka::subselect_query_positions(q, 1)(0, 0, 0), at)
            << "alpha " << a << ", beta " << b;
      }
  EXPECT_GE(bound_decides, 40);
}

// ---- nothing but NaN ----------------------------------------------------------------------------

TEST(Quoka, NothingButNanIsStillASelection) {
  Tensor4<Element> q(1, 4, 37, 17), k(1, 2, 127, 17);
  q.setConstant(stored<Element>(std::nan("")));
  k.setConstant(stored<Element>(std::nan("")));
  for (const QuokaOptions& options : every_switch())
    EXPECT_EQ(to_positions(QuokaSelector(options).select(q, k, {}))[0][1], oracle::range(0, 31))
        << name_of(options);
}

// ---- attention's scale --------------------------------------------------------------------------

TEST(Quoka, WeighsLogitsUnderASoftcap) {
  Random random(200);
  constexpr Index kv_len = 150, dim = 16, rows = 8;
  const auto q = random.tensor<float>(1, 2, rows, dim), k = random.tensor<float>(1, 1, kv_len, dim);
  const QuokaOptions options{.n_queries = rows,
                             .aggregation = Aggregation::mean,
                             .group_mode = GroupMode::per_head,
                             .domain = quoka::Domain::softmax};
  const auto scores_with = [&](const QuokaOptions& by, float cap) {
    quoka::Tensor<float, 3> scores(1, 1, kv_len);
    quoka::QuokaScorer::State state;
    const quoka::SelectorInput input{q, k, LogitOptions{.scale = 2.0f, .softcap = cap}};
    quoka::QuokaScorer(by).score(input, state, scores, SerialExecutor{});
    return scores;
  };
  for (const float cap : {0.5f, 5.0f, 50.0f}) {
    std::vector<double> expected(uz(kv_len));
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < rows; ++i) {
        std::vector<double> weights;
        double sum = 0;
        for (Index t = 0; t < kv_len; ++t) {
          double logit = 0;
          for (Index c = 0; c < dim; ++c)
            logit +=
                2.0 * static_cast<double>(q(0, head, i, c)) * static_cast<double>(k(0, 0, t, c));
          const double capped = static_cast<double>(cap);
          weights.push_back(std::exp(capped * std::tanh(logit / capped)));
          sum += weights.back();
        }
        for (Index t = 0; t < kv_len; ++t) expected[uz(t)] += weights[uz(t)] / sum / (2.0 * rows);
      }
    const auto scores = scores_with(options, cap);
    for (Index t = 0; t < kv_len; ++t)
      ASSERT_NEAR(static_cast<double>(scores(0, 0, t)), expected[uz(t)], 2e-6) << cap << " " << t;
  }
  // Codes know no cap: a sketch is left alone, and a part of the queries is not enough.
  QuokaOptions sketched = QuokaOptions::balanced(Budget::keys(10)), plain = sketched;
  sketched.sketch = quoka::Sketch::on, plain.sketch = quoka::Sketch::off, plain.cascade = 0;
  const quoka::SelectorInput input{q, k, LogitOptions{.scale = 2.0f, .softcap = 5.0f}};
  QuokaSelector::State told;
  Selection keep;
  QuokaSelector(sketched).appended({q, k}, told, SerialExecutor{});
  QuokaSelector(sketched).select(input, told, keep, SerialExecutor{});
  EXPECT_EQ(keep, QuokaSelector(plain).select(q, k, *input.logits));
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
  expect_refused([] { QuokaSelector({.n_queries = QueryCount::per_kv_head(0)}); },
                 {"n_queries", 0, 1});
}

}  // namespace
