// Key scores against the oracle, of any number of rows, keys and channels, and of keys out of the ordinary.

#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/stages.hpp>

#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::score_keys;

// Within 2e-6 of |q|; not finite where the oracle's is not.
template <class T>
void expect_as_oracle(const Tensor4<float>& q_bar, const Tensor4<T>& keys,
                      Aggregation aggregation) {
  const oracle::Tensor q_exact = to_oracle(q_bar), k_exact = to_oracle(keys);
  const oracle::Scores expected = oracle::score_keys(q_exact, k_exact, to_oracle(aggregation));
  const Tensor3<float> scores = score_keys(q_bar, keys, aggregation);
  for (Index b = 0; b < k_exact.batch; ++b)
    for (Index head = 0; head < k_exact.heads; ++head) {
      double longest = 0;
      for (Index m = 0; m < q_exact.len; ++m)
        longest = std::max(longest, oracle::norm(q_exact.row(b, head, m)));
      for (Index t = 0; t < k_exact.len; ++t) {
        const double exact = expected[uz(b)][uz(head)][uz(t)];
        const double score = static_cast<double>(scores(b, head, t));
        if (std::isnan(exact)) {
          ASSERT_FALSE(std::isfinite(score)) << "key " << t;
          continue;
        }
        ASSERT_NEAR(score, exact, 2e-6 * longest) << "[" << b << ", " << head << ", " << t << "]";
      }
    }
}

template <class T>
void expect_as_oracle(Random& random, Index rows, Index kv_len, Index dim) {
  SCOPED_TRACE("rows " + std::to_string(rows) + ", kv_len " + std::to_string(kv_len) + ", dim " +
               std::to_string(dim));
  const auto q_bar = random.tensor<float>(2, 3, rows, dim);
  const auto keys = random.tensor<T>(2, 3, kv_len, dim);
  for (Aggregation aggregation : aggregations) expect_as_oracle(q_bar, keys, aggregation);
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(ScoreKeys, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(101);
    for (Index dim : {1, 3, 15, 16, 17, 56, 64, 80, 100, 128, 192})
      expect_as_oracle<T>(random, 16, 37, dim);
  });
  Random random(102);
  const Index tile = quoka::detail::kernel_sizes().tile_rows;
  for (Index rows : {1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 127, 128})
    expect_as_oracle<Element>(random, rows, 37, 20);
  for (Index kv_len :
       {Index{1}, Index{3}, tile - 1, tile, tile + 1, 3 * tile + 1, Index{127}, Index{501}})
    expect_as_oracle<Element>(random, 3, kv_len, 17);
  expect_as_oracle<Element>(random, 1, quoka::tuning::score_task_keys + 1, 3);
}

// ---- keys out of the ordinary -------------------------------------------------------------------

TEST(ScoreKeys, AZeroKeyScoresZero) {
  Random random(106);
  const auto q_bar = random.tensor<float>(1, 1, 16, 17);
  auto keys = random.tensor<Element>(1, 1, 37, 17);
  for (Index t : {0, 13, 36})
    for (Index c = 0; c < 17; ++c) keys(0, 0, t, c) = stored<Element>(0.0);
  for (Aggregation aggregation : aggregations) {
    const auto scores = score_keys(q_bar, keys, aggregation);
    for (Index t : {0, 13, 36}) EXPECT_EQ(scores(0, 0, t), 0.0f);
  }
}

TEST(ScoreKeys, AKeyThatIsNotFiniteSpoilsItsOwnScoreOnly) {
  for_each_storage([]<class T>() {
    Random random(107);
    for (float odd : {not_a_number, infinity, -infinity})
      for (Index c : {0, 15, 16})
        for (Aggregation aggregation : aggregations) {
          const auto q_bar = random.tensor<float>(1, 1, 19, 17);
          auto keys = random.tensor<T>(1, 1, 37, 17);
          const auto before = score_keys(q_bar, keys, aggregation);
          keys(0, 0, 20, c) = stored<T>(odd);
          const auto scores = score_keys(q_bar, keys, aggregation);
          for (Index t = 0; t < 37; ++t) {
            if (t == 20)
              EXPECT_FALSE(std::isfinite(scores(0, 0, t)))
                  << odd << ", channel " << c << ": " << scores(0, 0, t);
            else
              ASSERT_EQ(scores(0, 0, t), before(0, 0, t));
          }
        }
  });
}

TEST(ScoreKeys, AnInfiniteKeyIsNotFiniteEvenForAZeroQuery) {
  Random random(108);
  Tensor4<float> q_bar(1, 1, 3, 17);
  q_bar.setZero();
  auto keys = random.tensor<Element>(1, 1, 7, 17);
  keys(0, 0, 4, 16) = stored<Element>(infinity);
  for (Aggregation aggregation : aggregations)
    EXPECT_FALSE(std::isfinite(score_keys(q_bar, keys, aggregation)(0, 0, 4)));
}

TEST(ScoreKeysOfWideRange, HugeAndTinyKeysHaveTheirCosine) {
  Random random(109);
  const auto q_bar = random.tensor<float>(1, 1, 7, 37);
  for (double scale : {1e30, 1e15, 1e-15, 1e-30})
    expect_as_oracle(q_bar, random.tensor<float>(1, 1, 37, 37, scale), Aggregation::max);
}

TEST(ScoreKeys, TheStagesInverseNormsAreTheCaches) {
  for_each_storage([]<class T>() {
    Random random(118);
    const auto keys = random.tensor<T>(2, 3, 127, 37);
    quoka::KvCache cache(2, 3, 37, 37, quoka::format_of<T>(), quoka::format_of<T>());
    cache.append(keys, keys);
    const auto norms = quoka::inverse_norms(keys);
    for (Index b = 0; b < 2; ++b)
      for (Index head = 0; head < 3; ++head)
        for (Index t = 0; t < 127; ++t)
          EXPECT_EQ(norms(b, head, t), cache.inverse_norms().at(b, head, t));
  });
}

}  // namespace
