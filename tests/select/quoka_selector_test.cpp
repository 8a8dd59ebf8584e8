// The whole of Algorithm 1 against the oracle under every switch, and what must not change it.

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

TEST(Quoka, AgreesWithTheOracleUnderEverySwitch) {
  Random random(151);
  for (Index group : {1, 4, 5, 7, 8}) {
    SCOPED_TRACE("group " + std::to_string(group));
    const auto q = random.tensor<float>(1, 2 * group, 37, 24);
    const auto k = random.tensor<float>(1, 2, 127, 24);
    for (const QuokaOptions& options : every_switch()) expect_agrees_with_oracle(options, q, k);
  }
}

TEST(Quoka, AgreesWithTheOracleForEveryHeadDim) {
  Random random(152);
  for (Index dim : {1, 3, 56, 64, 80, 96, 100, 112, 128, 192, 256})
    for (GroupMode mode : group_modes) {
      SCOPED_TRACE("head_dim " + std::to_string(dim));
      const auto q = random.tensor<float>(1, 10, 37, dim);
      const auto k = random.tensor<float>(1, 2, 127, dim);
      expect_agrees_with_oracle({.budget = Budget::keys(31), .group_mode = mode}, q, k);
    }
}

TEST(Quoka, AgreesWithTheOracleOnEveryStorageType) {
  for_each_storage([]<class T>() {
    Random random(153);
    for (Index dim : {56, 64, 100, 128})
      for (Index group : {1, 5, 8}) {
        const auto q = random.tensor<T>(2, 3 * group, 128, dim);
        const auto k = random.tensor<T>(2, 3, 501, dim);
        expect_agrees_with_oracle({.budget = Budget::keys(127)}, q, k);
      }
  });
}

TEST(Quoka, AgreesWithTheOracleWithWindowsAndForcedKeys) {
  Random random(154);
  const auto q = random.tensor<Element>(2, 4, 37, 64);
  const auto k = random.tensor<Element>(2, 2, 127, 64);
  for (Index window : {1, 2, 3, 7})
    for (Index keep_first : {0, 4, 40})
      for (Index keep_last : {0, 7, 40})
        expect_agrees_with_oracle(
            {.budget = Budget::keys(31),
             .top_k = {.window = window, .keep_first = keep_first, .keep_last = keep_last}},
            q, k);
}

// Softmax weights of rows that look far along one direction: nearly all mass on a few keys.
TEST(Quoka, AgreesWithTheOracleInTheSoftmaxDomain) {
  Random random(157);
  for (Index group : {1, 4, 8})
    for (double factor : {1.0, 6.0}) {
      auto q = random.tensor<Element>(2, 3 * group, 37, 64);
      const auto k = random.tensor<Element>(2, 3, 501, 64);
      for (Index i = 0; i < q.size(); ++i) q.data()[i] = times(q.data()[i], factor);
      for (GroupMode mode : group_modes)
        for (Aggregation aggregation : aggregations)
          for (Index window : {1, 7})
            expect_agrees_with_oracle({.budget = Budget::keys(127),
                                       .aggregation = aggregation,
                                       .group_mode = mode,
                                       .query_choice = QueryChoice::mixed,
                                       .domain = quoka::Domain::softmax,
                                       .top_k = {.window = window}},
                                      q, k);
    }
}

