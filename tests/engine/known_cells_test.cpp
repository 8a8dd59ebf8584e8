// KnownCells: the plug-in's memory of a cache that an engine changes without notice.

#include <quoka/quoka.hpp>

#include "ggml/known_cells.hpp"
#include "support/world.hpp"

#include <numeric>
#include <vector>

namespace {

using namespace quoka;
using quoka_ggml::KnownCells;
using quoka_test::Random, quoka_test::StoredRows, quoka_test::uz;

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

// Did this cell change since the last look? Cell 0 did not.
bool changed(const KnownCells& known, Position cell) {
  std::vector<Position> cells{cell, 0};
  quoka::detail::find_own(known.changed(), cells, 2);
  return cells.back() == cell;
}

// Caches one after the other, whose cells are written, copied, exchanged and changed in one bit without notice. Looks at
// all cells or at the first ones, with a sketch or without, may fail, or be asked for again: each finds the cells whose
// bytes are not those of the last look that succeeded, and no other, and leaves the sketch of the keys as they lie.
TEST(KnownCells, ALookFindsTheCellsThatChanged) {
  quoka::ThreadPool threads(3);
  quoka_test::for_each_draw(30, [&](Random& random) {
    const auto below = [&](Index n) { return random.below(n); };
    KnownCells known;
    bool sketched = false;
    for (int caches = 0; caches < 2; ++caches) {
      const Index heads = 1 + below(4), dim = random.one_of(3, 16, 32, 37),
                  cells = 100 + below(200);
      const Format& format =
          below(2) == 0 ? quoka::format_of<Eigen::half>() : quoka::float_format();
      StoredRows keys(random.tensor<float>(1, heads, cells, dim), format,
                      StoredRows::Layout::tokens, random);
      const Index row_bytes = format.row_bytes({dim});
      const auto bytes_of = [&](Index cell) {
        std::vector<std::byte> bytes;
        for (Index head = 0; head < heads; ++head)
          bytes.insert(bytes.end(), keys.row(0, head, cell), keys.row(0, head, cell) + row_bytes);
        return bytes;
      };
      const auto write_some = [&] {
        for (Index count = below(12); count > 0; --count) {
          const Index cell = 1 + below(cells - 1), other = 1 + below(cells - 1),
                      i = below(row_bytes);
          std::byte* const row = keys.row(0, below(heads), cell);
          switch (below(4)) {
            case 0:
              row[i] ^= std::byte{static_cast<unsigned char>(1 << i % 4)};  // a number stays one
              break;
            case 1:
              for (Index head = 0; head < heads; ++head)
                std::copy_n(keys.row(0, head, other), row_bytes, keys.row(0, head, cell));
              break;
            case 2:  // two bytes with the same place in their numbers
              std::swap(row[i], keys.row(0, below(heads), cell)[i % 4 + below(row_bytes / 4) * 4]);
              break;
            default:
              for (Index head = 0; head < heads; ++head) keys.change(0, head, cell);
          }
        }
      };
      std::vector<std::vector<std::byte>> seen;  // at the last look
      std::vector<bool> again;                   // what it reported
      for (int round = 0; round < 8; ++round) {
        SCOPED_TRACE(round);
        write_some();
        const Index len = below(4) == 0 ? 1 + below(cells) : cells;
        const bool sketch = below(3) == 0, once_more = !again.empty() && below(4) == 0;
        if (once_more) known.find_again();
        if (below(3) == 0) try {
            known.refresh(keys.rows(len), sketch, quoka_test::FailsAt{below(6)});
            seen.clear();  // it did not fail: what it found is not looked at
          } catch (const quoka_test::Failure&) {
            write_some();
          }
        const bool anew = seen.empty() || sketch > sketched;
        known.refresh(keys.rows(len), sketch, threads);
        sketched = sketched || sketch;
        std::vector<bool> found(uz(len), true);
        for (Index cell = 0; cell < len && !anew; ++cell) {
          const auto at = uz(cell);
          found[at] = at >= seen.size() || bytes_of(cell) != seen[at] ||
                      (once_more && at < again.size() && again[at]);
          if (cell > 0) {
            ASSERT_EQ(changed(known, static_cast<Position>(cell)), found[at]) << "cell " << cell;
          }
        }
        again = anew ? std::vector<bool>() : found;
        seen.clear();
        for (Index cell = 0; cell < len; ++cell) seen.push_back(bytes_of(cell));
        ASSERT_EQ(known.sketch() != nullptr, sketched) << "once there, it stays";
        if (sketched) expect_sketched(known, keys.rows(len));
      }
    }
  });
}

// A context was freed and another made where it lay: the same bytes are other keys.
TEST(KnownCells, AnotherShapeAtTheSameAddress) {
  std::vector<Eigen::half> bytes(64 * 64);
  Random random(3);
  for (auto& x : bytes) x = static_cast<Eigen::half>(static_cast<float>(random.below(100) - 50));
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

TEST(KnownCells, TheCellOfAChunksFirstQuery) {
  Random random(1);
  StoredRows keys(random.tensor<float>(1, 1, 64, 32), quoka::format_of<Eigen::half>());
  KnownCells known;
  known.refresh(keys.rows(), false, quoka::SerialExecutor{});
  const auto own = [&](std::vector<Position> cells, Index seen) {
    quoka::detail::find_own(known.changed(), cells, seen);
    return cells[uz(seen - 1)];
  };
  // If all cells are new: the nearest before the next query's cell, or the last.
  EXPECT_EQ(own({1, 3, 5, 9, 6}, 4), 5);
  EXPECT_EQ(own({1, 3, 5, 9}, 4), 9);
  for (const Index cell : {3, 9, 20}) keys.change(0, 0, cell);
  known.refresh(keys.rows(), false, quoka::SerialExecutor{});
  EXPECT_EQ(own({1, 3, 5, 9, 6}, 4), 3);
  EXPECT_EQ(own({1, 3, 5}, 3), 3);
  EXPECT_EQ(own({1, 5, 9, 12, 6}, 4), 9);  // none before it changed
  EXPECT_EQ(own({1, 5, 7, 8, 6}, 4), 5);   // none changed
  EXPECT_EQ(own({7}, 1), 7);
  std::vector<Position> cells{1, 3, 5, 7, 6};
  quoka::detail::find_own(known.changed(), cells, 4);
  EXPECT_EQ(cells, (std::vector<Position>{1, 5, 7, 3, 6}));
  EXPECT_EQ(KnownCells().sketch(), nullptr);
  std::vector<Position> eight(8);  // nothing remembered
  std::iota(eight.begin(), eight.end(), 0);
  quoka::detail::find_own({}, eight, 8);
  EXPECT_EQ(eight.back(), 7);
}

}  // namespace
