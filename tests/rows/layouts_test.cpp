// rows/layouts.hpp: views of buffers in the orders that engines keep: each size and each error. Attention over rows of any
// strides and formats is in attention_suite_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/rows/layouts.hpp>

#include "support/fixtures.hpp"

#include <array>

namespace {

using namespace quoka_test;
using quoka::head_major, quoka::token_major, quoka::as_half, quoka::as_bfloat16, quoka::as_format;
using quoka::OutputRows, quoka::Rows;

// ---- types --------------------------------------------------------------------------------------

using Floats = std::vector<float>;
using Shorts = std::vector<std::uint16_t>;
template <class Buffer>
using ViewOf = decltype(token_major(std::declval<Buffer>(), 0, 1, 1));
static_assert(std::is_same_v<ViewOf<Floats&>, OutputRows>);
static_assert(std::is_same_v<ViewOf<const Floats&>, Rows>);
static_assert(std::is_same_v<ViewOf<std::span<const Eigen::half>>, Rows>);
static_assert(std::is_same_v<ViewOf<std::array<Eigen::bfloat16, 3>&>, OutputRows>);
static_assert(std::is_same_v<ViewOf<decltype(as_half(std::declval<Shorts&>()))>, OutputRows>);
static_assert(std::is_same_v<ViewOf<decltype(as_half(std::declval<const Shorts&>()))>, Rows>);
static_assert(std::is_same_v<ViewOf<decltype(as_half(std::span<const std::int16_t>()))>, Rows>);

// ---- where elements lie -------------------------------------------------------------------------

Floats counted(Index count) {
  Floats x(uz(count));
  for (Index i = 0; i < count; ++i) x[uz(i)] = static_cast<float>(i);
  return x;
}

// A buffer of any order, step and room, in an element type, a named half or a format of bytes; of another extent it is
// refused with both numbers.
TEST(Layouts, FindEveryRow) {
  for_each_draw(300, [](Random& random) {
    const Index batch = 1 + random.below(2), heads = 1 + random.below(3), len = 1 + random.below(7),
                dim = 1 + random.below(40), capacity = random.seldom(2) ? len + random.below(4) : 0,
                room = capacity > 0 ? capacity : len, kind = random.below(4);
    const Format* const formats[] = {&quoka::float_format(), &quoka::format_of<Eigen::half>(),
                                     &quoka::format_of<Eigen::bfloat16>(), &quoka::q8_0_format()};
    const Format& format = *formats[kind];
    const Index element = kind == 0 ? 4 : kind == 3 ? 1 : 2, row = format.row_bytes({dim});
    const bool by_token = random.seldom(2), padded = random.seldom(3);
    const Index step = (by_token ? heads * row : row) + (padded ? 4 * random.below(3) : 0),
                bytes = batch * room * step * (by_token ? 1 : heads),
                other = random.one_of(0, 0, 1, -1);
    const std::vector<float> floats(uz(std::max<Index>(bytes / 4 + other, 0)));
    const Shorts shorts(uz(std::max<Index>(bytes / 2 + other, 0)));
    const std::vector<std::uint8_t> codes(uz(bytes + other));
    const auto view = [&](const auto& buffer) {
      const quoka::BufferLayout layout{
          .batch = batch, .capacity = capacity, .step_bytes = padded ? step : 0};
      return by_token ? token_major(buffer, len, heads, dim, layout)
                      : head_major(buffer, len, heads, dim, layout);
    };
    const auto rows_of = [&] {
      return kind == 0   ? view(floats)
             : kind == 1 ? view(as_half(shorts))
             : kind == 2 ? view(as_bfloat16(shorts))
                         : view(as_format(codes, format));
    };
    if (other != 0) {
      expect_refused([&] { (void)rows_of(); },
                     {bytes / element + other, bytes / element, kind == 3 ? "bytes" : "elements"});
      return;
    }
    const Rows rows = rows_of();
    EXPECT_EQ(&rows.format(), &format);
    EXPECT_EQ(rows.sizes(), (Rows::Sizes{batch, heads, len, dim}));
    const auto* const first = kind == 0   ? reinterpret_cast<const std::byte*>(floats.data())
                              : kind == 3 ? reinterpret_cast<const std::byte*>(codes.data())
                                          : reinterpret_cast<const std::byte*>(shorts.data());
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < heads; ++head)
        for (Index i = 0; i < len; ++i)
          ASSERT_EQ(rows.row(b, head, i) - first, by_token
                                                      ? (b * room + i) * step + head * row
                                                      : ((b * heads + head) * room + i) * step);
  });
}

