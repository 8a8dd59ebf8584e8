// Products of 8-bit codes are the same integers by every unit: vectors, AMX's tiles, their emulation in plain C++, and one
// token's queries of 15 bits. Codes lie where the functions that place them say.

#include <quoka/base/buffer.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/token_codes.hpp>

#include "support/emulated_tiles.hpp"
#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace {

using namespace quoka_test;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
using simd::EmulatedTiles;

TEST(RoundToInt16, IsToNearestEven) {
  for (float x : {0.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 0.49f, -32768.0f, 32767.4f, 1234.6f})
    EXPECT_EQ(simd::round_to_int16(x), static_cast<std::int16_t>(std::nearbyint(x)));
  EXPECT_EQ(simd::round_to_int16(not_a_number), 0);
}

// ---- sums that are added in 16 bits -------------------------------------------------------------

// Which channels are added in 16 bits is what the instructions do: pairs, of code_run steps of four.
TEST(CodeDots, RunSumsAreOfTheChannelsThatAreAddedTogether) {
  if (simd::code_run == 0) GTEST_SKIP() << "products are added in 32 bits";
  std::vector<int> query(19);
  const auto sum_of = [&](std::vector<std::pair<Index, int>> codes) {
    std::fill(query.begin(), query.end(), 0);
    for (const auto& [c, code] : codes) query[uz(c)] = code;
    return simd::run_sum(query.data(), std::ssize(query));
  };
  EXPECT_EQ(sum_of({}), 0);
  EXPECT_EQ(sum_of({{0, 1}, {1, 2}, {4, 4}, {5, 8}}), 15);
  EXPECT_EQ(sum_of({{2, 1}, {3, 2}, {6, 4}, {7, 8}}), 15);
  EXPECT_EQ(sum_of({{0, 1}, {2, 2}, {8, 4}}), 4);
  EXPECT_EQ(sum_of({{0, -1}, {1, -2}, {4, 5}, {5, -4}}), 7);
  EXPECT_EQ(sum_of({{16, 3}, {17, -4}, {18, 5}}), 5);
}

TEST(CodeDots, AQueryAtItsRunScaleKeepsToTheRunSum) {
  Random random(17);
  for (const Index dim : {1, 3, 8, 37, 128})
    for (int turn = 0; turn < 100; ++turn) {
      std::vector<float> query(uz(dim));
      for (float& x : query) x = turn % 2 == 0 ? static_cast<float>(random.normal()) : 1.0f;
      const float scale = simd::run_scale(query.data(), dim);
      if (simd::code_run == 0) {
        ASSERT_EQ(scale, 0.0f);
        continue;
      }
      std::vector<int> codes;
      for (const float x : query) codes.push_back(static_cast<int>(std::nearbyint(x / scale)));
      const int sum = simd::run_sum(codes.data(), dim);
      ASSERT_LE(sum, simd::most_run_sum);
      // The sum is as large as it can be: there is room for 1 a code, of which rounding takes 1/2 either way.
      ASSERT_GE(sum, simd::most_run_sum - 3 * simd::code_run);
    }
}

TEST(CodeDots, BlocksAndStepsAreRoundedUp) {
  EXPECT_EQ(simd::code_blocks(0), 0);
  EXPECT_EQ(simd::code_blocks(simd::code_block + 1), 2);
  EXPECT_EQ(simd::code_steps(simd::code_channels + 1), 2);
}

// ---- tiles --------------------------------------------------------------------------------------

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

// ---- the units ----------------------------------------------------------------------------------

// Two blocks of keys and some queries, as codes.
struct Codes {
  using Code = std::function<int(Index row, Index c)>;

  Index rows, stride, steps;
  quoka::Buffer<std::uint8_t> keys;  // [2][block]
  std::vector<std::int32_t> queries, offsets;