TEST(Quoka, PresetsAreWhatTheySay) {
  using quoka::Domain;
  const auto paper = QuokaOptions::paper(Budget::keys(77)),
             defaults = QuokaOptions{.budget = Budget::keys(77)};
  EXPECT_EQ(name_of(paper), name_of(defaults));
  EXPECT_EQ(paper.budget.count(1000), 77);
  const auto robust = QuokaOptions::robust(Budget::share(0.25));
  EXPECT_EQ(robust.budget.count(1000), 250);
  EXPECT_EQ(robust.domain, Domain::softmax);
  const std::pair<Index, Index> half[] = {{1, 32}, {2, 16}, {4, 8}, {7, 4}, {8, 4}, {16, 4}};
  for (const auto& [group, n] : half)
    EXPECT_EQ(robust.n_queries.of_head(group), n) << "group " << group;
  const auto recommended = QuokaOptions::recommended(Budget::share(0.25));
  EXPECT_EQ(recommended.budget.count(1000), 250);
  EXPECT_EQ(recommended.domain, Domain::softmax);
  EXPECT_EQ(recommended.top_k.window, 3);
  const std::pair<Index, Index> whole[] = {{1, 64}, {2, 32}, {4, 16}, {7, 9},
                                           {8, 8},  {16, 4}, {32, 4}};
  for (const auto& [group, n] : whole)
    EXPECT_EQ(recommended.n_queries.of_head(group), n) << "group " << group;
  Random random(158);
  for (Index group : {1, 4, 7})
    for (const QuokaOptions& preset :
         {QuokaOptions::robust(Budget::keys(63)), QuokaOptions::recommended(Budget::keys(63))})
      expect_agrees_with_oracle(preset, random.tensor<float>(2, 2 * group, 37, 64),
                                random.tensor<float>(2, 2, 501, 64));
}

TEST(Quoka, AgreesWithTheOracleForEveryBudget) {
  Random random(155);
  const auto q = random.tensor<float>(1, 4, 37, 17);
  const auto k = random.tensor<float>(1, 2, 37, 17);
  for (Index budget : {0, 1, 2, 3, 7, 35, 36, 37, 38})
    expect_agrees_with_oracle({.budget = Budget::keys(budget)}, q, k);
  for (double budget : {0.001, 0.25, 0.5, 0.99, 1.0})
    expect_agrees_with_oracle({.budget = Budget::share(budget)}, q, k);
}

TEST(Quoka, AgreesWithTheOracleForEveryChunk) {
  Random random(156);
  const auto k = random.tensor<float>(1, 2, 127, 17);
  for (Index q_len : {1, 3, 15, 16, 17, 127, 128})
    for (Index n_queries : {1, 3, 16, 128}) {
      const auto q = random.tensor<float>(1, 4, q_len, 17);
      expect_agrees_with_oracle({.budget = Budget::keys(31), .n_queries = n_queries}, q, k);
    }
}

// ---- all, none, fractions -----------------------------------------------------------------------

TEST(Quoka, KeepsAllOfAPastWithinTheBudget) {
  Random random(157);
  for (Index kv_len : {0, 1, 36, 37}) {
    const auto q = random.tensor<float>(2, 4, 7, 17);
    const auto k = random.tensor<float>(2, 2, kv_len, 17);
    EXPECT_EQ(QuokaSelector({.budget = Budget::keys(37)}).select(q, k, {}),
              Selection::all(2, 2, kv_len));
  }
}

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

TEST(Quoka, OfBudgetZeroKeepsNone) {
  Random random(158);
  const auto q = random.tensor<float>(2, 4, 7, 17);
  const auto k = random.tensor<float>(2, 2, 37, 17);
  const Selection none =
      QuokaSelector({.budget = Budget::keys(0), .top_k = {.keep_first = 4, .keep_last = 4}})
          .select(q, k, {});
  EXPECT_EQ(none.total(), 0);
  EXPECT_FALSE(none.is_all());
  EXPECT_EQ(none.kv_len(), 37);
  EXPECT_EQ(none.batch(), 2);
}

TEST(Quoka, AFractionGrowsWithThePast) {
  Random random(159);
  const auto q = random.tensor<float>(1, 4, 7, 17);
  for (auto [kv_len, count] : {std::pair{1, 1}, {3, 1}, {37, 9}, {127, 31}, {501, 125}}) {
    const auto k = random.tensor<float>(1, 2, kv_len, 17);
    const Selection keep = QuokaSelector({.budget = Budget::share(0.25)}).select(q, k, {});
    for (Index head = 0; head < 2; ++head) EXPECT_EQ(keep.count(0, head), count);
  }
}

TEST(Quoka, KeepsEveryQueryOfAShortChunk) {  // then the choice of queries does not matter
  Random random(160);
  const auto k = random.tensor<float>(1, 2, 127, 17);
  for (Index q_len : {1, 7, 16}) {
    const auto q = random.tensor<float>(1, 4, q_len, 17);
    const Selection keep =
        QuokaSelector({.budget = Budget::keys(31), .n_queries = 16}).select(q, k, {});
    for (QueryChoice choice : query_choices)
      EXPECT_EQ(QuokaSelector({.budget = Budget::keys(31), .n_queries = 16, .query_choice = choice})
                    .select(q, k, {}),
                keep);
    EXPECT_EQ(QuokaSelector({.budget = Budget::keys(31), .n_queries = 1000}).select(q, k, {}),
              keep);
  }
}

