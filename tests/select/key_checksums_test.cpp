// select/key_checksums.hpp: which changes of a cache a State notices, in any format and layout.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/select/key_checksums.hpp>
#include <quoka/select/quoka.hpp>

#include "support/world.hpp"

#include <algorithm>
#include <string>

namespace {

using namespace quoka_test;
using quoka::detail::KeyChecksums;

KeyChecksums remembered(const Rows& rows) {
  KeyChecksums keys;
  keys.remember(rows, 0, rows.len());
  return keys;
}

// Nothing has changed in rows that lie elsewhere. Every channel of every row of the newest key counts, in every format,
// and rows that have changed places are other rows.
TEST(KeyChecksums, AnyChangeOfTheNewestKeyIsNoticed) {
  for_each_draw("FUZZ", 200, [](Random& random, std::uint64_t) {
    const Index batch = 1 + random.below(3), heads = 1 + random.below(3),
                len = 1 + random.below(20), dim = random.one_of(64, 1, 8, 31, 33),
                b = random.below(batch), head = random.below(heads), last = len - 1;
    const Format& format = *every_format()[uz(random.below(written_formats))];
    const auto layout = [&] { return StoredRows::layouts[random.below(batch > 1 ? 3 : 6)]; };
    const auto floats = random.tensor<float>(batch, heads, len, dim);
    const StoredRows k(floats, format, layout(), random);
    StoredRows other(k, layout(), random);
    KeyChecksums keys = remembered(k.rows());
    for (int call = 0; call < 20; ++call) EXPECT_EQ(keys.find_changed(other.rows()), -1);
    if (random.seldom(3) && batch * heads > 1 && dim > 1) {
      auto swapped = floats;
      const Index one = b * heads + head,
                  two = (one + 1 + random.below(batch * heads - 1)) % (batch * heads);
      for (Index c = 0; c < dim; ++c)
        std::swap(swapped(b, head, last, c), swapped(two / heads, two % heads, last, c));
      other = StoredRows(swapped, format, layout(), random);
    } else {
      const Index c = random.below(dim);
      other.set(b, head, last, c, other.floats()(b, head, last, c) > 0.0f ? -1.7f : 1.7f);
    }
    SCOPED_TRACE(format.name);
    EXPECT_EQ(keys.find_changed(other.rows()), last);
  });
}

// Another scale is another key, though its bytes are the same.
TEST(KeyChecksums, ScalesThatLieApartCount) {
  Random random(602);
  const StoredRows k(random.tensor<float>(1, 2, 40, 32), quoka::i8_format());
  const Rows plain(k.rows().data(), quoka::i8_format(), k.rows().sizes(), k.rows().strides());
  std::vector<float> own{0.03f, 0.03f};
  KeyChecksums keys = remembered(plain.with_scales(own.data(), 1));
  EXPECT_EQ(keys.find_changed(plain.with_scales(own.data(), 1)), -1);
  own[1] = 0.031f;
  EXPECT_EQ(keys.find_changed(plain.with_scales(own.data(), 1)), 39);
}

// A run of a tenth of the keys, wherever it lies, is found once each of the others has been compared.
TEST(KeyChecksums, ARunOfKeysIsFoundInTurn) {
  Random random(604);
  const auto k = random.tensor<float>(1, 2, 1000, 8);
  for (Index begin = 0; begin <= 900; begin += 50) {
    auto other = k;
    for (Index t = begin; t < begin + 100; ++t) other(0, 1, t, 3) += 1.0f;
    KeyChecksums keys = remembered(k);
    Index changed = -1;
    for (int call = 0; call < 16 && changed < 0; ++call) changed = keys.find_changed(other);
    EXPECT_GE(changed, begin);
    EXPECT_LT(changed, begin + 100);
  }
}

// As keys come others are remembered: in the end some of those that came last.
TEST(KeyChecksums, FollowAGrowingCacheAndACut) {
  Random random(605);
  const auto k = random.tensor<float>(1, 1, 400, 8), other = random.tensor<float>(1, 1, 400, 8);
  KeyChecksums keys;
  for (Index len = 1; len <= 400; ++len) {
    keys.remember(Rows(k).slice(0, len), len - 1, len);
    EXPECT_EQ(keys.find_changed(Rows(k).slice(0, len)), -1);
  }
  auto late = k;
  for (Index t = 200; t < 399; ++t) late.chip(t, 2) = other.chip(t, 2);
  int found = 0;
  for (int call = 0; call < 16; ++call) found += keys.find_changed(late) >= 0;
  EXPECT_GT(found, 4) << "of 16 keys, about half of which have changed";
  KeyChecksums cut = remembered(k);
  cut.truncate(399);
  late = k, late.chip(399, 2) = other.chip(399, 2);
  for (int call = 0; call < 16; ++call) EXPECT_EQ(cut.find_changed(late), -1);
  // Without new keys nothing is remembered.
  keys.remember(other, 400, 400);
  EXPECT_EQ(keys.find_changed(k), -1);
  // A longer cache that begins with the same keys: nothing has changed.
  EXPECT_EQ(keys.find_changed(k), -1);
  // After a cut one call compares all remembered keys that are left, whether the newest is among them or not.
  keys.truncate(300);
  EXPECT_EQ(keys.find_changed(k), -1);
  EXPECT_GE(keys.find_changed(Rows(other).slice(0, 300)), 0);
  keys.remember(other, 300, 400);
  EXPECT_EQ(keys.find_changed(k), 399);
  keys.truncate(0);
  EXPECT_EQ(keys.find_changed(other), -1);
}

// Each append replaces one of the 16 others that are remembered: the rest still stand for earlier calls.
TEST(KeyChecksums, AnAppendReplacesOneOfThem) {
  Random random(607);
  const auto k = random.tensor<float>(1, 1, 1001, 8), other = random.tensor<float>(1, 1, 1001, 8);
  KeyChecksums keys = remembered(Rows(k).slice(0, 1000));
  keys.remember(other, 1000, 1001);
  int found = 0;
  for (int call = 0; call < 16; ++call) found += keys.find_changed(other) >= 0;
  EXPECT_EQ(found, 15);
}

// Two conversations whose first 200 tokens are the same. The second one is longer: its newest key stands where a State
// has none of the first, so the State compares what it has before it remembers more.
TEST(KeyChecksums, AStateRefusesALongerConversationWhenItIsAppended) {
  Random random(607);
  const auto a = random.tensor<float>(1, 2, 300, 16);
  auto b = random.tensor<float>(1, 2, 400, 16);
  for (Index head = 0; head < 2; ++head)
    for (Index t = 0; t < 200; ++t)
      for (Index c = 0; c < 16; ++c) b(0, head, t, c) = a(0, head, t, c);
  const quoka::QuokaSelector selector(
      {.budget = quoka::Budget::keys(20), .sketch = quoka::Sketch::on});
  const auto append = [&](quoka::QuokaSelector::State& state, const Rows& k) {
    selector.appended({.q = {}, .k = k}, state, SerialExecutor{});
  };
  quoka::QuokaSelector::State state;
  append(state, a);
  expect_refused([&] { append(state, b); }, {"key at position", 299, 300, "truncate(0)"});
  append(state, a);  // nothing has changed
  // The first one was cut, and more of it is left than the second one has in common with it.
  state.truncate(280);
  expect_refused([&] { append(state, b); }, {"key at position", 280, "truncate(0)"});
  state.truncate(200);
  append(state, b);
}

}  // namespace
