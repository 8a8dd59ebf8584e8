// Every format: the contents of a row, to the last bit, and the error of writing one.
// Attention, selection, caches and layers over rows of them: attention_suite_test.cpp, selection_fuzz_test.cpp,
// kv_cache_test.cpp, prefill_suite_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/kv_cache.hpp>

#include "support/rounding_modes.hpp"
#include "support/world.hpp"

namespace {

using namespace quoka_test;
using quoka::RowShape;

// ---- the formats, decoded naively ---------------------------------------------------------------

enum class Kind {
  single,
  half,
  bfloat16,
  q8_0,
  u8,
  i8,
  i8_channel,
  e4m3,
  apart_single,
  apart_half,
  apart_bfloat16
};
constexpr Kind written_kinds[] = {Kind::single, Kind::half, Kind::bfloat16,   Kind::q8_0,
                                  Kind::u8,     Kind::i8,   Kind::i8_channel, Kind::e4m3};
constexpr Kind kinds[] = {Kind::single,       Kind::half,       Kind::bfloat16,      Kind::q8_0,
                          Kind::u8,           Kind::i8,         Kind::i8_channel,    Kind::e4m3,
                          Kind::apart_single, Kind::apart_half, Kind::apart_bfloat16};

// In the order of every_format().
const Format& format_of_kind(Kind kind) { return *every_format()[static_cast<std::size_t>(kind)]; }
std::string name_of(Kind kind) {
  constexpr const char* names[] = {"single",       "half",       "bfloat16",      "q8_0",
                                   "u8",           "i8",         "i8_channel",    "e4m3",
                                   "apart_single", "apart_half", "apart_bfloat16"};
  return names[static_cast<int>(kind)];
}
bool apart(Kind kind) { return kind >= Kind::apart_single; }
// Of one channel; 0: the format is no array of elements.
Index element_bytes(Kind kind) {
  if (kind > Kind::bfloat16 && !apart(kind)) return 0;
  return kind == Kind::single || kind == Kind::apart_single ? 4 : 2;
}
Index step_of(Kind kind, const RowShape& shape) {  // 0: side by side
  return shape.channel_step > 0 ? shape.channel_step : element_bytes(kind);
}
Index scales_per_head(Kind kind, Index dim) {
  if (kind == Kind::i8_channel) return dim;
  return kind == Kind::i8 || kind == Kind::e4m3 ? 1 : 0;
}

template <class T>
T value_at(const std::byte* p) {
  T x;
  std::memcpy(&x, p, sizeof(T));
  return x;
}
float half_value(const std::byte* p) { return static_cast<float>(value_at<Eigen::half>(p)); }
int signed_code(std::byte code) { return static_cast<std::int8_t>(code); }

float e4m3_value(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15u), mantissa = static_cast<int>(code & 7u);
  if (exponent == 15 && mantissa == 7) return not_a_number;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return static_cast<float>(code >= 128 ? -size : size);
}

float decoded(Kind kind, const std::byte* row, const RowShape& shape, Index c) {
  const auto scale = [&](Index i) { return shape.scales != nullptr ? shape.scales[i] : 1.0f; };
  const Index step = step_of(kind, shape);
  switch (kind) {
    case Kind::q8_0: {
      const std::byte* const block = row + c / 32 * 34;
      return half_value(block) * static_cast<float>(signed_code(block[2 + c % 32]));
    }
    case Kind::u8:
      return (static_cast<float>(std::to_integer<int>(row[8 + c])) - value_at<float>(row + 4)) *
             value_at<float>(row);
    case Kind::i8:
      return scale(0) * static_cast<float>(signed_code(row[c]));
    case Kind::i8_channel:
      return scale(c) * static_cast<float>(signed_code(row[c]));
    case Kind::e4m3:
      return scale(0) * e4m3_value(std::to_integer<unsigned>(row[c]));
    case Kind::single:
    case Kind::apart_single:
      return value_at<float>(row + c * step);
    case Kind::half:
    case Kind::apart_half:
      return half_value(row + c * step);
    default:
      return static_cast<float>(value_at<Eigen::bfloat16>(row + c * step));
  }
}

