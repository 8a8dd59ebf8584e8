// engine/mask_segments.hpp: sequences found in masks.

#include <quoka/engine/mask_segments.hpp>

#include "support/engine_mask.hpp"

#include <algorithm>
#include <numeric>

namespace {

using namespace quoka;
using quoka_test::EngineMask, quoka_test::for_each_draw, quoka_test::Random, quoka_test::uz;

class Masks : public ::testing::Test {
 protected:
  static constexpr Index cells = 700;
  static constexpr std::uint16_t hidden = 0xfc00;

  void row(const std::vector<Position>& seen) {
    rows.insert(rows.end(), cells, hidden);
    for (const Position cell : seen) at(count() - 1, cell) = 0;
  }
  Index count() const { return std::ssize(rows) / cells; }
  std::uint16_t& at(Index row, Index cell) { return rows[uz(row * cells + cell)]; }
  std::vector<MaskSegment> read() {
    return read_mask_segments({reinterpret_cast<const std::byte*>(rows.data()),
                               format_of<Eigen::half>(),
                               {1, 1, count(), cells},
                               {0, 0, cells * 2}},
                              SerialExecutor{});
  }
  static std::vector<Position> range(Position begin, Position end) {
    std::vector<Position> list(uz(end - begin));
    std::iota(list.begin(), list.end(), begin);
    return list;
  }

