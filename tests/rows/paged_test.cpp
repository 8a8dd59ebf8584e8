// Rows in pages and of lists (rows/rows.hpp): the same bits as the same rows side by side; and chunks that lie in the
// cache. Attention and selection over them: attention_suite_test.cpp, selection_fuzz_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/byte_formats.hpp>

#include "support/attention_fixtures.hpp"
#include "support/refused_calls.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

#include <set>

namespace {

using namespace quoka_test;
using quoka::Chunk;
using quoka::Past;

using List = std::vector<Position>;

List some_of(Random& random, Index len, Index count) {
  List cells;
  for (const Index cell : random.permutation(len)) cells.push_back(static_cast<Position>(cell));
  cells.resize(uz(count));
  return cells;
}

// ---- the same rows ------------------------------------------------------------------------------

// Of any format in any layout: slices of slices, heads, and lists, also of lists and of slices.
TEST(Paged, RowsOfAnyLayoutAreTheirRowsSideBySide) {
  for (const StoredRows::Layout layout : StoredRows::layouts)
    for_each_draw(20, [&](Random& random) {
      const Index len = random.seldom(8) ? 0 : 1 + random.below(120), heads = 1 + random.below(3);
      const StoredRows flat(random.tensor<float>(1, heads, len, 1 + random.below(40)),
                            *every_format()[uz(random.below(written_formats))]);
      const StoredRows laid(flat, layout, random);
      const Rows a = laid.rows(), b = flat.rows();
      EXPECT_TRUE(same_bits(a, b));
      const Index begin = random.below(len + 1), count = random.below(len - begin + 1),
                  inner = random.below(count + 1), head = random.below(heads);
      const Rows slice = a.slice(begin, count), of = b.slice(begin, count);
      EXPECT_TRUE(same_bits(slice, of));
      EXPECT_TRUE(same_bits(slice.slice(inner, count - inner), of.slice(inner, count - inner)));
      EXPECT_TRUE(same_bits(slice.some_heads(head, 1), of.some_heads(head, 1)));
      EXPECT_EQ(a.slice(len, 0).len(), 0);
      expect_refused([&] { (void)a.slice(len + 1, 0); }, {len + 1, len});
      expect_refused([&] { (void)a.slice(0, len + 1); }, {len + 1, len});
      expect_refused([&] { (void)a.slice(-1, 1); }, {-1, 0});
      if (count == 0) return;
      const List cells = some_of(random, count, 1 + random.below(count));
      List memory, of_memory;
      const Rows listed = slice.gathered(cells, memory), expected = of.gathered(cells, of_memory);
      EXPECT_TRUE(same_bits(listed, expected));
      for (Index i = 0; i < listed.len(); ++i)
        for (Index h = 0; h < heads; ++h)
          EXPECT_EQ(listed.row(0, h, i), slice.row(0, h, cells[uz(i)]));
      const List again = some_of(random, listed.len(), 1 + random.below(listed.len()));
      List second, of_second;
      EXPECT_TRUE(same_bits(listed.gathered(again, second), expected.gathered(again, of_second)));
      EXPECT_TRUE(of_memory.empty()) << "one list needs none";
    });
}

// A page in two places of a table, and in the tables of two sequences; a slice of some channels.
TEST(Paged, PagesMayBeShared) {
  Random random(5);
  const auto pool = random.tensor<float>(9, 2, 16, 16);
  for (const List& table : {List{7, 2, 7, 0, 5}, List{7, 2, 1, 1, 1}}) {
    const Rows rows = quoka::paged(pool, table, 70);
    for (Index i = 0; i < 70; ++i) {
      EXPECT_EQ(rows.row(0, 1, i),
                reinterpret_cast<const std::byte*>(&pool(table[uz(i / 16)], 1, i % 16, 0)));
      EXPECT_EQ(rows.first_channels(5).row(0, 1, i), rows.row(0, 1, i));
      EXPECT_EQ(rows.pool_row(i), table[uz(i / 16)] * 16 + i % 16);
    }
    EXPECT_EQ(rows.first_channels(5).dim(), 5);
  }
}

// Attention as without a past.
TEST(Paged, TheEmptySequenceOfAnyPool) {
  Random random(9);
  const auto in = random_inputs<float>(random, {.q_len = 5, .kv_len = 0});
  const auto pool = random.tensor<float>(3, 1, 16, 16);
  for (const Rows& none : {quoka::paged(pool, {}, 0), Rows(in.k).gathered({})}) {
    Output<float> output = unwritten<float>(in.q, in.v.dimension(3));
    quoka::attention(in.q, Past{none, none}, {in.k, in.v}, {output.out, output.lse});
    expect_same(output, attend(in));
  }
}

// ---- the chunk in the cache ---------------------------------------------------------------------

// Past and chunk as two views of one memory, described in any way: refused where they share a row, and nothing is written.
TEST(PagedChunks, ThatShareARowWithThePastAreRefused) {
  int refused = 0, accepted = 0;
  const bool complete = for_each_draw(400, [&](Random& random) {
    const bool slots = random.below(8) == 0;  // more rows than are compared at a time
    const Index pages = slots ? 1500 : 8, page = slots ? 1 : 16, dim = 4,
                q_len = slots ? 600 : random.one_of(1, 4), heads = 2;
    const auto memory = random.tensor<float>(pages, heads, page, dim);
    const Index step = heads * page * dim;
    List tables[4];
    // `count` rows of it: pages, a part of them, a list of them; a pool that begins elsewhere, of shorter pages, or of
    // every second page.
    const auto view = [&](List& table, List& cells, Index count) {
      const Index first = random.below(2), every = slots ? 1 : 1 + random.below(2),
                  tokens = slots || random.below(2) == 0 ? page : page / 2;
      const Index left = (pages - first - 1) / every + 1;
      const Rows pool = TensorView<const float>(&memory(first, 0, 0, 0), {left, heads, tokens, dim},
                                                {every * step, page * dim, dim, 1});
      const Index begin = slots ? 0 : random.below(tokens), kind = slots ? 0 : random.below(3);
      const Index used = quoka::ceil_div(begin + count + 5, tokens);
      table = some_of(random, left, std::min(left, used));
      const Index len = std::min<Index>(std::ssize(table) * tokens, begin + count + 5);
      const Rows rows = quoka::paged(pool, table, len);
      if (kind == 0) return rows.slice(std::min(begin, len - count), count);
      if (kind == 1)
        return Rows(TensorView<const float>(&memory(table[0], 0, 0, 0), {1, heads, page, dim},
                                            {step, page * dim, dim, 1}))
            .slice(random.below(page - count + 1), count);
      cells = some_of(random, len, count);
      return rows.gathered(cells);
    };
    const Index past_len = slots ? 600 : 1 + random.below(11);
    const Rows past = view(tables[0], tables[1], past_len),
               chunk = view(tables[2], tables[3], q_len);
    std::set<const std::byte*> of_past;
    for (Index i = 0; i < past.len(); ++i) of_past.insert(past.row(0, 1, i));
    bool shared = false;
    for (Index i = 0; i < q_len; ++i) shared = shared || of_past.contains(chunk.row(0, 1, i));
    const auto apart = random.tensor<float>(1, heads, std::max(past_len, q_len), dim),
               q = random.tensor<float>(1, heads, q_len, dim);
    const bool keys = random.below(2) == 0;
    auto output = unwritten<float>(q, dim);
    const auto call = [&] {
      quoka::attention(q,
                       {keys ? past : Rows(apart).slice(0, past_len),
                        keys ? Rows(apart).slice(0, past_len) : past},
                       {keys ? chunk : Rows(q), keys ? Rows(q) : chunk}, {output.out, output.lse});
    };
    if (shared) {
      expect_refused(
          call, {keys ? "chunk's keys lie in the past's" : "chunk's values lie in the past's"});
      EXPECT_EQ(output.out(0, 0, 0, 0), -12345.0f);
    } else {
      EXPECT_NO_THROW(call());
    }
    ++(shared ? refused : accepted);
  });
  if (!complete) return;
  EXPECT_GT(refused, 50);
  EXPECT_GT(accepted, 50);
}

// The output must not lie in any page of the pool, whether the sequence uses it or not.
TEST(PagedChunks, OutInThePoolIsRefused) {
  Random random(18);
  auto pool = random.tensor<float>(8, 2, 16, 16);
  const auto before = pool;
  const auto in =
      random_inputs<float>(random, {.q_heads = 2, .kv_heads = 2, .q_len = 4, .kv_len = 1});
  const List table{5, 1, 7};
  const Rows past = quoka::paged(pool, table, 40);
  for (const Index page : {1, 3}) {
    const TensorView<float> out(&pool(page, 0, 0, 0), {1, 2, 4, 16}, {512, 256, 16, 1});
    expect_refused(
        [&] {
          quoka::attention(in.q, {past, past}, {in.k, in.v}, out);
        },
        {"out shares memory with the past's keys"});
  }
  EXPECT_TRUE(same_bits(pool, before));
}

// ---- hostile tables -----------------------------------------------------------------------------

// Rows of a pool in memory that no program has.
Rows pool(Index pages = 8, Index page_size = 16) {
  constexpr std::uintptr_t nowhere = 4096;
  return {reinterpret_cast<const std::byte*>(nowhere),
          quoka::float_format(),
          {pages, 2, page_size, 16},
          {2 * 16 * 16 * 4, 16 * 16 * 4, 16 * 4}};
}

TEST(PagedRefuses, WhatIsNoTableAndNoList) {
  constexpr Position lowest = std::numeric_limits<Position>::min(),
                     highest = std::numeric_limits<Position>::max();
  constexpr Index most = std::numeric_limits<Index>::max(), most_keys = quoka::max_keys;
  const List sound{3, 1, 2}, first{0};
  const auto paged = [](const Rows& pool, const List& table, Index len) {
    return [=] { (void)quoka::paged(pool, table, len); };
  };
  const auto listed = [](const Rows& rows, const List& cells) {
    return [&rows, cells] { (void)rows.gathered(cells); };
  };
  const Rows one = pool(1), eight = pool(), rows = quoka::paged(eight, sound, 40),
             part = rows.slice(1, 20), of_list = one.gathered(first);
  expect_all_refused({
      // An entry that is not a page.
      {paged(eight, {3, -1, 2}, 40), {"block table", -1, 0}},
      {paged(eight, {3, 0, -1}, 40), {"block table", -1, 0}},
      {paged(eight, {8, 1, 2}, 40), {"block table", 8, 8}},
      {paged(eight, {3, 1, 9}, 40), {"block table", 9, 8}},
      {paged(eight, {highest, 1, 2}, 40), {"block table", highest, 8}},
      {paged(eight, {3, 1, highest}, 40), {"block table", highest, 8}},
      {paged(eight, {lowest}, 1), {lowest, 0}},
      // A table too short.
      {paged(eight, sound, 49), {"block table", 3, 4}},
      {paged(eight, {}, 1), {"block table", 0, 1}},
      {paged(eight, sound, most_keys), {"block table", 3, (most_keys - 1) / 16 + 1}},
      {paged(eight, sound, most_keys - 14), {"block table", 3, (most_keys - 15) / 16 + 1}},
      {paged(eight, sound, most_keys - 15), {"block table", 3, (most_keys - 16) / 16 + 1}},
      {paged(eight, sound, most), {most, most_keys}},
      // Pages of nothing.
      {paged(pool(8, 0), first, 1), {"tokens of a page", 0, 1}},
      {paged(pool(0), first, 1), {"block table", 0, 0}},
      {paged(eight, first, -1), {"length", -1, 0}},
      // A cell beyond the rows.
      {listed(one, {3, 16, 2}), {"gathered cell", 16, 16}},
      {listed(one, {3, -1, 2}), {"gathered cell", -1, 0}},
      {listed(rows, {0, 39, 40}), {"gathered cell", 40, 40}},
      {listed(part, {20}), {"gathered cell", 20, 20}},
      // A list of a batch and of a list, pages of a list.
      {listed(eight, first), {8, 1}},
      {listed(of_list, first), {"cannot be gathered again", "gathered(cells, memory)"}},
      {paged(of_list, sound, 1), {"itself in pages"}},
      // Strides, and more of a chunk than the cache holds.
      {[&] { (void)rows.typed<float>(); }, {"in pages"}},
      {[&] { (void)quoka::chunk_in_cache(rows, rows, 41); }, {41, 40}},
      {[&] { (void)quoka::chunk_in_cache(rows, rows, -1); }, {41, 40}},
      {[&] { (void)quoka::chunk_in_cache(rows, part, 4); }, {20, 40}},
  });
  EXPECT_EQ(quoka::paged(eight, sound, 48).len(), 48);
  const List three_of_four{7, 0, 7, -1};  // of which three are used
  EXPECT_EQ(quoka::paged(eight, three_of_four, 48).len(), 48);
}

}  // namespace