Index expected_bytes(Kind kind, const RowShape& shape) {
  if (kind == Kind::q8_0) return (shape.dim + 31) / 32 * 34;
  if (kind == Kind::u8) return 8 + shape.dim;
  const Index element = element_bytes(kind);
  return element == 0 ? shape.dim : (shape.dim - 1) * step_of(kind, shape) + element;
}

// A row of any bits, at times with scales of about 1.
void fill_row(Random& random, Kind kind, const RowShape& shape, std::byte* row) {
  const auto put = [](std::byte* to, auto x) { std::memcpy(to, &x, sizeof(x)); };
  const auto scale = [&] { return static_cast<float>((0.5 + random.uniform()) / 64); };
  std::generate_n(row, expected_bytes(kind, shape),
                  [&] { return static_cast<std::byte>(random.below(256)); });
  if (random.seldom(4)) return;
  if (kind == Kind::u8) put(row, scale()), put(row + 4, 64 + 8192 * scale());
  for (Index c = 0; kind == Kind::q8_0 && c < shape.dim; c += 32)
    put(row + c / 32 * 34, stored<Eigen::half>(scale()));
}

std::vector<float> random_scales(Random& random, Index count, double size = 1.0 / 64) {
  std::vector<float> scales;
  for (Index i = 0; i < count; ++i)
    scales.push_back(static_cast<float>((0.5 + random.uniform()) * size));
  return scales;
}

std::vector<Index> odd_dims() {
  std::vector<Index> dims = oracle::range(1, 71);
  dims.push_back(128);
  return dims;
}

bool same_float(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

class EveryFormat : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, ::testing::ValuesIn(kinds),
                         [](const auto& test) { return name_of(test.param); });
class WrittenFormat : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Formats, WrittenFormat, ::testing::ValuesIn(written_kinds),
                         [](const auto& test) { return name_of(test.param); });

// ---- one row ------------------------------------------------------------------------------------

// Rows that end at a fence and rows that begin at one, and rows an odd byte away from it.
TEST_P(EveryFormat, WidensWhatARowHoldsAndReadsNothingBesideIt) {
  const Kind kind = GetParam();
  const Format& format = format_of_kind(kind);
  Random random(801);
  const Fenced memory(4096);
  for (const Index dim : odd_dims())
    for (const bool scaled : {false, true}) {
      const auto scales = random_scales(random, scales_per_head(kind, dim));
      const RowShape shape{dim, apart(kind) ? 3 * element_bytes(kind) * (dim % 3) : 0,
                           scaled ? scales.data() : nullptr};
      const Index bytes = expected_bytes(kind, shape);
      ASSERT_EQ(format.row_bytes(shape), bytes) << dim;
      for (const Index gap : {0, 1, 2, 7}) {
        if (element_bytes(kind) > 0 && gap % element_bytes(kind) != 0) continue;
        for (std::byte* const row : {memory.begin() + gap, memory.end() - bytes - gap}) {
          std::fill(memory.begin(), memory.end(), std::byte{0xff});
          fill_row(random, kind, shape, row);
          std::vector<float> wide(uz(dim + 1), 7.0f);
          format.widen(row, shape, wide.data());
          for (Index c = 0; c < dim; ++c)
            ASSERT_TRUE(same_float(wide[uz(c)], decoded(kind, row, shape, c)))
                << dim << ", channel " << c << ": " << wide[uz(c)] << " and "
                << decoded(kind, row, shape, c);
          ASSERT_EQ(wide.back(), 7.0f);
        }
      }
    }
}