// Keys, then values, of each token; and all of an engine's fused queries, keys and values.
TEST(Layouts, SomeHeadsOfAFusedBufferAreAView) {
  const Floats x = counted(4 * (6 + 2 + 2) * 5);
  const auto all = token_major(x, 4, 10, 5);
  const auto q = all.some_heads(0, 6), k = all.some_heads(6, 2), v = all.some_heads(8, 2);
  EXPECT_EQ(q.heads(), 6);
  EXPECT_EQ(k.typed<float>().row(0, 1, 3)[2], (3 * 10 + 7) * 5 + 2);
  EXPECT_EQ(v.typed<float>().row(0, 0, 2)[4], (2 * 10 + 8) * 5 + 4);
  expect_refused([&] { (void)all.some_heads(9, 2); }, {"heads", 2, 1});
  expect_refused([&] { (void)all.some_heads(-1, 2); }, {"heads", -1, 0});
}

TEST(Layouts, ABufferThatIsNotConstIsAnOutput) {
  std::vector<std::uint8_t> bytes(9 * 2 * 34 * 2);  // 33 channels: two blocks
  const OutputRows out = head_major(as_format(bytes, quoka::q8_0_format()), 9, 2, 33);
  EXPECT_EQ(out.strides(), (Rows::Strides{2 * 9 * 68, 9 * 68, 68}));
}

TEST(Layouts, NothingIsAView) {
  const Floats none;
  EXPECT_TRUE(token_major(none, 0, 2, 5).empty());
  EXPECT_TRUE(head_major(std::span<const float>(), 0, 2, 5).empty());
  const Floats x = counted(70);
  EXPECT_EQ(token_major(x, 0, 2, 5, {.capacity = 7}).len(), 0);
}

// ---- errors -------------------------------------------------------------------------------------

TEST(Layouts, SizesThatCannotBeAreRefused) {
  const Floats x = counted(70);
  // A cache with room for more is said to be one.
  expect_refused([&] { (void)token_major(x, 3, 2, 5); }, {70, 30, ".capacity"});
  expect_refused([&] { (void)head_major(x, 3, 2, 5, {.capacity = 6}); }, {70, 60, "capacity"});
  expect_refused([&] { (void)token_major(x, -7, 2, 5); }, {"len", -7, 0});
  expect_refused([&] { (void)token_major(x, 7, 0, 5); }, {"heads", 0, 1});
  expect_refused([&] { (void)head_major(x, 7, 2, 0); }, {"dim", 0, 1});
  expect_refused([&] { (void)head_major(x, 7, 2, 5, {.batch = 0}); }, {"batch", 0, 1});
  expect_refused([&] { (void)token_major(x, 8, 2, 5, {.capacity = 7}); },
                 {"len", 8, "capacity", 7});
  expect_refused([&] { (void)token_major(x, 7, 2, 5, {.capacity = -1}); }, {"capacity", -1, 0});
  // Elements in place of bytes.
  expect_refused([&] { (void)token_major(x, 7, 2, 5, {.step_bytes = 10}); },
                 {"step_bytes", 10, 40});
  expect_refused([&] { (void)head_major(x, 7, 2, 5, {.step_bytes = 10}); }, {"step_bytes", 10, 20});
  expect_refused([&] { (void)token_major(x, 7, 2, 5, {.step_bytes = 42}); }, {"step_bytes", 42, 4});
  const Index huge = std::numeric_limits<Index>::max() / 4;
  expect_refused([&] { (void)token_major(x, huge, 2, 5); }, {"Index counts"});
  expect_refused([&] { (void)token_major(x, 7, huge, 5); }, {"Index counts"});
  expect_refused([&] { (void)head_major(x, 7, 2, huge + 1); }, {"Index counts"});
}

}  // namespace
