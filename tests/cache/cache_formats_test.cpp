// A cache whose formats keep scales apart: where the scales come from, what is kept of hostile values,
// and a layer over it against the oracle, and against a view that its user makes of the same bytes.

#include <quoka/cache/kv_cache.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::Format;
using quoka::KvCache;
using quoka::view_of;

// ---- ways to keep rows --------------------------------------------------------------------------

enum class Way { q8_0, u8, i8, i8_head, i8_channel, i8_head_channel, e4m3, e4m3_head };
constexpr Way ways[] = {Way::q8_0,    Way::u8,         Way::i8,
                        Way::i8_head, Way::i8_channel, Way::i8_head_channel,
                        Way::e4m3,    Way::e4m3_head};
constexpr Way scaled_ways[] = {Way::i8,   Way::i8_head,  Way::i8_channel, Way::i8_head_channel,
                               Way::e4m3, Way::e4m3_head};

std::string name_of(Way way) {
  constexpr const char* names[] = {
      "q8_0", "u8", "i8", "i8_head", "i8_channel", "i8_head_channel", "e4m3", "e4m3_head"};
  return names[static_cast<int>(way)];
}
const Format& format_of_way(Way way) {
  if (way == Way::q8_0) return quoka::q8_0_format();
  if (way == Way::u8) return quoka::u8_format();
  if (way == Way::e4m3 || way == Way::e4m3_head) return quoka::e4m3_format();
  return way == Way::i8 || way == Way::i8_head ? quoka::i8_format() : quoka::i8_channel_format();
}
bool scaled(Way way) { return way > Way::u8; }
bool each_head(Way way) {
  return way == Way::i8_head || way == Way::i8_head_channel || way == Way::e4m3_head;
}
bool is_fp8(Way way) { return way >= Way::e4m3; }
bool each_channel(Way way) { return way == Way::i8_channel || way == Way::i8_head_channel; }

