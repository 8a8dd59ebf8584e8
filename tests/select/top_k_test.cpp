// Top-k against the oracle, which gets the very same scores: every position must be equal.

#include <quoka/select/stages.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::top_k;
using quoka::TopKOptions;

Tensor3<float> row_of(const std::vector<float>& list) {
  Tensor3<float> scores(1, 1, std::ssize(list));
  std::copy(list.begin(), list.end(), scores.data());
  return scores;
}

std::vector<Position> best(const std::vector<float>& scores, Index k,
                           const TopKOptions& options = {}) {
  return top_k(row_of(scores), k, options).positions(0, 0);
}

void expect_as_oracle(const Tensor3<float>& scores, Index k, const TopKOptions& options = {}) {
  const oracle::Scores widened = oracle::window_max(to_oracle_scores(scores), options.window);
  EXPECT_EQ(to_positions(top_k(scores, k, options)),
            oracle::top_k(widened, k, options.keep_first, options.keep_last))
      << "kv_len " << scores.dimension(2) << ", k " << k << ", window " << options.window
      << ", keep_first " << options.keep_first << ", keep_last " << options.keep_last;
}

// Scores with what is hard: few values, both zeros, NaN, infinities, denormals, the ends of the
// range.
Tensor3<float> odd_scores(Random& random, Index batch, Index heads, Index len) {
  const float odd[] = {0.0f,
                       -0.0f,
                       1.0f,
                       -1.0f,
                       0.5f,
                       infinity,
                       -infinity,
                       not_a_number,
                       -not_a_number,
                       std::numeric_limits<float>::max(),
                       std::numeric_limits<float>::lowest(),
                       std::numeric_limits<float>::min(),
                       -std::numeric_limits<float>::min(),
                       std::numeric_limits<float>::denorm_min(),
                       -std::numeric_limits<float>::denorm_min()};
  Tensor3<float> scores(batch, heads, len);
  for (Index i = 0; i < scores.size(); ++i) scores.data()[i] = odd[random.below(std::ssize(odd))];
  return scores;
}

// ---- order --------------------------------------------------------------------------------------