// ---- invariances --------------------------------------------------------------------------------

TEST(Quoka, GroupModesAgreeForAGroupOfOne) {
  Random random(161);
  const auto q = random.tensor<float>(2, 3, 37, 17);
  const auto k = random.tensor<float>(2, 3, 127, 17);
  for (QuokaOptions options : every_switch()) {
    const Selection keep = QuokaSelector(options).select(q, k, {});
    options.group_mode = GroupMode::rank;
    EXPECT_EQ(QuokaSelector(options).select(q, k, {}), keep) << name_of(options);
  }
}

TEST(Quoka, ScalingAHeadsQueriesByAPowerOfTwoChangesNothing) {
  Random random(162);
  for (double factor : {0.125, 16.0}) {
    auto q = random.tensor<Element>(1, 4, 37, 17);
    const auto k = random.tensor<Element>(1, 2, 127, 17);
    std::vector<Selection> before;
    const auto selections = [&] {
      std::vector<Selection> list;
      for (const QuokaOptions& options : every_switch())
        if (options.scoring == Scoring::cosine)
          list.push_back(QuokaSelector(options).select(q, k, {}));
      return list;
    };
    before = selections();
    for (Index i = 0; i < 37; ++i)
      for (Index c = 0; c < 17; ++c) q(0, 1, i, c) = times(q(0, 1, i, c), factor);
    EXPECT_EQ(selections(), before) << factor;
  }
}

TEST(Quoka, ScalingAHeadsQueriesChangesNothingButRounding) {
  Random random(163);
  for (double factor : {1e-3, 0.7, 3.7, 1e4}) {
    auto q = random.tensor<float>(1, 4, 37, 17);
    const auto k = random.tensor<float>(1, 2, 127, 17);
    const QuokaOptions options{.budget = Budget::keys(31), .n_queries = 7};
    const auto kept = to_positions(quoka::subselect_query_positions(q, 7));
    const auto scores =
        oracle::scores_of_kept(to_oracle(q), kept, to_oracle(k), to_oracle(options, 127, 2));
    for (Index i = 0; i < 37; ++i)
      for (Index c = 0; c < 17; ++c) q(0, 1, i, c) = times(q(0, 1, i, c), factor);
    expect_same_keys(to_positions(QuokaSelector(options).select(q, k, {})), scores,
                     to_oracle(options, 127, 2));
  }
}

TEST(Quoka, ScalingAKeyChangesDotScoresOnly) {
  Random random(164);
  const auto q = random.tensor<Element>(1, 2, 37, 17);
  auto k = random.tensor<Element>(1, 1, 127, 17);
  const QuokaSelector cosine({.budget = Budget::keys(31)}),
      dot({.budget = Budget::keys(31), .scoring = Scoring::dot});
  const Selection by_cosine = cosine.select(q, k, {}), by_dot = dot.select(q, k, {});
  const auto all = oracle::range(0, 127);
  const auto kept = to_positions(by_dot)[0][0];
  std::vector<Index> left_out;
  std::set_difference(all.begin(), all.end(), kept.begin(), kept.end(),
                      std::back_inserter(left_out));
  const Index t = left_out[uz(random.below(std::ssize(left_out)))];
  for (Index c = 0; c < 17; ++c) k(0, 0, t, c) = times(k(0, 0, t, c), 256.0);
  EXPECT_EQ(cosine.select(q, k, {}), by_cosine);
  EXPECT_FALSE(dot.select(q, k, {}) == by_dot);
  const auto now = to_positions(dot.select(q, k, {}))[0][0];
  EXPECT_TRUE(std::binary_search(now.begin(), now.end(), t)) << "key " << t;
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

TEST(Quoka, HeadsAndBatchesDoNotMix) {
  Random random(166);
  const auto q = random.tensor<float>(2, 6, 37, 17);
  const auto k = random.tensor<float>(2, 3, 127, 17);
  const QuokaSelector selector({.budget = Budget::keys(31)});
  const auto together = to_positions(selector.select(q, k, {}));
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 3; ++head) {
      const TensorView<const float> q_own(&q(b, 2 * head, 0, 0), {1, 2, 37, 17},
                                          {0, 37 * 17, 17, 1});
      const TensorView<const float> k_own(&k(b, head, 0, 0), {1, 1, 127, 17}, {0, 0, 17, 1});
      EXPECT_EQ(to_positions(selector.select(q_own, k_own, {}))[0][0], together[uz(b)][uz(head)]);
    }
}