  std::vector<std::uint16_t> rows;
};

// As few segments as there are sequences, and what each is. That a chunk's cells are those that its rows see:
// RandomMasksAreReadAsTheyAre.
TEST_F(Masks, ArePiecesOfSoManyRows) {
  using Seen = std::vector<Position>;
  // Rows that see range(first, end), each of the next ones with both moved on.
  const auto tokens = [](Position first, Position end, Position count, Position first_moves = 0,
                         Position end_moves = 1) {
    std::vector<Seen> all;
    for (Position i = 0; i < count; ++i)
      all.push_back(range(first + i * first_moves, end + i * end_moves));
    return all;
  };
  const auto beside = [](Seen prefix, const Seen& own) {
    prefix.insert(prefix.end(), own.begin(), own.end());
    return prefix;
  };
  std::vector<Seen> copies;
  for (Position i = 0; i < 20; ++i) copies.push_back(beside(range(0, 100), {200 + i}));
  std::vector<Seen> chunk_of_a_copy{copies[0], copies[1], copies[2], beside(copies[2], {203}),
                                    beside(copies[2], {203, 204})};
  using Segment = std::pair<Index, MaskKind>;  // rows
  using enum MaskKind;
  const struct {
    const char* name;
    std::vector<std::vector<Seen>> rows;
    std::vector<Segment> segments;
  } table[] = {
      {"a chunk", {tokens(0, 500, 50)}, {{50, causal}}},
      {"sequences",
       {{range(0, 100)}, {range(200, 230)}, tokens(300, 400, 20)},
       {{1, causal}, {1, causal}, {20, causal}}},
      {"a window", {tokens(0, 100, 20, 1, 1)}, {{20, sliding}}},
      {"a window that fills first",
       {tokens(0, 40, 10), tokens(1, 50, 19, 1, 1)},
       {{10, causal}, {19, sliding}}},
      {"copies of a sequence", {copies}, {{20, bidirectional}}},
      {"a chunk behind copies", {chunk_of_a_copy}, {{2, bidirectional}, {3, causal}}},
      {"tokens seen both ways", {tokens(0, 100, 20, 0, 0)}, {{20, bidirectional}}},
      {"a chunk behind tokens seen both ways",
       {tokens(0, 105, 5, 0, 0), tokens(0, 106, 3)},
       {{5, bidirectional}, {3, causal}}},
      {"a sequence and its beginning",
       {{range(0, 100)}, {range(0, 50)}},
       {{1, causal}, {1, causal}}},
      {"two cells more or less",
       {{range(0, 100)}, {range(0, 102)}, {range(0, 100)}},
       {{1, causal}, {1, causal}, {1, causal}}},
      {"nothing seen, then a token", {{{}, {}, {7}}}, {{2, bidirectional}, {1, causal}}},
      {"nothing seen before a chunk", {{{}, {7}, {7, 8}}}, {{1, causal}, {2, causal}}},
  };
  for (const auto& of : table) {
    SCOPED_TRACE(of.name);
    rows.clear();
    for (const auto& some : of.rows)
      for (const Seen& seen : some) row(seen);
    std::vector<Segment> segments;
    Index begin = 0;
    for (const MaskSegment& segment : read()) {
      EXPECT_EQ(segment.begin, begin);
      begin += segment.count;
      segments.emplace_back(segment.count, segment.kind);
    }
    EXPECT_EQ(segments, of.segments);
  }
}

// Rows that share cells, each with its own; but not rows of other sequences.
TEST_F(Masks, SingleRowsThatShareCellsAreOneSegment) {
  Random random(3);
  for (Position i = 0; i < 5; ++i) row(range(100 * i, 100 * i + 60));  // nothing in common
  auto segments = read();
  ASSERT_EQ(segments.size(), 5u);
  join_sparse_segments(segments, cells);
  EXPECT_EQ(segments.size(), 5u);
  rows.clear();
  for (Position i = 0; i < 2; ++i) row(range(20 * i, 20 * i + 60));  // 1.5 rows see a cell
  segments = read();
  ASSERT_EQ(segments.size(), 2u);
  join_sparse_segments(segments, cells);
  EXPECT_EQ(segments.size(), 1u);
  rows.clear();
  for (Position i = 0; i < 20; ++i) row(range(0, 50 + i));  // a chunk
  for (int i = 0; i < 40; ++i) {
    const std::vector<Index> own = random.permutation(cells);
    row({own.begin(), own.begin() + 150 + i});
  }
  row(range(600, 700));
  segments = read();
  ASSERT_EQ(segments.size(), 42u);
  join_sparse_segments(segments, cells);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_TRUE(segments[0].causal());
  EXPECT_EQ(segments[0].cells, range(0, 69));
  EXPECT_EQ(segments[1].kind, MaskKind::sparse);
  EXPECT_EQ(segments[1].begin, 20);
  EXPECT_EQ(segments[1].count, 41);
}

constexpr std::uint16_t a_bias = 0x9419;  // about -0.001, as half

// A biased row is a token like the others, and is named. Rows with few others between them are one stretch, and a bias may
// stay from row to row.
TEST_F(Masks, BiasedRowsStayTokensOfTheirChunkAndAreNamedInStretches) {
  for (Position i = 0; i < 40; ++i) row(range(0, 100 + i));
  const auto plain = rows;
  std::vector<Index> all(40);
  std::iota(all.begin(), all.end(), 0);
  const std::pair<std::vector<Index>, std::vector<MaskStretch>> table[] = {
      {{7, 20}, {{7, 1}, {20, 1}}},
      {{0, 1, 2, 10, 19}, {{0, 11}, {19, 1}}},  // gaps of 7 and of 8
      {all, {{0, 40}}}};
  for (const auto& [queries, stretches] : table) {
    rows = plain;
    for (const Index query : queries) at(query, 50) = a_bias, at(query, 99) = 0x3c00;
    const auto segments = read();
    ASSERT_EQ(segments.size(), 1u);
    EXPECT_TRUE(segments[0].causal());
    EXPECT_EQ(segments[0].cells, range(0, 139));
    EXPECT_EQ(segments[0].biased, stretches);
  }
}

TEST_F(Masks, WhatHidesIsNoBias) {
  // Minus infinity, the lowest half, -60,000. Beside them: -59,968, infinity, the smallest half, NaN of both signs, -0.
  const std::uint16_t hides[] = {0xfc00, 0xfbff, 0xfb53},
                      biases[] = {0xfb52, 0x7c00, 0x0001, 0x7e00, 0x7c01, 0xfc01, 0xffff};
  for (Position i = 0; i < 10; ++i) row(range(0, 100 + i));
  for (const std::uint16_t x : hides) {
    for (Position i = 0; i < 10; ++i) at(i, 300) = x;
    const auto segments = read();
    ASSERT_EQ(segments.size(), 1u) << x;
    EXPECT_EQ(segments[0].cells, range(0, 109)) << x;
    EXPECT_TRUE(segments[0].biased.empty()) << x;
  }
  for (Position i = 0; i < 10; ++i) at(i, 300) = hidden;
  for (const std::uint16_t x : biases) {
    at(4, 10) = x;
    EXPECT_EQ(read()[0].biased, (std::vector<MaskStretch>{{4, 1}})) << x;
    EXPECT_EQ(read()[0].cells, range(0, 109)) << x;
  }
  at(4, 10) = 0x8000;
  EXPECT_TRUE(read()[0].biased.empty()) << "-0 adds nothing";
}

// For any mask: segments hold all rows in order, a chunk's cells are those that its rows see, and its stretches hold
// exactly the biased rows and the gaps between them.
TEST_F(Masks, RandomMasksAreReadAsTheyAre) {
  Index chunks = 0, biased_rows = 0;
  const bool complete = for_each_draw(250, [&](Random& random) {
    const EngineMask mask(random, 1 + random.below(40), cells);
    Index next = 0;
    for (const MaskSegment& segment : read_mask_segments(mask.values, SerialExecutor{})) {
      ASSERT_EQ(segment.begin, next);
      ASSERT_GT(segment.count, 0);
      next += segment.count;
      if (!segment.causal()) {
        EXPECT_TRUE(segment.cells.empty() && segment.biased.empty());
        continue;
      }
      ++chunks;
      std::vector<bool> of_segment(uz(cells), false);
      for (Index i = 0; i < segment.first_sees(); ++i)
        of_segment[uz(segment.cells[static_cast<std::size_t>(i)])] = true;
      std::size_t stretch = 0;
      for (Index i = 0; i < segment.count; ++i) {
        if (i > 0)
          of_segment[static_cast<std::size_t>(segment.cells[uz(segment.first_sees() + i - 1)])] =
              true;
        const bool biased = mask.is_biased(segment.begin + i);
        for (Index cell = 0; cell < cells; ++cell)
          ASSERT_EQ(mask.sees(segment.begin + i, cell), of_segment[uz(cell)])
              << "row " << segment.begin + i << ", cell " << cell;
        biased_rows += biased ? 1 : 0;
        while (stretch < segment.biased.size() &&
               segment.biased[stretch].begin + segment.biased[stretch].count <= i)
          ++stretch;
        const bool within = stretch < segment.biased.size() && segment.biased[stretch].begin <= i;
        EXPECT_TRUE(!biased || within) << "row " << segment.begin + i;
        if (within && (i == segment.biased[stretch].begin ||
                       i + 1 == segment.biased[stretch].begin + segment.biased[stretch].count)) {
          EXPECT_TRUE(biased) << "row " << segment.begin + i;
        }
      }
    }
    ASSERT_EQ(next, mask.values.dimension(2));
  });
  if (!complete) return;
  EXPECT_GT(chunks, 500);
  EXPECT_GT(biased_rows, 200);
}

TEST_F(Masks, AreHalvesOfOneSequenceAndHead) {
  row({1});
  const auto rows_of = [&](const Format& format, Index heads, Index batch = 1) {
    return Rows(reinterpret_cast<const std::byte*>(rows.data()), format,
                {batch, heads, 1, cells / 2}, {0, 0, 0});
  };
  EXPECT_THROW(read_mask_segments(rows_of(format_of<Eigen::half>(), 1, 2), SerialExecutor{}),
               std::invalid_argument);
  EXPECT_THROW(read_mask_segments(rows_of(format_of<float>(), 1), SerialExecutor{}),
               std::invalid_argument);
  EXPECT_THROW(read_mask_segments(rows_of(format_of<Eigen::half>(), 2), SerialExecutor{}),
               std::invalid_argument);
  EXPECT_TRUE(read_mask_segments({}, SerialExecutor{}).empty());
}

}  // namespace
