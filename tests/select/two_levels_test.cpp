// Two levels (TwoLevels of select/quoka.hpp): blocks first, then the keys of the best blocks. Against a
// naive oracle, and bit for bit against one level of the candidates alone.

#include <quoka/packing/byte_formats.hpp>
#include <quoka/quoka.hpp>

#include "support/selector_fixtures.hpp"

#include <numeric>

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::Domain;
using quoka::KeySketch;
using quoka::QuokaSelector;
using quoka::SelectorInput;
using quoka::Sketch;
using quoka::TwoLevels;

struct Layer {
  Tensor4<float> q, k;
  Layer(Random& random, Index group, Index kv_heads, Index q_len, Index kv_len, Index dim,
        Index batch = 1)
      : q(random.tensor<float>(batch, group * kv_heads, q_len, dim)),
        k(random.tensor<float>(batch, kv_heads, kv_len, dim)) {}
};

// A selector whose state was told of all keys.
Selection select(const QuokaOptions& options, const SelectorInput& input,
                 ExecutorRef executor = SerialExecutor{}) {
  const QuokaSelector selector(options);
  QuokaSelector::State state;
  Selection keep;
  selector.appended(input, state, executor);
  selector.select(input, state, keep, executor);
  return keep;
}

QuokaOptions one_level(QuokaOptions options) {
  options.two_levels = {};
  options.sketch = Sketch::on;
  return options;
}

// ---- what the candidates are, written from block_levels.hpp alone -------------------------------

struct Level {
  oracle::Tensor rows;
  Index wanted, keep_first, keep_last;
};

oracle::Tensor block_means(const oracle::Tensor& x, Index block) {
  oracle::Tensor means(x.batch, x.heads, x.len / block, x.dim);
  for (Index b = 0; b < x.batch; ++b)
    for (Index head = 0; head < x.heads; ++head)
      for (Index i = 0; i < means.len; ++i) {
        double finite = 0.0;
        for (Index t = i * block; t < (i + 1) * block; ++t) {
          if (!oracle::is_finite(x.row(b, head, t))) continue;
          finite += 1.0;
          for (Index c = 0; c < x.dim; ++c) means.at(b, head, i, c) += x.at(b, head, t, c);
        }
        for (Index c = 0; c < x.dim; ++c) means.at(b, head, i, c) /= std::max(finite, 1.0);
      }
  return means;
}

std::vector<Level> levels_of(const oracle::Tensor& k, Index budget, const QuokaOptions& options) {
  const auto [block, candidates] = options.two_levels;
  const Index first = std::min(options.top_k.keep_first, budget);
  std::vector<Level> levels{{k, budget, first, std::min(options.top_k.keep_last, budget - first)}};
  for (;;) {
    const Level& below = levels.back();
    Level above{block_means(below.rows, block), 0, 0, 0};
    above.keep_first = quoka::ceil_div(std::max<Index>(1, below.keep_first), block);
    Index end =
        above.rows.len * block;  // the last key of a whole block, counted down to the first forced
    while (end > below.rows.len - below.keep_last && end > 0) end -= block, ++above.keep_last;
    above.wanted = std::max(quoka::ceil_div(candidates * below.wanted, block),
                            above.keep_first + above.keep_last);
    if (candidates * below.wanted > below.rows.len || above.wanted >= above.rows.len) return levels;
    levels.push_back(above);
  }
}

oracle::Tensor rows_at(const oracle::Tensor& x, Index b, Index head, const std::vector<Index>& at) {
  oracle::Tensor some(1, 1, std::ssize(at), x.dim);
  for (Index i = 0; i < some.len; ++i)
    for (Index c = 0; c < x.dim; ++c) some.at(0, 0, i, c) = x.at(b, head, at[uz(i)], c);
  return some;
}

// Of the picked rows of a level, the rows below, and those behind its last whole block.
std::vector<Index> rows_below(const std::vector<Index>& picked, Index block, Index len) {
  std::vector<Index> rows;
  for (const Index i : picked)
    for (Index t = i * block; t < (i + 1) * block; ++t) rows.push_back(t);
  for (Index t = len / block * block; t < len; ++t) rows.push_back(t);
  return rows;
}

