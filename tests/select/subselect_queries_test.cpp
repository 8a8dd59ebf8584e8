// Query sub-selection by example: its order, also on ties, and queries that are zero, not finite or huge. Against the
// oracle: selection_fuzz_test.cpp.

#include <quoka/select/stages.hpp>

#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::subselect_queries;
using quoka::subselect_query_positions;

// [1, 1, len, dim] whose row i is pattern[i % pattern.size()].
template <class T>
Tensor4<T> repeated(const std::vector<std::vector<double>>& pattern, Index len) {
  Tensor4<T> q(1, 1, len, std::ssize(pattern[0]));
  for (Index i = 0; i < len; ++i)
    for (Index c = 0; c < q.dimension(3); ++c)
      q(0, 0, i, c) = stored<T>(pattern[uz(i) % pattern.size()][uz(c)]);
  return q;
}

// ---- order --------------------------------------------------------------------------------------

TEST(Subselect, KeepsThese) {
  const double nan = std::nan("");
  const struct {
    const char* what;
    std::vector<std::vector<double>> pattern;
    Index len;
    std::vector<Index> kept;
  } all[] = {
      // Mean (16, 1): cosines are about 1, -1 and 0.06.
      {"the most dissimilar one first", {{8, 0}, {8, 0}, {8, 0}, {-8, 0}, {0, 1}}, 5, {3, 4, 0}},
      {"the earlier one of equals", {{1, 2, 3}}, 37, {0, 1, 2, 3, 4, 5, 6}},
      {"equals of two kinds", {{1, 2, 4}, {1, 2, 4}, {-4, 1, 0}}, 12, {2, 5, 8, 11, 0, 1, 3}},
      // By powers of two: the cosines have the same bits.
      {"equals but for a factor", {{4, 2, 1}, {8, 4, 2}, {1, 0.5, 0.25}}, 37, {0, 1, 2, 3}},
      // Mean along (1, 0): cosines 1, 0, 0 and, for the last, below 0.
      {"zeros as if orthogonal", {{4, 0}, {0, 0}, {4, 0}, {0, 0}, {-1, 0}}, 5, {4, 1, 3, 0}},
      {"the first ones of a mean of zero", {{1, 2}, {-1, -2}}, 16, {0, 1, 2, 3, 4, 5, 6}},
      {"the first ones where none is finite", {{nan, 1}}, 37, {0, 1, 2, 3, 4, 5, 6}},
  };
  for (const auto& [what, pattern, len, kept] : all)
    EXPECT_EQ(to_positions(subselect_query_positions(repeated<Element>(pattern, len),
                                                     std::ssize(kept)))[0][0],
              kept)
        << what;
}

TEST(Subselect, AllAreKeptInOrderUpToTheNumberWanted) {
  Random random(75);
  for (Index len : {1, 3, 15, 16}) {
    const auto kept =
        to_positions(subselect_query_positions(random.tensor<Element>(2, 3, len, 17), 16));
    EXPECT_EQ(kept, oracle::all_positions(2, 3, len));
  }
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

// ---- huge queries -------------------------------------------------------------------------------

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
