// A sketch of the engine's cache: pages, lists and changes of their rows, compared with selection in float, bit for
// bit; and caches that it is found not to belong to.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/quoka.hpp>

#include "layer/allocations.hpp"
#include "support/world.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace {

using namespace quoka_test;

using quoka::KeySketch;
using quoka::MassOptions;
using quoka::MassSelector;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::SelectorInput;
using quoka::Sketch;

constexpr Index q_heads = 4, kv_heads = 2;

QuokaOptions options(Sketch sketch, Index budget = 20) {
  return {.budget = Budget::keys(budget), .n_queries = 8, .sketch = sketch};
}

Selection select(const SelectorInput& input, Sketch sketch, Index budget = 20) {
  QuokaSelector::State state;
  Selection keep;
  QuokaSelector(options(sketch, budget)).select(input, state, keep, SerialExecutor{});
  return keep;
}

SelectorInput call(const Tensor4<float>& q, const Rows& k, const KeySketch& sketch) {
  return {.q = q, .k = k, .logits = LogitOptions{}, .sketch = &sketch};
}

// As selection in float has it; `input` names the sketch.
::testing::AssertionResult as_in_float(const SelectorInput& input, Index budget = 20) {
  SelectorInput plain = input;
  plain.sketch = nullptr;
  if (select(input, Sketch::on, budget) == select(plain, Sketch::off, budget))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "another selection than in float";
}

// The keys of one sequence, in pages of a pool.
StoredRows paged_cache(Random& random, Index len, Index dim = 32) {
  return StoredRows(random.tensor<float>(1, kv_heads, len, dim), quoka::float_format(),
                    StoredRows::Layout::pages, random);
}
KeySketch sketch_of(const Rows& pool) {
  KeySketch sketch;
  sketch.update(pool, 0, pool.batch() * pool.len(), SerialExecutor{});
  return sketch;
}

// Both have the same codes of the first rows, with the same scales, errors and lengths.
void expect_same_codes(const KeySketch& a, const KeySketch& b, Index rows) {
  for (Index head = 0; head < kv_heads; ++head) {
    const auto same = [&](auto of, Index count) {
      EXPECT_TRUE(std::equal(of(a), of(a) + count, of(b))) << "of head " << head;
    };
    same([&](const KeySketch& x) { return x.scales(0, head); }, rows);
    same([&](const KeySketch& x) { return x.errors(0, head); }, rows);
    same([&](const KeySketch& x) { return x.lengths(0, head); }, rows);
    for (Index block = 0; block < rows / 16; ++block)
      same([&](const KeySketch& x) { return x.codes(0, head, block); }, 16 * 32);
  }
}

// A cache, in pages or without, grows, shrinks, moves, is cut into other pages and overwritten. After each step the
// sketch equals a new one that is updated with the same rows; rows without an update have no codes. Selection by it is
// that in float, also after an update whose allocation failed.
TEST(CacheSketch, FollowsItsPoolThroughAnyHistory) {
  for_each_draw(40, [&](Random& random) {
    constexpr Index most = 384, dim = 32;  // rows of a head, channels
    const bool in_pages = !random.seldom(4);
    Index pages = in_pages ? 10 : 1, page = in_pages ? 16 : 150;
    Tensor4<float> memory = random.tensor<float>(1, kv_heads, most, dim);
    const auto pool = [&] {  // the first pages, or rows, of it
      const Index head_step = (in_pages ? page : most) * dim;
      return Rows(TensorView<const float>(memory.data(), {pages, kv_heads, page, dim},
                                          {kv_heads * head_step, head_step, dim, 1}));
    };
    KeySketch sketch;
    std::set<Position> updated;
    // A sketch that lacks room for all rows is not used.
    const auto expect_as_new = [&] {
      KeySketch fresh;
      fresh.update(pool(), std::vector<Position>(updated.begin(), updated.end()), SerialExecutor{});
      if (sketch.has_room()) expect_same_codes(sketch, fresh, pages * page);
      std::vector<Position> table;
      for (const Index i : random.permutation(pages)) table.push_back(static_cast<Position>(i));
      const Rows keys =
          in_pages ? quoka::paged(pool(), table, pages * page - random.below(page)) : pool();
      const auto q = random.tensor<float>(1, q_heads, 9, dim);
      EXPECT_TRUE(as_in_float({.q = q, .k = keys, .sketch = &sketch}));
    };
    // With every `step`-th of these rows.
    const auto update = [&](Index begin, Index count, Index step = 1) {
      std::vector<Position> rows;
      for (Index row = begin; row < begin + count; row += step)
        rows.push_back(static_cast<Position>(row));
      InTurns by{random.one_of(1, 2, 5)};
      const bool as_range = step == 1 && random.below(2) == 0;
      const auto once = [&] {
        as_range ? sketch.update(pool(), begin, count, by) : sketch.update(pool(), rows, by);
      };
      for (const Position row : rows) updated.erase(row);
      for (long left = 0; !has_memory(left, once); ++left) expect_as_new();
      updated.insert(rows.begin(), rows.end());
    };
    update(0, pages * page);
    for (int step = 0; step < 6 && !has_failed(); ++step) {
      const Index kind = random.below(4), before = pages * page;
      SCOPED_TRACE(::testing::Message() << "step " << step << " of kind " << kind);
      if (kind == 0) {
        (in_pages ? pages : page) =
            in_pages ? 5 + random.below(most / page - 4) : 60 + random.below(most - 60);
        updated.erase(updated.lower_bound(static_cast<Position>(pages * page)), updated.end());
        update(std::min(before, pages * page), std::max<Index>(pages * page - before, 0));
      } else if (kind == 1 && in_pages) {
        const Index old_page = std::exchange(page, Index{1} << random.below(6));
        pages = most / page;
        memory = random.tensor<float>(1, kv_heads, most, dim);
        if (page != old_page) {  // all rows are forgotten
          updated.clear();
          update(0, 0);
          expect_as_new();
        }
        update(0, pages * page);
      } else if (kind == 2) {
        Tensor4<float> elsewhere = memory;
        memory = std::move(elsewhere);
        update(0, 0);
      } else {
        const Index begin = random.below(before), count = random.below(before - begin + 1),
                    every = random.one_of(1, 3);
        for (Index row = begin; row < begin + count; row += every)
          for (Index head = 0; head < kv_heads; ++head) {
            const std::byte* const at = pool().row(row / page, head, row % page);
            const auto written = random.tensor<float>(1, 1, 1, dim);
            std::memcpy(const_cast<std::byte*>(at), written.data(), sizeof(float) * dim);
          }
        update(begin, count, every);
      }
      expect_as_new();
    }
  });
}