  Codes(Index dim, Index rows_, Index stride_, const Code& key, const Code& query)
      : rows(rows_), stride(stride_), steps(simd::code_steps(dim)) {
    const Index block = simd::code_block_bytes(dim);
    std::uint8_t* const x = keys.reserve(2 * block);
    std::fill_n(x, 2 * block, simd::stored_key_code(0));
    for (Index i = 0; i < 2 * simd::code_block; ++i)
      for (Index c = 0; c < dim; ++c)
        x[i / 16 * block + simd::key_code_at(i % 16, c)] = simd::stored_key_code(key(i, c));
    queries.resize(uz(steps * stride)), offsets.resize(uz(rows + rows % 2));
    auto* const bytes = reinterpret_cast<std::int8_t*>(queries.data());
    // Products beyond the rows are garbage, except those of the row that fills a pair.
    for (Index m = 0; m < stride; ++m) {
      std::vector<int> codes(uz(dim), 0);
      for (Index c = 0; c < dim && (m != rows || rows % 2 == 0); ++c) codes[uz(c)] = query(m, c);
      // Smaller by one factor, where products in 16 bits would saturate.
      if (const int sum = simd::run_sum(codes.data(), dim); sum > simd::most_run_sum)
        for (int& code : codes) code = code * simd::most_run_sum / sum;
      for (Index c = 0; c < dim; ++c)
        bytes[simd::query_code_at(stride, m, c)] = static_cast<std::int8_t>(codes[uz(c)]);
      if (m < rows)
        offsets[uz(m)] = simd::code_offset(std::accumulate(codes.begin(), codes.end(), 0));
    }
  }
  static Codes drawn(Random& random, Index dim, Index rows, Index stride) {
    const auto any = [&](Index, Index) { return static_cast<int>(random.below(255)) - 127; };
    return {dim, rows, stride, any, any};
  }
  detail::QueryCodes view() const { return {queries.data(), offsets.data(), rows, stride, steps}; }
  const std::uint8_t* block(Index i) const {
    return keys.data() + i * simd::code_block_bytes(4 * steps);
  }
  std::vector<std::byte> packed() const {
    std::vector<std::byte> result(uz(detail::packed_code_bytes(rows, steps)));
    detail::pack_codes<EmulatedTiles>(view(), result.data());
    return result;
  }
  std::int32_t dot(Index m, Index key) const {
    const auto* const bytes = reinterpret_cast<const std::int8_t*>(queries.data());
    std::int32_t sum = 0;
    for (Index c = 0; c < 4 * steps; ++c)
      sum += (block(key / 16)[simd::key_code_at(key % 16, c)] - simd::code_bias) *
             bytes[simd::query_code_at(stride, m, c)];
    return sum;
  }
};

// Maxima over the queries, and single products.
template <class Unit>
void expect_exact(const Codes& x, Unit& unit, bool products = true) {
  const simd::KeyPair keys{32, {x.block(0), x.block(1)}, {x.block(0), x.block(1)}};
  alignas(64) std::int32_t best[32];
  std::fill_n(best, 32, -100);
  unit.dots(keys, best);
  for (Index i = 0; i < 32; ++i) {
    std::int32_t expected = -100;
    for (Index m = 0; m < x.rows; ++m) expected = std::max(expected, x.dot(m, i));
    ASSERT_EQ(best[i], expected) << "key " << i;
  }
  if (!products) return;
  Index m = 0;
  while (m < x.rows) {
    const auto [height, of] = unit.products(m, keys);
    ASSERT_GT(height, 0);
    ASSERT_EQ(height % 2, 0);
    ASSERT_LE(height, Unit::most_height);
    for (Index i = 0; i < height * 32; ++i)
      ASSERT_EQ(static_cast<float>(of[i]), static_cast<float>(x.dot(m + i / 32, i % 32)))
          << "query " << m + i / 32 << ", key " << i % 32;
    m += height;
  }
  ASSERT_EQ(m, quoka::round_up(x.rows, Index{2}));
}
void expect_exact(const Codes& x) {
  const bool tiled = x.rows >= 4;
  detail::VectorCodes vectors(x.view());
  ASSERT_NO_FATAL_FAILURE(expect_exact(x, vectors, tiled));
  if (!tiled || !detail::fits_tiles(x.steps)) return;
  for_each_tiles([&]<class Tiles>(std::type_identity<Tiles>) {
    const std::vector<std::byte> packed = x.packed();
    detail::TileCodes<Tiles> tiles(x.view(), packed.data());
    ASSERT_NO_FATAL_FAILURE(expect_exact(x, tiles));
  });
}

