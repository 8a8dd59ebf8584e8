// kernels/bfloat16_panels.hpp and its parts: the option, the split of numbers, packing, emulated tiles. Properties of
// every arithmetic are in panel_arithmetics_test.

#include "kernels/every_arithmetic.hpp"

#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/kernels/bfloat16_units.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/kernels/float_panels.hpp>

#include "support/emulated_tiles.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

namespace {

using namespace quoka_test;
using quoka::detail::PanelArithmetic;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;

using Emulated = detail::TileUnit<simd::EmulatedTiles>;
using PlainPairs = detail::PairUnit<simd::PlainBfloat16Sums>;

// ---- the option ---------------------------------------------------------------------------------

template <class T>
quoka::Arithmetic comes_to(quoka::Arithmetic asked) {
  return quoka::arithmetic_used(asked, quoka::format_of<T>(), quoka::format_of<T>());
}

// Three products, or two of what has been rounded to bfloat16 already; float without tiles, or bfmmla for two.
TEST(Bfloat16Attention, AutomaticRoundsNoMoreThanTheCacheHas) {
  using quoka::Arithmetic;
  EXPECT_EQ(AttentionOptions{}.arithmetic, Arithmetic::automatic);
  const quoka::Format &f32 = quoka::float_format(), &f16 = quoka::format_of<Eigen::half>(),
                      &bf16 = quoka::format_of<Eigen::bfloat16>(), &q8 = quoka::q8_0_format(),
                      &u8 = quoka::u8_format();
  const bool tiles = simd::has_tiles, squares = simd::has_bfloat16_squares;
  const struct {
    const quoka::Format &k, &v;
    bool two;
  } caches[] = {{f32, f32, false},  {f16, f16, false},  {u8, u8, false},
                {bf16, f32, false}, {bf16, bf16, true}, {q8, q8, true}};
  for (const auto& [k, v, two] : caches) {
    SCOPED_TRACE(std::string(k.name) + ", " + v.name);
    const bool splits = tiles || (two && squares);
    EXPECT_EQ(quoka::arithmetic_used(Arithmetic::automatic, k, v),
              splits ? Arithmetic::automatic : Arithmetic::float_);
    const PanelArithmetic* const split =
        two ? detail::bfloat16_of_here<2>() : detail::bfloat16_of_here<3>();
    EXPECT_EQ(split != nullptr, splits);
    EXPECT_EQ(
        detail::used_arithmetic(Arithmetic::automatic, std::min(k.rounding, v.rounding), 1).panels,
        splits ? split : &detail::float_panels());
  }
  EXPECT_EQ(comes_to<float>(Arithmetic::float_), Arithmetic::float_);
}

// The result is that of the arithmetic's unit; without a unit it is float to the last bit.
template <class T>
void expect_asked(quoka::Arithmetic asked, const PanelArithmetic* panels) {
  Random random(5);
  const auto in =
      random_inputs<T>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 301});
  const auto output = attend(in, {.arithmetic = asked});
  EXPECT_EQ(comes_to<T>(asked), panels == nullptr ? quoka::Arithmetic::float_ : asked);
  if (panels == nullptr)
    expect_same(output, attend(in, {.arithmetic = quoka::Arithmetic::float_}));
  else
    expect_same(output, attend_by(*panels, in));
}
TEST(Bfloat16Attention, TheOptionDoesWhatItSays) {
  using quoka::Arithmetic;
  expect_asked<float>(Arithmetic::bf16, detail::bfloat16_of_here<1>());
  expect_asked<Eigen::bfloat16>(Arithmetic::automatic, detail::bfloat16_of_here<2>());
  expect_asked<float>(Arithmetic::automatic, detail::bfloat16_of_here<3>());
}