// A key's direction, its length and its largest channel.
TEST(CacheSketch, HoldsAKeyWithAllThatItKeepsOfIt) {
  Tensor4<float> k(1, 1, 1, 8);
  k.setZero();
  k(0, 0, 0, 0) = 127.0f, k(0, 0, 0, 1) = 10.4f;
  const KeySketch sketch = sketch_of(k);
  EXPECT_TRUE(sketch.holds(0, 0, 0, k.data()));
  Tensor4<float> other = k;
  other(0, 0, 0, 1) = -10.4f;  // of the same length and scale
  EXPECT_FALSE(sketch.holds(0, 0, 0, other.data()));
  for (Index c = 0; c < 8; ++c)
    other(0, 0, 0, c) = 2 * k(0, 0, 0, c);  // of the same codes and scale
  EXPECT_FALSE(sketch.holds(0, 0, 0, other.data()));
  other = k;
  other(0, 0, 0, 0) = 127.01f;  // of the same codes and length
  float& small = other(0, 0, 0, 1);
  small = 10.2765f;
  while (sketch_of(other).lengths(0, 0)[0] < sketch.lengths(0, 0)[0]) small += 1e-5f;
  ASSERT_EQ(sketch_of(other).lengths(0, 0)[0], sketch.lengths(0, 0)[0]);
  EXPECT_EQ(std::memcmp(sketch_of(other).codes(0, 0, 0), sketch.codes(0, 0, 0), 8 * 16), 0);
  EXPECT_FALSE(sketch.holds(0, 0, 0, other.data()));
}

// Too wide to be compared: selection scores such keys in float.
TEST(CacheSketch, HoldsAnyKeyOfMoreThan1024Channels) {
  Random random(522);
  for (const Index dim : {1024, 1040}) {
    const auto k = random.tensor<float>(1, 1, 2, dim), other = random.tensor<float>(1, 1, 2, dim);
    EXPECT_EQ(sketch_of(k).holds(0, 0, 1, &other(0, 0, 1, 0)), dim > 1024) << dim;
  }
}

// ---- what was forgotten ---------------------------------------------------------------------------

// The kept keys are turned round, made better, and changed a little: by more than the bound and less than 8 times of
// it. The keys at the threshold are compared; this few are rarely among those that are looked up.
TEST(CacheSketch, AForgottenChangeIsFoundWhicheverWayItGoes) {
  enum class Way { round, better, other };
  constexpr Index few = 3;
  Random random(523);
  for (int turn = 0; turn < 12; ++turn) {
    const Way way = turn == 0 ? Way::better : turn == 1 ? Way::other : Way::round;
    StoredRows cache = paged_cache(random, 300);
    const KeySketch sketch = sketch_of(cache.pool());
    const auto q = random.tensor<float>(1, q_heads, 9, 32);
    const SelectorInput input = call(q, cache.rows(), sketch);
    const Selection best = select(input, Sketch::on, 1), keep = select(input, Sketch::on, few);
    for (Index head = 0; head < kv_heads; ++head)
      for (const Position i : keep.row(0, head))
        for (Index c = 0; c < 32; ++c) {
          const float x = cache.floats()(0, head, i, c);
          cache.set(0, head, i, c,
                    way == Way::round    ? -x
                    : way == Way::better ? cache.floats()(0, head, best.row(0, head)[0], c)
                                         : x + static_cast<float>(0.15 * random.normal()));
        }
    expect_refused([&] { select(input, Sketch::on, few); }, {"key at position", "sketched", 300});
  }
}

