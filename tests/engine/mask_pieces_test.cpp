// Sequences found in masks.

#include <quoka/engine/mask_pieces.hpp>

#include <gtest/gtest.h>

#include <numeric>

namespace {

using namespace quoka;

class Masks : public ::testing::Test {
 protected:
  static constexpr Index cells = 700;
  static constexpr std::uint16_t hidden = 0xfc00;

  void row(const std::vector<Position>& seen) {
    rows.insert(rows.end(), cells, hidden);
    for (const Position cell : seen) at(count() - 1, cell) = 0;
  }
  Index count() const { return std::ssize(rows) / cells; }
  std::uint16_t& at(Index row, Index cell) {
    return rows[static_cast<std::size_t>(row * cells + cell)];
  }
  std::vector<MaskPiece> read() {
    return read_mask_pieces({reinterpret_cast<const std::byte*>(rows.data()),
                             format_of<Eigen::half>(),
                             {1, 1, count(), cells},
                             {0, 0, cells * 2}},
                            SerialExecutor{});
  }
  static std::vector<Position> range(Position begin, Position end) {
    std::vector<Position> list(static_cast<std::size_t>(end - begin));
    std::iota(list.begin(), list.end(), begin);
    return list;
  }

  std::vector<std::uint16_t> rows;
};

TEST_F(Masks, OneChunk) {
  for (Position i = 0; i < 50; ++i) row(range(0, 500 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_TRUE(pieces[0].causal);
  EXPECT_EQ(pieces[0].cells, range(0, 549));
  EXPECT_EQ(pieces[0].first_sees(), 500);
  EXPECT_TRUE(pieces[0].in_order());
}

TEST_F(Masks, TokensInTheOrderOfTheirCellsOrNot) {
  row({4, 5, 9});
  row({4, 5, 9, 600});
  row({2, 4, 5, 9, 600});
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].cells, (std::vector<Position>{4, 5, 9, 600, 2}));
  EXPECT_FALSE(pieces[0].in_order());
}

TEST_F(Masks, SeveralSequences) {
  row(range(0, 100));
  row(range(200, 230));
  for (Position i = 0; i < 20; ++i) row(range(300, 400 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[1].begin, 1);
  EXPECT_EQ(pieces[2].count, 20);
  for (const MaskPiece& piece : pieces) EXPECT_TRUE(piece.causal);
}

TEST_F(Masks, AWindow) {
  for (Position i = 0; i < 20; ++i) row(range(i, 100 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_FALSE(pieces[0].causal);
  EXPECT_TRUE(pieces[0].cells.empty());
}

// Tokens of copies share a mask; a chunk after them is one.
TEST_F(Masks, CopiesOfASequence) {
  const auto with = [](std::vector<Position> prefix, std::vector<Position> own) {
    prefix.insert(prefix.end(), own.begin(), own.end());
    return prefix;
  };
  row(with(range(0, 100), {200}));
  row(with(range(0, 100), {201}));
  row(with(range(0, 100), {202}));
  row(with(range(0, 100), {202, 203}));
  row(with(range(0, 100), {202, 203, 204}));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_FALSE(pieces[0].causal);
  EXPECT_EQ(pieces[0].count, 2);
  EXPECT_TRUE(pieces[1].causal);
  EXPECT_EQ(pieces[1].begin, 2);
  EXPECT_EQ(pieces[1].count, 3);
  EXPECT_EQ(pieces[1].cells, with(range(0, 100), {202, 203, 204}));
}

TEST_F(Masks, AWindowThatFillsFirst) {
  for (Position i = 0; i < 10; ++i) row(range(0, 40 + i));
  for (Position i = 1; i < 20; ++i) row(range(i, 49 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_TRUE(pieces[0].causal);
  EXPECT_EQ(pieces[0].count, 10);
  EXPECT_FALSE(pieces[1].causal);
  EXPECT_EQ(pieces[1].count, 19);
}

TEST_F(Masks, TokensSeenBothWaysAndAChunkAfterThem) {
  for (int i = 0; i < 5; ++i) row(range(0, 105));
  for (Position i = 1; i < 4; ++i) row(range(0, 105 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_FALSE(pieces[0].causal);
  EXPECT_EQ(pieces[0].count, 5);
  EXPECT_TRUE(pieces[1].causal);
  EXPECT_EQ(pieces[1].cells, range(0, 108));
}

TEST_F(Masks, ALongSequenceAndItsBeginning) {
  row(range(0, 100));
  row(range(0, 50));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 2u);
  for (const MaskPiece& piece : pieces) EXPECT_TRUE(piece.causal);
}

TEST_F(Masks, OtherNumbers) {
  row(range(0, 100));
  row(range(0, 101));
  at(1, 600) = 0x3c00;
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_FALSE(pieces[0].causal);
  EXPECT_EQ(pieces[0].count, 2);
}

// In the first row, and in one that would begin another sequence.
TEST_F(Masks, OtherNumbersInAnyRow) {
  for (const Index of : {0, 2}) {
    rows.clear();
    row(range(0, 100));
    row(range(0, 101));
    row(range(300, 310));
    at(of, 305) = 0xbc00;
    const auto pieces = read();
    ASSERT_EQ(pieces.size(), 1u) << of;
    EXPECT_FALSE(pieces[0].causal);
    EXPECT_EQ(pieces[0].count, 3);
    EXPECT_TRUE(pieces[0].cells.empty());
  }
}

// Two cells more, or less: another sequence.
TEST_F(Masks, TwoCellsMoreOrLess) {
  row(range(0, 100));
  row(range(0, 102));
  row(range(0, 100));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 3u);
  for (const MaskPiece& piece : pieces) EXPECT_TRUE(piece.causal);
  EXPECT_EQ(pieces[1].cells, range(0, 102));
}

TEST_F(Masks, RowsThatSeeNothing) {
  row({});
  row({});
  row({7});
  ASSERT_EQ(read().size(), 2u);
  EXPECT_FALSE(read()[0].causal);
  EXPECT_EQ(read()[1].first_sees(), 1);
  rows.erase(rows.begin(), rows.begin() + cells);
  row({7, 8});
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].first_sees(), 0);
  EXPECT_EQ(pieces[1].first_sees(), 1);
  EXPECT_EQ(pieces[1].count, 2);
}

TEST_F(Masks, AreHalvesOfOneSequenceAndHead) {
  row({1});
  const auto rows_of = [&](const Format& format, Index heads, Index batch = 1) {
    return Rows(reinterpret_cast<const std::byte*>(rows.data()), format,
                {batch, heads, 1, cells / 2}, {0, 0, 0});
  };
  EXPECT_THROW(read_mask_pieces(rows_of(format_of<Eigen::half>(), 1, 2), SerialExecutor{}),
               std::invalid_argument);
  EXPECT_THROW(read_mask_pieces(rows_of(format_of<float>(), 1), SerialExecutor{}),
               std::invalid_argument);
  EXPECT_THROW(read_mask_pieces(rows_of(format_of<Eigen::half>(), 2), SerialExecutor{}),
               std::invalid_argument);
  EXPECT_TRUE(read_mask_pieces({}, SerialExecutor{}).empty());
}

}  // namespace