// best(level, candidates of it, j) -> those that are kept, for one head from the highest level down.
template <class Best>
std::vector<Index> descend(const std::vector<Level>& levels, Index block, const Best& best) {
  std::vector<Index> rows = oracle::range(0, levels.back().rows.len);
  for (Index j = std::ssize(levels) - 1;; --j) {
    const std::vector<Index> picked = best(levels[uz(j)], rows, j);
    if (j == 0) return picked;
    rows = rows_below(picked, block, levels[uz(j - 1)].rows.len);
  }
}

// ---- against the oracle -------------------------------------------------------------------------

// In double throughout. [batch][kv_head]
oracle::Positions oracle_selection(const QuokaOptions& options, const oracle::Tensor& q,
                                   const oracle::Tensor& k) {
  const oracle::QuokaOptions o = to_oracle(options, k.len, q.heads / k.heads);
  const oracle::Tensor kept = oracle::gather_queries(
      q, oracle::subselect_queries(q, o.n_queries, o.choice, k.heads, o.group));
  const oracle::Tensor q_bar =
      oracle::pre_aggregate(kept, k.heads, o.group, oracle::Scoring::cosine);
  oracle::Positions keep(uz(k.batch));
  const std::vector<Level> levels = levels_of(k, o.budget, options);
  for (Index b = 0; b < k.batch; ++b)
    for (Index head = 0; head < k.heads; ++head)
      keep[uz(b)].push_back(descend(levels, options.two_levels.block,
                                    [&](const Level& level, const std::vector<Index>& rows, Index) {
                                      const oracle::Scores scores = oracle::score_keys(
                                          rows_at(q_bar, b, head, oracle::range(0, q_bar.len)),
                                          rows_at(level.rows, b, head, rows),
                                          oracle::Scoring::cosine, o.aggregation);
                                      const oracle::Positions best = oracle::top_k(
                                          scores, level.wanted, level.keep_first, level.keep_last);
                                      std::vector<Index> picked;
                                      for (const Index i : best[0][0])
                                        picked.push_back(rows[uz(i)]);
                                      return picked;
                                    }));
  return keep;
}

void expect_as_oracle(const QuokaOptions& options, const Layer& x) {
  SCOPED_TRACE(name_of(options) + ", " + std::to_string(x.k.dimension(2)) + " keys, blocks of " +
               std::to_string(options.two_levels.block));
  EXPECT_EQ(to_positions(select(options, {.q = x.q, .k = x.k, .logits = LogitOptions{}})),
            oracle_selection(options, to_oracle(x.q), to_oracle(x.k)));
}

TEST(TwoLevels, AgreesWithTheOracle) {
  Random random(800);
  for (const Index dim : {16, 37, 64})
    for (const Aggregation aggregation : aggregations)
      for (const GroupMode mode : group_modes) {
        const Layer x(random, 2, 2, 21, 501, dim, 2);
        expect_as_oracle({.budget = Budget::keys(20),
                          .n_queries = 7,
                          .aggregation = aggregation,
                          .group_mode = mode,
                          .two_levels = {.block = 16, .candidates = 3}},
                         x);
      }
}

// Each sequence has its own codes: those of zeros miss nothing, those beside an outlier miss much. Those
// of the queries, integers up to 127, miss nothing: the keys' errors alone are allowed for.
TEST(TwoLevels, AgreesWithTheOracleForSequencesThatDiffer) {
  Random random(806);
  Layer x(random, 1, 2, 1, 501, 32, 2);
  for (Index i = 0; i < x.q.size(); ++i)
    x.q.data()[i] = i % 32 == 0 ? 127.0f : std::round(30.0f * x.q.data()[i]);
  for (Index i = 0; i < x.k.size() / 2; ++i) x.k.data()[i] = 0.0f;
  for (Index head = 0; head < 2; ++head)
    for (Index t = 0; t < 501; ++t) x.k(1, head, t, t % 32) += 254.0f;
  expect_as_oracle({.budget = Budget::keys(20), .two_levels = {.block = 16, .candidates = 3}}, x);
}

TEST(TwoLevels, AgreesWithTheOracleThroughSeveralLevels) {
  Random random(801);
  const Layer x(random, 2, 2, 21, 5003, 16);
  const QuokaOptions options{.budget = Budget::keys(24),
                             .two_levels = {.block = 16, .candidates = 2}};
  ASSERT_EQ(levels_of(to_oracle(x.k), 24, options).size(), 3u);
  expect_as_oracle(options, x);
  expect_as_oracle({.budget = Budget::keys(24), .two_levels = {.block = 16, .candidates = 5}}, x);
  expect_as_oracle({.budget = Budget::share(0.01), .two_levels = {.block = 32, .candidates = 2}},
                   x);
}

