// rows/layouts.hpp: views of buffers in the orders that engines keep: each size and each error. Attention over rows of any
// strides and formats is in attention_suite_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/rows/layouts.hpp>

#include "support/fixtures.hpp"

#include <array>
#include <cstring>

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

TEST(Layouts, FindEveryElement) {
  const Floats x = counted(2 * 11 * 3 * 5);
  const auto tokens = token_major(x, 7, 3, 5, {.batch = 2, .capacity = 11}).typed<float>(),
             heads = head_major(x, 7, 3, 5, {.batch = 2, .capacity = 11}).typed<float>();
  EXPECT_EQ(tokens.sizes(), (std::array<Index, 4>{2, 3, 7, 5}));
  EXPECT_EQ(heads.sizes(), tokens.sizes());
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 7; ++i)
        for (Index c = 0; c < 5; ++c) {
          EXPECT_EQ(tokens.row(b, head, i)[c],
                    static_cast<float>(((b * 11 + i) * 3 + head) * 5 + c));
          EXPECT_EQ(heads.row(b, head, i)[c],
                    static_cast<float>(((b * 3 + head) * 11 + i) * 5 + c));
        }
}

TEST(Layouts, APaddedStepIsFollowed) {
  const Floats x = counted(7 * 20);
  const auto tokens = token_major(x, 7, 3, 5, {.step_bytes = 80}).typed<float>();
  EXPECT_EQ(tokens.row(0, 2, 6)[4], 6 * 20 + 2 * 5 + 4);
  const auto heads = head_major(x, 5, 4, 5, {.capacity = 5, .step_bytes = 28}).typed<float>();
  EXPECT_EQ(heads.row(0, 3, 4)[4], (3 * 5 + 4) * 7 + 4);
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

TEST(Layouts, NamedHalvesAreTheRowsOfTheirFormat) {
  Random random(3);
  const auto half = random.tensor<Eigen::half>(1, 7, 2, 5);
  Shorts bits(uz(half.size()));
  std::memcpy(bits.data(), half.data(), bits.size() * 2);
  const Rows rows = token_major(as_half(bits), 7, 2, 5);
  EXPECT_EQ(&rows.format(), &quoka::format_of<Eigen::half>());
  const auto typed = rows.typed<Eigen::half>();
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 7; ++i)
      for (Index c = 0; c < 5; ++c) EXPECT_EQ(typed.row(0, head, i)[c], half(0, i, head, c));
  EXPECT_EQ(&Rows(head_major(as_bfloat16(bits), 7, 2, 5)).format(),
            &quoka::format_of<Eigen::bfloat16>());
}

TEST(Layouts, ABufferOfBytesHasTheRowsOfItsFormat) {
  std::vector<std::uint8_t> bytes(9 * 2 * 34 * 2);  // 33 channels: two blocks
  const Rows rows = token_major(as_format(bytes, quoka::q8_0_format()), 7, 2, 33, {.capacity = 9});
  EXPECT_EQ(rows.strides(), (Rows::Strides{9 * 136, 68, 136}));
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

TEST(Layouts, AnotherExtentIsRefusedWithBothNumbers) {
  const Floats x = counted(7 * 2 * 5);
  const Shorts h(7 * 2 * 5);
  const std::vector<std::byte> q8(7 * 2 * 34);
  for (const Index len : {6, 8}) {
    const Index wanted = len * 2 * 5;
    expect_refused([&] { (void)token_major(x, len, 2, 5); }, {70, wanted, "elements"});
    expect_refused([&] { (void)head_major(x, len, 2, 5); }, {70, wanted, "elements"});
    expect_refused([&] { (void)token_major(as_half(h), len, 2, 5); }, {70, wanted, "elements"});
    expect_refused([&] { (void)head_major(as_bfloat16(h), len, 2, 5); }, {70, wanted, "elements"});
    expect_refused([&] { (void)token_major(as_format(q8, quoka::q8_0_format()), len, 2, 32); },
                   {476, len * 68, "bytes"});
  }
  // A cache with room for more is said to be one.
  expect_refused([&] { (void)token_major(x, 3, 2, 5); }, {70, 30, ".capacity"});
  (void)token_major(x, 3, 2, 5, {.capacity = 7});
  expect_refused([&] { (void)head_major(x, 3, 2, 5, {.capacity = 6}); }, {70, 60, "capacity"});
  expect_refused([&] { (void)token_major(x, 7, 2, 5, {.batch = 2}); }, {70, 140});
  expect_refused([&] { (void)token_major(x, 7, 2, 5, {.step_bytes = 48}); }, {70, 84});
}

TEST(Layouts, SizesThatCannotBeAreRefused) {
  const Floats x = counted(70);
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