TEST(Arithmetic, IsNamed) {
  using quoka::Arithmetic;
  for (const auto& [name, arithmetic] : {std::pair{"automatic", Arithmetic::automatic},
                                         {"float", Arithmetic::float_},
                                         {"bf16", Arithmetic::bf16},
                                         {"int8", Arithmetic::int8}}) {
    EXPECT_STREQ(quoka::arithmetic_name(arithmetic), name);
    EXPECT_EQ(quoka::arithmetic_named(name), arithmetic);
  }
  for (const char* const gone : {"bfloat16_x2", "bfloat16_x3"})
    expect_refused([&] { quoka::arithmetic_named(gone); }, {gone, "gone", "automatic"});
  expect_refused([] { quoka::arithmetic_named("single"); }, {"single", "float"});
  expect_refused([] { quoka::arithmetic_named("fp8"); }, {"fp8", "automatic, float, bf16"});
  expect_refused([] { quoka::arithmetic_named("bfloat16"); }, {"bfloat16", "called bf16"});
}

TEST(Bfloat16Attention, EmulatedTilesAreExactlyWhatTheirPartsSay) {
  Random random(24);
  const auto in = random_inputs<Eigen::bfloat16>(
      random, {.q_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 301});
  // A cache of bfloat16 has no low parts: a third product adds nothing.
  const auto two = attend_by(panels_named("emulated tiles, 2 products"), in);
  const auto three = attend_by(panels_named("emulated tiles, 3 products"), in);
  expect_same(two, three);
}

// ---- the parts ----------------------------------------------------------------------------------

// Every float of every exponent: rounded to 8 bits, and split in two.
TEST(Bfloat16Parts, RoundingAndSplittingKeepTheirBounds) {
  Random random(50);
  for (int round = 0; round < 20000; ++round) {
    alignas(64) float x[simd::lanes], high[simd::lanes], low[simd::lanes];
    for (float& one : x) {
      do one = simd::float_of(static_cast<std::uint32_t>(random.bits()));
      while (!(std::abs(one) < 0x1p126f));
    }
    const simd::Packet at = simd::load(x), rounded = simd::round_bfloat16(at);
    simd::store(high, rounded);
    simd::store(low, simd::round_bfloat16(simd::sub(at, rounded)));
    for (int i = 0; i < simd::lanes; ++i) {
      const double exact = static_cast<double>(x[i]);
      EXPECT_EQ(simd::bits_of(high[i]) & 0xffffu, 0u);
      EXPECT_EQ(simd::bits_of(low[i]) & 0xffffu, 0u);
      EXPECT_LE(std::abs(static_cast<double>(high[i]) - exact),
                0x1p-8 * std::abs(exact) + 0x1p-134);
      EXPECT_LE(std::abs(static_cast<double>(high[i]) + static_cast<double>(low[i]) - exact),
                0x1p-16 * std::abs(exact) + 0x1p-134);
    }
  }
}

// ---- what is left to float ----------------------------------------------------------------------

// Rows of one number, with `huge` at one place.
template <class T>
struct PackedRows {
  PackedRows(Index rows, Index dim, Index at_row, Index at_channel, float huge)
      : numbers(uz(rows * dim), static_cast<T>(0.5f)) {
    numbers[uz(at_row * dim + at_channel)] = static_cast<T>(huge);
    for (Index i = 0; i < rows; ++i)
      all.push_back(reinterpret_cast<quoka::ConstRow>(numbers.data() + i * dim));
    shape.dim = dim;
  }
  std::vector<T> numbers;
  std::vector<quoka::ConstRow> all;
  quoka::RowShape shape;
};