TEST(TwoLevels, AgreesWithTheOracleForAnyLength) {
  Random random(802);
  for (Index len = 1; len <= 150; ++len)
    expect_as_oracle({.budget = Budget::keys(9), .two_levels = {.block = 16, .candidates = 2}},
                     Layer(random, 1, 2, 5, len, 12));
  for (Index len = 78; len <= 130; ++len)  // from twice the budget on there may be a level
    expect_as_oracle({.budget = Budget::keys(40), .two_levels = {.block = 16, .candidates = 2}},
                     Layer(random, 1, 2, 5, len, 12));
}

TEST(TwoLevels, KeepsForcedKeysWhateverTheirBlocksScore) {
  Random random(803);
  const Layer x(random, 2, 2, 21, 813, 16);
  for (const Index keep_first : {0, 4, 16, 17, 40})
    for (const Index keep_last : {0, 7, 13, 14, 45, 60})
      expect_as_oracle({.budget = Budget::keys(60),
                        .top_k = {.keep_first = keep_first, .keep_last = keep_last},
                        .two_levels = {.block = 16, .candidates = 2}},
                       x);
}

TEST(TwoLevels, KeysThatAreNotFiniteHideNoOthersAndAreNotKept) {
  Random random(804);
  Layer x(random, 1, 1, 9, 320, 16);
  for (Index t = 160; t < 175; ++t) x.k(0, 0, t, t % 16) = t % 2 == 0 ? not_a_number : infinity;
  for (Index c = 0; c < 16; ++c) x.k(0, 0, 175, c) = 3.0f * x.q(0, 0, 0, c);  // alone in its block
  for (Index t = 192; t < 208; ++t) x.k(0, 0, t, 3) = infinity;               // a whole block
  const QuokaOptions options{.budget = Budget::keys(10),
                             .two_levels = {.block = 16, .candidates = 2}};
  const auto keep =
      to_positions(select(options, {.q = x.q, .k = x.k, .logits = LogitOptions{}}))[0][0];
  EXPECT_NE(std::find(keep.begin(), keep.end(), 175), keep.end());
  const oracle::Tensor k = to_oracle(x.k);
  for (const Index t : keep) EXPECT_TRUE(oracle::is_finite(k.row(0, 0, t))) << t;
  expect_as_oracle(options, x);
}

// Keys so long that their sum is infinite: their mean is not, and their block is found.
TEST(TwoLevels, MeansOfTheLongestKeysDoNotOverflow) {
  Random random(805);
  Layer x(random, 1, 1, 9, 320, 16);
  for (Index t = 96; t < 112; ++t)
    for (Index c = 0; c < 16; ++c) x.k(0, 0, t, c) = x.q(0, 0, 8, c) * 1e11f;
  const auto longest = [&](float factor) {
    Layer y = x;
    for (Index t = 96; t < 112; ++t)
      for (Index c = 0; c < 16; ++c) y.k(0, 0, t, c) *= factor;
    return select({.budget = Budget::keys(20), .two_levels = {.block = 16, .candidates = 2}},
                  {.q = y.q, .k = y.k, .logits = LogitOptions{}});
  };
  EXPECT_EQ(longest(2e26f), longest(1e-11f));
}

// ---- bit for bit ----------------------------------------------------------------------------------

