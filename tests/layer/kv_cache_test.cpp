// The cache holds what was appended, with its inverse norms, and bad input changes nothing.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/softmax_scores.hpp>

#include "support/world.hpp"
#include "support/sanitized.hpp"

#include <array>
#include <limits>
#include <memory>
#include <new>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::KvCache;

// A cache refers to its formats.
template <class F>
concept MakesACache =
    std::is_constructible_v<KvCache, Index, Index, Index, Index, F, const quoka::Format&>;
static_assert(MakesACache<const quoka::Format&> && !MakesACache<quoka::Format>);

// Against a list of rows: random appends in any format, cuts, moves and reserves, by any executor; and what is refused,
// which changes nothing.
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

// Normal numbers; at times a row of zeros, an infinity and a NaN.
Tensor4<float> odd_rows(Random& random, Index n, Index dim) {
  auto x = random.tensor<float>(2, 3, n, dim);
  if (n == 0 || random.below(3) > 0) return x;
  x.chip(random.below(n), 2).setZero();
  for (const float odd : {infinity, -infinity, not_a_number})
    x(random.below(2), random.below(3), random.below(n), random.below(dim)) = odd;
  return x;
}

// Other shapes, views of the cache's own memory, which growth frees, and lengths that there are not.
void expect_refusals(KvCache& cache, Random& random, const Part& k, const Part& v) {
  const auto refuses = [&](const auto& keys, const auto& values,
                           const std::vector<Fragment>& says) {
    expect_refused([&] { cache.check(keys, values); }, says);
    expect_refused([&] { cache.append(keys, values); }, says);
  };
  const auto tensor = [&](Index batch, Index heads, Index len, Index dim) {
    return random.tensor<float>(batch, heads, len, dim);
  };
  const auto one_k = tensor(2, 3, 1, k.dim), one_v = tensor(2, 3, 1, v.dim),
             k_new = tensor(2, 3, 3, k.dim), v_new = tensor(2, 3, 3, v.dim);
  refuses(tensor(5, 3, 1, k.dim), one_v, {"batch", 5, 2});
  refuses(tensor(2, 4, 1, k.dim), one_v, {"heads", 4, 3});
  refuses(tensor(2, 3, 1, k.dim + 1), one_v, {"dim", k.dim + 1, k.dim});
  refuses(one_k, tensor(1, 3, 1, v.dim), {"batch", 1, 2});
  refuses(one_k, tensor(2, 1, 1, v.dim), {"heads", 1, 3});
  refuses(one_k, tensor(2, 3, 1, v.dim + 8), {"dim", v.dim + 8, v.dim});
  refuses(k_new, one_v, {"len", 1, 3});
  const Index len = cache.len();
  expect_refused([&] { cache.truncate(len + 1); }, {"truncate", len + 1, len});
  expect_refused([&] { cache.truncate(-3); }, {"truncate", -3, 0});
  if (len < 3) return;
  const Rows own_k = cache.k(), own_v = cache.v();
  const auto seen_as = [&](const Rows& own, Index dim) {
    return Rows(own.data(), own.format(), {2, 3, 3, dim}, {0, 0, 0});
  };
  for (const Index begin : {Index{0}, len - 3}) {
    refuses(own_k.slice(begin, 3), v_new, {"k", "cache"});
    refuses(k_new, own_v.slice(begin, 3), {"v", "cache"});
  }
  refuses(seen_as(own_v, k.dim), v_new, {"k", "cache"});
  refuses(k_new, seen_as(own_k, v.dim), {"v", "cache"});
  refuses(Rows(reinterpret_cast<const std::byte*>(cache.inverse_norms().data()),
               quoka::float_format(), {2, 3, 3, k.dim}, {0, 0, 0}),
          v_new, {"k", "cache"});
}