// The largest error that byte_formats.hpp allows for x, in a row that was written.
double error_bound(Kind kind, const std::vector<float>& x, Index c, const std::byte* row,
                   const RowShape& shape) {
  const auto most = [&](Index begin, Index end) {
    double size = 0;
    for (Index i = begin; i < end; ++i) size = std::max(size, std::abs(double{x[uz(i)]}));
    return size;
  };
  const double size = std::abs(double{x[uz(c)]});
  const auto scale = [&](Index i) {
    return double{shape.scales != nullptr ? shape.scales[i] : 1.0f};
  };
  switch (kind) {
    case Kind::single:
      return 0;
    case Kind::half:
      return std::max(0x1p-11 * size, 0x1p-25);
    case Kind::bfloat16:
      return 0x1p-8 * size;
    case Kind::q8_0: {
      const double d = most(c / 32 * 32, std::min(shape.dim, c / 32 * 32 + 32)) / 127;
      const int code = signed_code(row[c / 32 * 34 + 2 + c % 32]);
      return 0.50002 * d + std::abs(code) * std::max(d * 0x1p-11, 0x1p-25);
    }
    case Kind::u8:
      return 0.5 * double{value_at<float>(row)} + 0x1p-21 * most(0, shape.dim) + 1e-43;
    case Kind::i8:
      return 0.5 * scale(0) + 0x1p-23 * size + 0x1p-149;
    case Kind::i8_channel:
      return 0.5 * scale(c) + 0x1p-23 * size + 0x1p-149;
    default:
      return std::max(0x1p-4 * size * (1 + 0x1p-20), 0x1p-10 * scale(0)) + 0x1p-149;
  }
}

// A normal row; some are far from 0, some have channels of very different size.
std::vector<float> row_to_write(Random& random, Kind kind, const RowShape& shape) {
  std::vector<float> x;
  const Index way = random.below(4);
  const double offset = way == 1 && kind == Kind::u8 ? 300 * random.normal() : 0;
  for (Index c = 0; c < shape.dim; ++c) {
    double value = random.normal() / 3.5;  // within [-1, 1]
    if (way == 2) value *= std::exp2(-static_cast<double>(random.below(12)));
    if (kind == Kind::q8_0 && way == 3) value *= 0x1p-15;  // d is a denormal half
    if (kind == Kind::i8) value *= 127 * double{shape.scales != nullptr ? shape.scales[0] : 1.0f};
    if (kind == Kind::i8_channel)
      value *= 127 * double{shape.scales != nullptr ? shape.scales[c] : 1.0f};
    if (kind == Kind::e4m3) value *= 448 * double{shape.scales != nullptr ? shape.scales[0] : 1.0f};
    x.push_back(static_cast<float>(value + offset));
  }
  return x;
}

