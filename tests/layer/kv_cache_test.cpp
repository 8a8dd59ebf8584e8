// The cache holds what was appended, with its inverse norms, and bad input changes nothing.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/query_scores.hpp>

#include "support/attention_case.hpp"
#include "support/sanitized.hpp"

#include <array>
#include <limits>
#include <memory>
#include <new>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::KvCache;
using quoka::view_of;

constexpr Index batch = 2, kv_heads = 3, key_dim = 17, value_dim = 9;

// A cache refers to its formats.
template <class F>
concept MakesACache =
    std::is_constructible_v<KvCache, Index, Index, Index, Index, F, const quoka::Format&>;
static_assert(MakesACache<const quoka::Format&> && !MakesACache<quoka::Format>);

template <class T>
struct OneCache {
  Tensor4<T> keys(Random& random, Index n) { return random.tensor<T>(batch, kv_heads, n, key_dim); }
  Tensor4<T> values(Random& random, Index n) {
    return random.tensor<T>(batch, kv_heads, n, value_dim);
  }
  KvCache cache{batch, kv_heads, key_dim, value_dim, quoka::format_of<T>(), quoka::format_of<T>()};
};

// The cache holds the first cache.len() rows of k and v, and the inverse norm of each key, bit for
// bit.
template <class T>
void expect_holds(const KvCache& cache, const Tensor4<T>& k, const Tensor4<T>& v) {
  EXPECT_TRUE(same_bits(cache.k().typed<T>(), view_of(k).slice(0, cache.len())));
  EXPECT_TRUE(same_bits(cache.v().typed<T>(), view_of(v).slice(0, cache.len())));
  const auto norms = cache.inverse_norms();
  quoka::RowReader floats;
  ASSERT_EQ(norms.sizes(), (std::array<Index, 3>{k.dimension(0), k.dimension(1), cache.len()}));
  for (Index b = 0; b < k.dimension(0); ++b)
    for (Index head = 0; head < k.dimension(1); ++head)
      for (Index i = 0; i < cache.len(); ++i) {
        const float* const key = floats.read(Rows(k), b, head, i);
        const float expected = quoka::inverse_norm(key, k.dimension(3));
        ASSERT_EQ(std::bit_cast<std::uint32_t>(norms.at(b, head, i)),
                  std::bit_cast<std::uint32_t>(expected));
      }
}

// Against a list of rows: random appends in any format, cuts, moves and reserves, by any executor.
struct Part {  // the keys, or the values
  const quoka::Format* format;
  Index dim;
  std::vector<float> scales;  // of each head, where the format has some apart
  std::vector<std::vector<std::byte>> rows[6] = {};  // of each (batch, head)

  quoka::RowShape shape(Index head) const {
    return {dim, 0, scales.empty() ? nullptr : scales.data() + head * format->separate_scales(dim)};
  }
  // Rows of the same format with the same scales, or with none.
  bool takes_bytes_of(const Rows& x) const { return &x.format() == format && scales.empty(); }
  void append(const Rows& x, bool same_bytes = false) {
    for (Index i = 0; i < 6 * x.len(); ++i) {
      const Index head = i / x.len();
      std::vector<float> values(uz(dim));
      std::vector<std::byte> row(uz(format->row_bytes({dim})));
      x.format().widen(x.row(head / 3, head % 3, i % x.len()), x.shape(head % 3), values.data());
      format->narrow(values.data(), shape(head % 3), row.data());
      if (same_bytes) std::copy_n(x.row(head / 3, head % 3, i % x.len()), row.size(), row.data());
      rows[head].push_back(row);
    }
  }
  void expect_is(const Rows& x) const {
    ASSERT_EQ(x.sizes(), (std::array<Index, 4>{2, 3, std::ssize(rows[0]), dim}));
    for (Index head = 0; head < 6; ++head)
      for (Index i = 0; i < x.len(); ++i) {
        const auto& row = rows[head][uz(i)];
        ASSERT_EQ(std::memcmp(x.row(head / 3, head % 3, i), row.data(), row.size()), 0) << i;
      }
  }
};

