// softmax_scores() in float against the oracle: any number of rows, keys and channels, several passes of rows, keys of
// a chunk that rows see beside those that get scores, keys and queries that are not finite; and the scores that
// both mass methods compute from it.

#include <quoka/select/float_mass.hpp>
#include <quoka/select/query_scores.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::QueryScoreState;
using quoka::RowWriter;
using quoka::detail::panels_at_once;

constexpr Aggregation mean = Aggregation::mean, most = Aggregation::max;
constexpr std::array overs = {mean, most};
constexpr Index tile = quoka::tuning::tile_rows, block = quoka::tuning::block_keys,
                panel = quoka::tuning::panel_rows;

// A chunk's keys [1, 1, len, dim], and how many of them each row sees.
struct Chunk {
  const Tensor4<float>& k;
  std::vector<Index> ends;
};

// Scores of keys [1, 1, len, dim] by queries [1, 1, rows, dim], whose logits are q.k.
std::vector<float> masses(const Tensor4<float>& queries, const Rows& keys, Aggregation over,
                          const Chunk* chunk = nullptr, float* chunk_score = nullptr) {
  const Index rows = queries.dimension(2), dim = keys.dim();
  const auto fill = [&](Index, Index, RowWriter& to) {
    for (Index i = 0; i < rows; ++i)
      to.add(queries.data() + i * dim, 1.0f, chunk != nullptr ? chunk->ends[uz(i)] : 0);
  };
  std::vector<float> mass(uz(keys.len()), -12345.0f);
  QueryScoreState state;
  quoka::softmax_scores({.rows = {rows, dim},
                         .fill = fill,
                         .keys = keys,
                         .over = over,
                         .chunk_k = chunk != nullptr ? Rows(chunk->k) : Rows(),
                         .chunk_scores = chunk_score},
                        quoka::score_view(mass.data(), 1, 1, keys.len()), state, SerialExecutor{});
  return mass;
}

// The same, row by row in double: the chunk's score is the last one. NaN for a key that is not finite.
template <class T>
std::vector<double> exact_masses(const Tensor4<float>& queries, const Tensor4<T>& keys,
                                 Aggregation over, const Chunk* chunk = nullptr) {
  const oracle::Tensor q = to_oracle(queries), k = to_oracle(keys),
                       own = to_oracle(chunk != nullptr ? chunk->k : Tensor4<float>(1, 1, 0, 1));
  std::vector<double> mass(uz(k.len) + 1, 0.0);
  std::vector<Index> finite;
  for (Index t = 0; t < k.len; ++t) {
    if (oracle::is_finite(k.row(0, 0, t)))
      finite.push_back(t);
    else
      mass[uz(t)] = oracle::not_a_number;
  }
  for (Index i = 0; i < q.len; ++i) {
    std::vector<double> logits;
    for (Index t : finite) logits.push_back(oracle::dot(q.row(0, 0, i), k.row(0, 0, t)));
    for (Index t = 0; chunk != nullptr && t < chunk->ends[uz(i)]; ++t)
      logits.push_back(oracle::dot(q.row(0, 0, i), own.row(0, 0, t)));
    const std::vector<double> p = oracle::softmax(logits);
    for (std::size_t n = 0; n < p.size(); ++n) {
      double& of_key = mass[n < finite.size() ? uz(finite[n]) : uz(k.len)];
      of_key = over == mean ? of_key + p[n] / static_cast<double>(q.len) : std::max(of_key, p[n]);
    }
  }
  if (chunk == nullptr) mass.pop_back();
  return mass;
}

// Every mass within 1e-5 of itself, where logits are small: they are rounded to float, and the mass
// has their absolute error.
void expect_masses(const std::vector<float>& mass, const std::vector<double>& expected,
                   double largest_logit = 0.0) {
  const double tolerance = 1e-5 + 2e-7 * largest_logit;
  ASSERT_EQ(mass.size(), expected.size());
  for (std::size_t t = 0; t < mass.size(); ++t) {
    if (std::isnan(expected[t]))
      ASSERT_EQ(mass[t], -infinity) << "key " << t;
    else
      ASSERT_NEAR(static_cast<double>(mass[t]), expected[t], tolerance * expected[t] + 1e-30)
          << "key " << t;
  }
}