template <class Unit, class T>
void expect_huge_keys_and_values_are_found(Index rows, Index dim) {
  const quoka::Format& format = quoka::format_of<T>();
  const Index padded = detail::padded_depth<Unit>(dim), channels = detail::padded_channels(dim);
  const Index tiled = quoka::round_up(rows, Index{Unit::tile_rows});
  std::vector<detail::Bfloat16> keys(uz(tiled * padded)),
      values(uz(detail::unit_value_size<Unit>(dim, rows)));
  std::vector<float> factors(uz(tiled)), apart(uz(channels)),
      room(uz(padded + detail::unit_value_room(dim)));
  for (const Index row : {Index{0}, Index{1}, rows / 2, rows - 1})
    for (Index c = 0; c < dim; ++c) {
      SCOPED_TRACE("row " + std::to_string(row) + ", channel " + std::to_string(c));
      for (const float huge : {0x1p49f, 0x1p51f}) {
        const PackedRows<T> x(rows, dim, row, c, huge);
        const bool held = huge < detail::most_length;
        ASSERT_EQ(detail::pack_unit_keys<Unit>(format, x.all.data(), rows, x.shape,
                                               {keys.data(), nullptr}, factors.data(), room.data()),
                  held);
        for (Index i = 0; i < rows; ++i) ASSERT_EQ(std::isnan(factors[uz(i)]), !held && i == row);
        ASSERT_EQ(
            detail::pack_unit_values<Unit>(format, x.all.data(), rows, x.shape,
                                           {values.data(), nullptr}, apart.data(), room.data()),
            held);
        for (Index i = 0; i < channels; ++i) ASSERT_EQ(apart[uz(i)], !held && i == c ? 1.0f : 0.0f);
      }
    }
}
TEST(Bfloat16Packing, FindsHugeKeysAndValuesWhereverTheyAre) {
  for (const Index dim : {37, 64, 128}) {
    expect_huge_keys_and_values_are_found<Emulated, float>(35, dim);
    expect_huge_keys_and_values_are_found<Emulated, Eigen::bfloat16>(35, dim);
    expect_huge_keys_and_values_are_found<PlainPairs, Eigen::bfloat16>(35, dim);
  }
}
TEST(Bfloat16Packing, FindsHugeQueriesWhereverTheyAre) {
  constexpr Index rows = tuning::panel_rows;
  for (const Index dim : {37, 128}) {
    quoka::Buffer<detail::Bfloat16> packed;  // aligned
    packed.reserve(rows * detail::padded_depth<Emulated>(dim));
    for (const Index row : {Index{0}, rows - 1})
      for (Index c = 0; c < dim; ++c)
        for (const float huge : {0x1p49f, 0x1p51f}) {
          const PackedRows<float> x(rows, dim, row, c, 4 * huge);
          std::vector<const float*> floats;
          for (const quoka::ConstRow of_row : x.all)
            floats.push_back(reinterpret_cast<const float*>(of_row));
          alignas(64) float factors[rows];
          const bool held = huge < detail::most_length;
          ASSERT_EQ(detail::pack_unit_queries<Emulated>(floats.data(), rows, dim, 0.25f,
                                                        {packed.data(), nullptr}, factors),
                    held)
              << dim << " channels, row " << row << ", channel " << c;
          for (Index i = 0; i < rows; ++i) ASSERT_EQ(std::isnan(factors[uz(i)]), !held && i == row);
        }
  }
}

// Two packets to pairs and back.
TEST(Bfloat16Parts, PairsAreRoundedInOrder) {
  Random random(52);
  for (int round = 0; round < 20000; ++round) {
    alignas(64) float x[2][simd::lanes], back[2][simd::lanes], start[simd::lanes], sum[simd::lanes];
    for (auto& row : x)
      for (float& one : row) {
        do one = simd::float_of(static_cast<std::uint32_t>(random.bits()));
        while (!(std::abs(one) < 0x1p126f));
      }
    for (float& one : start) one = static_cast<float>(random.normal());
    const simd::Packet pairs = simd::round_pairs(simd::load(x[0]), simd::load(x[1]));
    simd::store(back[0], simd::firsts(pairs));
    simd::store(back[1], simd::seconds(pairs));
    simd::store(sum, simd::add_pairs(simd::load(start), pairs));
    for (int i = 0; i < simd::lanes; ++i) {
      double exact = static_cast<double>(start[i]), size = std::abs(exact);
      for (int of = 0; of < 2; ++of) {
        const double at = static_cast<double>(x[of][i]), rounded = static_cast<double>(back[of][i]);
        EXPECT_EQ(simd::bits_of(back[of][i]) & 0xffffu, 0u);
        EXPECT_LE(std::abs(rounded - at), 0x1p-8 * std::abs(at) + 0x1p-126);
        exact += rounded, size += std::abs(rounded);
      }
      EXPECT_LE(std::abs(static_cast<double>(sum[i]) - exact), 0x1p-23 * size + 0x1p-126);
    }
  }
}

