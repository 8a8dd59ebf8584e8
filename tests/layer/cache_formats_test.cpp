// A cache whose formats keep scales apart: the scales' source, the stored form of hostile values, and refused scales. A
// layer over such caches is in prefill_suite_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/dense.hpp>

#include "support/attention_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::Format;
using quoka::KvCache;

// ---- ways to keep rows --------------------------------------------------------------------------

enum class Way { i8, i8_head, i8_channel, i8_head_channel, e4m3, e4m3_head };
constexpr Way ways[] = {Way::i8,   Way::i8_head,  Way::i8_channel, Way::i8_head_channel,
                        Way::e4m3, Way::e4m3_head};

std::string name_of(Way way) {
  constexpr const char* names[] = {"i8",   "i8_head",  "i8_channel", "i8_head_channel",
                                   "e4m3", "e4m3_head"};
  return names[static_cast<int>(way)];
}
const Format& format_of_way(Way way) {
  if (way == Way::e4m3 || way == Way::e4m3_head) return quoka::e4m3_format();
  return way == Way::i8 || way == Way::i8_head ? quoka::i8_format() : quoka::i8_channel_format();
}
bool each_head(Way way) {
  return way == Way::i8_head || way == Way::i8_head_channel || way == Way::e4m3_head;
}
bool is_fp8(Way way) { return way >= Way::e4m3; }
bool each_channel(Way way) { return way == Way::i8_channel || way == Way::i8_head_channel; }

// Scales at which normal values fill the codes, and a few lie beyond them.
std::vector<float> random_scales(Random& random, Way way, Index heads, Index dim) {
  std::vector<float> scales;
  const Index n = (each_channel(way) ? dim : 1) * (each_head(way) ? heads : 1);
  for (Index i = 0; i < n; ++i)
    scales.push_back(static_cast<float>((2.5 + random.uniform()) / (is_fp8(way) ? 448 : 127)));
  return scales;
}

float scale_at(const std::vector<float>& scales, Way way, Index head, Index dim, Index c) {
  const Index n = each_channel(way) ? dim : 1;
  return scales[uz((each_head(way) ? head * n : 0) + (each_channel(way) ? c : 0))];
}

// ---- the formats, naively -----------------------------------------------------------------------

std::vector<float> e4m3_sizes() {  // of codes 0 ... 0x7e
  std::vector<float> sizes;
  for (int code = 0; code <= 0x7e; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    sizes.push_back(static_cast<float>(exponent == 0 ? std::ldexp(mantissa, -9)
                                                     : std::ldexp(8 + mantissa, exponent - 10)));
  }
  return sizes;
}
// The stored form of x: the nearest code, of two the even one, saturated; integers have no NaN.
float kept(bool fp8, float x, float scale) {
  const float q = scale == 0 ? 0.0f : x / scale;
  if (!fp8) return std::isnan(q) ? 0.0f : scale * std::clamp(std::nearbyint(q), -127.0f, 127.0f);
  if (std::isnan(q)) return q;
  static const std::vector<float> sizes = e4m3_sizes();
  const double size = std::abs(double{q});
  int best = 0;
  double least = size;
  for (int code = 1; code <= 0x7e; ++code) {
    const double far = std::abs(double{sizes[uz(code)]} - size);
    if (far < least || (far == least && code % 2 == 0)) best = code, least = far;
  }
  return scale * std::copysign(sizes[uz(std::isinf(q) ? 0x7e : best)], q);
}
// The largest error that byte_formats.hpp allows; infinity for what lies beyond the codes.
double bound_of(bool fp8, float x, float scale) {
  const double size = std::abs(double{x}), s = double{scale};
  if (!(size <= s * (fp8 ? 448 : 127))) return double{infinity};
  if (!fp8) return s / 2 + 0x1p-23 * size;
  return std::max(0x1p-4 * size * (1 + 0x1p-20), 0x1p-10 * s) + 0x1p-149;
}

// Rows of a tensor [1, heads, len, dim].
Tensor4<float> kept(Way way, const std::vector<float>& scales, const Tensor4<float>& x) {
  Tensor4<float> values = x;
  const Index heads = x.dimension(1), len = x.dimension(2), dim = x.dimension(3);
  for (Index head = 0; head < heads; ++head)
    for (Index i = 0; i < len; ++i)
      for (Index c = 0; c < dim; ++c) {
        float& to = values(0, head, i, c);
        to = kept(is_fp8(way), to, scale_at(scales, way, head, dim, c));
      }
  return values;
}