// Any number of queries, in a wider matrix or alone, and of channels: 37, 160 and 576 of them, too.
TEST(CodeUnits, AreExactForAnyNumberOfQueriesAndChannels) {
  Random random(711);
  for (const Index dim : {1, 3, 4, 8, 28, 37, 64, 72, 80, 128, 160, 576})
    for (const Index rows :
         {1, 2, 3, 4, 5, 6, 7, 8, 13, 15, 16, 17, 18, 20, 26, 27, 32, 33, 34, 45, 48, 50, 64, 100})
      for (const Index more : {rows % 2, Index{3}}) {
        SCOPED_TRACE(std::to_string(rows) + " queries, " + std::to_string(dim) + " channels");
        ASSERT_NO_FATAL_FAILURE(expect_exact(Codes::drawn(random, dim, rows, rows + more)));
      }
}

// The patterns of codes that saturate first: the largest ones, of one sign or of two, in all channels,
// or in the few that are added in 16 bits.
TEST(CodeUnits, NothingSaturates) {
  const auto all = [](int code) { return [code](Index, Index) { return code; }; };
  const Codes::Code patterns[] = {
      all(127),
      all(-127),
      [](Index, Index c) { return c % 2 == 0 ? 127 : -127; },
      [](Index, Index c) { return c % 4 < 2 ? 127 : -127; },
      [](Index, Index c) { return c % 8 < 4 ? 127 : -127; },
      [](Index, Index c) { return c % 4 < 2 ? 127 : 0; },
      [](Index, Index c) { return c % 4 >= 2 ? -127 : 0; },
      [](Index, Index c) { return c % 8 < 2 ? 127 : 0; },
      [](Index, Index c) { return c % 8 == 5   ? 127
                                  : c % 8 == 4 ? 1
                                               : 0; },
      [](Index m, Index c) { return c == m % 8 ? 127 : 0; },
  };
  for (const Index dim : {1, 2, 3, 5, 8, 9, 12, 36, 37, 128})
    for (const auto& key : patterns)
      for (const auto& query : patterns)
        ASSERT_NO_FATAL_FAILURE(expect_exact(Codes(dim, 9, 10, key, query))) << dim;
}