TEST(Quoka, StridedQueriesAndKeysGiveTheSame) {
  Random random(167);
  for (Index dim : {17, 64, 100}) {
    const auto q = random.tensor<Element>(2, 4, 37, dim);
    const auto k = random.tensor<Element>(2, 2, 127, dim);
    const Strided<Element> q_strided(q), k_strided(k);
    for (GroupMode mode : group_modes) {
      const QuokaSelector selector({.budget = Budget::keys(31), .group_mode = mode});
      EXPECT_EQ(selector.select(q_strided.view(), k_strided.view(), {}), selector.select(q, k, {}));
    }
  }
}

TEST(Quoka, TheCachesInverseNormsGiveTheSame) {
  Random random(168);
  for (Index dim : {37, 64, 100}) {
    const auto q = random.tensor<Element>(2, 4, 37, dim);
    const auto k = random.tensor<Element>(2, 2, 127, dim);
    quoka::KvCache cache(2, 2, dim, dim, quoka::format_of<Element>(), quoka::format_of<Element>());
    cache.append(k, k);
    const QuokaSelector selector({.budget = Budget::keys(31)});
    EXPECT_EQ(selector.select(q, cache.k(), {}, quoka::SerialExecutor{}, cache.inverse_norms()),
              selector.select(q, k, {}));
  }
}

