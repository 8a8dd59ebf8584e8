// Query sub-selection against the oracle, its order on ties, and which query a NaN may disturb.

#include <quoka/select/stages.hpp>

#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::subselect_queries;
using quoka::subselect_query_positions;

// Its positions are the oracle's, near ties aside; kv_heads says which heads form a group.
template <class T>
void expect_as_oracle(const Tensor4<T>& q, Index n, QueryChoice choice, Index kv_heads = 1) {
  const oracle::Tensor exact = to_oracle(q);
  const auto kept = subselect_query_positions(q, n, {choice, exact.heads / kv_heads});
  SCOPED_TRACE("q_len " + std::to_string(exact.len) + ", dim " + std::to_string(exact.dim) +
               ", n " + std::to_string(n));
  expect_same_queries(to_positions(kept),
                      oracle::subselect_queries(exact, n, to_oracle(choice), kv_heads),
                      oracle::query_cosines(exact));
}

// [1, 1, len, dim] whose row i is pattern[i % pattern.size()].
template <class T>
Tensor4<T> repeated(const std::vector<std::vector<double>>& pattern, Index len) {
  Tensor4<T> q(1, 1, len, std::ssize(pattern[0]));
  for (Index i = 0; i < len; ++i)
    for (Index c = 0; c < q.dimension(3); ++c)
      q(0, 0, i, c) = stored<T>(pattern[uz(i) % pattern.size()][uz(c)]);
  return q;
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(Subselect, DissimilarAgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(71);
    for (Index dim : {1, 3, 17, 56, 80, 100, 128})
      for (Index len : {1, 3, 7, 37, 127})
        for (Index n : {1, 3, 16})
          expect_as_oracle(random.tensor<T>(2, 3, len, dim), n, QueryChoice::dissimilar);
  });
}

TEST(Subselect, MixedAgreesWithTheOracleForEveryGroup) {
  Random random(84);
  for (Index group : {1, 4, 5, 7, 8, 16})
    for (Index len : {5, 17, 128})
      for (Index n : {1, 2, 4, 8})
        expect_as_oracle(random.tensor<Element>(2, 2 * group, len, 17), n, QueryChoice::mixed, 2);
}

// The four heads of a group space their tokens as one head would four times as many.
TEST(Subselect, MixedHeadsCoverTheChunkTogether) {
  Random random(85);
  const auto kept = to_positions(
      subselect_query_positions(random.tensor<Element>(1, 4, 130, 3), 8, {QueryChoice::mixed, 4}));
  std::vector<Index> spaced;
  for (Index head = 0; head < 4; ++head) {
    const auto& list = kept[0][uz(head)];
    spaced.insert(spaced.end(), list.begin() + 2, list.begin() + 6);
    EXPECT_EQ((std::vector<Index>{list[6], list[7]}), (std::vector<Index>{128, 129}));
    EXPECT_EQ(std::set<Index>(list.begin(), list.end()).size(), 8u);
  }
  std::sort(spaced.begin(), spaced.end());
  for (Index i = 0; i < 16; ++i) EXPECT_EQ(spaced[uz(i)], 8 * i);
}

// ---- order --------------------------------------------------------------------------------------

TEST(Subselect, MostDissimilarComesFirst) {
  // Mean (16, 1): cosines are about 1, -1 and 0.06.
  const auto q = repeated<Element>({{8, 0}, {8, 0}, {8, 0}, {-8, 0}, {0, 1}}, 5);
  const auto kept = to_positions(subselect_query_positions(q, 3));
  EXPECT_EQ(kept[0][0], (std::vector<Index>{3, 4, 0}));
}

TEST(Subselect, EqualQueriesKeepTheirOrder) {
  const auto q = repeated<Element>({{1, 2, 4}, {1, 2, 4}, {-4, 1, 0}}, 37);
  const auto exact = to_oracle(q);
  for (Index n : {1, 7, 12, 13, 36})
    EXPECT_EQ(to_positions(subselect_query_positions(q, n)),
              oracle::subselect_queries(exact, n, oracle::Choice::dissimilar, 1));
}

TEST(Subselect, QueriesAllAlikeKeepTheirOrder) {
  const auto kept = to_positions(subselect_query_positions(repeated<Element>({{1, 2, 3}}, 37), 7));
  EXPECT_EQ(kept[0][0], oracle::range(0, 7));
}

TEST(Subselect, ScaledQueriesTie) {  // by powers of two: the cosines have the same bits
  const auto q = repeated<Element>({{4, 2, 1}, {8, 4, 2}, {1, 0.5, 0.25}}, 37);
  const auto kept = to_positions(subselect_query_positions(q, 7));
  EXPECT_EQ(kept[0][0], oracle::range(0, 7));
}

