// Rows in pages and of lists (rows/rows.hpp): the same bits as the same rows side by side; and chunks that lie in the
// cache. Attention and selection over them: attention_suite_test.cpp, selection_fuzz_test.cpp.

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <memory>
#include <optional>

namespace {

using namespace quoka_test;
using quoka::AttentionOutput;
using quoka::Chunk;
using quoka::Past;

using List = std::vector<Position>;

// ---- a cache in pages ---------------------------------------------------------------------------

enum class Layout {
  heads_outside,
  tokens_outside
};  // [page, head, token, dim] or [page, token, ...]

// One sequence in the pages of a pool, in random order between pages of NaN.
template <class T>
class PagedCopy {
 public:
  PagedCopy(Random& random, const Tensor4<T>& x, Index page_size, Layout layout)
      : len_(x.dimension(2)) {
    const Index used = (len_ + page_size - 1) / page_size, pages = used + 3;
    for (const Index page : random.permutation(pages))
      table_.push_back(static_cast<Position>(page));
    table_.resize(uz(used));
    if (layout == Layout::tokens_outside) {
      rows_.emplace(pages, x.dimension(1), page_size, x.dimension(3));
    } else {
      heads_.resize(pages, x.dimension(1), page_size, x.dimension(3));
      heads_.setConstant(stored<T>(std::nan("")));
    }
    for (Index head = 0; head < x.dimension(1); ++head)
      for (Index i = 0; i < len_; ++i)
        std::copy_n(&x(0, head, i, 0), x.dimension(3),
                    pool_view().row(table_[uz(i / page_size)], head, i % page_size));
  }

  Rows pool() { return pool_view(); }
  TensorView<T> pool_view() { return rows_ ? rows_->view() : TensorView<T>(heads_); }
  const List& table() const { return table_; }
  Rows rows() { return quoka::paged(pool(), table_, len_); }

 private:
  Index len_;
  List table_;
  Tensor4<T> heads_;
  std::optional<Strided<T>> rows_;
};

template <class T>
Output<T> attend_to(const Tensor4<T>& q, const Past& past, const Chunk& chunk,
                    const AttentionOptions& options = {}, ExecutorRef executor = SerialExecutor{}) {
  Output<T> output =
      unwritten<T>(q, past.v.len() > 0 || chunk.v.len() == 0 ? past.v.dim() : chunk.v.dim());
  quoka::attention(q, past, chunk, {output.out, output.lse}, options, executor);
  return output;
}

constexpr Layout layouts[] = {Layout::heads_outside, Layout::tokens_outside};

// ---- pages --------------------------------------------------------------------------------------

// A page in two places of a table, and in the tables of two sequences.
TEST(Paged, PagesMayBeShared) {
  Random random(5);
  const auto pool = random.tensor<Element>(9, 2, 16, 16);
  const auto q = random.tensor<Element>(1, 4, 5, 16);
  const auto k = random.tensor<Element>(1, 2, 5, 16), v = random.tensor<Element>(1, 2, 5, 16);
  for (const List& table : {List{7, 2, 7, 0, 5}, List{7, 2, 1, 1, 1}}) {
    Tensor4<Element> flat(1, 2, 70, 16);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 70; ++i)
        std::copy_n(&pool(table[uz(i / 16)], head, i % 16, 0), 16, &flat(0, head, i, 0));
    const Rows rows = quoka::paged(pool, table, 70);
    expect_same(attend_to(q, {rows, rows}, {k, v}), attend_to(q, {flat, flat}, {k, v}));
  }
}