// Scales at which normal values fill the codes, and a few lie beyond them.
std::vector<float> random_scales(Random& random, Way way, Index heads, Index dim) {
  std::vector<float> scales;
  if (!scaled(way)) return scales;
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
// What is kept of x: the nearest code, of two the even one, saturated; integers have no NaN.
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

// Of a tensor [1, heads, len, dim]; by the format itself where scales are in the row.
Tensor4<float> kept(Way way, const std::vector<float>& scales, const Tensor4<float>& x) {
  Tensor4<float> values = x;
  const Index heads = x.dimension(1), len = x.dimension(2), dim = x.dimension(3);
  std::vector<std::byte> row(uz(format_of_way(way).row_bytes({dim})));
  for (Index head = 0; head < heads; ++head)
    for (Index i = 0; i < len; ++i) {
      float* const to = &values(0, head, i, 0);
      if (scaled(way)) {
        for (Index c = 0; c < dim; ++c)
          to[c] = kept(is_fp8(way), to[c], scale_at(scales, way, head, dim, c));
      } else {
        format_of_way(way).narrow(to, {dim}, row.data());
        format_of_way(way).widen(row.data(), {dim}, to);
      }
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

class EveryWay : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, EveryWay, ::testing::ValuesIn(ways),
                         [](const auto& test) { return name_of(test.param); });
class ScaledWay : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, ScaledWay, ::testing::ValuesIn(scaled_ways),
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

TEST_P(ScaledWay, KeepsTheNearestCodesOfEachHead) {
  const Way way = GetParam();
  Random random(901);
  for (const Index dim : {64, 17}) {
    const auto k_scales = random_scales(random, way, 3, dim),
               v_scales = random_scales(random, way, 3, 9);
    const auto k = random.tensor<float>(1, 3, 21, dim), v = random.tensor<float>(1, 3, 21, 9);
    KvCache cache(1, 3, dim, 9, {format_of_way(way), k_scales}, {format_of_way(way), v_scales});
    for (const auto& [begin, n] : {std::pair<Index, Index>{0, 13}, {13, 1}, {14, 7}})
      cache.append(view_of(k).slice(begin, n), view_of(v).slice(begin, n));
    const auto k_kept = kept(way, k_scales, k), v_kept = kept(way, v_scales, v);
    EXPECT_TRUE(same_values(cache.k(), k_kept));
    EXPECT_TRUE(same_values(cache.v(), v_kept));
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 21; ++i)
        EXPECT_EQ(cache.inverse_norms().at(0, head, i),
                  quoka::inverse_norm(&k_kept(0, head, i, 0), dim));
  }
}

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

// ---- a layer ------------------------------------------------------------------------------------

constexpr Index q_heads = 4, kv_heads = 2;

// The bytes of a cache in an engine's order, [len, heads, bytes of a row], with scales of its own.
class ByHand {
 public:
  ByHand(const Rows& kept, const std::vector<float>& scales, Way way)
      : scales_(scales),
        format_(kept.format()),
        sizes_(kept.sizes()),
        step_(each_head(way) ? format_.separate_scales(kept.dim()) : 0) {
    const Index bytes = format_.row_bytes({kept.dim()});
    strides_ = {0, bytes, kept.heads() * bytes};
    memory_.resize(uz(kept.heads() * kept.len() * bytes));
    for (Index head = 0; head < kept.heads(); ++head)
      for (Index i = 0; i < kept.len(); ++i)
        std::memcpy(&memory_[uz(head * strides_[1] + i * strides_[2])], kept.row(0, head, i),
                    uz(bytes));
  }
  Rows rows() const {
    const Rows all(memory_.data(), format_, sizes_, strides_);
    return scales_.empty() ? all : all.with_scales(scales_.data(), step_);
  }

 private:
  std::vector<float> scales_;
  const Format& format_;
  Rows::Sizes sizes_;
  Rows::Strides strides_;
  Index step_;
  std::vector<std::byte> memory_;
};

Way next_way(Way way) { return ways[(static_cast<std::size_t>(way) + 1) % std::size(ways)]; }

// Chunks, a step back, and a token.
template <class S>
void expect_layer(Way k_way, Way v_way, const typename S::Options& options) {
  Random random(905);
  const Index dim = 80, v_dim = 48, len = 139;
  const auto q = random.tensor<float>(1, q_heads, len, dim),
             k = random.tensor<float>(1, kv_heads, len, dim),
             v = random.tensor<float>(1, kv_heads, len, v_dim);
  auto k_scales = random_scales(random, k_way, kv_heads, dim),
       v_scales = random_scales(random, v_way, kv_heads, v_dim);
  const auto k_kept = kept(k_way, k_scales, k), v_kept = kept(v_way, v_scales, v);
  auto given_k = k_scales, given_v = v_scales;
  quoka::ChunkedPrefill<S> layer({.q_heads = q_heads,
                                  .kv_heads = kv_heads,
                                  .head_dim = dim,
                                  .v_dim = v_dim,
                                  .k_format = &format_of_way(k_way),
                                  .v_format = &format_of_way(v_way),
                                  .k_scales = given_k,
                                  .v_scales = given_v},
                                 options);
  given_k.assign(given_k.size(), 0.0f), given_v.assign(given_v.size(), 0.0f);
  layer.append(view_of(k).slice(40, 24), view_of(v).slice(40, 24));
  layer.truncate(0);
  for (const auto& [begin, n] : {std::pair<Index, Index>{0, 24}, {24, 90}, {114, 24}, {138, 1}}) {
    const auto part = [begin = begin, n = n](const Tensor4<float>& x) {
      return view_of(x).slice(begin, n);
    };
    const Rows past_k = layer.cache().k(), past_v = layer.cache().v();
    ASSERT_TRUE(same_values(past_k, k_kept));
    ASSERT_TRUE(same_values(past_v, v_kept));
    const ByHand hand_k(past_k, k_scales, k_way), hand_v(past_v, v_scales, v_way);
    Tensor4<float> out(1, q_heads, n, v_dim), by_hand = out;
    layer.forward(part(q), part(k), part(v), out);

    Selection chosen;
    typename S::State state;
    S(options).select({.q = part(q), .k = hand_k.rows(), .logits = LogitOptions{}}, state, chosen,
                      SerialExecutor{});
    EXPECT_EQ(to_positions(chosen), to_positions(layer.selection())) << begin;
    quoka::attention(part(q), {hand_k.rows(), hand_v.rows(), chosen}, {part(k), part(v)}, by_hand);
    EXPECT_TRUE(same_bits(out, by_hand)) << begin;

    const auto lists = to_positions(layer.selection());
    const auto past = [begin = begin](const Tensor4<float>& x) {
      return to_oracle(view_of(x).slice(0, begin));
    };
    const auto exact = oracle::attention(to_oracle(part(q)), past(k_kept), past(v_kept), &lists,
                                         to_oracle(part(k)), to_oracle(part(v)), {});
    EXPECT_LE(oracle::relative_error(to_oracle(out), exact.out), float_error) << begin;
  }
  EXPECT_EQ(layer.kv_len(), len);
}

TEST_P(EveryWay, ALayerIsTheOraclesOverWhatIsKept) {
  const Way way = GetParam();
  expect_layer<quoka::DenseSelector>(way, next_way(way), {});
  expect_layer<quoka::QuokaSelector>(way, next_way(way), {.budget = Budget::keys(64)});
}

}  // namespace