// Any k, window and forced keys; scores of all kinds, by whole rows and by ranges. They are left alone.
TEST(TopK, AgreesWithTheOracle) {
  quoka::ThreadPool pool(16);
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    Random random(seed);
    const Index len = 1 + random.below(seed % 50 == 0  ? 9000
                                       : seed % 3 == 0 ? 12
                                                       : 501),
                kind = random.below(5);
    Tensor3<float> scores = kind == 0 ? odd_scores(random, 2, 3, len) : random.scores(2, 3, len);
    for (Index i = 0; i < scores.size() && kind > 1; ++i) {
      const std::uint64_t bits = random.bits();
      scores.data()[i] = kind == 2 ? std::bit_cast<float>(static_cast<std::uint32_t>(bits))  // any
                         : kind == 3
                             ? static_cast<float>(bits % 7) - 1.0f                // many ties
                             : 1.0f + 0x1p-23f * static_cast<float>(bits % 300);  // of one bucket
    }
    const auto some = [&](Index most) {
      return random.below(4) > 0 ? Index{0} : random.below(most);
    };
    const Index k = random.below(3) > 0 ? random.below(len + 2)
                                        : random.below(4) + len - std::min<Index>(len, 3);
    const TopKOptions options{1 + (random.below(2) == 0 ? 0 : some(20) + some(3 * len)),
                              some(9) + some(len), some(9) + some(len)};
    const auto before = scores;
    expect_as_oracle(scores, k, options);
    EXPECT_EQ(top_k(scores, k, options, pool), top_k(scores, k, options));
    EXPECT_TRUE(same_bits(scores, before));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(TopK, KeepsTheBestInAscendingPosition) {
  EXPECT_EQ(best({0.1f, 0.9f, 0.3f, 0.8f, 0.2f}, 3), (std::vector<Position>{1, 2, 3}));
}

TEST(TopK, RanksNegativeScoresByValueToo) {
  EXPECT_EQ(best({-0.5f, -0.1f, -3.0f, -0.2f, -1e30f}, 2), (std::vector<Position>{1, 3}));
}

// ---- ties ---------------------------------------------------------------------------------------

TEST(TopK, TiesGoToTheEarlierKey) {
  EXPECT_EQ(best({1, 2, 1, 2, 1, 2, 1}, 2), (std::vector<Position>{1, 3}));
  EXPECT_EQ(best({1, 2, 1, 2, 1, 2, 1}, 4), (std::vector<Position>{0, 1, 3, 5}));
}

TEST(TopK, AllEqualKeepsTheFirst) {
  for (float score : {0.0f, -0.0f, 0.3f, -7.0f, not_a_number, infinity, -infinity})
    for (Index len : {2, 3, 37, 501}) {
      const std::vector<float> scores(uz(len), score);
      for (Index k = 1; k < len; k += 1 + len / 5) {
        const auto list = best(scores, k);
        EXPECT_EQ(std::vector<Index>(list.begin(), list.end()), oracle::range(0, k)) << score;
      }
    }
}

TEST(TopK, MinusZeroEqualsZero) {
  EXPECT_EQ(best({-0.0f, 0.0f, -0.0f, 0.0f}, 2), (std::vector<Position>{0, 1}));
  EXPECT_EQ(best({-1.0f, -0.0f, 0.0f, 1.0f}, 2), (std::vector<Position>{1, 3}));
}

// ---- NaN, infinities, denormals -----------------------------------------------------------------

TEST(TopK, ScoresThatAreNotFiniteRankLast) {
  EXPECT_EQ(best({infinity, not_a_number, -5.0f, -infinity, -7.0f}, 2),
            (std::vector<Position>{2, 4}));
}

TEST(TopK, ScoresThatAreNotFiniteFillUpByPosition) {
  EXPECT_EQ(best({infinity, not_a_number, -5.0f, -infinity, -7.0f}, 3),
            (std::vector<Position>{0, 2, 4}));
  EXPECT_EQ(best({infinity, not_a_number, -5.0f, -infinity, -7.0f}, 4),
            (std::vector<Position>{0, 1, 2, 4}));
}

TEST(TopK, TheLowestFiniteScoreIsAboveNan) {
  EXPECT_EQ(best({not_a_number, std::numeric_limits<float>::lowest(), infinity}, 1),
            (std::vector<Position>{1}));
}

TEST(TopK, DenormalsAreNotZero) {
  const float least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(best({-least, 0.0f, least}, 1), (std::vector<Position>{2}));
  EXPECT_EQ(best({-least, -0.0f, -least}, 1), (std::vector<Position>{1}));
}

// ---- all and none -------------------------------------------------------------------------------

TEST(TopK, OfNoMoreKeysThanKIsAll) {
  Random random(137);
  const auto scores = random.scores(2, 3, 37);
  for (Index k : {37, 38, 1024}) EXPECT_EQ(top_k(scores, k), Selection::all(2, 3, 37));
}

TEST(TopK, OfZeroIsNone) {
  Random random(138);
  for (Index keep : {0, 3}) {
    const Selection none =
        top_k(random.scores(2, 3, 37), 0, {.window = 3, .keep_first = keep, .keep_last = keep});
    EXPECT_EQ(none.sum_of_counts(), 0);
    EXPECT_EQ(none.kv_len(), 37);
    EXPECT_FALSE(none.is_all());
  }
}

TEST(TopK, OfAnEmptyPastIsAll) { EXPECT_TRUE(top_k(Tensor3<float>(2, 3, 0), 7).is_all()); }

// ---- forced keys --------------------------------------------------------------------------------

TEST(TopK, ForcedKeysCountInsideK) {
  EXPECT_EQ(best({0, 1, 9, 1, 8, 1, 0}, 4, {.keep_first = 1, .keep_last = 2}),
            (std::vector<Position>{0, 2, 5, 6}));
}

TEST(TopK, ForcedKeysAreNotCountedTwice) {
  EXPECT_EQ(best({9, 1, 2, 1, 8}, 3, {.keep_first = 1, .keep_last = 1}),
            (std::vector<Position>{0, 2, 4}));
}

TEST(TopK, ForcedKeysMayBeNan) {
  EXPECT_EQ(best({not_a_number, 1, 2, 1, infinity}, 3, {.keep_first = 1, .keep_last = 1}),
            (std::vector<Position>{0, 2, 4}));
}

TEST(TopK, TheFirstKeysStayWhereBothDoNotFit) {
  const std::vector<float> scores = {0, 1, 2, 3, 4, 5, 6};
  EXPECT_EQ(best(scores, 3, {.keep_first = 2, .keep_last = 2}), (std::vector<Position>{0, 1, 6}));
  EXPECT_EQ(best(scores, 3, {.keep_first = 3, .keep_last = 2}), (std::vector<Position>{0, 1, 2}));
  EXPECT_EQ(best(scores, 3, {.keep_first = 1000, .keep_last = 1000}),
            (std::vector<Position>{0, 1, 2}));
}

TEST(TopK, TheLastKeysMayFillAllOfK) {
  EXPECT_EQ(best({9, 8, 7, 6, 5, 4, 3}, 3, {.keep_last = 1000}), (std::vector<Position>{4, 5, 6}));
}

// ---- windows ------------------------------------------------------------------------------------

TEST(TopK, AWindowBringsTheNeighboursOfAGoodKey) {
  EXPECT_EQ(best({1, 2, 3, 9, 0, 0, 0}, 3, {.window = 3}), (std::vector<Position>{2, 3, 4}));
}

TEST(TopK, AnEvenWindowLooksOneFurtherAhead) {
  // window 2: positions kv and kv + 1
  EXPECT_EQ(best({0, 0, 0, 9, 0, 0, 0}, 2, {.window = 2}), (std::vector<Position>{2, 3}));
  // window 4: kv - 1 ... kv + 2
  EXPECT_EQ(best({0, 0, 0, 9, 0, 0, 0}, 4, {.window = 4}), (std::vector<Position>{1, 2, 3, 4}));
}

TEST(TopK, AWindowStopsAtTheEndsOfTheRow) {
  EXPECT_EQ(best({9, 0, 1, 0, 8}, 4, {.window = 3}), (std::vector<Position>{0, 1, 3, 4}));
}

TEST(TopK, AWindowPassesOverScoresThatAreNotFinite) {
  // The NaN key itself stays last, its neighbours take nothing from it.
  EXPECT_EQ(best({0, 1, not_a_number, 2, infinity, 0, 0}, 5, {.window = 3}),
            (std::vector<Position>{0, 1, 3, 5, 6}));
}

TEST(TopK, AWindowSeesForcedKeys) {
  EXPECT_EQ(best({9, 0, 1, 1, 0, 0}, 2, {.window = 3, .keep_first = 1}),
            (std::vector<Position>{0, 1}));
}

TEST(TopK, TheLargestWindowIsThatOfTheWholeRow) {
  EXPECT_EQ(best({0, 1, 2, 9, 0}, 2, {.window = std::numeric_limits<Index>::max()}),
            (std::vector<Position>{0, 1}));
}

TEST(TopK, TheLargestNumbersOfForcedKeysAreAllOfK) {
  const Index largest = std::numeric_limits<Index>::max();
  EXPECT_EQ(best({0, 1, 2, 9, 0}, 2, {.keep_first = largest, .keep_last = largest}),
            (std::vector<Position>{0, 1}));
}

}  // namespace
