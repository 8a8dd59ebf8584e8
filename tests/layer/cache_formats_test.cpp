// A cache whose formats keep scales apart: the scales' source, bytes that are taken as they are, and refused scales. What a
// cache holds of any rows is in kv_cache_test.cpp, how a value is rounded in byte_formats_test.cpp, a layer over such
// caches in prefill_suite_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/kv_cache.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::Format;
using quoka::KvCache;

TEST(Formats, SayHowManyScalesAHeadHas) {
  EXPECT_EQ(quoka::i8_format().separate_scales(17), 1);
  EXPECT_EQ(quoka::e4m3_format().separate_scales(17), 1);
  EXPECT_EQ(quoka::i8_channel_format().separate_scales(17), 17);
  for (const Format* const format :
       {&quoka::q8_0_format(), &quoka::u8_format(), &quoka::float_format(),
        &quoka::format_of<Eigen::half>(), &quoka::channel_major_format<float>()})
    EXPECT_EQ(format->separate_scales(17), 0) << format->name;
}

// ---- rows of the same format --------------------------------------------------------------------

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
  spaced.row_bytes = [](const quoka::RowShape& shape) {
    return (shape.dim - 1) * std::max<Index>(1, shape.channel_step) + 1;
  };
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

// Of keys and of values, three heads of 8 channels.
void expect_refused_scales(const Format& format, const std::vector<float>& scales,
                           const std::vector<Fragment>& says) {
  const quoka::CacheFormat wrong{format, scales}, plain{quoka::float_format()};
  for (const bool of_values : {false, true}) {
    std::vector<Fragment> all = says;
    all.emplace_back(of_values ? "v's scale" : "k's scale");
    expect_refused(
        [&] { KvCache(1, 3, 8, 8, of_values ? plain : wrong, of_values ? wrong : plain); }, all);
  }
}

TEST(Scales, OfAnotherNumberAreRefused) {
  const struct {
    const Format& format;
    std::size_t count;
    std::vector<Fragment> says;
  } table[] = {{quoka::i8_format(), 2, {"i8", 2, 1, 3}},
               {quoka::i8_format(), 4, {"i8", 4, 1, 3}},
               {quoka::i8_channel_format(), 5, {"i8_channel", 5, 8, 24}},
               {quoka::i8_channel_format(), 25, {"i8_channel", 25, 8, 24}},
               {quoka::q8_0_format(), 1, {"q8_0", 1, 0}},
               {quoka::float_format(), 3, {3, 0}}};
  for (const auto& [format, count, says] : table)
    expect_refused_scales(format, std::vector<float>(count, 1.0f), says);
}

TEST(Scales, ThatAreNegativeOrNotFiniteAreRefused) {
  for (const float bad : {-0.25f, -1e-45f, infinity, -infinity, not_a_number})
    for (const Index at : {0, 7}) {
      std::vector<float> scales(8, 0.5f);
      scales[uz(at)] = bad;
      char as[32];
      std::snprintf(as, sizeof as, "%g", double{bad});
      expect_refused_scales(quoka::i8_channel_format(), scales, {at, as});
    }
}

}  // namespace