TEST(Paged, ASliceIsASliceOfTheSequence) {
  Random random(7);
  const auto flat = random.tensor<Element>(1, 2, 301, 16);
  const Rows side_by_side(flat);
  for (const Layout layout : layouts)
    for (const Index page : {1, 3, 16, 17, 32, 64}) {
      SCOPED_TRACE("pages of " + std::to_string(page) +
                   (layout == Layout::tokens_outside ? ", tokens outside" : ", heads outside"));
      PagedCopy<Element> copy(random, flat, page, layout);
      const Rows rows = copy.rows();
      EXPECT_TRUE(same_bits(rows, side_by_side));
      EXPECT_TRUE(same_bits(rows.slice(33, 200), side_by_side.slice(33, 200)));
      EXPECT_TRUE(same_bits(rows.slice(33, 200).slice(5, 7), side_by_side.slice(38, 7)));
      EXPECT_TRUE(same_bits(rows.first_channels(5), side_by_side.first_channels(5)));
      EXPECT_EQ(rows.slice(301, 0).len(), 0);
      expect_refused([&] { (void)rows.slice(300, 2); }, {2, 1});
      expect_refused([&] { (void)rows.slice(302, 0); }, {302, 301});
      expect_refused([&] { (void)rows.slice(-1, 1); }, {-1, 0});
    }
}

TEST(PagedFormats, TheEmptySequenceOfAnyPool) {
  Random random(9);
  const auto in = random_inputs<float>(random, {.q_len = 5, .kv_len = 0});
  const auto pool = random.tensor<float>(3, 1, 16, 16);
  const Rows none = quoka::paged(pool, {}, 0);
  EXPECT_EQ(none.len(), 0);
  expect_same(attend_to(in.q, {none, none}, {in.k, in.v}), attend(in));
  const Rows nothing_gathered = Rows(in.k).gathered({});
  expect_same(attend_to(in.q, {nothing_gathered, nothing_gathered}, {in.k, in.v}), attend(in));
}

TEST(PagedFormats, MappedRowsHaveNoStrides) {
  Random random(10);
  const auto pool = random.tensor<float>(3, 1, 16, 16);
  const List table{2, 0};
  expect_refused([&] { (void)quoka::paged(pool, table, 20).typed<float>(); }, {"in pages"});
  expect_refused([&] { (void)quoka::paged(quoka::paged(pool, table, 20), table, 20); },
                 {"itself in pages"});
}

// ---- lists --------------------------------------------------------------------------------------

// Rows `cells` of x, side by side.
template <class T>
Tensor4<T> gathered(const Tensor4<T>& x, const List& cells) {
  Tensor4<T> y(1, x.dimension(1), std::ssize(cells), x.dimension(3));
  for (Index head = 0; head < x.dimension(1); ++head)
    for (Index i = 0; i < std::ssize(cells); ++i)
      std::copy_n(&x(0, head, cells[uz(i)], 0), x.dimension(3), &y(0, head, i, 0));
  return y;
}

inline List some_cells(Random& random, Index len, Index count) {
  List cells;
  for (const Index cell : random.permutation(len)) cells.push_back(static_cast<Position>(cell));
  cells.resize(uz(count));
  return cells;
}

TEST(Paged, AListIsItsRowsSideBySide) {
  Random random(11);
  const auto in = random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .kv_len = 301});
  const List cells = some_cells(random, 301, 177);
  const auto k = gathered(in.past_k, cells);
  const Rows gathered_k = Rows(in.past_k).gathered(cells);
  EXPECT_TRUE(same_bits(gathered_k, Rows(k)));
  EXPECT_TRUE(same_bits(gathered_k.slice(20, 100), Rows(k).slice(20, 100)));
  // A list of rows that are a slice.
  const auto of_slice = gathered(in.past_k, {149, 100, 107});
  const List in_slice{49, 0, 7};
  EXPECT_TRUE(same_bits(Rows(in.past_k).slice(100, 50).gathered(in_slice), Rows(of_slice)));
  // A list of a list.
  List memory;
  const auto of_part = gathered(in.past_k, {99, 50, 57}), of_list_slice = gathered(k, {69, 20, 27}),
             two = gathered(in.past_k, {149, 100});
  EXPECT_TRUE(same_bits(Rows(in.past_k).slice(50, 150).gathered(in_slice, memory), Rows(of_part)));
  EXPECT_TRUE(memory.empty()) << "one list needs none";
  EXPECT_TRUE(same_bits(gathered_k.slice(20, 100).gathered(in_slice, memory), Rows(of_list_slice)));
  for (const Index page : {1, 16, 17}) {
    PagedCopy<Element> paged_k(random, in.past_k, page, Layout::heads_outside);
    const List of_pages{7, 0, 49, 33}, of_list{2, 1};
    EXPECT_TRUE(same_bits(
        paged_k.rows().slice(100, 50).gathered(of_pages).gathered(of_list, memory), Rows(two)));
    const Rows listed = paged_k.rows().slice(100, 50).gathered(in_slice);
    EXPECT_TRUE(same_bits(listed, Rows(of_slice)));
    EXPECT_TRUE(same_bits(listed.slice(1, 2), Rows(of_slice).slice(1, 2)));
    for (const Index i : {0, 1, 2})
      EXPECT_EQ(listed.pool_row(i), paged_k.rows().pool_row(100 + in_slice[uz(i)]));
  }
}

