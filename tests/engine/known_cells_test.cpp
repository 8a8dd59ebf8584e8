// KnownCells: the backend's memory of a cache that an engine changes without notice.

#include <quoka/engine/known_cells.hpp>

#include <quoka/quoka.hpp>

#include "support/failing_executor.hpp"

#include <Eigen/Core>

#include <gtest/gtest.h>

#include <numeric>

namespace {

using namespace quoka;

// A cache [1, heads, cells, dim] of bytes, heads side by side, cells further apart than they need.
class Memory {
 public:
  Memory(const quoka::Format& format, Index heads, Index cells, Index dim)
      : format_(&format),
        sizes_{1, heads, cells, dim},
        row_(format.row_bytes({dim})),
        cell_(heads * row_ + 24),
        bytes_(static_cast<std::size_t>(cells * cell_)) {
    for (Index cell = 0; cell < cells; ++cell) write(cell);
  }
  Rows rows() const { return {bytes_.data(), *format_, sizes_, {0, row_, cell_}}; }
  Index row_bytes() const { return row_; }
  std::byte& byte(Index cell, Index head, Index i) {
    return bytes_[static_cast<std::size_t>(cell * cell_ + head * row_ + i)];
  }
  void write(Index cell) {  // halves of normal size, or any bytes
    for (Index head = 0; head < sizes_[1]; ++head)
      for (Index i = 0; i < row_; ++i)
        byte(cell, head, i) =
            std::byte{static_cast<unsigned char>(i % 2 == 0 ? random_() : 0x38 + random_() % 8)};
  }
  void copy(Index from, Index to) {
    std::copy_n(&byte(from, 0, 0), sizes_[1] * row_, &byte(to, 0, 0));
  }
  std::mt19937& random() { return random_; }

 private:
  const quoka::Format* format_;
  Rows::Sizes sizes_;
  Index row_, cell_;
  std::vector<std::byte> bytes_;
  std::mt19937 random_{1};
};

void expect_sketched(const KnownCells& known, const Rows& k) {
  ASSERT_NE(known.sketch(), nullptr);
  quoka::KeySketch fresh;
  fresh.update(k, 0, k.len(), quoka::SerialExecutor{});
  const Index blocks = k.len() / 16;
  for (Index head = 0; head < k.heads(); ++head) {
    const auto same = [&](auto of, Index count) {
      EXPECT_TRUE(std::equal(of(fresh), of(fresh) + count, of(*known.sketch())));
    };
    same([&](const quoka::KeySketch& x) { return x.scales(0, head); }, k.len());
    same([&](const quoka::KeySketch& x) { return x.lengths(0, head); }, k.len());
    for (Index block = 0; block < blocks; ++block)
      same([&](const quoka::KeySketch& x) { return x.codes(0, head, block); }, 16 * k.dim());
  }
}

// The one cell of n that changed since the last look, by the question for a chunk's own.
Position changed_cell(const KnownCells& known, Index n) {
  std::vector<Position> cells(static_cast<std::size_t>(n));
  std::iota(cells.begin(), cells.end(), 0);
  known.find_own(cells, n);
  return cells.back();
}

TEST(KnownCells, EveryBitOfACellCounts) {
  for (const Index dim : {3, 32, 37}) {
    Memory memory(quoka::format_of<Eigen::half>(), 3, 100, dim);
    KnownCells known;
    known.refresh(memory.rows(), false, quoka::SerialExecutor{});
    EXPECT_EQ(known.sketch(), nullptr);
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < memory.row_bytes(); ++i) {
        const Index cell =
            (17 * i + head) % 99;  // not the last, which is the answer where none changed
        memory.byte(cell, head, i) ^= std::byte{static_cast<unsigned char>(1 << i % 8)};
        known.refresh(memory.rows(), false, quoka::SerialExecutor{});
        ASSERT_EQ(changed_cell(known, 100), cell) << "head " << head << ", byte " << i;
      }
    known.refresh(memory.rows(), false, quoka::SerialExecutor{});
    EXPECT_EQ(changed_cell(known, 100), 99);
  }
}