TEST(Cache, IsAListOfRows) {
  const quoka::Format* const formats[] = {&quoka::float_format(),
                                          &quoka::format_of<Eigen::half>(),
                                          &quoka::format_of<Eigen::bfloat16>(),
                                          &quoka::q8_0_format(),
                                          &quoka::u8_format(),
                                          &quoka::i8_format(),
                                          &quoka::i8_channel_format(),
                                          &quoka::e4m3_format(),
                                          &quoka::channel_major_format<float>(),
                                          &quoka::channel_major_format<Eigen::half>(),
                                          &quoka::channel_major_format<Eigen::bfloat16>()};
  using enum StoredRows::Layout;
  constexpr StoredRows::Layout layouts[] = {dense, side_by_side, padded};
  quoka::ThreadPool pool(3);
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const auto part = [&] {
      Part x{formats[random.below(8)], 1 + random.below(70), {}};
      for (Index i = 3 * x.format->separate_scales(x.dim); i > 0; --i)
        x.scales.push_back(static_cast<float>(0.02 + 0.02 * random.uniform()));
      return x;
    };
    Part k = part(), v = part();
    auto k_scales = k.scales, v_scales = v.scales;
    auto cache =
        std::make_unique<KvCache>(2, 3, k.dim, v.dim, quoka::CacheFormat{*k.format, k_scales},
                                  quoka::CacheFormat{*v.format, v_scales});
    EXPECT_EQ(cache->len() + cache->capacity(), 0);
    k_scales.assign(k_scales.size(), 77.0f), v_scales.assign(v_scales.size(), 77.0f);  // copied
    for (int step = 0; step < 12; ++step) {
      const ExecutorRef by = random.below(2) == 0 ? ExecutorRef(pool) : SerialExecutor{};
      const Index len = cache->len(), kind = random.below(8),
                  n = random.below(random.below(4) == 0 ? 90 : 4);
      if (kind == 0) {
        const Index to = random.below(len + 1);
        cache->truncate(to);
        for (Index head = 0; head < 6; ++head)
          k.rows[head].resize(uz(to)), v.rows[head].resize(uz(to));
      } else if (kind == 1) {
        const Index before = cache->capacity(), room = random.below(300);
        cache->reserve(room);
        EXPECT_EQ(cache->capacity(), std::max(before, room));
      } else if (kind == 2) {
        cache = std::make_unique<KvCache>(std::move(*cache));
      } else if (kind == 3) {
        const Index before = cache->capacity();
        cache->grow(before + random.below(2));
        EXPECT_TRUE(cache->capacity() == before || cache->capacity() >= 2 * before);
      } else if (kind == 4) {  // of another cache, to the byte
        KvCache other(2, 3, k.dim, v.dim, {*k.format, k.scales}, {*v.format, v.scales});
        const auto keys = random.tensor<float>(2, 3, n, k.dim),
                   values = random.tensor<float>(2, 3, n, v.dim);
        other.append(keys, values);
        cache->append(other.k(), other.v(), by);
        k.append(other.k(), true), v.append(other.v(), true);
      } else if (kind == 5) {
        const Strided<float> keys(random.tensor<float>(2, 3, n, k.dim)),
            values(random.tensor<float>(2, 3, n, v.dim));
        cache->append(keys.view(), values.view(), by);
        k.append(keys.view()), v.append(values.view());
      } else {
        const auto rows = [&](Index dim) {  // of any format, as an engine may keep them
          const StoredRows x(random.tensor<float>(2, 3, n, dim), *formats[random.below(11)]);
          return StoredRows(x, layouts[random.below(3)], random);
        };
        const StoredRows keys = rows(k.dim), values = rows(v.dim);
        cache->append(keys.rows(), values.rows(), by);
        k.append(keys.rows(), k.takes_bytes_of(keys.rows()));
        v.append(values.rows(), v.takes_bytes_of(values.rows()));
      }
      k.expect_is(cache->k()), v.expect_is(cache->v());
      for (Index head = 0; head < 6; ++head)
        for (Index i = 0; i < cache->len(); ++i) {
          std::vector<float> key(uz(k.dim));
          k.format->widen(k.rows[head][uz(i)].data(), k.shape(head % 3), key.data());
          ASSERT_EQ(cache->inverse_norms().at(head / 3, head % 3, i),
                    quoka::inverse_norm(key.data(), k.dim));
        }
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(Cache, ReservedRoomIsNotMoved) {
  OneCache<Element> one;
  Random random(54);
  const auto k = one.keys(random, 127);
  const auto v = one.values(random, 127);
  one.cache.reserve(127);
  EXPECT_EQ(one.cache.capacity(), 127);
  const auto* at = one.cache.k().data();
  for (Index i = 0; i < 127; ++i) one.cache.append(view_of(k).slice(i, 1), view_of(v).slice(i, 1));
  EXPECT_EQ(one.cache.k().data(), at);
  EXPECT_EQ(one.cache.capacity(), 127);
  expect_holds(one.cache, k, v);
}

TEST(Cache, HoldsZeroInfiniteAndNanKeys) {
  for_each_storage([]<class T>() {
    OneCache<T> one;
    Random random(60);
    auto k = one.keys(random, 3);
    const auto v = one.values(random, 3);
    for (Index c = 0; c < key_dim; ++c) k(0, 0, 0, c) = stored<T>(0.0);
    k(0, 0, 1, 16) = stored<T>(infinity);
    k(1, 2, 2, 0) = stored<T>(std::nan(""));
    one.cache.append(k, v);
    expect_holds(one.cache, k, v);
    EXPECT_EQ(one.cache.inverse_norms().at(0, 0, 0), 0.0f);
    EXPECT_EQ(one.cache.inverse_norms().at(0, 0, 1), 0.0f);
    EXPECT_TRUE(std::isnan(one.cache.inverse_norms().at(1, 2, 2)));
  });
}

// ---- rows that grow -----------------------------------------------------------------------------

TEST(RowStore, GrowsByDoublingAndKeepsTheRowsOfEveryHead) {
  quoka::RowStore<float> rows(2, 3, 4);
  Index grown = 0;
  for (Index len = 1; len <= 1000; ++len) {
    const Index before = rows.capacity();
    rows.resize(len);
    grown += rows.capacity() != before;
    for (Index b = 0; b < 2; ++b)
      for (Index head = 0; head < 3; ++head)
        rows.row(b, head, len - 1)[3] = static_cast<float>((b * 3 + head) * 1000 + len);
  }
  EXPECT_LE(grown, 11);
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 1000; ++i)
        ASSERT_EQ(rows.row(b, head, i)[3], static_cast<float>((b * 3 + head) * 1000 + i + 1));
}

TEST(RowStore, ForgetsAllInAnotherShape) {
  for (const std::array<Index, 3>& other :
       {std::array<Index, 3>{1, 3, 4}, std::array<Index, 3>{2, 1, 4},
        std::array<Index, 3>{2, 3, 5}}) {
    quoka::RowStore<float> rows(2, 3, 4);
    rows.resize(7);
    rows.reshape(2, 3, 4);
    EXPECT_EQ(rows.len(), 7);
    rows.reshape(other[0], other[1], other[2]);
    EXPECT_EQ(rows.len(), 0);
    EXPECT_EQ(rows.capacity(), 0);
    EXPECT_EQ(rows.batch(), other[0]);
    EXPECT_EQ(rows.heads(), other[1]);
    EXPECT_EQ(rows.dim(), other[2]);
  }
}

TEST(RowStore, OfNoShapeHasRoomForRowsOfNothing) {
  quoka::RowStore<float> rows;
  rows.resize(5);
  EXPECT_EQ(rows.len(), 5);
  EXPECT_EQ(rows.dim(), 0);
}

// More elements than there is memory for, or than an Index counts.
TEST(RowStore, IsAsItWasWhenMemoryRunsOut) {
  std::vector<Index> counts{std::numeric_limits<Index>::max() / 2};
#if !defined(QUOKA_TEST_SANITIZED)
  counts.push_back(Index{1} << 50);
#endif
  for (const Index count : counts) {
    quoka::RowStore<float> rows(2, 3, 4);
    rows.resize(2);
    rows.row(1, 2, 1)[3] = 5.0f;
    EXPECT_THROW(rows.reserve(count), std::bad_alloc);
    EXPECT_EQ(rows.len(), 2);
    EXPECT_EQ(rows.capacity(), 2);
    EXPECT_EQ(rows.row(1, 2, 1)[3], 5.0f);
  }
}

// ---- refused ------------------------------------------------------------------------------------

TEST(RowStore, TruncateAddsNoRows) {
  quoka::RowStore<float> rows(1, 1, 4);
  rows.resize(3);
  rows.truncate(5);
  EXPECT_EQ(rows.len(), 3);
  rows.truncate(2);
  EXPECT_EQ(rows.len(), 2);
}

TEST(CacheSizes, BelowOneAreRefused) {
  expect_refused([] { KvCache(0, 3, 17, 9); }, {"batch", 0, 1});
  expect_refused([] { KvCache(2, -3, 17, 9); }, {"kv_heads", -3, 1});
  expect_refused([] { KvCache(2, 3, 0, 9); }, {"head_dim", 0, 1});
  expect_refused([] { KvCache(2, 3, 17, 0); }, {"dim", 0, 1});
}

TEST(Cache, RefusesOtherShapesAndStaysAsItWas) {
  OneCache<Element> one;
  Random random(62);
  const auto k = one.keys(random, 7);
  const auto v = one.values(random, 7);
  one.cache.append(k, v);
  const auto refuses = [&](std::array<Index, 4> k_sizes, std::array<Index, 4> v_sizes,
                           std::initializer_list<Fragment> both) {
    const auto tensor = [&](const auto& s) {
      return random.tensor<Element>(s[0], s[1], s[2], s[3]);
    };
    const auto k_bad = tensor(k_sizes);
    const auto v_bad = tensor(v_sizes);
    expect_refused([&] { one.cache.append(k_bad, v_bad); }, both);
    expect_refused([&] { one.cache.check(k_bad, v_bad); }, both);
    EXPECT_EQ(one.cache.len(), 7);
    expect_holds(one.cache, k, v);
  };
  refuses({5, 3, 1, 17}, {2, 3, 1, 9}, {"batch", 5, 2});
  refuses({2, 4, 1, 17}, {2, 3, 1, 9}, {"heads", 4, 3});
  refuses({2, 3, 1, 16}, {2, 3, 1, 9}, {"dim", 16, 17});
  refuses({2, 3, 1, 17}, {1, 3, 1, 9}, {"batch", 1, 2});
  refuses({2, 3, 1, 17}, {2, 1, 1, 9}, {"heads", 1, 3});
  refuses({2, 3, 1, 17}, {2, 3, 1, 17}, {"dim", 17, 9});
  refuses({2, 3, 4, 17}, {2, 3, 5, 9}, {"len", 5, 4});
}

// Views of the cache's own memory, which growth frees: as keys, as values, in part or another way
// round. Room for them changes nothing.
TEST(Cache, RefusesViewsOfItsOwnMemoryAndStaysAsItWas) {
  OneCache<Element> one;
  Random random(65);
  const auto k = one.keys(random, 37);
  const auto v = one.values(random, 37);
  const auto k_new = one.keys(random, 3);
  const auto v_new = one.values(random, 3);
  const auto refuses = [&](const Rows& own_k, const Rows& own_v, const char* what) {
    expect_refused([&] { one.cache.check(own_k, own_v); }, {what, "cache"});
    expect_refused([&] { one.cache.append(own_k, own_v); }, {what, "cache"});
    EXPECT_EQ(one.cache.len(), 37);
    expect_holds(one.cache, k, v);
  };
  one.cache.append(k, v);
  for (Index capacity : {37, 100}) {
    one.cache.reserve(capacity);
    const Rows own_k = one.cache.k(), own_v = one.cache.v();
    for (Index begin : {0, 7, 34}) {
      refuses(own_k.slice(begin, 3), v_new, "k");
      refuses(k_new, own_v.slice(begin, 3), "v");
    }
    const Rows keys_of_values(own_v.data(), own_v.format(), {batch, kv_heads, 3, key_dim},
                              {0, 0, 0});
    refuses(keys_of_values, v_new, "k");
    const Rows values_of_keys(own_k.data(), own_k.format(), {batch, kv_heads, 3, value_dim},
                              own_k.strides());
    refuses(k_new, values_of_keys, "v");
    const auto norms = one.cache.inverse_norms();
    const Rows keys_of_norms(reinterpret_cast<const std::byte*>(norms.data()),
                             quoka::float_format(), {batch, kv_heads, 3, key_dim}, {0, 0, 0});
    refuses(keys_of_norms, v_new, "k");
  }
  one.cache.append(k_new, v_new);
  EXPECT_EQ(one.cache.len(), 40);
}

TEST(Cache, TruncateRefusesBeyondItsLengthAndBelowZero) {
  OneCache<Element> one;
  Random random(63);
  const auto k = one.keys(random, 7);
  const auto v = one.values(random, 7);
  one.cache.append(k, v);
  expect_refused([&] { one.cache.truncate(8); }, {"truncate", 8, 7});
  expect_refused([&] { one.cache.truncate(-3); }, {"truncate", -3, 0});
  EXPECT_EQ(one.cache.len(), 7);
  expect_holds(one.cache, k, v);
}

// ---- a layer's own cache ------------------------------------------------------------------------

// A layer with 37 tokens in its cache and a chunk of 3 that fits.
class OwnCache : public ::testing::Test {
 protected:
  OwnCache() {
    layer.append(k, k);
    own = layer.cache().k();
  }
  void expect_unchanged() {
    EXPECT_EQ(layer.kv_len(), 37);
    EXPECT_EQ(layer.cache().k().data(), own.data()) << "the cache has grown";
    EXPECT_TRUE(same_bits(layer.cache().k(), Rows(k)));
    EXPECT_TRUE(same_bits(layer.cache().v(), Rows(k)));
  }

  Random random{69};
  Tensor4<float> k = random.tensor<float>(1, 2, 37, 16), chunk = random.tensor<float>(1, 2, 3, 16),
                 out = random.tensor<float>(1, 2, 3, 16);
  quoka::ChunkedPrefill<quoka::DenseSelector> layer{{.q_heads = 2, .kv_heads = 2, .head_dim = 16}};
  Rows own;
};

TEST_F(OwnCache, IsRefusedByForwardAndPrefillAsAnyOfTheirTensors) {
  const Rows part = own.slice(34, 3);
  const quoka::OutputRows into(const_cast<std::byte*>(part.data()), part.format(), part.sizes(),
                               part.strides());
  const auto forward = [&](auto&... tensors) { layer.forward(tensors...); };
  const auto prefill = [&](auto&... tensors) { layer.prefill(tensors..., 2); };
  const auto refused_by = [&](const auto& run) {
    expect_refused([&] { run(part, chunk, chunk, out); }, {"q", "cache"});
    expect_refused([&] { run(chunk, part, chunk, out); }, {"k", "cache"});
    expect_refused([&] { run(chunk, chunk, part, out); }, {"v", "cache"});
    expect_refused([&] { run(chunk, chunk, chunk, into); }, {"out", "cache"});
    expect_unchanged();
  };
  refused_by(forward);
  refused_by(prefill);
}

TEST_F(OwnCache, IsRefusedByAppendAsAnyOfItsTensors) {
  const Rows part = own.slice(34, 3);
  expect_refused([&] { layer.append(part, chunk, chunk); }, {"q", "cache"});
  expect_refused([&] { layer.append(chunk, part, chunk); }, {"k", "cache"});
  expect_refused([&] { layer.append(part, chunk); }, {"k", "cache"});
  expect_refused([&] { layer.append(chunk, part); }, {"v", "cache"});
  expect_unchanged();
}

}  // namespace