// The same value; any NaN is as good as another.
::testing::AssertionResult same_values(const Rows& is, const Tensor4<float>& should) {
  const oracle::Tensor x = to_oracle(is);
  for (Index b = 0; b < is.batch(); ++b)
    for (Index head = 0; head < is.heads(); ++head)
      for (Index i = 0; i < is.len(); ++i)
        for (Index c = 0; c < is.dim(); ++c) {
          const double a = x.at(b, head, i, c), e = double{should(b, head, i, c)};
          if (!(a == e || (std::isnan(a) && std::isnan(e))))
            return ::testing::AssertionFailure() << "[" << b << ", " << head << ", " << i << ", "
                                                 << c << "]: " << a << " and " << e;
        }
  return ::testing::AssertionSuccess();
}

class ScaledWay : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, ScaledWay, ::testing::ValuesIn(ways),
                         [](const auto& test) { return name_of(test.param); });

TEST(Formats, SayHowManyScalesAHeadHas) {
  EXPECT_EQ(quoka::i8_format().separate_scales(17), 1);
  EXPECT_EQ(quoka::e4m3_format().separate_scales(17), 1);
  EXPECT_EQ(quoka::i8_channel_format().separate_scales(17), 17);
  for (const Format* const format :
       {&quoka::q8_0_format(), &quoka::u8_format(), &quoka::float_format(),
        &quoka::format_of<Eigen::half>(), &quoka::channel_major_format<float>()})
    EXPECT_EQ(format->separate_scales(17), 0) << format->name;
}

// ---- what is kept -------------------------------------------------------------------------------

// Values at every end of float and of the codes, under scales at the ends of float.
TEST_P(ScaledWay, RoundsHostileValuesWithinTheBoundAndSaturatesBeyond) {
  const Way way = GetParam();
  const float most = std::numeric_limits<float>::max();
  for (const float scale : {1.0f, 0.3f, 1e-38f, 1e-42f, 1e30f, 0.0f}) {
    std::vector<float> values;
    for (const float x : {0.0f, 1e-45f, 1e-40f, 1e-38f, 1e-30f, 1.0f, 1e30f, most, infinity})
      values.push_back(x);
    for (const float q : {0.4999f, 0.5f, 0.5001f, 1.5f, 2.5f, 126.5f, 127.0f, 127.4f, 127.5f,
                          128.0f, 447.0f, 448.0f, 449.0f, 463.9f, 464.0f, 500.0f, 0x1p-10f})
      values.push_back(q * scale);
    const auto positive = values;
    for (const float x : positive) values.push_back(-x);
    values.push_back(not_a_number);

    const Index dim = std::ssize(values);
    Tensor4<float> x(1, 2, 1, dim);
    for (Index c = 0; c < dim; ++c) x(0, 0, 0, c) = x(0, 1, 0, c) = values[uz(c)];
    const std::vector<float> scales(uz((each_channel(way) ? dim : 1) * (each_head(way) ? 2 : 1)),
                                    scale);
    KvCache cache(1, 2, dim, dim, {format_of_way(way), scales}, {format_of_way(way), scales});
    cache.append(x, x);
    const auto should = kept(way, scales, x);
    EXPECT_TRUE(same_values(cache.k(), should)) << scale;
    EXPECT_TRUE(same_values(cache.v(), should)) << scale;
    const oracle::Tensor is = to_oracle(cache.k());
    const float end = scale * (is_fp8(way) ? 448.0f : 127.0f);
    for (Index c = 0; c + 1 < dim; ++c) {
      const double kept_is = is.at(0, 1, 0, c), value = double{values[uz(c)]};
      const double bound = bound_of(is_fp8(way), values[uz(c)], scale);
      if (bound < double{infinity})
        EXPECT_LE(std::abs(kept_is - value), bound) << value << " at " << scale;
      else
        EXPECT_EQ(std::abs(kept_is), double{end}) << value << " at " << scale;
    }
    if (scale > 0) {
      EXPECT_EQ(std::isnan(is.at(0, 0, 0, dim - 1)), is_fp8(way));
    }
  }
}