TEST(KnownCells, ExchangedWordsAndCellsAreChanges) {
  Memory memory(quoka::format_of<float>(), 2, 64, 16);
  KnownCells known;
  known.refresh(memory.rows(), false, quoka::SerialExecutor{});
  for (Index i = 0; i < 4; ++i) std::swap(memory.byte(5, 0, i), memory.byte(5, 0, i + 4));
  known.refresh(memory.rows(), false, quoka::SerialExecutor{});
  EXPECT_EQ(changed_cell(known, 64), 5);
  for (Index i = 0; i < 64; ++i) std::swap(memory.byte(9, 0, i), memory.byte(9, 1, i));
  known.refresh(memory.rows(), false, quoka::SerialExecutor{});
  EXPECT_EQ(changed_cell(known, 64), 9);
}

// Cells are written, moved, copied and swapped without notice, by one thread and by several.
TEST(KnownCells, TheSketchIsThatOfTheKeysAsTheyLie) {
  Memory memory(quoka::format_of<Eigen::half>(), 2, 256, 32);
  quoka::ThreadPool threads(3);
  KnownCells known;
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    const auto cell = [&] { return static_cast<Index>(memory.random()() % 256); };
    for (auto count = memory.random()() % 20; count-- > 0;) {
      if (count % 3 == 0)
        memory.copy(cell(), cell());
      else
        memory.write(cell());
    }
    // The part of the cache that an engine passes grows and shrinks.
    const Index len = round % 4 == 3 ? 128 : 256;
    known.refresh(memory.rows().slice(0, len), true, threads);
    expect_sketched(known, memory.rows().slice(0, len));
  }
}

TEST(KnownCells, LooksWithoutAndWithASketchAlternate) {
  Memory memory(quoka::format_of<Eigen::half>(), 2, 64, 32);
  KnownCells known;
  int round = 0;
  for (const bool sketch : {false, true, false, true, true}) {
    memory.write(7), memory.write(40);
    known.refresh(memory.rows(), sketch, quoka::SerialExecutor{});
    memory.write(11);
    EXPECT_EQ(known.sketch() != nullptr, round++ > 0) << "once there, it stays";
  }
  known.refresh(memory.rows(), true, quoka::SerialExecutor{});
  expect_sketched(known, memory.rows());
}

// A context was freed and another made where it lay: the same bytes are other keys.
TEST(KnownCells, AnotherShapeAtTheSameAddress) {
  std::vector<Eigen::half> bytes(64 * 64);
  std::mt19937 random(3);
  for (auto& x : bytes) x = static_cast<Eigen::half>(static_cast<float>(random() % 100) - 50.0f);
  const auto view = [&](Index heads) {
    return Rows(quoka::TensorView<const Eigen::half>(bytes.data(), {1, heads, 64, 64 / heads},
                                                     {0, 64 / heads, 64, 1}));
  };
  KnownCells known;
  for (const Index heads : {1, 4, 2, 1}) {
    known.refresh(view(heads), true, quoka::SerialExecutor{});
    expect_sketched(known, view(heads));
  }
  const Rows other(reinterpret_cast<const std::byte*>(bytes.data()),
                   quoka::format_of<Eigen::bfloat16>(), {1, 1, 64, 64}, {0, 128, 128});
  known.refresh(other, true, quoka::SerialExecutor{});
  expect_sketched(known, other);
}

// More heads, or longer rows, than any look before: the hash has random words for all of them.
TEST(KnownCells, MoreHeadsAndChannelsThanBefore) {
  KnownCells known;
  for (const Index heads : {1, 2, 8}) {
    Memory memory(quoka::format_of<Eigen::half>(), heads, 64, 32 * heads);
    known.refresh(memory.rows(), false, quoka::SerialExecutor{});
    memory.byte(9, heads - 1, 64 * heads - 1) ^= std::byte{1};
    known.refresh(memory.rows(), false, quoka::SerialExecutor{});
    EXPECT_EQ(changed_cell(known, 64), 9) << heads;
  }
}