// To nearest; in another rounding mode, which a program may have set, errors are twice as large, and denormals may be
// zeros. What was read is written as it is.
TEST_P(WrittenFormat, WritesWithinItsBoundAndNothingBesideTheRow) {
  const Kind kind = GetParam();
  const Format& format = format_of_kind(kind);
  ASSERT_TRUE(format.writes);
  Random random(802);
  const Fenced memory(4096);
  double closest = 0;  // an error as a part of its bound
  for (const Index dim : odd_dims())
    for (int round = 0; round < 40; ++round) {
      const double sizes[] = {1.0 / 64, 1.0 / 64, 1.0, 1e-38, 1e-42, 1e30};  // to the ends of float
      const auto scales = random_scales(random, scales_per_head(kind, dim), sizes[random.below(6)]);
      const RowShape shape{dim, 0, round % 2 == 1 ? scales.data() : nullptr};
      const std::vector<float> x = row_to_write(random, kind, shape);
      const Index bytes = format.row_bytes(shape),
                  gap = round % 3 * std::max<Index>(element_bytes(kind), 1);
      std::byte* const row =
          round % 4 < 2 ? memory.begin() + gap : memory.end() - bytes - gap;  // odd ones too
      const auto expect_written = [&](const RoundingMode& mode) {
        std::fill(memory.begin(), memory.end(), std::byte{0xa5});
        const double times = mode.rounding == FE_TONEAREST ? 1.0 : 2.4,
                     least = double{std::numeric_limits<float>::min()},
                     zero = mode.no_denormals ? 512 * least : 0.0;
        in(mode, [&] { format.narrow(x.data(), shape, row); });
        const auto untouched = [](const std::byte* begin, const std::byte* end) {
          return std::count(begin, end, std::byte{0xa5}) == end - begin;
        };
        ASSERT_TRUE(untouched(memory.begin(), row)) << dim;
        ASSERT_TRUE(untouched(row + bytes, memory.end())) << dim;
        for (Index c = 0; c < dim; ++c) {
          const float back = decoded(kind, row, shape, c);
          const double error = std::abs(double{back} - double{x[uz(c)]});
          const double bound = error_bound(kind, x, c, row, shape);
          ASSERT_LE(error, times * bound + zero)
              << "dim " << dim << ", " << x[uz(c)] << " became " << back << ", " << mode.name;
          if (bound > 0 && times == 1.0 && zero == 0.0) closest = std::max(closest, error / bound);
        }
      };
      ASSERT_NO_FATAL_FAILURE(expect_written(random.one_of(rounding_modes)));
      ASSERT_NO_FATAL_FAILURE(expect_written(rounding_modes[0]));
      std::vector<float> once(uz(dim)), twice(uz(dim));
      format.widen(row, shape, once.data());
      format.narrow(once.data(), shape, row);
      format.widen(row, shape, twice.data());
      float most = kind == Kind::q8_0 ? 0x1p3f : 0x1p-128f;  // d may be a denormal half
      for (const float value : once) most = std::max(most, std::abs(value));
      for (Index c = 0; c < dim; ++c)
        ASSERT_NEAR(twice[uz(c)], once[uz(c)], 0x1p-21f * most) << dim << ", " << c;
    }
  EXPECT_TRUE(closest > 0.97 || kind == Kind::single) << "the bound is larger than it has to be";
}

// ---- q8_0 ---------------------------------------------------------------------------------------

std::vector<std::byte> written(const Format& format, const std::vector<float>& x,
                               const float* scales = nullptr) {
  const RowShape shape{std::ssize(x), 0, scales};
  std::vector<std::byte> row(uz(format.row_bytes(shape)), std::byte{0x5a});
  format.narrow(x.data(), shape, row.data());
  return row;
}
std::vector<float> widened(const Format& format, const std::vector<std::byte>& row, Index dim,
                           const float* scales = nullptr) {
  std::vector<float> x(uz(dim));
  format.widen(row.data(), {dim, 0, scales}, x.data());
  return x;
}
std::vector<float> round_trip(const Format& format, const std::vector<float>& x,
                              const float* scales = nullptr) {
  return widened(format, written(format, x, scales), std::ssize(x), scales);
}

TEST(Q8_0, HasTheBytesOfGgml) {
  Random random(804);
  for (int round = 0; round < 300; ++round) {
    const Index dim = 1 + random.below(100);
    std::vector<float> x;
    const double size = std::exp2(static_cast<double>(random.below(40)) - 24);
    for (Index c = 0; c < dim; ++c) x.push_back(static_cast<float>(size * random.normal()));
    const auto row = written(quoka::q8_0_format(), x);
    for (Index block = 0; block * 32 < dim; ++block) {
      float most = 0;
      const Index begin = block * 32, end = std::min(dim, begin + 32);
      for (Index c = begin; c < end; ++c) most = std::max(most, std::abs(x[uz(c)]));
      const float d = most / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
      ASSERT_EQ(half_value(&row[uz(block * 34)]), static_cast<float>(static_cast<Eigen::half>(d)));
      for (Index c = begin; c < begin + 32; ++c) {
        const float scaled = c < end ? x[uz(c)] * inverse : 0.0f;
        ASSERT_EQ(signed_code(row[uz(block * 34 + 2 + c % 32)]),
                  static_cast<int>(std::nearbyint(scaled)))
            << x[uz(c)];
      }
    }
  }
}