// One level, by a sketch of the candidates alone, gathered: for every head by itself.
Selection selection_of_gathered(const QuokaOptions& options, const Tensor4<float>& q,
                                const oracle::Tensor& k) {
  const Index group = q.dimension(1) / k.heads, budget = options.budget.count(k.len);
  const std::vector<Level> levels = levels_of(k, budget, options);
  oracle::Positions keep(uz(k.batch));
  for (Index b = 0; b < k.batch; ++b)
    for (Index head = 0; head < k.heads; ++head) {
      Tensor4<float> q_of_head(1, group, q.dimension(2), q.dimension(3));
      for (Index r = 0; r < group; ++r)
        for (Index i = 0; i < q.dimension(2); ++i)
          for (Index c = 0; c < q.dimension(3); ++c)
            q_of_head(0, r, i, c) = q(b, head * group + r, i, c);
      keep[uz(b)].push_back(descend(
          levels, options.two_levels.block,
          [&](const Level& level, const std::vector<Index>& rows, Index j) {
            Tensor4<float> gathered(1, 1, std::ssize(rows), k.dim);
            for (Index i = 0; i < std::ssize(rows); ++i)
              for (Index c = 0; c < k.dim; ++c)
                gathered(0, 0, i, c) = static_cast<float>(level.rows.at(b, head, rows[uz(i)], c));
            QuokaOptions of_level = one_level(options);
            of_level.budget = Budget::keys(level.wanted);
            of_level.top_k = {j > 0 ? 1 : options.top_k.window, level.keep_first, level.keep_last};
            if (j > 0 && options.domain == Domain::softmax) of_level.aggregation = Aggregation::max;
            const auto best = to_positions(
                select(of_level, {.q = q_of_head, .k = gathered, .logits = LogitOptions{}}));
            std::vector<Index> picked;
            for (const Index i : best[0][0]) picked.push_back(rows[uz(i)]);
            return picked;
          }));
    }
  return to_selection(keep, k.len);
}

QuokaOptions robust(Budget budget, const TwoLevels& two_levels) {
  QuokaOptions options = QuokaOptions::robust(budget);
  options.two_levels = two_levels;
  return options;
}

// Keys that point where their neighbours do, so that blocks matter, in quarters: float adds them up as
// double does.
Tensor4<float> drifting_keys(Random& random, Index batch, Index heads, Index len, Index dim) {
  Tensor4<float> k(batch, heads, len, dim);
  for (Index b = 0; b < batch; ++b)
    for (Index head = 0; head < heads; ++head) {
      std::vector<double> centre(uz(dim));
      for (Index t = 0; t < len; ++t)
        for (Index c = 0; c < dim; ++c) {
          if (t % 40 == 0) centre[uz(c)] = random.normal();
          k(b, head, t, c) =
              static_cast<float>(std::round(4.0 * (centre[uz(c)] + random.normal()))) / 4.0f;
        }
    }
  return k;
}

TEST(TwoLevels, InTheSoftmaxDomainIsOneLevelOfTheCandidates) {
  Random random(810);
  for (const Index len : {333, 1024, 2003})
    for (const TwoLevels two_levels : {TwoLevels{16, 2}, TwoLevels{32, 4}}) {
      SCOPED_TRACE(std::to_string(len) + " keys, blocks of " + std::to_string(two_levels.block));
      const auto k = drifting_keys(random, 2, 2, len, 64);
      const auto q = random.tensor<float>(2, 8, 37, 64, 2.0);
      for (const Index window : {1, 3}) {
        QuokaOptions options = robust(Budget::keys(24), two_levels);
        options.top_k.window = window;
        ASSERT_GT(levels_of(to_oracle(k), 24, options).size(), 1u);
        EXPECT_EQ(select(options, {.q = q, .k = k, .logits = LogitOptions{}}),
                  selection_of_gathered(options, q, to_oracle(k)));
      }
    }
}

// Logits so large that their bound is too wide for codes: heads are done in float, candidates alone.
TEST(TwoLevels, InTheSoftmaxDomainIsOneLevelOfTheCandidatesInFloatToo) {
  Random random(815);
  const auto k = drifting_keys(random, 2, 2, 1024, 64);
  const auto q = random.tensor<float>(2, 8, 37, 64, 20.0);
  QuokaOptions options = robust(Budget::keys(24), {16, 2});
  options.top_k.window = 5;
  EXPECT_EQ(select(options, {.q = q, .k = k, .logits = LogitOptions{}}),
            selection_of_gathered(options, q, to_oracle(k)));
}

TEST(TwoLevels, InTheSoftmaxDomainKeysThatAreNotFiniteDoNotCount) {
  Random random(816);
  auto k = drifting_keys(random, 1, 2, 1024, 64);
  for (Index t = 0; t < 1024; t += 2)
    if (t / 64 % 3 != 0) k(0, t / 2 % 2, t, 5) = t % 4 == 0 ? not_a_number : infinity;
  for (Index t = 96; t < 112; ++t) k(0, 0, t, 0) = k(0, 1, t, 0) = infinity;
  const auto q = random.tensor<float>(1, 8, 37, 64, 2.0);
  const QuokaOptions options = robust(Budget::keys(24), {16, 4});
  EXPECT_EQ(select(options, {.q = q, .k = k, .logits = LogitOptions{}}),
            selection_of_gathered(options, q, to_oracle(k)));
}