// ---- the chunk in the cache ---------------------------------------------------------------------

// The past and the chunk as one cache.
template <class T>
Tensor4<T> joined(const Tensor4<T>& past, const Tensor4<T>& chunk) {
  Tensor4<T> x = past.concatenate(chunk, 2);
  return x;
}

TEST(Paged, AChunkThatThePastHoldsTooIsRefused) {
  Random random(14);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 5, .kv_len = 130});
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  const auto refused = [&](const Rows& cache_k, const Rows& cache_v) {
    const auto [past, chunk] = quoka::chunk_in_cache(cache_k, cache_v, 5);
    EXPECT_NO_THROW(attend_to(in.q, past, chunk));
    auto output = unwritten<Element>(in.q, 16);
    const auto before = output;
    const auto attend_twice = [&](const Past& twice) {
      quoka::attention(in.q, twice, chunk, {output.out, output.lse});
    };
    expect_refused([&] { attend_twice({cache_k, cache_v}); }, {"chunk's keys lie in the past's"});
    expect_refused(
        [&] {
          attend_twice({cache_k.slice(0, 131), cache_v.slice(0, 131)});
        },
        {"chunk's keys lie in the past's"});
    expect_refused(
        [&] {
          attend_twice({cache_k.slice(1, 130), past.v});
        },
        {"chunk's keys lie in the past's"});
    expect_refused(
        [&] {
          attend_twice({past.k, cache_v.slice(1, 130)});
        },
        {"chunk's values lie in the past's"});
    expect_same(output, before);
  };
  refused(k, v);
  for (const Layout layout : layouts)
    for (const Index page : {1, 3, 16, 17, 64}) {
      SCOPED_TRACE("pages of " + std::to_string(page));
      PagedCopy<Element> paged_k(random, k, page, layout), paged_v(random, v, page, layout);
      refused(paged_k.rows(), paged_v.rows());
    }
  const List cells = some_cells(random, 135, 135);
  refused(Rows(k).gathered(cells), Rows(v).gathered(cells));
  PagedCopy<Element> paged_k(random, k, 16, Layout::tokens_outside),
      paged_v(random, v, 16, Layout::tokens_outside);
  refused(paged_k.rows().gathered(cells), paged_v.rows().gathered(cells));
}