TEST(Quoka, AnyNumberOfThreadsGivesTheSame) {
  Random random(169);
  const auto q = random.tensor<Element>(1, 4, 37, 16);
  const auto k =
      random.tensor<Element>(1, 2, quoka::tuning::score_task_keys + 127, 16);  // two tasks a head
  for (GroupMode mode : group_modes) {
    const QuokaSelector selector(
        {.budget = Budget::keys(501), .group_mode = mode, .top_k = {.window = 3}});
    const Selection alone = selector.select(q, k, {});
    for_each_executor(
        [&](ExecutorRef executor) { EXPECT_EQ(selector.select(q, k, {}, executor), alone); });
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

TEST(Quoka,
     FindsTheKeyOfAnOutlierQueryByThatQuery) {  // without it, the key is like any other, or less
  for (std::uint64_t seed = 180; seed < 190; ++seed) {
    Random random(seed);
    const Planted<float> planted(random, 4, 128, 501);
    const Selection keep =
        QuokaSelector({.budget = Budget::keys(7), .query_choice = QueryChoice::last})
            .select(planted.q, planted.k, {});
    EXPECT_FALSE(planted.is_in(keep, 0));
    EXPECT_FALSE(planted.is_in(keep, 1));
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

// ---- zero, NaN and infinity ---------------------------------------------------------------------

TEST(Quoka, KeysThatAreNotFiniteRankLast) {
  Random random(191);
  for (float odd : {not_a_number, infinity, -infinity})
    for (QuokaOptions options : every_switch()) {
      const auto q = random.tensor<Element>(1, 2, 17, 17);
      auto k = random.tensor<Element>(1, 1, 37, 17);
      for (Index t : {3, 20, 36}) k(0, 0, t, t % 17) = stored<Element>(odd);
      options.budget = Budget::keys(34);
      auto finite = oracle::range(0, 36);
      finite.erase(finite.begin() + 20);
      finite.erase(finite.begin() + 3);
      EXPECT_EQ(to_positions(QuokaSelector(options).select(q, k, {}))[0][0], finite)
          << odd << ", " << name_of(options);
      options.budget = Budget::keys(35);
      finite.insert(finite.begin() + 3, 3);
      EXPECT_EQ(to_positions(QuokaSelector(options).select(q, k, {}))[0][0], finite)
          << odd << ", " << name_of(options);
    }
}

TEST(Quoka, ZeroKeysScoreZero) {
  Random random(192);
  const auto q = random.tensor<Element>(1, 2, 17, 17);
  auto k = random.tensor<Element>(1, 1, 127, 17);
  for (Index t : {0, 50, 126})
    for (Index c = 0; c < 17; ++c) k(0, 0, t, c) = stored<Element>(0.0);
  for (Index n_queries : {1, 7})
    for (Index budget : {31, 63, 124})
      expect_agrees_with_oracle({.budget = Budget::keys(budget), .n_queries = n_queries}, q, k);
}

TEST(Quoka, ZeroQueriesKeepTheFirstKeys) {  // every score is 0
  Random random(193);
  Tensor4<float> q(1, 2, 17, 17);
  q.setZero();
  const auto k = random.tensor<float>(1, 1, 127, 17);
  for (QuokaOptions options : every_switch())
    EXPECT_EQ(to_positions(QuokaSelector(options).select(q, k, {}))[0][0], oracle::range(0, 31))
        << name_of(options);
}

TEST(Quoka, ANanQueryIsAsIfLeftOut) {
  Random random(194);
  const auto q = random.tensor<Element>(1, 4, 37, 17);
  const auto k = random.tensor<Element>(1, 2, 127, 17);
  Tensor4<Element> longer(1, 4, 38, 17);
  for (float odd : {not_a_number, infinity, -infinity}) {
    for (Index i = 0; i < 38; ++i)
      for (Index head = 0; head < 4; ++head)
        for (Index c = 0; c < 17; ++c)
          longer(0, head, i, c) = i == 5 ? stored<Element>(odd) : q(0, head, i < 5 ? i : i - 1, c);
    for (GroupMode mode : group_modes) {
      const QuokaSelector selector(
          {.budget = Budget::keys(31), .n_queries = 7, .group_mode = mode});
      EXPECT_EQ(selector.select(longer, k, {}), selector.select(q, k, {})) << odd;
    }
  }
}

TEST(Quoka, ANanQueryOfOneHeadAgreesWithTheOracle) {
  Random random(195);
  auto q = random.tensor<Element>(1, 4, 37, 17);
  const auto k = random.tensor<Element>(1, 2, 127, 17);
  q(0, 1, 5, 16) = stored<Element>(std::nan(""));
  q(0, 3, 0, 0) = stored<Element>(infinity);
  for (QuokaOptions options : every_switch())
    for (Index n_queries : {7, 36, 37}) {  // 37: they are kept, and count as zero
      options.n_queries = n_queries;
      expect_agrees_with_oracle(options, q, k);
    }
}

TEST(Quoka, NothingButNanIsStillASelection) {
  Tensor4<Element> q(1, 4, 37, 17), k(1, 2, 127, 17);
  q.setConstant(stored<Element>(std::nan("")));
  k.setConstant(stored<Element>(std::nan("")));
  for (const QuokaOptions& options : every_switch())
    EXPECT_EQ(to_positions(QuokaSelector(options).select(q, k, {}))[0][1], oracle::range(0, 31))
        << name_of(options);
}

// ---- attention's scale --------------------------------------------------------------------------

// The call with a State, told of attention's scale.
Selection select_with_scale(const QuokaSelector& selector, const Rows& q, const Rows& k,
                            float scale) {
  quoka::SelectorInput input{q, k, LogitOptions{}};
  input.logits->scale = scale;
  QuokaSelector::State state;
  Selection selection;
  selector.select(input, state, selection, SerialExecutor{});
  return selection;
}

TEST(Quoka, TakesAttentionsScaleInOneCall) {
  Random random(196);
  const auto q = random.tensor<Element>(2, 4, 37, 16);
  const auto k = random.tensor<Element>(2, 2, 127, 16);
  const QuokaSelector selector(QuokaOptions::robust(Budget::keys(31)));
  for (float scale : {0.01f, 0.25f, 2.0f}) {
    const Selection keep = selector.select(q, k, {.scale = scale});
    EXPECT_EQ(keep, select_with_scale(selector, q, k, scale)) << scale;
    const bool is_default = scale == 0.25f;
    EXPECT_EQ(keep == selector.select(q, k, {}), is_default) << scale;
  }
}

// As Gemma has it: scale 1. Queries times 8 with the default scale, 1 / 8 here, have the same logits.
TEST(Quoka, SelectsByTheScaleThatAttentionGets) {
  Random random(199);
  const auto q = random.tensor<float>(1, 4, 37, 64), k = random.tensor<float>(1, 2, 301, 64),
             v = random.tensor<float>(1, 2, 301, 64), own = random.tensor<float>(1, 2, 37, 64);
  auto q8 = q, out = q, out8 = q;
  for (Index i = 0; i < q.size(); ++i) q8.data()[i] = 8.0f * q.data()[i];
  for (const QuokaOptions& preset :
       {QuokaOptions::recommended(Budget::keys(31)), QuokaOptions::robust(Budget::keys(31))}) {
    const quoka::AttentionOptions options{.scale = 1.0f};
    const QuokaSelector selector(preset);
    const Selection keep = selector.select(q, k, options);
    quoka::attention(q, {k, v, keep}, {own, own}, out, options);
    expect_agrees_with_oracle(preset, q8, k);
    EXPECT_EQ(keep, selector.select(q8, k, {}));
    quoka::attention(q8, {k, v, keep}, {own, own}, out8);
    EXPECT_TRUE(same_up_to_rounding(out, out8, 1e-5));
    EXPECT_FALSE(keep == selector.select(q, k, {}));
  }
}

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
  QuokaOptions sketched = QuokaOptions::recommended(Budget::keys(10)), plain = sketched;
  sketched.sketch = quoka::Sketch::on, plain.sketch = quoka::Sketch::off, plain.cascade = 0;
  const quoka::SelectorInput input{q, k, LogitOptions{.scale = 2.0f, .softcap = 5.0f}};
  QuokaSelector::State told;
  Selection keep;
  QuokaSelector(sketched).appended({q, k}, told, SerialExecutor{});
  QuokaSelector(sketched).select(input, told, keep, SerialExecutor{});
  EXPECT_EQ(keep, QuokaSelector(plain).select(q, k, *input.logits));
}

// ---- what a selector is not told, or cannot do --------------------------------------------------

TEST(QuokaRefuses, ToGuessAttentionsScale) {
  Random random(201);
  const auto q = random.tensor<float>(1, 4, 37, 16), k = random.tensor<float>(1, 2, 127, 16);
  QuokaSelector::State state;
  Selection keep;
  const QuokaSelector weighs(QuokaOptions::recommended(Budget::keys(31))),
      cosines({.budget = Budget::keys(31)});
  expect_refused([&] { weighs.select({.q = q, .k = k}, state, keep, SerialExecutor{}); },
                 {"SelectorInput::logits"});
  EXPECT_NO_THROW(cosines.select({.q = q, .k = k}, state, keep, SerialExecutor{}));
  // At once, not when the past outgrows the budget.
  const Rows few = Rows(k).slice(0, 7);
  expect_refused([&] { weighs.select({.q = q, .k = few}, state, keep, SerialExecutor{}); },
                 {"SelectorInput::logits"});
}

TEST(QuokaRefuses, WhatItsScoresDoNotKnow) {
  Random random(202);
  const auto q = random.tensor<float>(1, 4, 37, 16), k = random.tensor<float>(1, 2, 127, 16);
  const QuokaSelector weighs(QuokaOptions::recommended(Budget::keys(31))),
      cosines({.budget = Budget::keys(31)});
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f};
  const quoka::AttentionOptions alibi{.alibi_slopes = slopes}, window{.sliding_window = 50};
  expect_refused([&] { (void)weighs.select(q, k, alibi); }, {4, "alibi_slopes"});
  EXPECT_EQ(cosines.select(q, k, alibi), cosines.select(q, k, {}));
  for (const QuokaSelector* selector : {&weighs, &cosines})
    expect_refused([&] { (void)selector->select(q, k, window); }, {"sliding_window", 50});
  Tensor4<float> biases(1, 1, 37, 127 + 37);
  biases.setZero();
  expect_refused([&] { (void)cosines.select(q, k, quoka::AttentionOptions{.mask = biases}); },
                 {"mask", "select_visible()"});
}

// ---- how many queries score ---------------------------------------------------------------------

TEST(QueryCount, OfAKvHeadIsSharedAmongItsQueryHeads) {
  using quoka::QueryCount;
  EXPECT_EQ(QueryCount(16).of_head(1), 16);
  EXPECT_EQ(QueryCount(16).of_head(8), 16);
  EXPECT_EQ(QueryCount::per_kv_head(64).of_head(1), 64);
  EXPECT_EQ(QueryCount::per_kv_head(64).of_head(7), 9);
  EXPECT_EQ(QueryCount::per_kv_head(64).of_head(16), 4);
  EXPECT_EQ(QueryCount::per_kv_head(64).of_head(17), 4);  // at least
  EXPECT_FALSE(QueryCount(64) == QueryCount::per_kv_head(64));
  expect_refused([] { QuokaSelector({.n_queries = QueryCount::per_kv_head(0)}); },
                 {"n_queries", 0, 1});
}

TEST(QueryCount, OfAKvHeadSelectsAsThatManyOfEachQueryHead) {
  Random random(203);
  for (const auto& [group, n] :
       std::initializer_list<std::pair<Index, Index>>{{1, 12}, {3, 4}, {5, 4}}) {
    const auto q = random.tensor<float>(1, 2 * group, 37, 16),
               k = random.tensor<float>(1, 2, 127, 16);
    for (QuokaOptions options :
         {QuokaOptions{.budget = Budget::keys(31)}, QuokaOptions::robust(Budget::keys(31))}) {
      options.n_queries = quoka::QueryCount::per_kv_head(12);
      const Selection keep = QuokaSelector(options).select(q, k, {});
      options.n_queries = n;
      EXPECT_EQ(keep, QuokaSelector(options).select(q, k, {})) << group;
      options.n_queries = n + 9;
      EXPECT_FALSE(keep == QuokaSelector(options).select(q, k, {})) << group;
    }
  }
}

TEST(Quoka, CosinesDoNotDependOnAttentionsScale) {
  Random random(197);
  const auto q = random.tensor<float>(2, 4, 37, 16), k = random.tensor<float>(2, 2, 127, 16);
  const QuokaSelector selector({.budget = Budget::keys(31)});
  EXPECT_EQ(selector.select(q, k, {.scale = 2.0f}), selector.select(q, k, {}));
}

// ---- whose state --------------------------------------------------------------------------------

// A State that was told of 37 keys of 2 sequences and 3 KV heads, 30 channels each.
class QuokaState : public ::testing::TestWithParam<quoka::Sketch> {
 protected:
  QuokaState() { selector.appended(input(q, k), state, SerialExecutor{}); }

  static quoka::SelectorInput input(const Rows& q, const Rows& k, std::uint64_t sequence = 7) {
    quoka::SelectorInput x{q, k, LogitOptions{}};
    x.sequence = sequence;
    return x;
  }
  Selection select(const quoka::SelectorInput& x) {
    Selection selection;
    selector.select(x, state, selection, SerialExecutor{});
    return selection;
  }
  // By select() and by appended(), and the state serves its own sequence as before.
  void expect_refuses(const quoka::SelectorInput& x, std::initializer_list<Fragment> both) {
    const Selection before = select(input(q, k));
    expect_refused([&] { (void)select(x); }, both);
    expect_refused([&] { selector.appended(x, state, SerialExecutor{}); }, both);
    EXPECT_EQ(select(input(q, k)), before);
  }

  Random random{198};
  Tensor4<float> q = random.tensor<float>(2, 6, 5, 30), k = random.tensor<float>(2, 3, 37, 30);
  QuokaSelector selector{QuokaOptions{.budget = Budget::keys(11), .sketch = GetParam()}};
  QuokaSelector::State state;
};

INSTANTIATE_TEST_SUITE_P(WithAndWithoutSketch, QuokaState,
                         ::testing::Values(quoka::Sketch::on, quoka::Sketch::off),
                         [](const auto& test) {
                           return test.param == quoka::Sketch::on ? "sketch" : "float_scores";
                         });

TEST_P(QuokaState, ServesItsOwnSequence) {
  const Selection keep = select(input(q, k));
  EXPECT_EQ(keep, selector.select(q, k, {}));
  EXPECT_EQ(select(input(q, k)), keep);
}

TEST_P(QuokaState, RefusesAnotherHeadDimOfTheSamePaddedWidth) {
  const auto q_wider = random.tensor<float>(2, 6, 5, 32),
             k_wider = random.tensor<float>(2, 3, 37, 32);
  expect_refuses(input(q_wider, k_wider), {"head_dim", 32, 30});
}

TEST_P(QuokaState, RefusesAnotherBatchAndOtherKvHeads) {
  const auto q_other = random.tensor<float>(3, 6, 5, 30),
             k_other = random.tensor<float>(3, 2, 37, 30);
  expect_refuses(input(q_other, k_other), {"batch", 3, 2});
  const auto k_heads = random.tensor<float>(2, 2, 37, 30);
  expect_refuses(input(q, k_heads), {"kv_heads", 2, 3});
}

TEST_P(QuokaState, RefusesAnotherSequenceNumber) {
  expect_refuses(input(q, k, 8), {"sequence", 8, 7});
  expect_refuses(input(q, k, 0), {"sequence", 0, 7});
}

TEST_P(QuokaState, RefusesACacheThatIsShorterUntilTruncate) {
  expect_refuses(input(q, Rows(k).slice(0, 36)), {"truncate", 37, 36});
  state.truncate(36);
  EXPECT_EQ(select(input(q, Rows(k).slice(0, 36))), selector.select(q, Rows(k).slice(0, 36), {}));
}

TEST_P(QuokaState, MayBeReusedAfterTruncateToNothing) {
  (void)select(input(q, k));
  state.truncate(0);
  const auto q_other = random.tensor<float>(3, 6, 5, 32),
             k_other = random.tensor<float>(3, 2, 41, 32);
  selector.appended(input(q_other, k_other, 8), state, SerialExecutor{});
  EXPECT_EQ(select(input(q_other, k_other, 8)), selector.select(q_other, k_other, {}));
  expect_refused([&] { (void)select(input(q, k)); }, {"batch", 2, 3});
}

TEST_P(QuokaState, RemainsItsSequencesAfterTruncateToSomething) {
  state.truncate(7);
  expect_refused([&] { (void)select(input(q, k, 8)); }, {"sequence", 8, 7});
}

// Same shape, no numbers: the sketch knows its keys; float scores remember none.
TEST(QuokaStates, WithASketchRefuseOtherKeysOfTheSameShape) {
  Random random(199);
  const auto q = random.tensor<float>(1, 4, 5, 30), k = random.tensor<float>(1, 2, 37, 30),
             other = random.tensor<float>(1, 2, 37, 30);
  const QuokaSelector selector({.budget = Budget::keys(11), .sketch = quoka::Sketch::on});
  QuokaSelector::State state;
  Selection selection;
  selector.appended({q, k}, state, SerialExecutor{});
  expect_refused(
      [&] {
        selector.select({q, other, LogitOptions{}}, state, selection, SerialExecutor{});
      },
      {"key"});
  selector.select({q, k, LogitOptions{}}, state, selection, SerialExecutor{});
  EXPECT_EQ(selection, selector.select(q, k, {}));
  state.truncate(0);
  selector.appended({q, other}, state, SerialExecutor{});
  selector.select({q, other, LogitOptions{}}, state, selection, SerialExecutor{});
  EXPECT_EQ(selection, selector.select(q, other, {}));
}

// ---- refused ------------------------------------------------------------------------------------

TEST(QuokaRefuses, OptionsOutOfRange) {
  expect_refused([] { QuokaSelector({.n_queries = 0}); }, {"n_queries", 0, 1});
  expect_refused([] { QuokaSelector({.top_k = {.window = 0}}); }, {"window", 0, 1});
  expect_refused([] { QuokaSelector({.top_k = {.keep_first = -3}}); }, {"keep_first", -3, 0});
  expect_refused([] { QuokaSelector({.top_k = {.keep_last = -4}}); }, {"keep_last", -4, 0});
  expect_refused([] { QuokaSelector({.budget = Budget::keys(-5)}); }, {"budget", -5, 0});
}

}  // namespace