TEST(Q8_0, BlocksThatCannotBeHeldAreNanAndTheOthersAreNot) {
  for (const float bad : {infinity, -infinity, not_a_number, 9e6f, -3e38f}) {
    std::vector<float> x(70, 1.0f);
    x[40] = bad;
    const auto back = round_trip(quoka::q8_0_format(), x);
    for (Index c = 0; c < 70; ++c)
      EXPECT_EQ(std::isnan(back[uz(c)]), c >= 32 && c < 64) << bad << " " << c;
    const auto row = written(quoka::q8_0_format(), x);
    for (Index i = 0; i < 32; ++i) EXPECT_EQ(row[uz(36 + i)], std::byte{0});
  }
  const auto held = round_trip(quoka::q8_0_format(), {8.3e6f, -8.3e6f});
  EXPECT_NEAR(held[0], 8.3e6f, 1e4f);
  EXPECT_NEAR(held[1], -8.3e6f, 1e4f);
}

TEST(Q8_0, ZeroAndWhatIsBelowHalfAreZero) {
  for (const float x : {0.0f, -0.0f, 1e-45f, 1e-40f, 1e-38f, 3e-37f, 1e-20f, 1e-6f})
    for (const float back : round_trip(quoka::q8_0_format(), std::vector<float>(33, x)))
      EXPECT_EQ(back, 0.0f) << x;
}

// ---- u8 -----------------------------------------------------------------------------------------

TEST(U8, KeepsARowOfOneValueExactly) {
  for (const float x : {0.0f, -0.0f, 1.0f, -3.7f, 1e-45f, -1e-30f, 1e30f, 3.4e38f, -3.4e38f})
    for (const Index dim : {1, 17, 64})
      for (const float back : round_trip(quoka::u8_format(), std::vector<float>(uz(dim), x)))
        ASSERT_EQ(back, x);
}

TEST(U8, ReachesBothEndsOfTheRange) {
  const auto row = written(quoka::u8_format(), {-1.0f, 0.25f, 2.0f});
  EXPECT_FLOAT_EQ(value_at<float>(row.data()), 3.0f / 255.0f);
  EXPECT_FLOAT_EQ(value_at<float>(row.data() + 4), 85.0f);
  EXPECT_EQ(row[8], std::byte{0});
  EXPECT_EQ(row[9], std::byte{106});  // 106.25
  EXPECT_EQ(row[10], std::byte{255});
}

TEST(U8, ARowThatCannotBeHeldIsNan) {
  for (const float bad : {infinity, -infinity, not_a_number}) {
    for (const Index at : {0, 1, 19}) {
      std::vector<float> x(20, 1.0f);
      x[uz(at)] = bad;
      for (const float back : round_trip(quoka::u8_format(), x)) EXPECT_TRUE(std::isnan(back));
    }
  }
  for (const float back : round_trip(quoka::u8_format(), {3e38f, -3e38f}))  // their difference
    EXPECT_TRUE(std::isnan(back));
  EXPECT_TRUE(std::isnan(value_at<float>(written(quoka::u8_format(), {3e38f, -3e38f}).data())));
}

// x / scale alone would leave no bits for the codes.
TEST(U8, ARowFarFromZeroKeepsItsCodes) {
  std::vector<float> x(128);
  for (std::size_t c = 0; c < x.size(); ++c) x[c] = 3e7f + 6.0f * static_cast<float>(c);
  const auto row = written(quoka::u8_format(), x);
  for (std::size_t c = 0; c < x.size(); ++c)
    ASSERT_EQ(std::to_integer<int>(row[8 + c]),
              static_cast<int>(std::nearbyint(255.0 * static_cast<double>(c) / 127.0)));
}

TEST(U8, HoldsDenormalRanges) {
  const std::vector<float> x{0.0f, 1e-45f, 3e-44f, 1e-40f};
  const auto back = round_trip(quoka::u8_format(), x);
  for (std::size_t c = 0; c < x.size(); ++c) EXPECT_NEAR(back[c], x[c], 3e-43);
}

// ---- i8 and e4m3 --------------------------------------------------------------------------------

