// select/key_checksums.hpp: which changes of a cache a State notices, in any format and layout.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/key_checksums.hpp>
#include <quoka/rows/tensor.hpp>
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
quoka::KvCache cache_of(const quoka::Format& format, const std::vector<float>& scales,
                        const Tensor4<float>& k) {
  quoka::KvCache cache(k.dimension(0), k.dimension(1), k.dimension(3), k.dimension(3),
                       {format, scales}, {format, scales});
  cache.append(k, k);
  return cache;
}

TEST(KeyChecksums, EveryChannelOfTheNewestKeyCountsInEveryFormat) {
  Random random(601);
  const std::vector<float> none, scales{0.03f};
  for (const auto& [format, of] : {std::pair{&quoka::format_of<float>(), &none},
                                   {&quoka::format_of<Eigen::half>(), &none},
                                   {&quoka::format_of<Eigen::bfloat16>(), &none},
                                   {&quoka::q8_0_format(), &none},
                                   {&quoka::i8_format(), &scales}}) {
    SCOPED_TRACE(format->name);
    const auto k = random.tensor<float>(2, 3, 20, 64);
    const quoka::KvCache cache = cache_of(*format, *of, k);
    KeyChecksums keys = remembered(cache.k());
    for (int call = 0; call < 40; ++call) EXPECT_EQ(keys.find_changed(cache.k()), -1);
    for (Index c = 0; c < 64; ++c) {
      auto other = k;
      float& x = other(c % 2, c % 3, 19, c);
      x = x > 0.0f ? -1.7f : 1.7f;
      EXPECT_EQ(keys.find_changed(cache_of(*format, *of, other).k()), 19);
    }
  }
}

// Another scale is another key, though its bytes are the same.
TEST(KeyChecksums, ScalesThatLieApartCount) {
  Random random(602);
  const quoka::KvCache cache =
      cache_of(quoka::i8_format(), {0.03f}, random.tensor<float>(1, 2, 40, 32));
  const Rows plain(cache.k().data(), quoka::i8_format(), cache.k().sizes(), cache.k().strides());
  std::vector<float> own{0.03f, 0.03f};
  KeyChecksums keys = remembered(plain.with_scales(own.data(), 1));
  EXPECT_EQ(keys.find_changed(plain.with_scales(own.data(), 1)), -1);
  own[1] = 0.031f;
  EXPECT_EQ(keys.find_changed(plain.with_scales(own.data(), 1)), 39);
}

// Any two heads of any sequences that have changed places are other keys.
TEST(KeyChecksums, RowsOfHeadsAndSequencesAreNotInterchangeable) {
  Random random(606);
  constexpr Index batch = 3, heads = 3, len = 10;
  const auto k = random.tensor<float>(batch, heads, len, 8);
  for (Index one = 0; one < batch * heads; ++one)
    for (Index two = 0; two < one; ++two) {
      SCOPED_TRACE(std::to_string(one) + " and " + std::to_string(two));
      auto other = k;
      for (Index t = 0; t < len; ++t)
        for (Index c = 0; c < 8; ++c)
          std::swap(other(one / heads, one % heads, t, c), other(two / heads, two % heads, t, c));
      EXPECT_EQ(remembered(k).find_changed(other), len - 1);
    }
}

TEST(KeyChecksums, ACacheMayLieElsewhere) {
  Random random(603);
  const auto k = random.tensor<float>(1, 2, 100, 24);
  KeyChecksums keys = remembered(k);
  for (const StoredRows::Layout layout : StoredRows::layouts) {
    const StoredRows elsewhere(k, quoka::float_format(), layout, random);
    for (int call = 0; call < 20; ++call) EXPECT_EQ(keys.find_changed(elsewhere.rows()), -1);
  }
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