// Two views of one pool that are described in two ways: only shared rows count, not the
// description.
TEST(PagedChunks, WhatTwoViewsOfOnePoolShareCounts) {
  Random random(15);
  const auto pool = random.tensor<float>(8, 2, 16, 16);  // of keys and values
  const auto q = random.tensor<float>(1, 4, 4, 16);
  const List table{5, 1, 7};
  const Rows past = quoka::paged(pool, table, 40);  // the last page half full
  const auto attend_to_chunk = [&](const Rows& chunk) {
    return attend_to(q, {past, past}, {chunk, chunk});
  };
  const auto page = [&](Index i) {
    return TensorView<const float>(&pool(i, 0, 0, 0), {1, 2, 16, 16}, {512, 256, 16, 1});
  };
  for (const Index i : {0, 2, 3, 4, 6}) EXPECT_NO_THROW(attend_to_chunk(page(i).slice(3, 4))) << i;
  for (const Index i : {5, 1, 7})
    expect_refused([&] { attend_to_chunk(page(i).slice(4, 4)); }, {"keys lie in the past's"});
  EXPECT_NO_THROW(attend_to_chunk(page(7).slice(8, 4)));  // rows of the last page behind the past
  expect_refused([&] { attend_to_chunk(page(7).slice(7, 4)); }, {"keys lie in the past's"});
  // A list of the rows of one page, and a chunk in pages of its own.
  const List apart{15, 8, 9, 10}, one_shared{15, 8, 7, 10};
  EXPECT_NO_THROW(attend_to_chunk(Rows(page(7)).gathered(apart)));
  expect_refused([&] { attend_to_chunk(Rows(page(7)).gathered(one_shared)); },
                 {"keys lie in the past's"});
  const List elsewhere{6};
  EXPECT_NO_THROW(attend_to_chunk(quoka::paged(pool, elsewhere, 4)));
  const List shared{1};
  expect_refused([&] { attend_to_chunk(quoka::paged(pool, shared, 4)); },
                 {"keys lie in the past's"});
  // A past side by side, a chunk of its cache's cells.
  const Rows cache = page(2);
  const auto listed = [&](const Rows& before, const List& cells) {
    return attend_to(q, {before, before}, {cache.gathered(cells), cache.gathered(cells)});
  };
  const List behind{12, 15, 13, 14}, within{12, 15, 13, 11};
  EXPECT_NO_THROW(listed(cache.slice(0, 12), behind));
  EXPECT_NO_THROW(listed(cache.slice(3, 9), behind));
  expect_refused([&] { listed(cache.slice(0, 12), within); }, {"keys lie in the past's"});
  expect_refused([&] { listed(cache.slice(3, 9), within); }, {"keys lie in the past's"});
}

// A past that begins and ends inside a page holds its rows of both, and none of the pages beside them.
TEST(PagedChunks, APastThatBeginsInsideAPage) {
  Random random(19);
  const auto pool = random.tensor<float>(8, 2, 16, 16);
  const auto q = random.tensor<float>(1, 4, 4, 16);
  const List table{5, 1, 7};
  const Rows past = quoka::paged(pool, table, 48).slice(10, 20);
  for (Index page = 0; page < 8; ++page)
    for (const Index first : {0, 6, 9, 12}) {
      const List one{static_cast<Position>(page)};
      const Rows chunk = quoka::paged(pool, one, 16).slice(first, 4);
      const auto attend_both = [&] { return attend_to(q, {past, past}, {chunk, chunk}); };
      // Rows 10 to 15 of page 5, rows 0 to 13 of page 1.
      if ((page == 5 && first + 4 > 10) || (page == 1 && first < 14))
        expect_refused(attend_both, {"keys lie in the past's"});
      else
        EXPECT_NO_THROW(attend_both()) << page << ", " << first;
    }
}

// Pools that begin elsewhere, or whose pages are shorter, in the same memory.
TEST(PagedChunks, PoolsOfTheSameMemory) {
  Random random(20);
  const auto memory = random.tensor<float>(8, 2, 16, 16);
  const auto q = random.tensor<float>(1, 4, 4, 16);
  const auto pool_from = [&](Index page) {
    return TensorView<const float>(&memory(page, 0, 0, 0), {7, 2, 16, 16}, {512, 256, 16, 1});
  };
  const List fourth{4}, fifth{5};
  const Rows past = quoka::paged(pool_from(0), fifth, 16);
  const auto attend_to_chunk = [&](const Rows& chunk) {
    return attend_to(q, {past, past}, {chunk, chunk});
  };
  expect_refused([&] { attend_to_chunk(quoka::paged(pool_from(1), fourth, 4)); },
                 {"keys lie in the past's"});
  EXPECT_NO_THROW(attend_to_chunk(quoka::paged(pool_from(1), fifth, 4)));
  const Rows shorter = Rows(pool_from(0)).slice(0, 8);
  expect_refused([&] { attend_to_chunk(quoka::paged(shorter, fifth, 4)); },
                 {"keys lie in the past's"});
  EXPECT_NO_THROW(attend_to_chunk(quoka::paged(shorter, fourth, 4)));

  const auto four_pages = [&](Index step) {  // elements from one to the next
    return TensorView<const float>(&memory(0, 0, 0, 0), {4, 2, 16, 16}, {step, 256, 16, 1});
  };
  const List first{1}, second{2};
  const Rows page_two = quoka::paged(four_pages(512), second, 16);
  const auto attend_to_every_second = [&](const List& table) {
    const Rows chunk = quoka::paged(four_pages(1024), table, 4);
    return attend_to(q, {page_two, page_two}, {chunk, chunk});
  };
  expect_refused([&] { attend_to_every_second(first); }, {"keys lie in the past's"});
  EXPECT_NO_THROW(attend_to_every_second(second));
}