template <class T>
void expect_as_oracle(Random& random, Index rows, Index kv_len, Index dim) {
  SCOPED_TRACE("rows " + std::to_string(rows) + ", kv_len " + std::to_string(kv_len) + ", dim " +
               std::to_string(dim));
  const double scale = 2.0 / std::sqrt(static_cast<double>(dim));
  const auto q = random.tensor<float>(1, 1, rows, dim, scale);
  const auto k = random.tensor<T>(1, 1, kv_len, dim);
  for (Aggregation over : overs) expect_masses(masses(q, k, over), exact_masses(q, k, over));
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(SoftmaxMass, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(401);
    for (Index dim : {1, 3, 15, 16, 17, 64, 100, 128}) expect_as_oracle<T>(random, 7, 37, dim);
  });
  Random random(402);
  for (Index kv_len : {Index{1}, Index{3}, tile - 1, tile, tile + 1, block - tile, block - 1, block,
                       block + 1, block + tile, 2 * block + 3, Index{501}})
    expect_as_oracle<Element>(random, 7, kv_len, 17);
  constexpr Index lanes = quoka::simd::lanes;
  for (Index rows : {Index{1}, Index{3}, lanes, lanes + 1, panel - 1, panel, panel + 1, 2 * panel,
                     3 * panel + 1})
    expect_as_oracle<Element>(random, rows, block + 3, 17);
  constexpr Index at_once = quoka::tuning::max_panels_per_task * panel;
  for (Index rows : {at_once, at_once + 1, 2 * at_once + panel + 3}) {  // more than one task takes
    EXPECT_EQ(panels_at_once(rows, 137), quoka::tuning::max_panels_per_task);
    expect_as_oracle<float>(random, rows, 137, 3);
  }
}

// Logits of 2.36e38 and more would overflow in units of log2, and their differences overflow anyway.
TEST(SoftmaxMass, LogitsUpToTheLastFloatHaveTheirMass) {
  constexpr float last = std::numeric_limits<float>::max();
  constexpr Index rows = 5, len = 2 * block + 3;
  Tensor4<float> q(1, 1, rows, 3), k(1, 1, len, 3);
  q.setZero(), k.setZero();
  q.chip(0, 3).setConstant(1.0f);
  for (const float top : {2.35e38f, 2.37e38f, last}) {
    for (Index t = 0; t < len; ++t) k(0, 0, t, 0) = t % 2 == 0 ? -top : 0.5f * top;
    k(0, 0, 7, 0) = k(0, 0, block + 4, 0) = top;
    const auto mass = masses(q, k, mean);
    for (Index t = 0; t < len; ++t)
      ASSERT_EQ(mass[uz(t)], t == 7 || t == block + 4 ? 0.5f : 0.0f) << top << ", key " << t;
    k.chip(0, 3).setConstant(-top);
    for (const float of_key : masses(q, k, most)) ASSERT_NEAR(of_key * len, 1.0f, 1e-5f);
  }
}

TEST(SoftmaxMassInGroups, OfOnePanelAgreesWithTheOracle) {  // more weights than memory is meant for
  Random random(405);
  constexpr Index kv_len = quoka::tuning::mass_weight_bytes / (panel * Index{sizeof(float)}) + 1;
  constexpr Index rows = 2 * panel + 1;
  ASSERT_EQ(panels_at_once(rows, kv_len), 1);
  const auto q = random.tensor<float>(1, 1, rows, 1), k = random.tensor<float>(1, 1, kv_len, 1);
  expect_masses(masses(q, k, mean), exact_masses(q, k, mean));
}

// ---- what a mass is -----------------------------------------------------------------------------

TEST(SoftmaxMassOf, NoRowsIsNone) {
  Random random(411);
  const Tensor4<float> q(1, 1, 0, 17);
  const auto k = random.tensor<float>(1, 1, 37, 17);
  for (Aggregation over : overs) EXPECT_EQ(masses(q, k, over), std::vector<float>(37, 0.0f));
}

// One channel, and a query of 1: a key is its logit.
Tensor4<float> keys_of_logits(const std::vector<double>& logits) {
  Tensor4<float> k(1, 1, std::ssize(logits), 1);
  for (Index t = 0; t < k.size(); ++t) k.data()[t] = stored<float>(logits[uz(t)]);
  return k;
}

TEST(SoftmaxMassOf, LogitsFarFromZero) {  // and from each other: blocks that rise, fall, or neither
  Tensor4<float> one(1, 1, 1, 1);
  one.setConstant(1.0f);
  for (double step : {400.0, -400.0, 0.0})
    for (double base : {-1e4, 0.0, 1e4}) {
      SCOPED_TRACE("step " + std::to_string(step) + ", base " + std::to_string(base));
      std::vector<double> logits;
      for (Index t = 0; t < 3 * block + 5; ++t)
        logits.push_back(base + step * static_cast<double>(t / block) + (t % 7 == 0 ? 1.0 : 0.0));
      const auto k = keys_of_logits(logits);
      for (Aggregation over : overs)
        expect_masses(masses(one, k, over), exact_masses(one, k, over), 1e4);
    }
}

