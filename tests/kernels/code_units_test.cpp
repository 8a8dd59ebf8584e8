// kernels/code_units.hpp: products of 8-bit codes are the same integers by every unit: vectors, AMX's tiles
// and their emulation in plain C++. So are the scores of the sketch, and the keys that they select.

#include <quoka/kernels/code_units.hpp>
#include <quoka/select/code_mass.hpp>
#include <quoka/select/sketched_cosines.hpp>

#include "support/codes.hpp"
#include "support/emulated_tiles.hpp"
#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
using simd::EmulatedTiles;

// f(type_identity<Tiles>): the emulation, and the ISA's own.
template <bool own = simd::has_tiles, class F>
void for_each_tiles(F&& f) {
  {
    SCOPED_TRACE("emulated tiles");
    f(std::type_identity<EmulatedTiles>{});
  }
  if constexpr (own) {
    SCOPED_TRACE("tiles");
    ASSERT_TRUE(simd::tiles_allowed()) << "compiled for tiles, and the system refuses them";
    f(std::type_identity<simd::Tiles>{});
  }
}

// ---- the instructions ---------------------------------------------------------------------------

template <class Tiles>
simd::TileShapes shapes_of(int rows, int depth, int columns) {
  simd::TileShapes shapes;
  shapes.palette = 1;
  const auto set = [&](int t, int r, int bytes) {
    shapes.rows[t] = static_cast<std::uint8_t>(r);
    shapes.row_bytes[t] = static_cast<std::uint16_t>(bytes);
  };
  set(0, rows, 4 * columns), set(1, rows, 4 * depth), set(2, depth, 4 * columns);
  return shapes;
}

TEST(Tiles, CodesAreMultipliedSignedAndUnsigned) {
  for_each_tiles([]<class Tiles>(std::type_identity<Tiles>) {
    Random random(710);
    for (const auto& [rows, depth, columns] :
         {std::array{16, 16, 16}, {1, 1, 1}, {7, 10, 16}, {16, 3, 5}}) {
      std::uint8_t a[16][64], b[16][64];
      std::int32_t c[16][16], by_signed[16][16], by_unsigned[16][16];
      for (auto* tile : {&a, &b})
        for (auto& row : *tile)
          for (auto& x : row) x = static_cast<std::uint8_t>(random.below(256));
      for (auto& row : c)
        for (auto& x : row) x = static_cast<std::int32_t>(random.below(2001)) - 1000;
      const std::size_t bytes = sizeof c;
      std::memcpy(by_signed, c, bytes), std::memcpy(by_unsigned, c, bytes);
      Tiles::configure(shapes_of<Tiles>(rows, depth, columns));
      Tiles::template load<1>(a, 64), Tiles::template load<2>(b, 64);
      Tiles::template load<0>(c, 64), Tiles::template dot_signed_codes<0, 1, 2>();
      Tiles::template store<0>(by_signed, 64);
      Tiles::template load<0>(c, 64), Tiles::template dot_codes<0, 1, 2>();
      Tiles::template store<0>(by_unsigned, 64);
      Tiles::release();
      for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
          std::int32_t sum[2] = {c[m][n], c[m][n]};
          for (int k = 0; m < rows && n < columns && k < 4 * depth; ++k) {
            const std::uint8_t x = a[m][k], y = b[k / 4][4 * n + k % 4];
            sum[0] += static_cast<std::int8_t>(x) * y;
            sum[1] += x * static_cast<std::int8_t>(y);
          }
          ASSERT_EQ(by_signed[m][n], sum[0]) << m << ", " << n;
          ASSERT_EQ(by_unsigned[m][n], sum[1]) << m << ", " << n;
        }
    }
  });
}

// ---- the units ----------------------------------------------------------------------------------

// Two blocks of keys and some queries, as codes.
struct Codes {
  Index rows, stride, steps;
  quoka::Buffer<std::uint8_t> keys;  // [2][block]
  std::vector<std::int32_t> queries, offsets;

