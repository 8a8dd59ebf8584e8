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

// Some k of [1, len - 1], the ends among them.
std::vector<Index> some_k(Index len) {
  std::vector<Index> list;
  for (Index k : {Index{1}, Index{2}, len / 3, len / 2, len - 2, len - 1})
    if (k >= 1 && k < len) list.push_back(k);
  return list;
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

TEST(TopK, KeepsTheBestInAscendingPosition) {
  EXPECT_EQ(best({0.1f, 0.9f, 0.3f, 0.8f, 0.2f}, 3), (std::vector<Position>{1, 2, 3}));
}

TEST(TopK, AgreesWithTheOracle) {
  Random random(131);
  for (Index len : {2, 3, 7, 37, 127, 501, 1024, 5003})
    for (Index k : some_k(len)) expect_as_oracle(random.scores(2, 3, len), k);
}

TEST(TopK, AgreesWithTheOracleForEveryK) {
  Random random(132);
  const auto scores = random.scores(1, 1, 127);
  for (Index k = 0; k <= 128; ++k) expect_as_oracle(scores, k);
}

TEST(TopK, AgreesWithTheOracleForScoresThatShareTheirLeadingBits) {
  Random random(133);
  for (Index len : {37, 501}) {  // one bucket for all, or nearly
    Tensor3<float> scores(1, 1, len);
    for (Index i = 0; i < len; ++i)
      scores.data()[i] = 1.0f + 0x1p-23f * static_cast<float>(random.below(len));
    for (Index k : some_k(len)) expect_as_oracle(scores, k);
  }
}

TEST(TopK, AgreesWithTheOracleForScoresOfEveryMagnitude) {
  Random random(134);
  Tensor3<float> scores(1, 1, 5003);
  for (Index i = 0; i < scores.size(); ++i)
    scores.data()[i] = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
  for (Index k : some_k(5003)) expect_as_oracle(scores, k);
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
      for (Index k : some_k(len)) {
        const auto list = best(scores, k);
        EXPECT_EQ(std::vector<Index>(list.begin(), list.end()), oracle::range(0, k)) << score;
      }
    }
}

TEST(TopK, MinusZeroEqualsZero) {
  EXPECT_EQ(best({-0.0f, 0.0f, -0.0f, 0.0f}, 2), (std::vector<Position>{0, 1}));
  EXPECT_EQ(best({-1.0f, -0.0f, 0.0f, 1.0f}, 2), (std::vector<Position>{1, 3}));
}

TEST(TopK, AgreesWithTheOracleOnManyTies) {
  Random random(135);
  for (Index values : {2, 3, 7})
    for (Index len : {3, 7, 37, 501})
      for (Index k : some_k(len)) {
        Tensor3<float> scores(2, 3, len);
        for (Index i = 0; i < scores.size(); ++i)
          scores.data()[i] = static_cast<float>(random.below(values)) - 1.0f;
        expect_as_oracle(scores, k);
      }
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

TEST(TopK, AgreesWithTheOracleOnOddScores) {
  Random random(136);
  for (Index len : {2, 3, 7, 37, 127, 501})
    for (Index k : some_k(len)) expect_as_oracle(odd_scores(random, 2, 3, len), k);
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
    EXPECT_EQ(none.total(), 0);
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

TEST(TopK, AgreesWithTheOracleOnForcedKeys) {
  Random random(139);
  for (Index len : {3, 7, 37, 127})
    for (Index k : some_k(len))
      for (Index keep_first : {Index{0}, Index{1}, Index{4}, k, k + 1, len + 7})
        for (Index keep_last : {Index{0}, Index{1}, Index{4}, k, k + 1, len + 7}) {
          const TopKOptions options{.keep_first = keep_first, .keep_last = keep_last};
          expect_as_oracle(random.scores(1, 2, len), k, options);
          expect_as_oracle(odd_scores(random, 1, 2, len), k, options);
        }
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

TEST(TopK, AgreesWithTheOracleForEveryWindow) {
  Random random(140);
  for (Index len : {2, 3, 7, 37, 127})
    for (Index window :
         {Index{1}, Index{2}, Index{3}, Index{4}, Index{5}, Index{6}, Index{7}, Index{8}, Index{16},
          len - 1, len, len + 1, 2 * len, 2 * len + 1, 2 * len + 2, 10 * len})
      for (Index k : some_k(len)) {
        expect_as_oracle(random.scores(1, 2, len), k, {.window = window});
        expect_as_oracle(odd_scores(random, 1, 2, len), k, {.window = window});
      }
}

TEST(TopK, AgreesWithTheOracleForWindowsWithForcedKeys) {
  Random random(141);
  for (Index len : {7, 37, 127})
    for (Index window : {2, 3, 7, 501})
      for (Index k : some_k(len))
        for (Index keep : {1, 3, 501}) {
          const auto scores = odd_scores(random, 1, 2, len);
          expect_as_oracle(scores, k, {.window = window, .keep_first = keep});
          expect_as_oracle(scores, k, {.window = window, .keep_last = keep});
          expect_as_oracle(scores, k, {.window = window, .keep_first = keep, .keep_last = keep});
        }
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

// ---- threads, refusals --------------------------------------------------------------------------

TEST(TopK, LeavesTheScoresAlone) {
  Random random(142);
  const auto scores = odd_scores(random, 1, 2, 127);
  const auto before = scores;
  (void)top_k(scores, 7, {.window = 3});
  EXPECT_TRUE(same_bits(scores, before));
}

}  // namespace