TEST(SoftmaxMassOf, ARowWithALogitBeyondFloatDoesNotCount) {
  Tensor4<float> q(1, 1, 3, 1);
  q.setZero();
  q(0, 0, 1, 0) = 1e30f;
  for (const Index at : {Index{3}, block + 2}) {
    std::vector<double> logits(uz(block + 5), 0.0);
    logits[uz(at)] = 1e30;
    const auto k = keys_of_logits(logits);
    for (const float x : masses(q, k, mean))
      EXPECT_NEAR(x, 2.0f / 3.0f / static_cast<float>(logits.size()), 1e-6f) << at;
  }
}

// ---- keys of a chunk that rows see as well ------------------------------------------------------

TEST(SoftmaxMass, IsOfAllAttentionWhereRowsSeeAChunk) {
  Random random(412);
  for (Index chunk_len : {Index{1}, tile - 1, block, block + tile})
    for (Index rows : {Index{1}, Index{7}, panel, 2 * panel + 3}) {
      SCOPED_TRACE("rows " + std::to_string(rows) + ", chunk " + std::to_string(chunk_len));
      const auto q = random.tensor<float>(1, 1, rows, 17, 0.5);
      const auto k = random.tensor<Element>(1, 1, block + 3, 17);
      const auto own = random.tensor<float>(1, 1, chunk_len, 17);
      Chunk chunk{own, {}};
      for (Index i = 0; i < rows; ++i) chunk.ends.push_back(random.below(chunk_len + 1));
      for (Aggregation over : overs) {
        float chunk_score = -1.0f;
        auto mass = masses(q, k, over, &chunk, &chunk_score);
        auto expected = exact_masses(q, k, over, &chunk);
        if (over == mean)
          mass.push_back(chunk_score);
        else
          expected.pop_back();
        expect_masses(mass, expected);
      }
    }
}

TEST(SoftmaxMassOfAChunk, HidesWhatRowsDoNotSeeWhateverItHolds) {  // to the bit
  Random random(413);
  const auto q = random.tensor<float>(1, 1, 7, 17), k = random.tensor<float>(1, 1, block + 3, 17);
  auto own = random.tensor<float>(1, 1, 2 * block + 3, 17);
  const Chunk chunk{own, {1, tile, block - 1, block, block + 1, 3, 0}};
  const auto before = masses(q, k, mean, &chunk);
  for (Index t = block + 1; t < own.dimension(2); ++t)
    for (Index c = 0; c < 17; ++c) own(0, 0, t, c) = t % 2 == 0 ? 1e10f : not_a_number;
  EXPECT_EQ(masses(q, k, mean, &chunk), before);
}

// ---- rows of several heads of scores ------------------------------------------------------------

// The keys of a KV head serve several heads of scores, each as if it were alone.
TEST(SoftmaxMass, OfSeveralHeadsOfScoresIsThatOfEach) {
  Random random(414);
  for (Index rows : {Index{3}, panel, panel + 1}) {
    const auto q = random.tensor<float>(2, 6, rows, 20),
               k = random.tensor<float>(2, 2, block + 3, 20);
    const auto fill = [&](Index b, Index head, RowWriter& to) {
      for (Index i = 0; i < rows; ++i) to.add(&q(b, head, i, 0), 1.0f);
    };
    Tensor3<float> scores(2, 6, block + 3);
    QueryScoreState state;
    quoka::softmax_scores({.rows = {rows, 20}, .fill = fill, .keys = k}, scores, state,
                          SerialExecutor{});
    for (Index b = 0; b < 2; ++b)
      for (Index head = 0; head < 6; ++head) {
        Tensor4<float> one(1, 1, rows, 20);
        std::copy_n(&q(b, head, 0, 0), rows * 20, one.data());
        const auto alone = masses(one, Rows(k).sequence(b).some_heads(head / 3, 1), mean);
        for (Index t = 0; t < block + 3; ++t)
          ASSERT_NEAR(scores(b, head, t), alone[uz(t)], 1e-5f * alone[uz(t)]);
      }
  }
}

// ---- keys that are not finite -------------------------------------------------------------------