  Codes(Random& random, Index rows_, Index stride_, Index steps_)
      : rows(rows_), stride(stride_), steps(steps_) {
    const Index block = simd::code_block_bytes(4 * steps);
    std::uint8_t* const x = keys.reserve(2 * block);
    for (Index i = 0; i < 2 * block; ++i)
      x[i] = simd::stored_key_code(static_cast<int>(random.below(255)) - 127);
    queries.resize(uz(steps * stride)), offsets.resize(uz(rows + rows % 2));
    auto* const bytes = reinterpret_cast<std::int8_t*>(queries.data());
    for (Index m = 0; m < stride;
         ++m) {  // products beyond the rows are garbage, except those of the row that fills a pair
      std::vector<int> query(uz(4 * steps));
      for (int& code : query) code = static_cast<int>(random.below(255)) - 127;
      if (m == rows && rows % 2 == 1) std::fill(query.begin(), query.end(), 0);
      keep_to_run_sums(query);
      for (Index c = 0; c < 4 * steps; ++c)
        bytes[simd::query_code_at(stride, m, c)] = static_cast<std::int8_t>(query[uz(c)]);
      if (m < rows)
        offsets[uz(m)] = simd::code_offset(std::accumulate(query.begin(), query.end(), 0));
    }
  }
  detail::QueryCodes view() const { return {queries.data(), offsets.data(), rows, stride, steps}; }
  std::vector<std::byte> packed() const {
    std::vector<std::byte> result(uz(detail::packed_bytes<EmulatedTiles>(rows, steps)));
    detail::pack_codes<EmulatedTiles>(view(), result.data());
    return result;
  }
  std::int32_t dot(Index m, Index key) const {
    const auto* const bytes = reinterpret_cast<const std::int8_t*>(queries.data());
    const std::uint8_t* const block = keys.data() + key / 16 * simd::code_block_bytes(4 * steps);
    std::int32_t sum = 0;
    for (Index c = 0; c < 4 * steps; ++c)
      sum += (block[simd::key_code_at(key % 16, c)] - simd::code_bias) *
             bytes[simd::query_code_at(stride, m, c)];
    return sum;
  }
};

template <class Unit>
void expect_exact_dots(simd::CodeScores over, const Codes& x, Unit& unit, detail::CodePair keys) {
  const std::int32_t start = over == simd::CodeScores::sum ? 7 : -100;
  alignas(64) std::int32_t best[32];
  std::fill_n(best, 32, start);
  unit.dots(over, keys, best, {keys[0], keys[1]});
  for (Index i = 0; i < 32; ++i) {
    std::int32_t expected = start;
    for (Index m = 0; m < x.rows; ++m)
      expected =
          over == simd::CodeScores::sum ? expected + x.dot(m, i) : std::max(expected, x.dot(m, i));
    ASSERT_EQ(best[i], expected) << "key " << i;
  }
}

template <class Unit>
void expect_exact_products(const Codes& x, Unit& unit, detail::CodePair keys) {
  Index done = 0;
  alignas(64) float room[detail::VectorCodes::most_height * simd::code_pair];
  const auto use = [&](Index m, Index height, const auto* products) {
    ASSERT_EQ(m, done);
    ASSERT_EQ(height % 2, 0);
    ASSERT_LE(height, Unit::most_height);
    for (Index i = 0; i < height * 32; ++i)
      ASSERT_EQ(static_cast<float>(products[i]), static_cast<float>(x.dot(m + i / 32, i % 32)))
          << "query " << m + i / 32 << ", key " << i % 32;
    done += height;
  };
  unit.products(keys, room, {keys[0], keys[1]}, use);
  ASSERT_EQ(done, quoka::round_up(x.rows, Index{2}));
}

template <class Unit>
void expect_exact(const Codes& x, Unit& unit) {
  const std::uint8_t* const keys[2] = {x.keys.data(),
                                       x.keys.data() + simd::code_block_bytes(4 * x.steps)};
  expect_exact_dots(simd::CodeScores::max, x, unit, keys);
  expect_exact_dots(simd::CodeScores::sum, x, unit, keys);
  expect_exact_products(x, unit, keys);
}

