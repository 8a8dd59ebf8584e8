// Sequences found in masks.

#include "ggml/pieces.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace {

using namespace quoka_ggml;

class Masks : public ::testing::Test {
 protected:
  static constexpr Index cells = 700;
  static constexpr std::uint16_t hidden = 0xfc00;

  void row(const std::vector<Position>& seen) {
    rows.emplace_back(cells, hidden);
    for (const Position cell : seen) rows.back()[static_cast<std::size_t>(cell)] = 0;
  }
  std::vector<Piece> read() {
    return read_pieces([&](Index query) { return rows[static_cast<std::size_t>(query)].data(); },
                       static_cast<Index>(rows.size()), cells, quoka::SerialExecutor{});
  }
  static std::vector<Position> range(Position begin, Position end) {
    std::vector<Position> list(static_cast<std::size_t>(end - begin));
    std::iota(list.begin(), list.end(), begin);
    return list;
  }

  std::vector<std::vector<std::uint16_t>> rows;
};

TEST_F(Masks, OneChunk) {
  for (Position i = 0; i < 50; ++i) row(range(0, 500 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_TRUE(pieces[0].causal);
  EXPECT_EQ(pieces[0].cells, range(0, 549));
  EXPECT_EQ(pieces[0].first_sees(), 500);
  EXPECT_TRUE(in_order(pieces[0].cells));
}

TEST_F(Masks, TokensInTheOrderOfTheirCellsOrNot) {
  row({4, 5, 9});
  row({4, 5, 9, 600});
  row({2, 4, 5, 9, 600});
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].cells, (std::vector<Position>{4, 5, 9, 600, 2}));
  EXPECT_FALSE(in_order(pieces[0].cells));
}

TEST_F(Masks, SeveralSequences) {
  row(range(0, 100));
  row(range(200, 230));
  for (Position i = 0; i < 20; ++i) row(range(300, 400 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[1].begin, 1);
  EXPECT_EQ(pieces[2].count, 20);
  for (const Piece& piece : pieces) EXPECT_TRUE(piece.causal);
}

TEST_F(Masks, AWindow) {
  for (Position i = 0; i < 20; ++i) row(range(i, 100 + i));
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_FALSE(pieces[0].causal);
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
  for (const Piece& piece : pieces) EXPECT_TRUE(piece.causal);
}

TEST_F(Masks, OtherNumbers) {
  row(range(0, 100));
  row(range(0, 101));
  rows[1][600] = 0x3c00;
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_FALSE(pieces[0].causal);
  EXPECT_EQ(pieces[0].count, 2);
}

TEST_F(Masks, RowsThatSeeNothing) {
  row({});
  row({});
  row({7});
  ASSERT_EQ(read().size(), 2u);
  EXPECT_FALSE(read()[0].causal);
  EXPECT_EQ(read()[1].first_sees(), 1);
  rows.erase(rows.begin());
  row({7, 8});
  const auto pieces = read();
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].first_sees(), 0);
  EXPECT_EQ(pieces[1].first_sees(), 1);
  EXPECT_EQ(pieces[1].count, 2);
}

}  // namespace