TEST(SoftmaxMass, OfAKeyThatIsNotFiniteIsNoneAndDisturbsNoOther) {
  Random random(415);
  const auto q = random.tensor<float>(1, 1, panel + 3, 17, 0.5);
  const auto finite = random.tensor<Element>(1, 1, 2 * block + 3, 17);
  for (float odd : {not_a_number, infinity, -infinity})
    for (Index c : {0, 15, 16})
      for (const std::vector<Index>& at :
           {std::vector<Index>{0}, {tile - 1, tile}, {block - 1}, {block, 2 * block + 2}}) {
        auto k = finite;
        for (Index t : at) k(0, 0, t, c) = stored<Element>(odd);
        for (Aggregation over : overs) expect_masses(masses(q, k, over), exact_masses(q, k, over));
      }
}

TEST(SoftmaxMassOfNan, IsNoneThroughSeveralPasses) {
  Random random(416);
  const auto q = random.tensor<float>(1, 1, 2 * quoka::tuning::max_panels_per_task * panel + 3, 3);
  auto k = random.tensor<float>(1, 1, 37, 3);
  k(0, 0, 20, 2) = not_a_number;
  for (Aggregation over : overs) expect_masses(masses(q, k, over), exact_masses(q, k, over));
}

TEST(SoftmaxMassOfNan, BlocksLeavesTheOthersTheirMass) {  // the first block, the last one, both
  Tensor4<float> one(1, 1, 1, 1);
  one.setConstant(1.0f);
  for (double base : {-1e4, 0.0, 1e4})
    for (Index first : {Index{0}, block})
      for (Index end : {2 * block, 3 * block}) {
        std::vector<double> logits(uz(3 * block), oracle::not_a_number);
        for (Index t = first; t < end; ++t) logits[uz(t)] = base + (t % 7 == 0 ? 1.0 : 0.0);
        const auto k = keys_of_logits(logits);
        for (Aggregation over : overs)
          expect_masses(masses(one, k, over), exact_masses(one, k, over), 1e4);
      }
}

// ---- scores of a chunk's queries ----------------------------------------------------------------

// Scores of the queries at position_of(m), m < n, of every head of the group, by softmax or by mean logits.
void score_queries(const SelectorInput& input, Index n,
                   quoka::FunctionRef<Index(Index m)> position_of, Domain domain, Aggregation over,
                   TensorView<float, 3> scores, quoka::QueryScoreState& state,
                   quoka::ExecutorRef executor) {
  const Index group = input.group();
  const auto fill = [&](Index b, Index kv_head, quoka::RowWriter& rows) {
    for (Index r = 0; r < group; ++r)
      for (Index m = 0; m < n; ++m)
        rows.add(input.q, b, kv_head * group + r, position_of(m), input.logit_scale());
  };
  const quoka::QueryRows shape{group * n, input.k.dim(), input.q};
  if (domain == Domain::logit)
    return quoka::mean_logit_scores(shape, fill, input.k, scores, state, executor);
  quoka::softmax_scores(
      {.rows = shape, .fill = fill, .keys = input.k, .capacity = input.capacity, .over = over},
      scores, state, executor);
}

// The same of every `stride`-th query. [batch, kv_heads, kv_len]
Tensor3<float> exact_scores(const SelectorInput& input, Index stride, Domain domain,
                            Aggregation over = mean) {
  Tensor3<float> scores(input.k.batch(), input.k.heads(), input.k.len());
  scores.setConstant(-12345.0f);
  quoka::QueryScoreState state;
  quoka::SerialExecutor serial;
  const auto position_of = [&](Index m) { return m * stride; };
  score_queries(input, quoka::ceil_div(input.q.len(), stride), position_of, domain, over, scores,
                state, serial);
  return scores;
}
std::vector<Index> every(Index stride, Index len) {
  std::vector<Index> list;
  for (Index i = 0; i < len; i += stride) list.push_back(i);
  return list;
}

TEST(SoftmaxMass, MakesTheScoresOfTheQueriesAskedFor) {
  Random random(419);
  for (Index group : {1, 3})
    for (Index stride : {1, 5}) {
      const auto q = random.tensor<Element>(2, 2 * group, 37, 20);
      const auto k = random.tensor<Element>(2, 2, block + 3, 20);
      for (Domain domain : domains)
        expect_scores(
            exact_scores(SelectorInput{q, k, LogitOptions{}}, stride, domain),
            oracle::scores_by_rows(to_oracle(q), to_oracle(k), every(stride, 37), domain, 0),
            domain);
      expect_scores(exact_scores(SelectorInput{q, k, LogitOptions{}}, 1, Domain::softmax, most),
                    oracle::max_scores(to_oracle(q), to_oracle(k), 0), Domain::softmax);
    }
}