TEST(Bfloat16Parts, HalvesSideBySideAndZipped) {
  alignas(64) float a[simd::lanes], b[simd::lanes], pairs[simd::lanes], zipped[2 * simd::lanes];
  std::uint16_t halves[simd::lanes];
  for (int i = 0; i < simd::lanes; ++i) {
    a[i] = simd::float_of(0x3f800000u + (static_cast<std::uint32_t>(i) << 16));
    b[i] = simd::float_of(0xc0000000u + (static_cast<std::uint32_t>(i) << 16));
  }
  simd::store(pairs, simd::upper_halves(simd::load(a), simd::load(b)));
  simd::store_upper_half(halves, simd::load(a));
  simd::store_zipped(zipped, simd::load(a), simd::load(b));
  for (int i = 0; i < simd::lanes; ++i) {
    EXPECT_EQ(simd::bits_of(pairs[i]), simd::bits_of(a[i]) >> 16 | simd::bits_of(b[i]));
    EXPECT_EQ(halves[i], simd::bits_of(a[i]) >> 16);
    EXPECT_EQ(zipped[2 * i], a[i]);
    EXPECT_EQ(zipped[2 * i + 1], b[i]);
  }
}

// The ISA's own sums are those of the plain ones, to the bit.
template <class Sums>
void expect_plain_sums() {
  Random random(51);
  for (int round = 0; round < 2000; ++round) {
    alignas(64) simd::Bfloat16Pair a[simd::lanes], b[simd::lanes];
    alignas(64) float c[simd::lanes], got[simd::lanes], plain[simd::lanes];
    const auto draw = [&] {  // normal numbers, and denormals
      const float x = static_cast<float>(random.normal());
      return simd::bits_of(random.below(9) == 0 ? x * 1e-39f : x) & 0xffff0000u;
    };
    for (int i = 0; i < simd::lanes; ++i) {
      a[i].bits = draw() | draw() >> 16, b[i].bits = draw() | draw() >> 16;
      c[i] = static_cast<float>(random.normal());
    }
    simd::store(got, fma(Sums::load(a), Sums::load(b), Sums::of(simd::load(c))).to_float());
    simd::store(plain, fma(simd::PlainBfloat16Sums::load(a), simd::PlainBfloat16Sums::load(b),
                           simd::PlainBfloat16Sums::of(simd::load(c)))
                           .to_float());
    for (int i = 0; i < simd::lanes; ++i) EXPECT_EQ(got[i], plain[i]) << round;
  }
}
template <bool has = simd::has_bfloat16_sums>
void expect_own_sums() {
  if constexpr (has) expect_plain_sums<simd::DotBfloat16Sums>();
}
TEST(Bfloat16Parts, TheISAsSumsAreThePlainOnes) {
  expect_plain_sums<simd::PlainBfloat16Sums>();
  expect_own_sums();
}

// ---- emulated tiles -----------------------------------------------------------------------------

simd::TileShapes all_tiles() {
  simd::TileShapes shapes;
  shapes.palette = 1;
  for (int t = 0; t < simd::tile_count; ++t) shapes.rows[t] = 16, shapes.row_bytes[t] = 64;
  return shapes;
}

// Loses what one of its registers holds.
struct ForgetfulTiles : simd::EmulatedTiles {
  template <int t>
  static void load(const void* p, Index step) {
    EmulatedTiles::load<t>(p, step);
    if (t == 6) EmulatedTiles::zero<t>();
  }
};
TEST(EmulatedTiles, PassTheTestBeforeTheFirstUseAndForgetfulOnesFail) {
  EXPECT_TRUE(detail::tiles_agree<simd::EmulatedTiles>());
  EXPECT_FALSE(detail::tiles_agree<ForgetfulTiles>());
}

// A guest leaves the tiles of its thread as its host had configured them.
TEST(EmulatedTiles, TheHostsConfigurationComesBack) {
  using Tiles = simd::EmulatedTiles;
  Random random(53);
  const auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  const PanelArithmetic& unit = panels_named("emulated tiles, 1 product");
  simd::TileShapes host = all_tiles(), after;
  host.rows[3] = 5;
  Tiles::configure(host);
  attend_by(unit, in);
  Tiles::configuration(after);
  EXPECT_EQ(std::memcmp(&host, &after, sizeof host), 0);
  Tiles::release();
  attend_by(unit, in);
  Tiles::configuration(after);
  EXPECT_EQ(after.palette, 0);
}

}  // namespace