TEST(CodeUnits, TilesServeSomeQueriesAndChannelsThatFillThem) {
  for (const Index steps : {1, 10, 16, 18, 20, 32, 40, 144})
    EXPECT_TRUE(detail::fits_tiles(steps)) << steps;
  for (const Index steps : {0, 17, 25, 37}) EXPECT_FALSE(detail::fits_tiles(steps)) << steps;
  EXPECT_TRUE(detail::tiles_serve<EmulatedTiles>(4, 32));
  EXPECT_FALSE(detail::tiles_serve<EmulatedTiles>(3, 32));
  EXPECT_FALSE(detail::tiles_serve<EmulatedTiles>(16, 17));
  EXPECT_EQ(detail::tiles_serve<simd::Tiles>(16, 32), simd::has_tiles);
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
  const Codes x = Codes::drawn(random, 128, 16, 16);
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

// ---- one token's queries ------------------------------------------------------------------------

using detail::TokenCodeGroup;

constexpr Index rows = detail::token_code_rows;

struct Coded {
  Index dim;
  quoka::Buffer<std::byte> memory;
  bool fits;

  Coded(const std::vector<float>& queries, Index d) : dim(d) {
    memory.reserve(detail::token_code_bytes(dim));
    fits = detail::code_token_queries(queries.data(), dim, memory.data());
  }
  const TokenCodeGroup& group(Index g) const {
    return reinterpret_cast<const TokenCodeGroup*>(memory.data())[g];
  }
  float unit(Index i) const {
    const Index groups = quoka::ceil_div(dim, simd::code_group);
    return reinterpret_cast<const float*>(memory.data() +
                                          groups * static_cast<Index>(sizeof(TokenCodeGroup)))[i];
  }
  // Channel c of query r, as it is coded.
  double channel(Index r, Index c) const {
    const Index at = r * 16 + c % 16, half = c % 32 / 16;
    return static_cast<double>(unit(r)) *
           (128 * group(c / 32).high[half][at] + group(c / 32).low[half][at]);
  }
};

std::vector<float> normal_queries(Index dim, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> queries(uz(rows * dim));
  for (float& x : queries) x = static_cast<float>(random.normal());
  return queries;
}

TEST(TokenCodes, AreTheQueriesToFifteenBits) {
  for (const Index dim : {16, 32, 80, 128, 144}) {
    auto queries = normal_queries(dim, 1);
    queries[3] = 1e4f, queries[uz(dim)] = -3e30f;  // alone in their rows
    for (Index c = 0; c < dim; ++c) queries[uz(2 * dim + c)] = 0.0f;
    const Coded coded(queries, dim);
    ASSERT_TRUE(coded.fits);
    for (Index r = 0; r < rows; ++r) {
      double largest = 0.0;
      for (Index c = 0; c < dim; ++c)
        largest = std::max(largest, std::abs(double{queries[uz(r * dim + c)]}));
      for (Index c = 0; c < dim; ++c)
        ASSERT_NEAR(coded.channel(r, c), queries[uz(r * dim + c)], largest / 32638 * 1.01)
            << "query " << r << ", channel " << c << " of " << dim;
      for (Index i = r; i < 16; i += rows) EXPECT_EQ(coded.unit(i), coded.unit(r));
      for (Index c = dim; c < quoka::round_up(dim, Index{32}); ++c)
        EXPECT_EQ(coded.channel(r, c), 0.0);
    }
  }
}

TEST(TokenCodes, OfWhatIntegersCannotHoldAreRefused) {
  for (const float x : {infinity, -infinity}) {
    auto queries = normal_queries(64, 2);
    queries.back() = x;
    EXPECT_FALSE(Coded(queries, 64).fits);
  }
  std::vector<float> tiny(rows * 64, 1e-38f);
  EXPECT_FALSE(Coded(tiny, 64).fits);
  EXPECT_TRUE(Coded(std::vector<float>(rows * 64), 64).fits) << "zeros";
}

// Rows of q8_0 that lie anywhere, with these codes.
struct Keys {
  static constexpr Index block_bytes = 34;
  Index count, bytes;
  std::vector<std::byte> memory;

  Keys(Index n, Index dim, const std::function<int()>& code)
      : count(n), bytes(quoka::ceil_div(dim, Index{32}) * block_bytes) {
    for (Index i = 0; i < n * bytes; ++i) memory.push_back(static_cast<std::byte>(code()));
  }
  void set_scale(Index i, Index g, std::uint16_t half) {
    std::memcpy(memory.data() + i * bytes + g * block_bytes, &half, 2);
  }
  double code(Index i, Index c) const {
    return static_cast<std::int8_t>(memory[uz(i * bytes + c / 32 * block_bytes + 2 + c % 32)]);
  }
  // count rounded up to fours, [key][4]
  std::vector<float> logits(const Coded& coded, Index dim) const {
    std::vector<float> x(uz(quoka::round_up(count, Index{4}) * 4), 7.0f);
    const quoka::RowRun run{memory.data(), bytes, nullptr, nullptr};
    detail::token_code_logits<quoka::formats::Q8_0Row::Group>(
        run, count, {dim}, coded.memory.data(), x.data(), nullptr);
    return x;
  }
};

// A query with a NaN has no others, and changes no bit of the other queries'.
TEST(TokenCodes, OfAQueryThatIsNotANumberAreItsOwn) {
  auto queries = normal_queries(64, 5);
  std::mt19937 random(5);
  Keys keys(5, 64, [&] { return static_cast<int>(random()); });
  for (Index i = 0; i < 5; ++i)
    for (const Index g : {0, 1}) keys.set_scale(i, g, 0x3c00);
  const auto clean = keys.logits(Coded(queries, 64), 64);
  queries[2 * 64 + 7] = not_a_number;
  const Coded coded(queries, 64);
  ASSERT_TRUE(coded.fits);
  const auto x = keys.logits(coded, 64);
  for (Index i = 0; i < 5 * rows; ++i)
    EXPECT_TRUE(i % rows == 2 ? std::isnan(x[uz(i)]) : x[uz(i)] == clean[uz(i)]) << i;
}

// Also of every key's code against the largest query of either sign: nothing saturates.
TEST(TokenCodes, GiveTheLogitsOfTheirIntegers) {
  std::mt19937 random(3);
  const std::uint16_t scales[] = {0x3c00, 0x4000, 0x3800, 0x0000};  // 1, 2, 1/2, 0
  const double values[] = {1.0, 2.0, 0.5, 0.0};
  const auto any = [&] { return static_cast<int>(random()); };
  const std::vector<std::function<int()>> codes{any, [] { return -128; }, [] { return -127; },
                                                [] { return 0; }, [] { return 127; }};
  for (const Index dim : {16, 32, 64, 80, 128, 144})
    for (const Index count : {1, 3, 4, 5, 16})
      for (const auto& code : codes) {
        // Integers, of which the largest is that of the codes: the unit is 1, no query is rounded.
        std::vector<float> queries(uz(rows * dim));
        for (Index i = 0; i < rows * dim; ++i) {
          const Index r = i / dim;
          const bool largest = i % dim == r || &code != &codes[0];
          queries[uz(i)] = !largest     ? static_cast<float>(any() % 16320)
                           : r % 2 == 0 ? 16319.0f
                                        : -16319.0f;
        }
        const Coded coded(queries, dim);
        ASSERT_TRUE(coded.fits);
        Keys keys(count, dim, code);
        const Index groups = quoka::ceil_div(dim, Index{32});
        for (Index i = 0; i < count; ++i)
          for (Index g = 0; g < groups; ++g) keys.set_scale(i, g, scales[uz(i + g) % 4]);
        const auto x = keys.logits(coded, dim);
        for (Index i = 0; i < count; ++i)
          for (Index r = 0; r < rows; ++r) {
            double exact = 0.0, size = 0.0;
            for (Index c = 0; c < dim; ++c) {
              const double product =
                  keys.code(i, c) * values[(i + c / 32) % 4] * double{queries[uz(r * dim + c)]};
              exact += product, size += std::abs(product);
            }
            ASSERT_NEAR(x[uz(i * rows + r)], exact, 2e-7 * size)
                << "key " << i << " of " << count << ", query " << r << ", dim " << dim;
          }
      }
}

// ---- which formats have them --------------------------------------------------------------------

struct Silent {
  static constexpr bool has_codes = false;
};
struct Says {
  static constexpr bool has_codes = true;
};

// Rows {int8 sign of the row; int8 codes[dim]}. A Group with a member named `codes`, which alone does not make its rows
// codes.
template <class Said>
struct SignedRow : quoka::formats::AnyRow {
  static constexpr const char* name = "signed";
  static Index bytes(const quoka::RowShape& shape) { return 1 + shape.dim; }
  static float sign(quoka::ConstRow row) { return row[0] == std::byte{0} ? 1.0f : -1.0f; }
  struct Group : Said {
    static constexpr Index channels = 32;
    const std::int8_t* codes;
    simd::Packet scale;

    Group(quoka::ConstRow row, Index c)
        : codes(reinterpret_cast<const std::int8_t*>(row + 1 + c)),
          scale(simd::broadcast(sign(row))) {}
    simd::Packet load(Index c) const { return simd::mul(scale, simd::load_int8(codes + c)); }
  };
  static simd::Packet load(quoka::ConstRow row, Index c, const quoka::RowShape&) {
    return Group(row, c).load(0);
  }
  static float at(quoka::ConstRow row, Index c, const quoka::RowShape&) {
    return sign(row) * static_cast<float>(static_cast<std::int8_t>(row[1 + c]));
  }
};

// A row type of which a member does not fit is none, also if rows could do without it.
struct WithoutAt : SignedRow<Says> {
  static void at(quoka::ConstRow, Index, const quoka::RowShape&);
};
struct NarrowTurned : SignedRow<Says> {
  static void narrow(const float*, std::byte*, const quoka::RowShape&);
};
struct GroupWithoutChannels : SignedRow<Says> {
  struct Group {
    Group(quoka::ConstRow, Index);
    simd::Packet load(Index) const;
  };
};
struct UnsignedCodes : SignedRow<Says> {
  struct Group : SignedRow<Says>::Group {
    using SignedRow<Says>::Group::Group;
    const std::uint8_t* codes;
  };
};
static_assert(quoka::RowType<SignedRow<Silent>> && quoka::RowType<SignedRow<Says>>);
static_assert(!quoka::RowType<WithoutAt> && !quoka::RowType<NarrowTurned>);
static_assert(!quoka::RowType<GroupWithoutChannels> && !quoka::RowType<UnsignedCodes>);

TEST(TokenCodes, AreTakenOfAGroupThatSaysItHasThem) {
  EXPECT_EQ(quoka::format_table<SignedRow<Silent>>().token_code_logits, nullptr);
  EXPECT_EQ(quoka::format_table<SignedRow<Says>>().token_code_logits != nullptr,
            simd::has_token_codes);
  EXPECT_EQ(quoka::q8_0_format().token_code_logits != nullptr, simd::has_token_codes);
}

}  // namespace
QUOKA_PACKET_ARGUMENTS_END
