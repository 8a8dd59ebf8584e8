// Selection: positions in, positions out, and what is no selection is refused.

#include <quoka/select/selection.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;

// [batch 2, kv_heads 2, count 3] of 7 keys
const oracle::Positions some = {{{0, 1, 2}, {0, 3, 6}}, {{4, 5, 6}, {1, 2, 5}}};

Tensor3<Position> row_of(std::initializer_list<Position> list) {
  Tensor3<Position> positions(1, 1, std::ssize(list));
  std::copy(list.begin(), list.end(), positions.data());
  return positions;
}

TEST(Selection, MadeOfNothingIsEmpty) {
  const Selection none;
  EXPECT_EQ(none.batch(), 0);
  EXPECT_EQ(none.kv_heads(), 0);
  EXPECT_EQ(none.kv_len(), 0);
  EXPECT_EQ(none.count(), 0);
}

TEST(Selection, HoldsTheCallersPositions) {
  const Selection selection = to_selection(some, 7);
  EXPECT_EQ(selection.batch(), 2);
  EXPECT_EQ(selection.kv_heads(), 2);
  EXPECT_EQ(selection.kv_len(), 7);
  EXPECT_EQ(selection.count(), 3);
  EXPECT_FALSE(selection.is_all());
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 2; ++head) {
      const auto row = selection.row(b, head);
      EXPECT_EQ(std::vector<Index>(row.begin(), row.end()), some[uz(b)][uz(head)]);
      EXPECT_EQ(selection.positions(b, head), std::vector<Position>(row.begin(), row.end()));
    }
}

TEST(Selection, OfAllHoldsNoPositionsButSpellsThemOut) {
  const Selection all = Selection::all(2, 3, 7);
  EXPECT_TRUE(all.is_all());
  EXPECT_EQ(all.count(), 7);
  EXPECT_TRUE(all.row(1, 2).empty());
  EXPECT_EQ(all.positions(1, 2), (std::vector<Position>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Selection, OfNoneHoldsNoPositions) {
  Selection none;
  none.resize(2, 3, 7, 0);
  EXPECT_FALSE(none.is_all());
  EXPECT_EQ(none.count(), 0);
  EXPECT_TRUE(none.row(1, 2).empty());
  EXPECT_TRUE(none.positions(1, 2).empty());
}

TEST(Selection, OfAnEmptyPastIsAllAndNone) {
  const Selection nothing(Tensor3<Position>(2, 3, 0), 0);
  EXPECT_TRUE(nothing.is_all());
  EXPECT_TRUE(nothing.positions(1, 2).empty());
  EXPECT_EQ(nothing, Selection::all(2, 3, 0));
}

TEST(Selection, OfEveryPositionIsAll) {
  const Selection spelled_out(row_of({0, 1, 2}), 3);
  EXPECT_TRUE(spelled_out.is_all());
  EXPECT_EQ(spelled_out, Selection::all(1, 1, 3));
  EXPECT_EQ(spelled_out.positions(0, 0), (std::vector<Position>{0, 1, 2}));
}

// ---- comparison ---------------------------------------------------------------------------------

TEST(Selection, EqualsAnotherOfTheSamePositions) {
  EXPECT_EQ(to_selection(some, 7), to_selection(some, 7));
  auto other = some;
  other[1][1] = {1, 2, 6};
  EXPECT_FALSE(to_selection(some, 7) == to_selection(other, 7));
}

TEST(Selection, DiffersInKvLenEvenWithTheSamePositions) {
  EXPECT_FALSE(to_selection(some, 7) == to_selection(some, 8));
}

TEST(Selection, DiffersInShape) {
  EXPECT_FALSE(Selection::all(1, 4, 7) == Selection::all(2, 2, 7));
  EXPECT_FALSE(Selection::all(2, 2, 7) == Selection::all(2, 2, 8));
}

TEST(Selection, AllDiffersFromNone) {
  Selection none;
  none.resize(1, 1, 7, 0);
  EXPECT_FALSE(none == Selection::all(1, 1, 7));
}

// ---- reuse --------------------------------------------------------------------------------------

TEST(Selection, ReusedIsAsNew) {
  Selection selection = to_selection(some, 7);
  selection.select_all(1, 1, 5);
  EXPECT_EQ(selection, Selection::all(1, 1, 5));
  selection.resize(1, 1, 9, 2);
  selection.mutable_row(0, 0)[0] = 3;
  selection.mutable_row(0, 0)[1] = 8;
  EXPECT_EQ(selection, Selection(row_of({3, 8}), 9));
  selection.resize(1, 1, 9, 0);
  Selection none;
  none.resize(1, 1, 9, 0);
  EXPECT_EQ(selection, none);
}

TEST(Selection, MutableRowsAreApart) {
  Selection selection;
  selection.resize(2, 2, 7, 3);
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 2; ++head) {
      const auto row = selection.mutable_row(b, head);
      ASSERT_EQ(row.size(), 3u);
      for (std::size_t i = 0; i < 3; ++i) row[i] = static_cast<Position>(some[uz(b)][uz(head)][i]);
    }
  EXPECT_EQ(selection, to_selection(some, 7));
}

// ---- refused ------------------------------------------------------------------------------------

TEST(Selection, RefusesAPositionBeyondThePast) {
  expect_refused([] { Selection(row_of({0, 7}), 7); }, {"position", 7, 6});
  expect_refused([] { Selection(row_of({0, 1}), 1); }, {2, 1});
  expect_refused([] { Selection(row_of({0}), 0); }, {1, 0});
}

TEST(Selection, RefusesANegativePosition) {
  expect_refused([] { Selection(row_of({-3, 2}), 7); }, {"position", -3, 0});
}

TEST(Selection, RefusesAPositionTwice) {
  expect_refused([] { Selection(row_of({1, 4, 4}), 7); }, {"position", 4, 5});
}

TEST(Selection, RefusesPositionsThatDescend) {
  expect_refused([] { Selection(row_of({5, 2}), 7); }, {"position", 2, 6});
}

TEST(Selection, RefusesTheOneBadRowAmongGoodOnes) {
  Tensor3<Position> positions(2, 2, 3);
  for (Index i = 0; i < positions.size(); ++i) positions.data()[i] = static_cast<Position>(i % 3);
  positions(1, 1, 2) = 9;
  expect_refused([&] { Selection(positions, 7); }, {9, 6});
}

TEST(Selection, RefusesANegativeLength) {
  expect_refused([] { Selection(row_of({0}), -3); }, {"kv_len", -3, 0});
}

TEST(Selection, RefusesMorePositionsThanKeys) {
  expect_refused([] { Selection().resize(1, 1, 3, 4); }, {"count", 4, 3});
}

}  // namespace