TEST(Subselect, AllAreKeptInOrderUpToTheNumberWanted) {
  Random random(75);
  for (QueryChoice choice : query_choices)
    for (Index len : {1, 3, 15, 16}) {
      const auto kept = to_positions(
          subselect_query_positions(random.tensor<Element>(2, 3, len, 17), 16, {choice}));
      EXPECT_EQ(kept, oracle::all_positions(2, 3, len));
    }
}

TEST(Subselect, DecodeKeepsItsOneQuery) {
  Random random(76);
  const auto q = random.tensor<Element>(2, 3, 1, 17);
  EXPECT_TRUE(same_bits(subselect_queries(q, 16), q));
}

// ---- the rows -----------------------------------------------------------------------------------

TEST(Subselect, KeptRowsAreTheQueriesBitForBit) {
  for_each_storage([]<class T>() {
    Random random(79);
    const auto q = random.tensor<T>(2, 3, 37, 17);
    const auto kept = subselect_queries(q, 7);
    const auto positions = subselect_query_positions(q, 7);
    ASSERT_EQ(kept.dimension(2), 7);
    for (Index b = 0; b < 2; ++b)
      for (Index head = 0; head < 3; ++head)
        for (Index m = 0; m < 7; ++m)
          for (Index c = 0; c < 17; ++c)
            ASSERT_EQ(kept(b, head, m, c), q(b, head, positions(b, head, m), c));
  });
}

// ---- zero, NaN, infinite and huge queries -------------------------------------------------------

TEST(Subselect, ZeroQueriesHaveCosineZero) {
  // Mean along (1, 0): cosines 1, 0, 0 and, for the last, below 0.
  const auto q = repeated<Element>({{4, 0}, {0, 0}, {4, 0}, {0, 0}, {-1, 0}}, 5);
  const auto kept = to_positions(subselect_query_positions(q, 4));
  EXPECT_EQ(kept[0][0], (std::vector<Index>{4, 1, 3, 0}));
}

TEST(Subselect, AMeanOfZeroLeavesThePositionsToDecide) {
  const auto q = repeated<Element>({{1, 2}, {-1, -2}}, 16);
  EXPECT_EQ(to_positions(subselect_query_positions(q, 7))[0][0], oracle::range(0, 7));
}

TEST(Subselect, QueriesThatAreNotFiniteRankLast) {
  Random random(83);
  for (float odd : {not_a_number, infinity, -infinity}) {
    auto q = random.tensor<Element>(1, 2, 37, 17);
    for (Index i : {3, 20, 36}) q(0, 1, i, 16) = stored<Element>(odd);
    for (QueryChoice choice : query_choices)
      for (Index n : {7, 34, 35, 36}) expect_as_oracle(q, n, choice);
    const auto kept = to_positions(subselect_query_positions(q, 36));
    EXPECT_EQ((std::vector<Index>(kept[0][1].end() - 2, kept[0][1].end())),
              (std::vector<Index>{3, 20}));
  }
}

TEST(Subselect, AQueryThatIsNotFiniteIsAsIfLeftOut) {
  Random random(84);
  const auto q = random.tensor<Element>(1, 3, 37, 17);
  Tensor4<Element> longer(1, 3, 38, 17);  // a NaN row at 5
  for (Index i = 0; i < 38; ++i)
    for (Index head = 0; head < 3; ++head)
      for (Index c = 0; c < 17; ++c)
        longer(0, head, i, c) =
            i == 5 ? stored<Element>(std::nan("")) : q(0, head, i < 5 ? i : i - 1, c);
  EXPECT_TRUE(same_bits(subselect_queries(q, 7), subselect_queries(longer, 7)));
}

TEST(Subselect, QueriesAllNanKeepTheirOrder) {
  const auto kept =
      to_positions(subselect_query_positions(repeated<Element>({{std::nan(""), 1}}, 37), 7));
  EXPECT_EQ(kept[0][0], oracle::range(0, 7));
}

// Each of them is finite, their sum in float is not.
TEST(Subselect, QueriesWhoseSumOverflowsAreRankedBeforeNan) {
  const double huge =
      0.9 * static_cast<double>(static_cast<float>(std::numeric_limits<Element>::max()));
  auto q = repeated<Element>({{huge, huge / 2}, {huge, huge}, {huge, -huge}}, 37);
  q(0, 0, 4, 0) = stored<Element>(std::nan(""));
  const auto kept = to_positions(subselect_query_positions(q, 36));
  EXPECT_EQ(std::set<Index>(kept[0][0].begin(), kept[0][0].end()).size(), 36u);
  EXPECT_EQ(std::count(kept[0][0].begin(), kept[0][0].end(), 4), 0);
}

}  // namespace