// More rows than are compared at a time.
TEST(PagedChunks, OneRowOfALongChunkInThePastIsFound) {
  Random random(16);
  const auto pool = random.tensor<float>(1500, 1, 1, 4);
  const auto q = random.tensor<float>(1, 1, 700, 4);
  List past_slots(700), chunk_slots(700);
  for (Index i = 0; i < 700; ++i) {
    past_slots[uz(i)] = static_cast<Position>(2 * i);
    chunk_slots[uz(i)] = static_cast<Position>(2 * i + 1);
  }
  const auto attend_both = [&] {
    const Rows past = quoka::paged(pool, past_slots, 700),
               chunk = quoka::paged(pool, chunk_slots, 700);
    return attend_to(q, {past, past}, {chunk, chunk});
  };
  EXPECT_NO_THROW(attend_both());
  for (const Index i : {0, 511, 512, 699}) {
    const Position own = std::exchange(chunk_slots[uz(i)], Position{1200});
    expect_refused(attend_both, {"keys lie in the past's"});
    chunk_slots[uz(i)] = own;
  }
}

TEST(PagedChunks, MoreThanTheCacheHoldsIsRefused) {
  Random random(17);
  const auto k = random.tensor<float>(1, 1, 16, 4), shorter = random.tensor<float>(1, 1, 15, 4);
  expect_refused([&] { (void)quoka::chunk_in_cache(k, k, 17); }, {17, 16});
  expect_refused([&] { (void)quoka::chunk_in_cache(k, k, -1); }, {17, 16});
  expect_refused([&] { (void)quoka::chunk_in_cache(k, shorter, 4); }, {15, 16});
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
  const TensorView<float> out(&pool(1, 0, 0, 0), {1, 2, 4, 16}, {512, 256, 16, 1});
  expect_refused(
      [&] {
        quoka::attention(in.q, {past, past}, {in.k, in.v}, out);
      },
      {"out shares memory with the past's keys"});
  EXPECT_TRUE(same_bits(pool, before));
}

// ---- hostile tables -----------------------------------------------------------------------------

// Rows of a pool whose memory cannot be read.
class PagedRefuses : public ::testing::Test {
 protected:
  static constexpr Index bytes = 8 * 2 * 16 * 16 * 4;

#if defined(__linux__)
  void SetUp() override {
    memory_ = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory_, MAP_FAILED);
  }
  void TearDown() override { ::munmap(memory_, bytes); }
  void* memory_ = nullptr;
#else
  Tensor4<float> floats_{8, 2, 16, 16};
  void* memory_ = floats_.data();
#endif

  Rows pool(Index pages = 8, Index page_size = 16) const {
    return {static_cast<const std::byte*>(memory_),
            quoka::float_format(),
            {pages, 2, page_size, 16},
            {2 * 16 * 16 * 4, 16 * 16 * 4, 16 * 4}};
  }
};

TEST_F(PagedRefuses, WhatIsNoTableAndNoList) {
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
  const struct {
    std::function<void()> wrong;
    std::vector<Fragment> says;
  } table[] = {
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
  };
  for (const auto& row : table) expect_refused(row.wrong, row.says);
  EXPECT_EQ(quoka::paged(eight, sound, 48).len(), 48);
  const List three_of_four{7, 0, 7, -1};  // of which three are used
  EXPECT_EQ(quoka::paged(eight, three_of_four, 48).len(), 48);
}

}  // namespace