// Any number of queries, in a wider matrix or alone, and of channels: 37, 160 and 576 of them, too.
TEST(CodeUnits, AreExactForAnyNumberOfQueriesAndChannels) {
  Random random(711);
  for (const Index steps : {1, 2, 7, 10, 16, 18, 20, 32, 40, 144})
    for (const Index rows : {4, 5, 6, 15, 16, 17, 18, 20, 26, 32, 33, 34, 48, 50, 64})
      for (const Index more : {rows % 2, Index{3}}) {
        SCOPED_TRACE(std::to_string(rows) + " queries, " + std::to_string(steps) + " steps");
        const Codes x(random, rows, rows + more, steps);
        detail::VectorCodes vectors(x.view());
        ASSERT_NO_FATAL_FAILURE(expect_exact(x, vectors));
        if (!detail::TiledQueries::fits(steps)) FAIL() << "these fill tiles";
        for_each_tiles([&]<class Tiles>(std::type_identity<Tiles>) {
          const std::vector<std::byte> packed = x.packed();
          detail::TileCodes<Tiles> tiles(x.view(), packed.data());
          ASSERT_NO_FATAL_FAILURE(expect_exact(x, tiles));
        });
      }
}

TEST(CodeUnits, TilesServeSomeQueriesAndChannelsThatFillThem) {
  using Emulated = detail::TiledQueries;
  for (const Index steps : {1, 10, 16, 18, 20, 32, 40, 144}) EXPECT_TRUE(Emulated::fits(steps));
  for (const Index steps : {0, 17, 25, 37}) EXPECT_FALSE(Emulated::fits(steps)) << steps;
  EXPECT_TRUE(detail::tiles_serve<EmulatedTiles>(4, 32));
  EXPECT_FALSE(detail::tiles_serve<EmulatedTiles>(3, 32));
  EXPECT_FALSE(detail::tiles_serve<EmulatedTiles>(16, 17));
  EXPECT_EQ(detail::tiles_serve<simd::Tiles>(16, 32), simd::has_tiles);
  EXPECT_EQ(detail::packed_bytes<simd::Tiles>(16, 32), simd::has_tiles ? 16 * (128 + 64) : 0);
}

// Tiles that lose something.
struct ForgetfulTiles : EmulatedTiles {
  template <int t>
  static void load(const void* p, Index step) {
    EmulatedTiles::load<t>(p, step);
    if (t == 7) EmulatedTiles::zero<t>();
  }
};
TEST(CodeUnits, TilesAreUsedWhereTheyAgreeWithVectors) {
  EXPECT_TRUE(detail::code_tiles_agree<EmulatedTiles>());
  EXPECT_FALSE(detail::code_tiles_agree<ForgetfulTiles>());
  EXPECT_FALSE(detail::code_tiles_work<ForgetfulTiles>());
}

// Another library's tiles are restored, also if the guest throws.
TEST(CodeUnits, GiveBackTheTilesThatWereConfigured) {
  Random random(712);
  const Codes x(random, 16, 16, 32);
  const std::vector<std::byte> packed = x.packed();
  const auto same = [](const simd::TileShapes& a) {
    simd::TileShapes now;
    EmulatedTiles::configuration(now);
    return std::memcmp(&now, &a, sizeof now) == 0;
  };
  for (const simd::TileShapes& before : {simd::TileShapes{}, shapes_of<EmulatedTiles>(3, 4, 5)}) {
    EmulatedTiles::configure(before);
    EXPECT_THROW(
        {
          const detail::CodeScope scope(detail::code_kernels_of<EmulatedTiles>, x.view(),
                                        packed.data());
          EXPECT_FALSE(same(before));
          throw std::runtime_error("between begin() and end()");
        },
        std::runtime_error);
    EXPECT_TRUE(same(before));
  }
  EmulatedTiles::release();
}