TEST(TwoLevels, IsOneLevelOfTheCandidatesInEveryFormatAndLayout) {
  Random random(811);
  const Index len = 700, dim = 64;
  const auto k = drifting_keys(random, 1, 2, len, dim);
  const auto q = random.tensor<float>(1, 4, 21, dim);
  for (const Domain domain : {Domain::logit, Domain::softmax}) {
    QuokaOptions options{.budget = Budget::keys(30), .domain = domain, .two_levels = {16, 3}};
    const auto half = k.cast<Eigen::half>().eval();
    const Tensor4<Eigen::half> narrow = half;
    EXPECT_EQ(select(options, {.q = q, .k = narrow, .logits = LogitOptions{}}),
              selection_of_gathered(options, q, to_oracle(narrow)));
    // in pages, in any order
    const Index page_len = 24, pages = quoka::ceil_div(len, page_len);
    Tensor4<float> pool(pages, 2, page_len, dim);
    pool.setConstant(not_a_number);
    std::vector<Position> table(uz(pages));
    for (Index p = 0; p < pages; ++p) table[uz(p)] = static_cast<Position>((p * 7) % pages);
    for (Index t = 0; t < len; ++t)
      for (Index head = 0; head < 2; ++head)
        for (Index c = 0; c < dim; ++c)
          pool(table[uz(t / page_len)], head, t % page_len, c) = k(0, head, t, c);
    EXPECT_EQ(
        select(options, {.q = q, .k = paged(Rows(pool), table, len), .logits = LogitOptions{}}),
        select(options, {.q = q, .k = k, .logits = LogitOptions{}}));
    // from a row within a page on
    const Tensor4<float> rest =
        k.slice(Eigen::array<Index, 4>{0, 0, 43, 0}, Eigen::array<Index, 4>{1, 2, len - 43, dim});
    EXPECT_EQ(select(options, {.q = q,
                               .k = paged(Rows(pool), table, len).slice(43, len - 43),
                               .logits = LogitOptions{}}),
              select(options, {.q = q, .k = rest, .logits = LogitOptions{}}));
    // 8-bit rows
    quoka::KvCache cache(1, 2, dim, dim, quoka::q8_0_format(), quoka::q8_0_format());
    cache.append(k, k);
    const auto of_codes = to_oracle(cache.k());
    if (domain == Domain::softmax) continue;
    EXPECT_EQ(to_positions(select(options, {.q = q, .k = cache.k(), .logits = LogitOptions{}})),
              oracle_selection(options, to_oracle(q), of_codes));
  }
}

TEST(TwoLevels, TakesInverseNormsThatAreKnown) {
  Random random(812);
  const Layer x(random, 2, 2, 21, 501, 64);
  quoka::KvCache cache(1, 2, 64, 64, quoka::format_of<float>(), quoka::format_of<float>());
  cache.append(x.k, x.k);
  const QuokaOptions options{.budget = Budget::keys(20),
                             .two_levels = {.block = 16, .candidates = 3}};
  EXPECT_EQ(select(options, {.q = x.q,
                             .k = cache.k(),
                             .logits = LogitOptions{},
                             .inverse_norms = cache.inverse_norms()}),
            select(options, {.q = x.q, .k = x.k, .logits = LogitOptions{}}));
  // Norms of other keys are no norms of theirs: each candidate has its own.
  Tensor3<float> wrong(1, 2, 501);
  wrong.setConstant(7.0f);
  expect_refused(
      [&] {
        select(options, {.q = x.q, .k = x.k, .logits = LogitOptions{}, .inverse_norms = wrong});
      },
      {"not the one that was sketched"});
}