TEST(QueryScores, OfACacheWithRoomForMoreAreTheSame) {  // scratch is sized for what is to come
  Random random(421);
  const auto q = random.tensor<float>(1, 4, 70, 20), k = random.tensor<float>(1, 2, 137, 20);
  const auto scores = exact_scores(SelectorInput{q, k, LogitOptions{}}, 1, Domain::softmax);
  for (Index capacity : {1, 137, 138, 50000})
    EXPECT_TRUE(same_bits(
        exact_scores(SelectorInput{q, k, LogitOptions{}, {}, capacity}, 1, Domain::softmax),
        scores));
}

TEST(QueryScores, OfAStateThatServedOthersAreTheSame) {
  Random random(422);
  const auto q = random.tensor<float>(1, 2, 7, 20), k = random.tensor<float>(1, 1, 37, 20);
  const auto q_other = random.tensor<float>(2, 8, 70, 64),
             k_other = random.tensor<float>(2, 2, 501, 64);
  for (Domain domain : domains) {
    const auto fresh = exact_scores(SelectorInput{q, k, LogitOptions{}}, 1, domain);
    quoka::QueryScoreState state;
    quoka::SerialExecutor serial;
    std::vector<float> scores(uz(2 * 2 * 501));
    const auto all = [](Index m) { return m; };
    for (Domain before : domains)
      score_queries(SelectorInput{q_other, k_other, LogitOptions{}}, 70, all, before, mean,
                    quoka::score_view(scores.data(), 2, 2, 501), state, serial);
    score_queries(SelectorInput{q, k, LogitOptions{}}, 7, all, domain, mean,
                  quoka::score_view(scores.data(), 1, 1, 37), state, serial);
    for (Index t = 0; t < 37; ++t) EXPECT_EQ(scores[uz(t)], fresh(0, 0, t));
  }
}

TEST(SoftmaxMass, LeavesQueriesThatAreNotFiniteOut) {  // to the bit
  Random random(423);
  const auto q = random.tensor<Element>(1, 4, 37, 20);
  const auto k = random.tensor<Element>(1, 2, block + 3, 20);
  const auto rest = without_row(q, 5);
  for (Domain domain : domains) {
    const auto expected = exact_scores(SelectorInput{rest, k, LogitOptions{}}, 1, domain);
    for (float odd : {not_a_number, infinity, -infinity}) {
      auto spoilt = q;
      for (Index head = 0; head < 4; ++head) spoilt(0, head, 5, 19) = stored<Element>(odd);
      EXPECT_TRUE(
          same_bits(exact_scores(SelectorInput{spoilt, k, LogitOptions{}}, 1, domain), expected));
    }
  }
}

TEST(QueryScores, CountAQueryOfOneHeadAloneOut) {  // the mean is over the others of the group
  Random random(424);
  auto q = random.tensor<float>(1, 2, 7, 20);
  const auto k = random.tensor<float>(1, 1, 37, 20);
  q(0, 1, 3, 0) = not_a_number;
  const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
  std::vector<oracle::Row> rows = oracle::group_rows(q_exact, 0, 0, 1, oracle::range(0, 7));
  rows.erase(rows.begin() + 7 + 3);
  for (Domain domain : domains)
    expect_scores(
        exact_scores(SelectorInput{q, k, LogitOptions{}}, 1, domain),
        {{oracle::aggregate(oracle::scaled_dots(rows, oracle::rows_of(k_exact, 0, 0), 0), domain)}},
        domain);
}

TEST(QueryScores, OfNoFiniteQueryAreZero) {
  Random random(425);
  const auto q = with_row(random.tensor<float>(1, 2, 1, 20), 0, not_a_number);
  const auto k = random.tensor<float>(1, 1, 37, 20);
  for (Domain domain : domains) {
    const auto scores = exact_scores(SelectorInput{q, k, LogitOptions{}}, 1, domain);
    for (Index t = 0; t < 37; ++t) EXPECT_EQ(scores(0, 0, t), 0.0f);
  }
}

TEST(SoftmaxMass, OfALogitIsNotFiniteForAKeyThatIsNot) {
  Random random(426);
  const auto q = random.tensor<Element>(1, 2, 7, 20);
  auto k = random.tensor<Element>(1, 1, 37, 20);
  const auto before = exact_scores(SelectorInput{q, k, LogitOptions{}}, 1, Domain::logit);
  for (float odd : {not_a_number, infinity, -infinity}) {
    k(0, 0, 20, 3) = stored<Element>(odd);
    const auto scores = exact_scores(SelectorInput{q, k, LogitOptions{}}, 1, Domain::logit);
    for (Index t = 0; t < 37; ++t) {
      if (t == 20)
        EXPECT_FALSE(std::isfinite(scores(0, 0, t)));
      else
        EXPECT_EQ(scores(0, 0, t), before(0, 0, t));
    }
  }
}

}  // namespace