TEST(I8, SaturatesAndTurnsNanIntoZero) {
  for (const Format* const format : {&quoka::i8_format(), &quoka::i8_channel_format()}) {
    EXPECT_EQ(
        round_trip(*format, {1e9f, -1e9f, infinity, -infinity, not_a_number, 127.4f, -128.0f}),
        (std::vector<float>{127, -127, 127, -127, 0, 127, -127}));
    // NaN with any bits.
    for (const std::uint32_t nan : {0x7fc00055u, 0xffc00033u, 0x7f800001u})
      EXPECT_EQ(round_trip(*format, {std::bit_cast<float>(nan)})[0], 0.0f) << nan;
    EXPECT_EQ(round_trip(*format, {0.5f, 1.5f, -0.5f, -2.5f, 0.51f}),
              (std::vector<float>{0, 2, 0, -2, 1}));  // ties to even
    const float zeros[] = {0.0f, 0.0f, 0.0f};
    EXPECT_EQ(round_trip(*format, {1.0f, -infinity, not_a_number}, zeros),
              (std::vector<float>{0, 0, 0}));
  }
}

// Against a search through all codes; of two at the same distance the even one.
TEST(E4m3, WritesTheNearestCode) {
  Random random(806);
  std::vector<float> x;
  for (int i = 0; i < 4000; ++i)
    x.push_back(static_cast<float>(random.normal() *
                                   std::exp2(static_cast<double>(random.below(20)) - 11)));
  for (unsigned code = 0; code < 0x7e; ++code) {
    const float middle = (e4m3_value(code) + e4m3_value(code + 1)) / 2;
    for (const float near :
         {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, infinity)})
      x.push_back(near), x.push_back(-near);
  }
  for (unsigned code = 0; code < 0x7f; ++code)
    x.push_back(e4m3_value(code)), x.push_back(-x.back());
  const auto row = written(quoka::e4m3_format(), x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    unsigned best = 0;
    for (unsigned code = 0; code < 0x7f; ++code) {
      const float size = std::abs(x[i]), far = std::abs(e4m3_value(code) - size),
                  least = std::abs(e4m3_value(best) - size);
      if (far < least || (far == least && code % 2 == 0)) best = code;
    }
    ASSERT_EQ(std::to_integer<unsigned>(row[i]), best | (std::signbit(x[i]) ? 0x80u : 0u)) << x[i];
  }
}

TEST(E4m3, SaturatesAndKeepsNan) {
  const auto x = round_trip(quoka::e4m3_format(),
                            {449.0f, 464.0f, -465.0f, -1e30f, infinity, -infinity, 1e-9f});
  EXPECT_EQ(x, (std::vector<float>{448, 448, -448, -448, 448, -448, 0}));
  for (const float nan : {not_a_number, -not_a_number})
    EXPECT_TRUE(std::isnan(round_trip(quoka::e4m3_format(), {1.0f, nan})[1]));
  const float scale = 0.5f, zero = 0.0f;
  EXPECT_EQ(round_trip(quoka::e4m3_format(), {448.0f}, &scale)[0], 224.0f);
  EXPECT_EQ(round_trip(quoka::e4m3_format(), {448.0f, 0.0f}, &zero), (std::vector<float>{0, 0}));
}

// ---- channels apart -----------------------------------------------------------------------------

TEST(ChannelMajor, IsOnlyRead) {
  const Format& format = quoka::channel_major_format<Eigen::half>();
  EXPECT_FALSE(format.writes);
  std::byte memory[64] = {};
  expect_refused(
      [&] {
        quoka::OutputRows(memory, format, {1, 1, 4, 8}, {0, 0, 2}, 8);
      },
      {"channel-major", "only read"});
  expect_refused([&] { quoka::KvCache(1, 1, 8, 8, format); }, {"channel-major", "only read"});
  expect_refused([&] { quoka::KvCache(1, 1, 8, 8, quoka::float_format(), format); },
                 {"channel-major", "only read"});
}

}  // namespace