// The newest and the oldest key of each head are looked up in each call, and the others in turn: in time all of them,
// by either selector.
TEST(CacheSketch, EveryForgottenChangeIsFoundInTime) {
  Random random(524);
  StoredRows cache = paged_cache(random, 300);
  const auto q = random.tensor<float>(1, q_heads, 9, 32);
  for (const bool softmax : {false, true}) {
    MassOptions by = MassOptions::balanced(Budget::keys(20));
    by.sketch = Sketch::on;
    const quoka::AnySelector selector(softmax ? quoka::SelectionOptions(by)
                                              : quoka::SelectionOptions(options(Sketch::on)));
    const KeySketch sketch = sketch_of(cache.pool());
    for (const Index at : {Index{299}, Index{0}, Index{137}, Index{210}}) {
      quoka::AnySelector::State state;
      Selection keep;
      const SelectorInput input = call(q, cache.rows(), sketch);
      selector.select(input, state, keep, SerialExecutor{});
      const Tensor4<float> before = cache.floats();
      for (Index head = 0; head < kv_heads; ++head) cache.set(0, head, at, 5, 0.4f);
      int calls = 0;
      try {
        for (; calls < 40; ++calls) selector.select(input, state, keep, SerialExecutor{});
      } catch (const std::invalid_argument& error) {
        EXPECT_TRUE(Fragment(at).is_in(error.what())) << error.what();
      }
      // 64 points a call, and at most 1.9 times as many as keys until each was one of them.
      EXPECT_LE(calls, at == 299 || at == 0 ? 0 : 9) << at;
      for (Index head = 0; head < kv_heads; ++head)
        cache.set(0, head, at, 5, before(0, head, at, 5));
    }
  }
}

// By MassSelector the best key of each head is looked up, beside the newest, the oldest and some others.
TEST(CacheSketch, AForgottenChangeOfTheBestKeyIsFoundByMass) {
  Random random(526);
  StoredRows cache = paged_cache(random, 300);
  const auto q = random.tensor<float>(1, q_heads, 9, 32);
  // Only one query attends to this key: the best in float and by any codes.
  constexpr Index best = 137;
  for (Index c = 0; c < 32; ++c) cache.set(0, 1, best, c, 4.0f * q(0, q_heads - 1, 4, c));
  MassOptions by = MassOptions::balanced(Budget::keys(1));
  by.sketch = Sketch::on, by.kernel_size = 1;
  const MassSelector selector(by);
  const KeySketch sketch = sketch_of(cache.pool());
  const SelectorInput input = call(q, cache.rows(), sketch);
  MassSelector::State state;
  Selection keep;
  selector.select(input, state, keep, SerialExecutor{});
  cache.set(0, 1, best, 5, cache.floats()(0, 1, best, 5) + 0.05f);
  expect_refused([&] { selector.select(input, state, keep, SerialExecutor{}); },
                 {"key at position", best, "KV head 1", "sketched", 300, "update()"});
}

// ---- refused ------------------------------------------------------------------------------------

// Also where a mask hides one of them.
TEST(CacheSketch, KeysOfAnotherCacheAreRefused) {
  Random random(507);
  const StoredRows cache = paged_cache(random, 300), other = paged_cache(random, 300);
  const auto q = random.tensor<float>(1, q_heads, 9, 32);
  const KeySketch sketch = sketch_of(cache.pool());
  const SelectorInput of_other = call(q, other.rows(), sketch);
  expect_refused([&] { select(of_other, Sketch::on); }, {"not of the cache"});
  std::vector<std::uint8_t> seen(9 * 309, 1);
  for (Index i = 0; i < 9; ++i) seen[uz(i * 309 + 7)] = 0;
  const quoka::Mask mask = quoka::Mask::bytes(seen.data(), {1, 1, 9, 309}, {0, 0, 309});
  QuokaSelector::State state;
  Selection keep;
  expect_refused(
      [&] { select_visible(QuokaSelector(options(Sketch::on)), of_other, mask, state, keep); },
      {"not of the cache"});
  // Pages beyond the pool that it knows.
  const Rows& whole = cache.pool();
  const Index pages = whole.batch(), before = pages / 2;
  KeySketch of_half = sketch_of(
      Rows(whole.data(), whole.format(), {before, kv_heads, whole.len(), 32}, whole.strides()));
  expect_refused([&] { select(call(q, cache.rows(), of_half), Sketch::on); },
                 {"number of pages", pages, before});
  of_half.update(whole, {}, SerialExecutor{});
  EXPECT_TRUE(as_in_float(call(q, cache.rows(), of_half)));
}