// A look that failed, in its first run or its second, has changed nothing that the next one finds.
TEST(KnownCells, AfterALookThatFailedTheNextFindsTheSame) {
  for (const bool sketch : {false, true})
    for (long at = 0;; ++at) {
      Memory memory(quoka::format_of<Eigen::half>(), 2, 200, 32);
      KnownCells known;
      known.refresh(memory.rows(), sketch, quoka::SerialExecutor{});
      for (const Index cell : {20, 21, 130}) memory.write(cell);
      for (Index cell = 30; cell < 50; ++cell) memory.write(cell);
      bool failed = false;
      try {
        known.refresh(memory.rows(), sketch, quoka_test::FailsAt{at});
      } catch (const quoka_test::Failure&) {
        failed = true;
        for (Index cell = 40; cell < 50; ++cell) memory.write(cell);
        known.refresh(memory.rows(), sketch, quoka::SerialExecutor{});
      }
      // The nearest changed cell before the next cell, and no other.
      std::vector<Position> cells{3, 20, 21, 52, 130, 140, 55};
      known.find_own(cells, 6);
      EXPECT_EQ(cells[5], 21) << at;
      if (sketch) expect_sketched(known, memory.rows());
      // And once more, where the call that it was for failed later.
      known.find_again();
      memory.write(22);
      known.refresh(memory.rows(), sketch, quoka::SerialExecutor{});
      cells = {3, 20, 21, 52, 130, 140, 55};
      known.find_own(cells, 6);
      EXPECT_EQ(cells[5], 21) << at;
      memory.write(3);
      known.refresh(memory.rows(), sketch, quoka::SerialExecutor{});
      cells = {3, 20, 21, 52, 130, 140, 55};
      known.find_own(cells, 6);
      EXPECT_EQ(cells[5], 3) << at;
      if (!failed) break;
    }
}

// The chunk's cells may be beyond those that were looked at.
TEST(KnownCells, CellsBeyondTheLastLookDidNotChange) {
  Memory memory(quoka::format_of<Eigen::half>(), 1, 640, 32);
  KnownCells known;
  known.refresh(memory.rows(), false, quoka::SerialExecutor{});
  known.refresh(memory.rows().slice(0, 64), false, quoka::SerialExecutor{});
  memory.write(9);
  known.refresh(memory.rows().slice(0, 64), false, quoka::SerialExecutor{});
  EXPECT_EQ(changed_cell(known, 640), 9);
}

TEST(KnownCells, TheCellOfAChunksFirstQuery) {
  Memory memory(quoka::format_of<Eigen::half>(), 1, 64, 32);
  KnownCells known;
  known.refresh(memory.rows(), false, quoka::SerialExecutor{});
  const auto own = [&](std::vector<Position> cells, Index seen) {
    known.find_own(cells, seen);
    return cells[static_cast<std::size_t>(seen - 1)];
  };
  // If all cells are new: the nearest before the next query's cell, or the last.
  EXPECT_EQ(own({1, 3, 5, 9, 6}, 4), 5);
  EXPECT_EQ(own({1, 3, 5, 9}, 4), 9);
  for (const Index cell : {3, 9, 20}) memory.write(cell);
  known.refresh(memory.rows(), false, quoka::SerialExecutor{});
  EXPECT_EQ(own({1, 3, 5, 9, 6}, 4), 3);
  EXPECT_EQ(own({1, 3, 5}, 3), 3);
  EXPECT_EQ(own({1, 5, 9, 12, 6}, 4), 9);  // none before it changed
  EXPECT_EQ(own({1, 5, 7, 8, 6}, 4), 5);   // none changed
  EXPECT_EQ(own({7}, 1), 7);
  std::vector<Position> cells{1, 3, 5, 7, 6};
  known.find_own(cells, 4);
  EXPECT_EQ(cells, (std::vector<Position>{1, 5, 7, 3, 6}));
  EXPECT_EQ(KnownCells().sketch(), nullptr);
  EXPECT_EQ(changed_cell(KnownCells(), 8), 7);  // nothing remembered
}

}  // namespace