// Faults that the hardware does not report, or only by a signal.
TEST(EmulatedTiles, RefuseMisuse) {
  using Tiles = EmulatedTiles;
  std::uint8_t memory[16 * 64] = {};
  const auto products_throw = [] {
    EXPECT_THROW((Tiles::dot_signed_codes<0, 1, 2>()), std::logic_error);
    EXPECT_THROW((Tiles::dot_codes<0, 1, 2>()), std::logic_error);
    EXPECT_THROW((Tiles::dot_bfloat16<0, 1, 2>()), std::logic_error);
  };
  Tiles::release();
  EXPECT_THROW(Tiles::zero<0>(), std::logic_error);
  EXPECT_THROW((Tiles::load<1>(memory, 64)), std::logic_error);
  EXPECT_THROW((Tiles::store<1>(memory, 64)), std::logic_error);
  products_throw();
  const std::array<int, 3> unfit[] = {{0, 4, 28}, {1, 5, 20}, {2, 5, 28}, {2, 6, 24}};
  for (const auto& [t, rows, row_bytes] : unfit) {
    SCOPED_TRACE(std::to_string(t) + ": " + std::to_string(rows) + " rows of " +
                 std::to_string(row_bytes));
    simd::TileShapes shapes = shapes_of<Tiles>(5, 6, 7);
    shapes.rows[t] = static_cast<std::uint8_t>(rows);
    shapes.row_bytes[t] = static_cast<std::uint16_t>(row_bytes);
    Tiles::configure(shapes);
    Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>();
    products_throw();
  }
  const auto refused = [](const std::function<void(simd::TileShapes&)>& change) {
    simd::TileShapes shapes = shapes_of<Tiles>(5, 6, 7);
    change(shapes);
    EXPECT_THROW(Tiles::configure(shapes), std::logic_error);
  };
  refused([](auto& shapes) { shapes.rows[3] = 17; });
  refused([](auto& shapes) { shapes.rows[3] = 1, shapes.row_bytes[3] = 65; });
  refused([](auto& shapes) { shapes.palette = 2; });
  // A tile that was configured and not written is not zero: as a float it is NaN.
  Tiles::configure(shapes_of<Tiles>(5, 6, 7));
  Tiles::store<0>(memory, 64);
  EXPECT_EQ(std::count(memory, memory + 28, 0xff), 28);
  Tiles::release();
}

// ---- the sketch by tiles ------------------------------------------------------------------------

struct Selected {
  Selection keep;
  std::vector<float> scores;
};

template <class Tiles>
Selected top_k_by(const Tensor4<float>& q_bar, const Rows& k, const KeySketch& sketch,
                  bool is_cache, Index wanted, ExecutorRef executor = SerialExecutor{}) {
  Selected result;
  const quoka::SketchedKeys keys(k, sketch, is_cache ? &sketch : nullptr);
  quoka::SelectionWriter writer(result.keep, k.batch(), k.heads(), k.len(), wanted);
  const quoka::TensorView<const float, 3> none;
  const detail::CosineCall call{.keys = keys,
                                .q_bar = q_bar.data(),
                                .rows = q_bar.dimension(2),
                                .inverse_norms = none,
                                .capacity = 0,
                                .first = 0,
                                .last = 0,
                                .wanted = wanted,
                                .writer = writer};
  const detail::HeadPlan plan(call.heads(), executor);
  quoka::QueryScoreState state;
  const detail::SketchedCosines cosines(call, plan, state, executor,
                                        detail::code_kernels_of<Tiles>);
  plan.run([&](const detail::HeadLoops& on) { cosines(on); });
  writer.commit();
  const float* const scores = cosines.memory(0).scores;  // the last head's, in the first slot
  result.scores.assign(scores, scores + k.len());
  return result;
}

// By vectors and by emulated tiles: the same bits. configured: how often tiles were.
void expect_same(const KeySketch& sketch, bool is_cache, const Tensor4<float>& q_bar, const Rows& k,
                 Index wanted) {
  const Selected vectors = top_k_by<simd::Tiles>(q_bar, k, sketch, is_cache, wanted);
  EmulatedTiles::counts() = {};
  const Selected tiles = top_k_by<EmulatedTiles>(q_bar, k, sketch, is_cache, wanted);
  EXPECT_GT(EmulatedTiles::counts().dot, 0);
  // Once for each task, and back: 4,096 keys of a head.
  EXPECT_EQ(EmulatedTiles::counts().configure,
            2 * k.batch() * k.heads() * quoka::ceil_div(k.len(), quoka::tuning::sketch_task_keys));
  EXPECT_EQ(tiles.keep, vectors.keep);
  EXPECT_EQ(tiles.scores, vectors.scores);
}

