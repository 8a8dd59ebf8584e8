// Views: construction, the place of each row, refusals.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/rows/overlap.hpp>
#include <quoka/rows/row_walk.hpp>
#include <quoka/rows/tensor.hpp>

#include "support/refused_calls.hpp"
#include "support/world.hpp"

namespace {

using namespace quoka_test;
using quoka::view_of;

template <class T>
using ColMajor4 = Eigen::Tensor<T, 4, Eigen::ColMajor>;
template <class T>
using Map4 = Eigen::TensorMap<Tensor4<T>>;

// ---- what is a view, and what must not become one -----------------------------------------------

static_assert(std::is_trivially_copyable_v<TensorView<const Eigen::half>>);
static_assert(std::is_trivially_copyable_v<TensorView<float, 3>>);

// Implicitly from row-major tensors and maps.
static_assert(std::is_convertible_v<Tensor4<float>&, TensorView<float>>);
static_assert(std::is_convertible_v<Tensor4<float>&, TensorView<const float>>);
static_assert(std::is_convertible_v<const Tensor4<float>&, TensorView<const float>>);
static_assert(std::is_convertible_v<Tensor3<float>&, TensorView<float>>);  // batch 1
static_assert(std::is_convertible_v<Tensor3<float>&, TensorView<float, 3>>);
static_assert(std::is_convertible_v<Map4<float>&, TensorView<float>>);
static_assert(std::is_convertible_v<Map4<float>, TensorView<float>>);  // a map does not own
static_assert(std::is_convertible_v<TensorView<float>, TensorView<const float>>);
static_assert(std::is_convertible_v<TensorView<float, 3>, TensorView<const float, 3>>);

// Not from temporaries, other layouts, const tensors, or another type or rank.
static_assert(!std::is_constructible_v<TensorView<const float>, Tensor4<float>>);
static_assert(!std::is_constructible_v<TensorView<const float>, const Tensor4<float>>);
static_assert(!std::is_constructible_v<TensorView<const float>, ColMajor4<float>&>);
static_assert(!std::is_constructible_v<TensorView<float>, const Tensor4<float>&>);
static_assert(!std::is_constructible_v<TensorView<float>, TensorView<const float>>);
static_assert(!std::is_constructible_v<TensorView<const float>, Tensor4<Eigen::half>&>);
static_assert(!std::is_constructible_v<TensorView<const float>, Tensor4<double>&>);
static_assert(!std::is_constructible_v<TensorView<const float, 3>, Tensor4<float>&>);

static_assert(std::is_same_v<quoka::storage_t<const Tensor4<Eigen::half>&>, Eigen::half>);
static_assert(std::is_same_v<quoka::storage_t<TensorView<const Eigen::bfloat16>>, Eigen::bfloat16>);
static_assert(std::is_same_v<quoka::storage_t<Map4<const float>>, float>);

// ---- from Eigen ---------------------------------------------------------------------------------

// Views of a tensor, of maps, temporary ones too, and of a rank-3 tensor, which has batch 1 or is a view of rank 3;
// slices of them, and of slices; and all of these as rows, which are views of their type again, and of no other.
TEST(View, FindsEveryElementOfWhatEigenHas) {
  for_each_storage([]<class T>() {
    Random random(1);
    auto x = random.tensor<T>(2, 3, 7, 5);
    const Map4<T> map(x.data(), 2, 3, 7, 5);
    const Eigen::TensorMap<const Tensor4<T>> read_only(x.data(), 2, 3, 7, 5);
    static_assert(std::is_same_v<decltype(view_of(std::as_const(x))), TensorView<const T>>);
    for (const TensorView<const T>& view :
         {TensorView<const T>(x), TensorView<const T>(map), TensorView<const T>(read_only),
          TensorView<const T>(Map4<T>(x.data(), 2, 3, 7, 5)), view_of(std::as_const(x)),
          view_of(view_of(std::as_const(x)))}) {
      EXPECT_EQ(view.sizes(), (std::array<Index, 4>{2, 3, 7, 5}));
      EXPECT_EQ(view.batch() * 1000 + view.heads() * 100 + view.len() * 10 + view.dim(), 2375);
      const TensorView<const T> part = view.slice(2, 5), last = part.slice(3, 2);
      EXPECT_EQ(part.sizes(), (std::array<Index, 4>{2, 3, 5, 5}));
      EXPECT_EQ(last.row(0, 1, 1), &x(0, 1, 6, 0));
      const Rows rows = view, some = part;
      EXPECT_EQ(&rows.format(), &quoka::format_of<T>());
      EXPECT_EQ(rows.sizes(), view.sizes());
      EXPECT_EQ(some.typed<T>().strides(), view.strides());
      EXPECT_TRUE(same_bits(some.typed<T>(), part));
      using Other = std::conditional_t<std::is_same_v<T, float>, Eigen::half, float>;
      expect_refused([&] { (void)rows.typed<Other>(); }, {"typed(): rows are of format"});
      for (Index b = 0; b < 2; ++b)
        for (Index head = 0; head < 3; ++head)
          for (Index i = 0; i < 7; ++i) {
            for (Index c = 0; c < 5; ++c) ASSERT_EQ(view.row(b, head, i) + c, &x(b, head, i, c));
            const auto* const row = reinterpret_cast<const std::byte*>(view.row(b, head, i));
            ASSERT_EQ(rows.row(b, head, i), row);
            ASSERT_EQ(rows.head(b, head)[i], row);
            if (i < 2) continue;
            ASSERT_EQ(part.row(b, head, i - 2), view.row(b, head, i));
            ASSERT_EQ(rows.slice(2, 5).row(b, head, i - 2), row);
          }
    }
  });
  Tensor3<float> x(3, 7, 5);
  const TensorView<float> heads_len_dim = x;
  EXPECT_EQ(heads_len_dim.sizes(), (std::array<Index, 4>{1, 3, 7, 5}));
  EXPECT_EQ(heads_len_dim.row(0, 2, 6), &x(2, 6, 0));
  const TensorView<float, 3> batch_heads_len = x;
  EXPECT_EQ(batch_heads_len.sizes(), (std::array<Index, 3>{3, 7, 5}));
  EXPECT_EQ(batch_heads_len.batch() * 100 + batch_heads_len.heads() * 10 + batch_heads_len.len(),
            375);
  EXPECT_EQ(&batch_heads_len.at(1, 2, 4), &x(1, 2, 4));
  EXPECT_EQ(&batch_heads_len.slice(3, 2).at(1, 2, 1), &x(1, 2, 4));
}

// ---- from memory --------------------------------------------------------------------------------

// By strides of 0, below 0 and of any size within a rank-3 row, and side by side without any.
TEST(View, FindsElementsByItsStrides) {
  float memory[2 * 3 * 5 * 7];
  const TensorView<const float> shared(memory, {1, 4, 7, 5}, {0, 0, 5, 1}),
      reversed(memory + 30, {1, 1, 7, 5}, {0, 0, -5, 1});
  EXPECT_EQ(shared.row(0, 3, 6), memory + 30);
  EXPECT_EQ(reversed.row(0, 0, 6), memory);
  EXPECT_EQ(Rows(reversed).row(0, 0, 6), reinterpret_cast<const std::byte*>(memory));
  EXPECT_EQ((&TensorView<float, 3>(memory, {1, 2, 5}, {0, 1, 3}).at(0, 1, 4)), memory + 13);
  const TensorView<float> four(memory, {2, 3, 5, 7});
  EXPECT_EQ(four.strides(), (std::array<Index, 4>{105, 35, 7, 1}));
  EXPECT_EQ(four.row(1, 2, 4) + 6, memory + 2 * 3 * 5 * 7 - 1);
  const TensorView<const float, 3> three(memory, {2, 3, 5});
  EXPECT_EQ(three.strides(), (std::array<Index, 3>{15, 5, 1}));
  EXPECT_TRUE(TensorView<float>(nullptr, {2, 0, 5, 7}).empty());
}

// Views, slices and rows: each refusal with both numbers.
TEST(View, RefusesWhatIsNoView) {
  float memory[4];
  float* const null = nullptr;
  const Index large = Index{1} << 40, largest = std::numeric_limits<Index>::max();
  const Tensor4<float> x(1, 2, 7, 5);
  const Rows rows = x;
  using Four = std::array<Index, 4>;
  using Three = std::array<Index, 3>;
  const auto dense = [](float* at, Four sizes) { return [=] { TensorView<float>(at, sizes); }; };
  const auto four = [](float* at, Four sizes, Four strides) {
    return [=] { TensorView<float>(at, sizes, strides); };
  };
  const auto three = [](float* at, Three sizes, Three strides) {
    return [=] { TensorView<float, 3>(at, sizes, strides); };
  };
  const auto rows_of = [](const std::byte* at, Four sizes) {
    return [=] { Rows(at, quoka::float_format(), sizes, {4, 4, 4}); };
  };
  const auto slice = [](const auto& of, Index begin, Index count) {
    return [=] { (void)of.slice(begin, count); };
  };
  const TensorView<const float> view = x;
  expect_all_refused({{dense(memory, {1, -3, 2, 2}), {"size", -3, 0}},
                      {dense(null, {1, 1, 2, 2}), {"pointer is null"}},
                      {dense(memory, {large, 1, large, 2}), {"size", large, (Index{1} << 22) - 1}},
                      {four(null, {1, 3, 7, 5}, {105, 35, 5, 1}), {"pointer is null"}},
                      {four(memory, {1, -3, 7, 5}, {0, 0, 5, 1}), {"size", -3, 0}},
                      {four(memory, {1, 3, 7, 5}, {0, 0, 5, 2}), {"stride", 2, 1}},
                      {four(memory, {1, 3, 7, 5}, {0, 0, 5, 0}), {"stride", 0, 1}},
                      {three(null, {1, 1, 1}, {1, 1, 1}), {"pointer is null"}},
                      {three(memory, {1, 1, -7}, {0, 0, 1}), {"size", -7, 0}},
                      {rows_of(nullptr, {1, 1, 1, 1}), {"pointer is null"}},
                      {rows_of(rows.data(), {1, -2, 7, 5}), {"size", -2, 0}},
                      {slice(view, 3, 5), {5, 4}},
                      {slice(view, 8, 0), {8, 7}},
                      {slice(view, -1, 2), {"begin", -1, 0}},
                      {slice(view, 3, -2), {"count", -2, 0}},
                      {slice(view, 1, largest), {largest, 6}},
                      {slice(view, largest, 1), {largest, 7}},
                      {slice(rows, 3, 5), {5, 4}},
                      {slice(rows, -1, 2), {"begin", -1, 0}},
                      {slice(rows, 1, largest), {6}}});
}

// ---- empty --------------------------------------------------------------------------------------

// Views without elements: default ones, an axis of size 0, with a pointer and without, an empty slice.
TEST(View, IsEmptyWhenAnyAxisIs) {
  float x = 0;
  const TensorView<const float> nothing;
  EXPECT_EQ(nothing.data(), nullptr);
  EXPECT_EQ(nothing.batch() + nothing.heads() + nothing.len() + nothing.dim(), 0);
  EXPECT_TRUE(nothing.empty());
  for (float* const at : {&x, static_cast<float*>(nullptr)}) {
    EXPECT_TRUE(TensorView<float>(at, {0, 3, 7, 5}, {1, 1, 1, 1}).empty());
    EXPECT_TRUE(TensorView<float>(at, {1, 3, 0, 5}, {0, 0, 5, 1}).empty());
    EXPECT_TRUE((TensorView<float, 3>(at, {2, 0, 7}, {1, 1, 1}).empty()));
  }
  EXPECT_FALSE(TensorView<float>(&x, {1, 1, 1, 1}, {1, 1, 1, 1}).empty());
  EXPECT_TRUE(TensorView<float>(nullptr, {1, 3, 0, 5}, {0, 0, 5, 1}).absent());
  EXPECT_TRUE(Rows(nullptr, quoka::float_format(), {1, 3, 0, 5}, {0, 0, 20}).empty());
  const Tensor4<float> seven(1, 2, 7, 5);
  for (const Index begin : {0, 3, 7}) EXPECT_TRUE(view_of(seven).slice(begin, 0).empty());
}

// ---- rows of any format -------------------------------------------------------------------------

using quoka::OutputRows;

static_assert(std::is_convertible_v<TensorView<Eigen::half>, Rows>);
static_assert(std::is_convertible_v<TensorView<const Eigen::bfloat16>, Rows>);
static_assert(std::is_convertible_v<Tensor4<float>&, Rows>);
static_assert(std::is_convertible_v<const Tensor3<Eigen::half>&, Rows>);  // batch 1
static_assert(std::is_convertible_v<Map4<float>, Rows>);                  // a map does not own
static_assert(std::is_convertible_v<Map4<float>, OutputRows>);
static_assert(std::is_convertible_v<TensorView<float>, OutputRows>);
static_assert(std::is_convertible_v<OutputRows, Rows>);

// Not from temporaries, const tensors for writing, or another element type or rank.
static_assert(!std::is_constructible_v<Rows, Tensor4<float>>);
static_assert(!std::is_constructible_v<Rows, const Tensor4<float>>);
static_assert(!std::is_constructible_v<OutputRows, Tensor4<float>>);
static_assert(!std::is_constructible_v<OutputRows, TensorView<const float>>);
static_assert(!std::is_constructible_v<OutputRows, Rows>);
static_assert(!std::is_constructible_v<Rows, TensorView<const double>>);
static_assert(!std::is_constructible_v<Rows, TensorView<const float, 3>>);

// Nor with a temporary format, block table or list of cells, which are borrowed.
template <class F>
concept MakesRowsOf =
    std::is_constructible_v<Rows, const std::byte*, F, Rows::Sizes, Rows::Strides>;
static_assert(MakesRowsOf<const quoka::Format&> && !MakesRowsOf<quoka::Format>);
template <class List>
concept Pages = requires(const Rows& pool, List&& table) {
  quoka::paged(pool, std::forward<List>(table), Index{20});
};
static_assert(Pages<const std::vector<Position>&> && !Pages<std::vector<Position>>);
template <class List>
concept Gathers = requires(const Rows& rows, List&& cells) {
  rows.gathered(std::forward<List>(cells));
};
static_assert(Gathers<const std::vector<Position>&> && !Gathers<std::vector<Position>>);
template <class T>
concept HasAView = requires(T&& x) {
  { view_of(std::forward<T>(x)).len() } -> std::same_as<Index>;
};
static_assert(HasAView<Tensor4<float>&> && !HasAView<Tensor4<float>>);

// One head: row after row. Several heads: token by token, or page by page where a page holds all rows of a head before
// those of the next. Rows are taken any number at a time, and are null past the end. The same for a list of rows.
TEST(View, AWalkGoesInTheOrderOfMemory) {
  using Found = std::vector<quoka::ConstRow>;
  for_each_draw(600, [](Random& random) {
    using enum StoredRows::Layout;
    const StoredRows::Layout layout = random.one_of(StoredRows::layouts);
    const Index heads = 1 + random.below(3), len = 1 + random.below(40),
                skipped = random.seldom(2) ? random.below(30) : 0;
    const StoredRows stored(random.tensor<float>(1, heads, skipped + len, 5),
                            *every_format()[uz(random.below(written_formats))], layout, random);
    const Rows rows = stored.rows().slice(skipped, len);
    const bool are_together = layout == tokens || layout == pages || layout == list_of_pages;
    EXPECT_EQ(rows.heads_side_by_side(), heads > 1 && are_together);
    const Index first = random.below(heads), some = 1 + random.below(heads - first),
                begin = random.below(len), end = begin + random.below(len - begin + 1);
    const auto expect_walk = [&](quoka::RowWalk walk, const Found& expected) {
      Found found(expected.size() + 2, rows.row(0, 0, 0));
      const auto count = std::ssize(found), piece = 1 + random.below(16);
      for (Index i = 0; i < count; i += piece)
        walk.take(std::min(piece, count - i), found.data() + i);
      EXPECT_TRUE(found[expected.size()] == nullptr && found[expected.size() + 1] == nullptr);
      found.resize(expected.size());
      EXPECT_EQ(found, expected);
    };
    // Where heads take turns.
    const Index page =
        layout == pages && rows.strides()[1] > rows.strides()[2] ? rows.pool_sizes()[2] : 1;
    Found walked, listed;
    for (Index at = begin, turn_end; at < end; at = turn_end) {
      turn_end = std::min(end, at + page - rows.pool_row(at) % page);
      for (Index head = first; head < first + some; ++head)
        for (Index i = at; i < turn_end; ++i) walked.push_back(rows.row(0, head, i));
    }
    const quoka::HeadRows head = rows.head(0, first);
    expect_walk(quoka::RowWalk(head, begin, end, some, rows.strides()[1]), walked);
    std::vector<Position> order;
    for (const Index i : random.permutation(len)) order.push_back(static_cast<Position>(i));
    const quoka::HeadRows finder = head.gathered(order.data());
    for (Index i = begin; i < end; ++i) listed.push_back(head[order[uz(i)]]);
    Found together(listed.size());
    finder.find(begin, end - begin, together.data());
    EXPECT_EQ(together, listed);
    for (Index i = begin; i < end; ++i)
      EXPECT_EQ(finder.from(begin)[i - begin], listed[uz(i - begin)]);
    expect_walk(quoka::RowWalk(finder, begin, end), listed);
  });
}

// ---- do two views share memory? -----------------------------------------------------------------

bool share(const Rows& a, const Rows& b) {
  using quoka::detail::Footprint;
  const bool shared = quoka::detail::share_memory(Footprint(a), Footprint(b));
  EXPECT_EQ(quoka::detail::share_memory(Footprint(b), Footprint(a)), shared);
  return shared;
}

// Random views in a small buffer, against a list of their bytes: shared bytes are always found. Views with common
// strides, each beyond the rows within, are recognised as separate if they share nothing.
TEST(SharedMemory, IsFoundAndInterleavedViewsAreToldApart) {
  std::vector<Eigen::half> memory(8000);
  int shared_bytes = 0, apart = 0, refused = 0;
  const bool complete = for_each_draw(3000, [&](Random& random) {
    const bool common = random.below(2) == 0;
    const Index row = 1 + random.below(8), len = 1 + random.below(6), heads = 1 + random.below(4),
                head = row * len + random.below(30), batch = head * heads + random.below(30);
    const bool token_major = random.below(2) == 0;
    std::vector<std::vector<bool>> touched;
    std::vector<Rows> rows;
    for (int which = 0; which < 2; ++which) {
      std::array<Index, 4> sizes{1 + random.below(3), 1 + random.below(4),
                                 random.below(20) == 0 ? 0 : 1 + random.below(5),
                                 1 + random.below(6)};
      std::array<Index, 4> strides{random.below(60), random.below(60), random.below(60), 1};
      if (common) {  // heads of `len` rows, or tokens of `len` heads
        sizes = {sizes[0], 1 + random.below(heads), 1 + random.below(len), 1 + random.below(row)};
        strides = {batch, head, row, 1};
        if (token_major) std::swap(sizes[1], sizes[2]), std::swap(strides[1], strides[2]);
      }
      for (Index axis = 0; axis < 3; ++axis)
        if (random.below(5) == 0) strides[uz(axis)] = -strides[uz(axis)];
      const TensorView<const Eigen::half> view(memory.data() + 3500 + random.below(400), sizes,
                                               strides);
      touched.emplace_back(memory.size());
      for (Index b = 0; b < sizes[0]; ++b)
        for (Index h = 0; h < sizes[1]; ++h)
          for (Index i = 0; i < sizes[2]; ++i)
            for (Index c = 0; c < sizes[3]; ++c)
              touched.back()[uz(view.row(b, h, i) + c - memory.data())] = true;
      rows.push_back(view);
    }
    bool meet = false;
    for (std::size_t i = 0; i < memory.size(); ++i) meet |= touched[0][i] && touched[1][i];
    const bool found = share(rows[0], rows[1]);
    if (meet || common) {
      ASSERT_EQ(found, meet);
    }
    (meet ? shared_bytes : found ? refused : apart) += 1;
  });
  if (!complete) return;
  EXPECT_GT(shared_bytes, 300);
  EXPECT_GT(apart, 300);
  EXPECT_GT(refused, 50);
}

// Channels apart, tokens side by side: past and chunk of one cache [heads, dim, tokens].
TEST(SharedMemory, TokensSideBySideAreToldApart) {
  std::vector<float> memory(2 * 8 * 32);
  const auto tokens = [&](Index first, Index count) {
    return Rows(reinterpret_cast<const std::byte*>(memory.data() + first),
                quoka::channel_major_format<float>(), {1, 2, count, 8}, {4 * 8 * 32, 4 * 8 * 32, 4},
                4 * 32);
  };
  EXPECT_FALSE(share(tokens(0, 20), tokens(20, 5)));
  EXPECT_TRUE(share(tokens(0, 21), tokens(20, 5)));
}

// The second head's scales are its own, also where it is the first of some heads.
TEST(RowsOfHeads, HaveTheirOwnScales) {
  const std::vector<std::byte> memory(4 * 2 * 8);
  const float scales[4] = {1, 2, 3, 4};
  const Rows all =
      Rows(memory.data(), quoka::i8_format(), {1, 4, 2, 8}, {64, 16, 8}).with_scales(scales, 1);
  for (Index head = 0; head < 4; ++head) EXPECT_EQ(all.shape(head).scales, scales + head);
  const Rows last = all.some_heads(1, 3).some_heads(1, 2);
  EXPECT_EQ(last.heads(), 2);
  EXPECT_EQ(last.row(0, 1, 1), all.row(0, 3, 1));
  EXPECT_EQ(last.shape(1).scales, scales + 3);
  EXPECT_TRUE(all.stored_as(all));
  EXPECT_FALSE(all.stored_as(all.with_scales(scales, 2))) << "another step from head to head";
  EXPECT_FALSE(all.stored_as(all.with_scales(scales + 1, 1)));
}

// Repeated heads lie in the memory of those that are stored, and no strides lead from one to the next.
TEST(RowsOfHeads, ThatAreRepeatedAreStoredOnce) {
  std::vector<float> memory(2 * 2 * 5 * 4);
  const TensorView<const float> two(memory.data(), {1, 2, 5, 4}),
      behind(two.row(0, 1, 4) + 4, {1, 2, 5, 4});
  const Rows stored = two, all = stored.repeated_heads(3);
  ASSERT_EQ(all.heads(), 6);
  for (Index head = 0; head < 6; ++head) EXPECT_EQ(all.row(0, head, 4), stored.row(0, head / 3, 4));
  EXPECT_FALSE(share_memory(quoka::detail::Footprint(all), quoka::detail::Footprint(Rows(behind))));
  const std::vector<quoka::Position> even{0, 2, 4}, odd{1, 3};
  EXPECT_TRUE(quoka::detail::share_no_rows(all.gathered(even), stored.gathered(odd)));
  EXPECT_TRUE(quoka::detail::share_no_rows(all.gathered(even), Rows(behind)));
  const Rows between_elements(stored.data(), stored.format(), {1, 2, 5, 4}, {0, 80, 18});
  expect_all_refused({{[&] { (void)all.typed<float>(); }, {"repeated", 3, 1}},
                      {[&] { (void)between_elements.typed<float>(); }, {"stride", 18, 4}},
                      {[&] { (void)all.some_heads(0, 2); }, {"repeated", 3, 1}},
                      {[&] { (void)quoka::Mask(all); }, {"repeated", 3, 1}},
                      {[&] { (void)all.repeated_heads(0); }, {"repeated", 0, 1}}});
}

}  // namespace