TEST(RowsWithTheirScale, RoundHostileValuesToWhatTheFormatsSay) {
  Tensor4<float> x(1, 1, 5, 32);
  x.setZero();  // row 0
  for (Index c = 0; c < 32; ++c) {
    x(0, 0, 1, c) = 1e-42f * static_cast<float>(c);
    x(0, 0, 2, c) = 1e6f * static_cast<float>(c - 16);
    x(0, 0, 3, c) = x(0, 0, 4, c) = 1.0f;
  }
  x(0, 0, 3, 5) = infinity, x(0, 0, 4, 31) = not_a_number;
  KvCache cache(1, 1, 32, 32, quoka::u8_format(), quoka::q8_0_format());
  cache.append(x, x);
  const oracle::Tensor k = to_oracle(cache.k()), v = to_oracle(cache.v());
  for (Index c = 0; c < 32; ++c) {
    EXPECT_EQ(k.at(0, 0, 0, c), 0);
    EXPECT_EQ(v.at(0, 0, 0, c), 0);
    EXPECT_NEAR(k.at(0, 0, 1, c), double{x(0, 0, 1, c)},
                31e-42 / 255 / 2 + 31e-42 * 0x1p-21 + 1e-43);
    EXPECT_EQ(v.at(0, 0, 1, c), 0);  // below the least half
    EXPECT_NEAR(k.at(0, 0, 2, c), double{x(0, 0, 2, c)}, 31e6 / 255 / 2 + 16e6 * 0x1p-21);
    EXPECT_TRUE(std::isnan(v.at(0, 0, 2, c)));  // d is beyond half
    for (const Index row : {3, 4}) {
      EXPECT_TRUE(std::isnan(k.at(0, 0, row, c)));
      EXPECT_TRUE(std::isnan(v.at(0, 0, row, c)));
    }
  }
}

// ---- rows of the same format --------------------------------------------------------------------

// Another cache's rows: with its scales they keep their bytes, with others they are rounded again.
TEST_P(ScaledWay, TakesTheBytesOfRowsWithItsScales) {
  const Way way = GetParam();
  Random random(903);
  const auto scales = random_scales(random, way, 2, 17);
  auto others = scales;
  others.back() *= 1.7f;
  const auto x = random.tensor<float>(1, 2, 21, 17);
  const quoka::CacheFormat as{format_of_way(way), scales}, other{format_of_way(way), others};
  KvCache from(1, 2, 17, 17, as, as), same(1, 2, 17, 17, as, as), apart(1, 2, 17, 17, other, as);
  from.append(x, x);
  same.append(from.k(), from.v().slice(0, 21));
  EXPECT_TRUE(same_bits(same.k(), from.k()));
  EXPECT_TRUE(same_bits(same.v(), from.v()));
  apart.append(from.k(), from.v());
  EXPECT_TRUE(same_values(apart.k(), kept(way, others, kept(way, scales, x))));
  EXPECT_FALSE(same_bits(apart.k(), from.k()));
}

// Codes that no quantiser here writes, under a scale too small to be multiplied without loss.
TEST(Scales, OfTheSameValueKeepEveryCodeOfAnEnginesCache) {
  std::vector<std::byte> codes;
  for (int code = 0; code < 256; ++code) codes.push_back(static_cast<std::byte>(code));
  for (const Format* const format :
       {&quoka::i8_format(), &quoka::i8_channel_format(), &quoka::e4m3_format()})
    for (const float scale : {1.0f, 1e-44f}) {
      const std::vector<float> scales(uz(format->separate_scales(128)), scale);
      const Rows rows(codes.data(), *format, {1, 1, 2, 128}, {0, 0, 128});
      const Rows engine = rows.with_scales(scales.data(), 0);
      KvCache cache(1, 1, 128, 128, {*format, scales}, {*format, scales});
      cache.append(engine, engine);
      EXPECT_TRUE(same_bits(cache.k(), rows)) << format->name;
      if (scale != 1.0f) continue;
      KvCache plain(1, 1, 128, 128, *format, *format);  // no scales are scales of 1
      plain.append(engine, rows);
      EXPECT_TRUE(same_bits(plain.k(), rows)) << format->name;
      cache.append(rows, rows);
      EXPECT_TRUE(same_bits(cache.k().slice(2, 2), rows)) << format->name;
    }
}

// A format that does not say that it has scales: rows with some are read by their values.
TEST(Scales, OfAFormatThatDoesNotTellOfThemArePartOfTheValues) {
  Format quiet = quoka::i8_format();
  quiet.separate_scales = [](Index) { return Index{0}; };
  const std::vector<std::byte> codes(32, std::byte{3});
  const float scale = 2.0f;
  const Rows rows(codes.data(), quiet, {1, 1, 1, 32}, {0, 0, 32});
  KvCache cache(1, 1, 32, 32, quiet, quiet);
  cache.append(rows.with_scales(&scale, 0), rows);
  EXPECT_EQ(to_oracle(cache.k()).at(0, 0, 0, 7), 6);
  EXPECT_EQ(to_oracle(cache.v()).at(0, 0, 0, 7), 3);
}