// The same memory, seen another way, in pages and without. Nothing is read.
TEST(CacheSketch, OtherViewsOfTheCacheAreRefused) {
  Random random(520);
  const auto pages = random.tensor<float>(10, kv_heads, 16, 32);
  const auto flat = random.tensor<float>(1, kv_heads, 300, 32);
  const Rows pool(pages), whole(flat), known = whole.slice(50, 100);
  const std::vector<Position> table{3, 1, 2};
  const Rows same = quoka::paged(pool, table, 40);
  KeySketch sketch = sketch_of(pool);
  const auto view = [](const Rows& of, const Rows::Sizes& sizes, const Rows::Strides& strides,
                       Index offset = 0) {
    return Rows(of.data() + offset, of.format(), sizes, strides);
  };
  const auto refuses = [&](const Rows& keys,
                           const std::vector<Fragment>& says = {"not of the cache"}) {
    expect_refused([&] { (void)sketch.map_rows(keys); }, says);
  };
  const auto [page, head, row] = pool.strides();
  EXPECT_EQ(sketch.map_rows(same)(17), 1 * 16 + 1);
  EXPECT_EQ(sketch.map_rows(same.slice(20, 20))(0), 1 * 16 + 4);
  const Rows of_page = view(pool, {1, kv_heads, 16, 32}, {page, head, row});
  const std::vector<Rows> pools{view(pool, {9, kv_heads, 16, 32}, {page, head, row}, page),
                                view(pool, {10, kv_heads, 8, 32}, {page, head, row}),
                                view(pool, {10, kv_heads, 16, 32}, {page, head / 2, row}),
                                view(pool, {10, kv_heads, 16, 32}, {page, head, row / 2}),
                                view(pool, {10, kv_heads, 16, 32}, {page / 2, head, row})};
  for (const Rows& other : pools) refuses(quoka::paged(other, table, 20));
  refuses(of_page), refuses(of_page.gathered(table));
  refuses(view(pool, {1, 1, 16, 32}, {page, head, row}), {"kv_heads", 1, 2});
  refuses(same.first_channels(16), {"head_dim", 16, 32});

  sketch = {};
  sketch.update(known, 0, 100, SerialExecutor{});
  const auto [batch, step, one] = whole.strides();
  EXPECT_EQ(sketch.map_rows(known)(99), 99);
  EXPECT_EQ(sketch.map_rows(whole.slice(60, 90))(7), 17);
  EXPECT_EQ(sketch.map_rows(whole.slice(60, 90).gathered(table))(2), 12);
  refuses(whole.slice(49, 20)), refuses(whole.slice(60, 91));
  refuses(view(known, {1, kv_heads, 20, 32}, {batch, step, 2 * one}));
  refuses(view(known, {1, kv_heads, 20, 32}, {batch, step / 2, one}));
  refuses(view(known, {1, kv_heads, 20, 32}, {batch, step, one}, 4));
  refuses(view(known, {2, kv_heads, 20, 32}, {batch, step, one}), {"batch", 2, 1});
  const Rows one_row = view(known, {1, kv_heads, 20, 32}, {batch, step, 0});  // twenty times
  sketch.update(one_row, 0, 20, SerialExecutor{});
  refuses(one_row);
}

TEST(CacheSketch, RowsOutsideThePoolAreRefusedAndNothingChanges) {
  Random random(508);
  const StoredRows cache = paged_cache(random, 300);
  const Rows& pool = cache.pool();
  const Index rows = cache.pool_rows();
  const auto q = random.tensor<float>(1, q_heads, 9, 32);
  const std::vector<Position> beyond{0, static_cast<Position>(rows)}, negative{5, -1};
  const SerialExecutor serial;
  KeySketch sketch = sketch_of(pool);
  expect_refused([&] { sketch.update(pool, beyond, serial); }, {"row of the pool", rows, rows - 1});
  expect_refused([&] { sketch.update(pool, negative, serial); }, {"row of the pool", -1, 0});
  expect_refused([&] { sketch.update(cache.rows(), {}, serial); }, {"whole pool"});
  expect_refused([&] { sketch.update(pool, 5, -2, serial); }, {"number of rows", -2, 0});
  EXPECT_TRUE(as_in_float(call(q, cache.rows(), sketch)));
}

}  // namespace