TEST(TwoLevels, IsOneLevelWhereTheCandidatesAreAllKeys) {
  Random random(813);
  const Layer x(random, 2, 2, 21, 501, 64, 2);
  for (const Domain domain : {Domain::logit, Domain::softmax})
    for (const Index candidates : {Index{26}, Index{1000}, Index{1} << 62}) {
      const QuokaOptions options{.budget = Budget::keys(20),
                                 .domain = domain,
                                 .two_levels = {.block = 16, .candidates = candidates}};
      EXPECT_EQ(select(options, {.q = x.q, .k = x.k, .logits = LogitOptions{}}),
                select(one_level(options), {.q = x.q, .k = x.k, .logits = LogitOptions{}}));
    }
}

TEST(TwoLevels, IsTheSameForAnyNumberOfThreads) {
  Random random(814);
  const Layer x(random, 4, 3, 21, 5003, 32, 2);
  for (const Domain domain : {Domain::logit, Domain::softmax}) {
    const QuokaOptions options{.budget = Budget::keys(24), .domain = domain, .two_levels = {16, 2}};
    const Selection serial = select(options, {.q = x.q, .k = x.k, .logits = LogitOptions{}});
    for (const int workers : {1, 2, 3, 5}) {
      quoka::ThreadPool threads(workers);
      EXPECT_EQ(select(options, {.q = x.q, .k = x.k, .logits = LogitOptions{}}, threads), serial)
          << workers;
    }
  }
}

// ---- states ---------------------------------------------------------------------------------------

TEST(TwoLevels, AStateThatGrowsSelectsAsAFreshOne) {
  Random random(820);
  const Layer x(random, 2, 2, 9, 701, 32);
  const Rows k(x.k);
  for (const Domain domain : {Domain::logit, Domain::softmax}) {
    const QuokaOptions options{.budget = Budget::keys(20), .domain = domain, .two_levels = {16, 2}};
    const QuokaSelector selector(options);
    QuokaSelector::State state;
    Selection keep;
    for (Index len = 1, step = 1; len <= 701; len += step, step = step % 53 + 7) {
      const SelectorInput input{.q = x.q, .k = k.slice(0, len), .logits = LogitOptions{}};
      selector.appended(input, state, SerialExecutor{});
      selector.select(input, state, keep, SerialExecutor{});
      ASSERT_EQ(keep, select(options, input)) << len << " keys";
    }
  }
}

TEST(TwoLevels, AStateThatIsCutSelectsAsAFreshOne) {
  Random random(821);
  const Layer before(random, 2, 2, 9, 5003, 16), after(random, 2, 2, 9, 5003, 16);
  for (const Domain domain : {Domain::logit, Domain::softmax})
    for (const Index len : {0, 15, 16, 255, 256, 300, 4800, 4999, 5003}) {
      const QuokaOptions options{
          .budget = Budget::keys(100), .domain = domain, .two_levels = {16, 2}};
      const QuokaSelector selector(options);
      QuokaSelector::State state;
      Selection keep;
      selector.appended({.q = before.q, .k = before.k}, state, SerialExecutor{});
      selector.select({.q = before.q, .k = before.k, .logits = LogitOptions{}}, state, keep,
                      SerialExecutor{});
      state.truncate(len);
      Tensor4<float> k = after.k;
      for (Index head = 0; head < 2; ++head)
        for (Index t = 0; t < len; ++t)
          for (Index c = 0; c < 16; ++c) k(0, head, t, c) = before.k(0, head, t, c);
      if (len > 0) {
        const SelectorInput cut{
            .q = before.q, .k = Rows(before.k).slice(0, len), .logits = LogitOptions{}};
        selector.select(cut, state, keep, SerialExecutor{});
        EXPECT_EQ(keep, select(options, cut)) << len;
      }
      const SelectorInput input{.q = after.q, .k = k, .logits = LogitOptions{}};
      selector.appended(input, state, SerialExecutor{});
      selector.select(input, state, keep, SerialExecutor{});
      EXPECT_EQ(keep, select(options, input)) << len;
    }
}

TEST(TwoLevels, AStateServesAnotherShapeAfterItWasCutToNothing) {
  Random random(822);
  const Layer x(random, 2, 2, 9, 501, 16), y(random, 2, 3, 9, 433, 32, 2);
  const QuokaOptions options{.budget = Budget::keys(20), .two_levels = {16, 2}};
  const QuokaSelector selector(options);
  QuokaSelector::State state;
  Selection keep;
  selector.appended({.q = x.q, .k = x.k}, state, SerialExecutor{});
  state.truncate(0);
  selector.appended({.q = y.q, .k = y.k}, state, SerialExecutor{});
  selector.select({.q = y.q, .k = y.k, .logits = LogitOptions{}}, state, keep, SerialExecutor{});
  EXPECT_EQ(keep, select(options, {.q = y.q, .k = y.k, .logits = LogitOptions{}}));
}