// Nor are channels that lie apart side by side in the cache.
TEST(Scales, AreNotAllThatTellsRowsOfOneFormatApart) {
  Format spaced = quoka::i8_format();
  spaced.widen = [](quoka::ConstRow row, const quoka::RowShape& shape, float* to) {
    for (Index c = 0; c < shape.dim; ++c)
      to[c] =
          static_cast<float>(std::to_integer<int>(row[c * std::max<Index>(1, shape.channel_step)]));
  };
  std::vector<std::byte> codes(64, std::byte{99});
  for (std::size_t c = 0; c < 32; ++c) codes[2 * c] = static_cast<std::byte>(c);
  const Rows rows(codes.data(), spaced, {1, 1, 1, 32}, {0, 0, 64}, 2);
  KvCache cache(1, 1, 32, 32, spaced, spaced);
  cache.append(rows, rows);
  for (Index c = 0; c < 32; ++c)
    EXPECT_EQ(to_oracle(cache.k()).at(0, 0, 0, c), static_cast<double>(c));
}

// ---- refused ------------------------------------------------------------------------------------

TEST(Scales, OfAnotherNumberAreRefused) {
  const Format &i8 = quoka::i8_format(), &channel = quoka::i8_channel_format();
  const auto refuses = [](const Format& format, std::size_t count,
                          std::initializer_list<Fragment> fragments) {
    const std::vector<float> scales(count, 1.0f);
    expect_refused([&] { KvCache(1, 3, 8, 5, {format, scales}); }, fragments);
  };
  refuses(i8, 2, {"k's scales", "i8", 2, 1, 3});
  refuses(i8, 4, {"k's scales", "i8", 4, 1, 3});
  refuses(channel, 1, {"k's scales", "i8_channel", 1, 8, 24});
  refuses(channel, 5, {"k's scales", "i8_channel", 5, 8, 24});
  refuses(channel, 25, {"k's scales", "i8_channel", 25, 8, 24});
  refuses(quoka::e4m3_format(), 8, {"k's scales", "e4m3", 8, 1, 3});
  refuses(quoka::q8_0_format(), 1, {"k's scales", "q8_0", 1, 0});
  refuses(quoka::float_format(), 3, {"k's scales", 3, 0});
  const std::vector<float> eight(8, 1.0f);
  expect_refused(
      [&] {
        KvCache(1, 3, 8, 5, {channel, eight}, {channel, eight});
      },
      {"v's scales", 8, 5, 15});
}

TEST(Scales, ThatAreNegativeOrNotFiniteAreRefused) {
  std::vector<float> good(6, 0.5f);
  for (const float bad : {-0.25f, -1e-45f, infinity, -infinity, not_a_number})
    for (const std::size_t at : {0, 5}) {
      auto scales = good;
      scales[at] = bad;
      char as[32];
      std::snprintf(as, sizeof as, "%g", double{bad});
      const quoka::CacheFormat refused{quoka::i8_channel_format(), scales},
          taken{quoka::i8_channel_format(), good};
      const auto index = static_cast<Index>(at);
      expect_refused([&] { KvCache(1, 1, 6, 6, refused, taken); }, {"k's scale", index, as});
      expect_refused([&] { KvCache(1, 1, 6, 6, taken, refused); }, {"v's scale", index, as});
    }
}

TEST(Scales, OfALayerAreCheckedLikeACaches) {
  const std::vector<float> two(2, 1.0f);
  quoka::LayerShape shape{.q_heads = 6,
                          .kv_heads = 3,
                          .head_dim = 8,
                          .k_format = &quoka::i8_format(),
                          .v_format = &quoka::i8_format()};
  shape.k_scales = two;
  expect_refused([&] { quoka::ChunkedPrefill<quoka::DenseSelector>{shape}; }, {"k's", 2, 1, 3});
  std::swap(shape.k_scales, shape.v_scales);
  expect_refused([&] { quoka::ChunkedPrefill<quoka::DenseSelector>{shape}; }, {"v's", 2, 1, 3});
}

TEST(Scales, StayAsTheyAreWhenAnAppendIsRefused) {
  Random random(904);
  const auto scales = random_scales(random, Way::i8_head_channel, 2, 8);
  const quoka::CacheFormat as{quoka::i8_channel_format(), scales};
  const auto x = random.tensor<float>(1, 2, 5, 8), wrong = random.tensor<float>(1, 2, 5, 7);
  KvCache cache(1, 2, 8, 8, as, as);
  cache.append(x, x);
  expect_refused([&] { cache.append(x, wrong); }, {"v's dim", 7, 8});
  expect_refused([&] { cache.append(cache.k(), x); }, {"k lies in the cache"});
  EXPECT_EQ(cache.len(), 5);
  EXPECT_TRUE(same_values(cache.k(), kept(Way::i8_head_channel, scales, x)));
}

}  // namespace