TEST(Cache, IsAListOfRows) {
  quoka::ThreadPool pool(3);
  for_each_draw(60, [&](Random& random) {
    const auto part = [&] {
      Part x{every_format()[uz(random.below(written_formats))], 1 + random.below(70), {}};
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
      const auto* const at = cache->k().data();
      const bool has_room = cache->capacity() >= len + n;
      if (step == 6) {
        expect_refusals(*cache, random, k, v);
      } else if (kind == 0) {
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
        const auto keys = odd_rows(random, n, k.dim), values = odd_rows(random, n, v.dim);
        other.append(keys, values);
        cache->append(other.k(), other.v(), by);
        k.append(other.k(), true), v.append(other.v(), true);
      } else {
        const auto rows = [&](Index dim) {  // of any format, as an engine may keep them
          const Format& format = *every_format()[uz(random.below(std::ssize(every_format())))];
          return StoredRows(odd_rows(random, n, dim), format, StoredRows::layouts[random.below(3)],
                            random);
        };
        const StoredRows keys = rows(k.dim), values = rows(v.dim);
        cache->append(keys.rows(), values.rows(), by);
        k.append(keys.rows(), k.takes_bytes_of(keys.rows()));
        v.append(values.rows(), v.takes_bytes_of(values.rows()));
      }
      if (kind > 3 && has_room && len > 0) {
        EXPECT_EQ(cache->k().data(), at) << "rows were moved";
      }
      k.expect_is(cache->k()), v.expect_is(cache->v());
      for (Index head = 0; head < 6; ++head)
        for (Index i = 0; i < cache->len(); ++i) {
          std::vector<float> key(uz(k.dim));
          k.format->widen(k.rows[head][uz(i)].data(), k.shape(head % 3), key.data());
          const float norm = cache->inverse_norms().at(head / 3, head % 3, i);
          ASSERT_EQ(std::bit_cast<std::uint32_t>(norm),
                    std::bit_cast<std::uint32_t>(quoka::inverse_norm(key.data(), k.dim)));
        }
      if (has_failed()) return;
    }
  });
}

// ---- rows that grow -----------------------------------------------------------------------------

// Rows stay when an allocation for more of them fails, and as long as the shape stays. How they grow and are cut is
// tested with a cache above.
TEST(RowStore, KeepsItsRowsUntilTheShapeChanges) {
  constexpr std::array<Index, 3> shape{2, 3, 4};
  quoka::RowStore<float> rows(shape[0], shape[1], shape[2]);
  rows.resize(7);
  const auto for_each_element = [&](auto&& f) {
    for (Index i = 0; i < 2 * 3 * 7 * 4; ++i)
      f(rows.row(i / 84, i / 28 % 3, i / 4 % 7)[i % 4], static_cast<float>(i));
  };
  for_each_element([](float& x, float value) { x = value; });
  const auto expect_all = [&] {
    ASSERT_EQ(rows.len(), 7);
    for_each_element([](float x, float value) { EXPECT_EQ(x, value); });
  };
  std::vector<Index> too_many{std::numeric_limits<Index>::max() / 2};
#if !defined(QUOKA_TEST_SANITIZED)
  too_many.push_back(Index{1} << 50);
#endif
  for (const Index many : too_many) {
    const Index capacity = rows.capacity();
    EXPECT_THROW(rows.reserve(many), std::bad_alloc);
    EXPECT_EQ(rows.capacity(), capacity);
    expect_all();
  }
  const Index before = rows.capacity();
  rows.grow(before + 1);
  EXPECT_GE(rows.capacity(), 2 * before);
  rows.grow(5, 100);
  EXPECT_EQ(rows.capacity(), 100);
  rows.truncate(9);  // adds no rows
  rows.reshape(shape[0], shape[1], shape[2]);
  expect_all();
  for (std::size_t axis = 0; axis < 3; ++axis) {
    auto other = shape;
    ++other[axis];
    rows.resize(5);
    rows.reshape(other[0], other[1], other[2]);
    EXPECT_TRUE(rows.len() == 0 && rows.capacity() == 0);
    EXPECT_EQ((std::array{rows.batch(), rows.heads(), rows.dim()}), other);
    rows.reshape(shape[0], shape[1], shape[2]);
  }
  quoka::RowStore<float> beyond_index(Index{1} << 40, Index{1} << 40, 1);
  EXPECT_THROW(beyond_index.resize(1), std::bad_alloc);
  EXPECT_EQ(beyond_index.len(), 0);
  quoka::RowStore<float> none;
  none.resize(5);
  EXPECT_TRUE(none.len() == 5 && none.dim() == 0);
}

// ---- refused ------------------------------------------------------------------------------------

TEST(CacheSizes, BelowOneAreRefused) {
  expect_refused([] { KvCache(0, 3, 17, 9); }, {"batch", 0, 1});
  expect_refused([] { KvCache(2, -3, 17, 9); }, {"kv_heads", -3, 1});
  expect_refused([] { KvCache(2, 3, 0, 9); }, {"head_dim", 0, 1});
  expect_refused([] { KvCache(2, 3, 17, 0); }, {"dim", 0, 1});
}

}  // namespace