TEST(CodeUnits, CosinesByTilesSelectTheSame) {
  Random random(713);
  for (const Index dim : {3, 37, 64, 80, 128})
    for (const Index kv_len : {17, 32, 511})
      for (const Index rows : {4, 16, 19, 33}) {
        const auto q_bar = random.tensor<float>(2, 2, rows, dim),
                   k = random.tensor<float>(2, 2, kv_len, dim);
        KeySketch sketch;
        sketch.append(Rows(k), kv_len, SerialExecutor{});
        expect_same(sketch, false, q_bar, Rows(k), kv_len / 3);
      }
}

TEST(CodeUnits, KeysOfAPoolAreScoredByTiles) {
  Random random(714);
  const auto q_bar = random.tensor<float>(1, 2, 9, 64), k = random.tensor<float>(1, 2, 700, 64);
  KeySketch pool;
  pool.update(Rows(k), 0, 700, SerialExecutor{});
  std::vector<Position> cells;
  for (Index i = 699; i >= 0; i -= 1 + random.below(2)) cells.push_back(static_cast<Position>(i));
  expect_same(pool, true, q_bar, Rows(k).gathered(cells), 50);
}

// Each thread has tiles of its own.
TEST(CodeUnits, TilesOfManyThreadsSelectTheSame) {
  Random random(715);
  const auto q_bar = random.tensor<float>(1, 4, 16, 64), k = random.tensor<float>(1, 4, 9000, 64);
  KeySketch sketch;
  sketch.append(Rows(k), 9000, SerialExecutor{});
  quoka::ThreadPool pool(3);
  EXPECT_EQ(top_k_by<EmulatedTiles>(q_bar, k, sketch, false, 300, pool).keep,
            top_k_by<EmulatedTiles>(q_bar, k, sketch, false, 300).keep);
}

// ---- how many instructions ----------------------------------------------------------------------

// Instructions of one selection's products with 128 channels and 8 KV heads, over 32,768 keys with 16 queries
// (QuoKA's), with 64 and with 20, and of 64 queries over 4,096 keys. Cycles are counted, not measured: one for each
// query of a product, 16 of a whole one.
TEST(CodeUnits, CountsOfOneSelection) {
  constexpr Index heads = 8, steps = 32;
  Random random(716);
  for (const auto& [rows, keys] :
       {std::array{Index{16}, Index{32768}}, {64, 32768}, {20, 32768}, {64, 4096}}) {
    const Codes x(random, rows, rows, steps);
    const std::uint8_t* const blocks[2] = {x.keys.data(),
                                           x.keys.data() + simd::code_block_bytes(4 * steps)};
    const std::vector<std::byte> packed = x.packed();
    alignas(64) std::int32_t best[32] = {};
    EmulatedTiles::counts() = {};
    constexpr Index part = 64;  // of the pairs of blocks; the others are the same
    const Index pairs = heads * keys / 32 / part;
    {
      detail::CodeScope scope(detail::code_kernels_of<EmulatedTiles>, x.view(), packed.data());
      detail::with_code_unit<EmulatedTiles>(scope.session, [&](auto& unit) {
        for (Index i = 0; i < pairs; ++i) unit.dots(simd::CodeScores::max, blocks, best, {});
      });
    }
    const EmulatedTiles::Counts& n = EmulatedTiles::counts();
    const Index tiles = quoka::ceil_div(rows, 16), height = quoka::ceil_div(rows, tiles);
    EXPECT_EQ(n.dot, pairs * 2 * tiles * (steps / 16));
    EXPECT_EQ(n.store, pairs * 2 * tiles);
    EXPECT_EQ(n.configure, 2);
    const auto print = [](Index number) { return std::to_string(number * part); };
    const std::string counts =
        print(n.dot) + " tile products, " + print(n.load) + " loads, " + print(n.store) +
        " stores; " + std::to_string(n.dot * part * height / 1000) + " thousand cycles of products";
    RecordProperty(std::to_string(rows) + "_queries_" + std::to_string(keys) + "_keys", counts);
    std::printf("%s queries, %s keys: %s\n", std::to_string(rows).c_str(),
                std::to_string(keys).c_str(), counts.c_str());
  }
}

}  // namespace