// Where no selector stands before it that refuses other keys.
TEST(BlockLevels, ForgetRowsOfAnotherShape) {
  Random random(827);
  const Layer x(random, 1, 2, 1, 501, 16), y(random, 1, 3, 1, 600, 32);
  quoka::detail::BlockLevels levels, fresh;
  levels.append(x.k, 16, 0, SerialExecutor{});
  levels.append(y.k, 16, 0, SerialExecutor{});
  fresh.append(y.k, 16, 0, SerialExecutor{});
  for (const Index j : {1, 2}) {
    EXPECT_EQ(to_oracle(levels.means(j)).data, to_oracle(fresh.means(j)).data);
    ASSERT_EQ(levels.sketch(j).len(), fresh.sketch(j).len());
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < fresh.sketch(j).len(); ++i)
        ASSERT_EQ(levels.sketch(j).lengths(0, head)[i], fresh.sketch(j).lengths(0, head)[i]);
  }
}

TEST(TwoLevels, AStateThatWasNotToldOfAllKeysScoresThemAll) {
  Random random(823);
  const Layer x(random, 2, 2, 9, 501, 16);
  const QuokaOptions options{.budget = Budget::keys(20), .two_levels = {16, 2}};
  const QuokaSelector selector(options);
  QuokaSelector::State state;
  Selection keep;
  selector.appended({.q = x.q, .k = Rows(x.k).slice(0, 400)}, state, SerialExecutor{});
  selector.select({.q = x.q, .k = x.k, .logits = LogitOptions{}}, state, keep, SerialExecutor{});
  EXPECT_EQ(keep, select(one_level(options), {.q = x.q, .k = x.k, .logits = LogitOptions{}}));
}

TEST(TwoLevels, FindsKeysThatChangedBehindItsBack) {
  Random random(824);
  for (const Domain domain : {Domain::logit, Domain::softmax}) {
    Layer x(random, 2, 2, 9, 501, 16);
    const QuokaSelector selector(
        {.budget = Budget::keys(20), .domain = domain, .two_levels = {16, 2}});
    QuokaSelector::State state;
    Selection keep;
    selector.appended({.q = x.q, .k = x.k}, state, SerialExecutor{});
    for (Index head = 0; head < 2; ++head)
      for (Index t = 0; t < 501; ++t) x.k(0, head, t, t % 16) += 5.0f;
    expect_refused(
        [&] {
          selector.select({.q = x.q, .k = x.k, .logits = LogitOptions{}}, state, keep,
                          SerialExecutor{});
        },
        {"not the one"});
  }
}

// A changed key that is scored in float, or looked up, is found, and named by its position.
TEST(TwoLevels, NamesTheKeyThatChanged) {
  Random random(825);
  Layer x(random, 1, 1, 9, 501, 16);
  const QuokaSelector selector({.budget = Budget::keys(20), .two_levels = {16, 2}});
  QuokaSelector::State state;
  Selection keep;
  selector.appended({.q = x.q, .k = x.k}, state, SerialExecutor{});
  Index found = 0;
  for (Index t = 0; t < 500; ++t) {
    const float was = x.k(0, 0, t, 5);
    x.k(0, 0, t, 5) = was + 30.0f;
    try {
      selector.select({.q = x.q, .k = x.k, .logits = LogitOptions{}}, state, keep,
                      SerialExecutor{});
    } catch (const std::invalid_argument& error) {
      ++found;
      EXPECT_TRUE(Fragment(t).is_in(error.what())) << t << ": " << error.what();
    }
    x.k(0, 0, t, 5) = was;
  }
  EXPECT_GT(found, 2);
}

TEST(TwoLevels, TakesMemoryForItsBlocks) {
  Random random(826);
  const Layer x(random, 1, 2, 9, 4096, 64);
  const auto kept = [&](const QuokaOptions& options) {
    const QuokaSelector selector(options);
    QuokaSelector::State state;
    selector.appended({.q = x.q, .k = x.k, .capacity = 4096}, state, SerialExecutor{});
    EXPECT_GE(state.bytes(), state.kept_bytes());
    return state.kept_bytes();
  };
  const Index without = kept({.sketch = Sketch::on}), with = kept({.two_levels = {.block = 32}});
  // 128 rows and 4 of the second level for each head, of 4 * 64 and 64 + 12 bytes.
  EXPECT_GE(with - without, 2 * 132 * (4 * 64 + 64 + 12));
  EXPECT_LE(with - without, 2 * 160 * (4 * 64 + 64 + 12));
}

// ---- what it is not for ---------------------------------------------------------------------------

TEST(TwoLevels, RefusesWhatMakesNoSense) {
  const auto refuses = [](const QuokaOptions& options, std::initializer_list<Fragment> said) {
    expect_refused([&] { QuokaSelector{options}; }, said);
  };
  refuses({.two_levels = {.block = -16}}, {"block", -16});
  refuses({.two_levels = {.block = 24}}, {"block", 24, 16});
  refuses({.two_levels = {.block = 32, .candidates = 1}}, {"candidates", 1, 2});
  refuses({.top_k = {.window = 3}, .two_levels = {.block = 32}}, {"window", 3});
  refuses({.sketch = Sketch::off, .two_levels = {.block = 32}}, {"sketch"});
  refuses({.scoring = Scoring::dot, .two_levels = {.block = 32}}, {"cosines"});
  refuses({.budget = Budget::relative(0.5), .two_levels = {.block = 32}}, {"budget"});
  refuses({.budget = Budget::mass(0.5), .domain = Domain::softmax, .two_levels = {.block = 32}},
          {"budget"});
  QuokaSelector({.scoring = Scoring::dot, .domain = Domain::softmax, .two_levels = {.block = 32}});
  QuokaSelector({.top_k = {.window = 3}, .two_levels = {.block = 0}});
  QuokaSelector({.domain = Domain::softmax, .top_k = {.window = 3}, .two_levels = {.block = 32}});
}

TEST(TwoLevels, RefusesASketchOfTheCache) {
  Random random(830);
  const Layer x(random, 2, 2, 9, 501, 16);
  KeySketch sketch;
  sketch.update(Rows(x.k), 0, 501, SerialExecutor{});
  for (const Domain domain : {Domain::logit, Domain::softmax})
    expect_refused(
        [&] {
          QuokaSelector::State state;
          Selection keep;
          QuokaSelector({.budget = Budget::keys(20), .domain = domain, .two_levels = {16, 2}})
              .select({.q = x.q, .k = x.k, .logits = LogitOptions{}, .sketch = &sketch}, state,
                      keep, SerialExecutor{});
        },
        {"two levels", "sketch"});
}

TEST(TwoLevels, ScoresAllKeysOfAList) {
  Random random(831);
  const Layer x(random, 2, 2, 9, 501, 16);
  std::vector<Position> cells(uz(400));
  std::iota(cells.begin(), cells.end(), Position{50});
  const QuokaOptions options{.budget = Budget::keys(20), .two_levels = {16, 2}};
  const SelectorInput input{.q = x.q, .k = Rows(x.k).listed(cells), .logits = LogitOptions{}};
  EXPECT_EQ(select(options, input), select(one_level(options), input));
}

// The whole driver, against the state told by hand.
TEST(TwoLevels, WorksInALayer) {
  Random random(832);
  const Layer x(random, 2, 2, 600, 600, 32);
  const QuokaOptions options{.budget = Budget::keys(40), .two_levels = {16, 2}};
  quoka::ChunkedPrefill<QuokaSelector> layer({.q_heads = 4, .kv_heads = 2, .head_dim = 32},
                                             options);
  Tensor4<float> out(1, 4, 100, 32);
  const TensorView<const float> q = x.q, k = x.k;
  for (Index begin = 0; begin < 600; begin += 100) {
    const auto of_chunk = q.slice(begin, 100);
    layer.forward(of_chunk, k.slice(begin, 100), k.slice(begin, 100), out);
    if (begin == 0) continue;
    EXPECT_EQ(layer.selection(),
              select(options, {.q = of_chunk, .k = k.slice(0, begin), .logits = LogitOptions{}}));
  }
}

}  // namespace
