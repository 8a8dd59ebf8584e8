// Views: what they are made of, where each row lies, what they refuse.

#include <quoka/core/view.hpp>

#include "support/fixtures.hpp"

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

// Not from what would dangle, is laid out otherwise, is const, or has another type or rank.
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

template <class T>
class View : public ::testing::Test {};
TYPED_TEST_SUITE(View, StorageTypes, StorageNames);

TYPED_TEST(View, OfATensorFindsEveryElement) {
  Random random(1);
  auto x = random.tensor<TypeParam>(2, 3, 7, 5);
  const TensorView<TypeParam> view = x;
  EXPECT_EQ(view.batch(), 2);
  EXPECT_EQ(view.heads(), 3);
  EXPECT_EQ(view.len(), 7);
  EXPECT_EQ(view.dim(), 5);
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 7; ++i)
        for (Index c = 0; c < 5; ++c) ASSERT_EQ(view.row(b, head, i) + c, &x(b, head, i, c));
}

TYPED_TEST(View, OfAMapFindsEveryElement) {
  std::vector<TypeParam> memory(2 * 3 * 7 * 5);
  Map4<TypeParam> map(memory.data(), 2, 3, 7, 5);
  const TensorView<TypeParam> view = map;
  EXPECT_EQ(view.row(0, 0, 0), memory.data());
  EXPECT_EQ(view.row(1, 2, 6) + 4, &memory.back());
}

TYPED_TEST(View, OfAConstMapIsReadOnly) {
  const std::vector<TypeParam> memory(3 * 5);
  const Eigen::TensorMap<const Tensor4<TypeParam>> map(memory.data(), 1, 1, 3, 5);
  const TensorView<const TypeParam> view = map;
  EXPECT_EQ(view.row(0, 0, 2), memory.data() + 10);
}

TYPED_TEST(View, OfATemporaryMapOutlivesTheMap) {
  std::vector<TypeParam> memory(3 * 5);
  const TensorView<const TypeParam> view = Map4<TypeParam>(memory.data(), 1, 1, 3, 5);
  EXPECT_EQ(view.row(0, 0, 1), memory.data() + 5);
}

TYPED_TEST(View, OfARankThreeTensorHasBatchOne) {
  Tensor3<TypeParam> x(3, 7, 5);  // [heads, len, dim]
  const TensorView<TypeParam> view = x;
  EXPECT_EQ(view.sizes(), (std::array<Index, 4>{1, 3, 7, 5}));
  EXPECT_EQ(view.row(0, 2, 6), &x(2, 6, 0));
}

TYPED_TEST(View, ViewOfDeducesTheStorageType) {
  Random random(2);
  const auto x = random.tensor<TypeParam>(1, 2, 3, 4);
  static_assert(std::is_same_v<decltype(view_of(x)), TensorView<const TypeParam>>);
  EXPECT_EQ(view_of(x).data(), x.data());
  EXPECT_EQ(view_of(view_of(x)).row(0, 1, 2), &x(0, 1, 2, 0));
}

TEST(View, RankThreeOfATensorIsBatchHeadsLen) {
  Tensor3<float> x(2, 3, 7);
  const TensorView<float, 3> view = x;
  EXPECT_EQ(view.batch(), 2);
  EXPECT_EQ(view.heads(), 3);
  EXPECT_EQ(view.len(), 7);
  EXPECT_EQ(&view.at(1, 2, 6), &x(1, 2, 6));
}

// ---- from memory --------------------------------------------------------------------------------

TYPED_TEST(View, WithStridesReadsACacheInAnotherOrder) {
  Random random(3);
  const auto x = random.tensor<TypeParam>(2, 3, 7, 5);
  const Strided<TypeParam> cache(x);  // [batch, len, heads, dim], padded
  EXPECT_TRUE(same_bits(x, cache.view()));
}

TYPED_TEST(View, WithStrideZeroRepeatsOneHead) {
  Random random(4);
  const auto x = random.tensor<TypeParam>(1, 1, 7, 5);
  const TensorView<const TypeParam> shared(x.data(), {1, 4, 7, 5}, {0, 0, 5, 1});
  EXPECT_EQ(shared.row(0, 3, 6), &x(0, 0, 6, 0));
}

TYPED_TEST(View, WithANegativeStrideRunsBackwards) {
  Random random(5);
  const auto x = random.tensor<TypeParam>(1, 1, 7, 5);
  const TensorView<const TypeParam> reversed(x.data() + 6 * 5, {1, 1, 7, 5}, {0, 0, -5, 1});
  EXPECT_EQ(reversed.row(0, 0, 6), x.data());
}

TEST(View, RankThreeMayHaveAnyInnerStride) {
  std::vector<float> memory(30);
  const TensorView<float, 3> view(memory.data(), {1, 2, 5}, {0, 1, 3});
  EXPECT_EQ(&view.at(0, 1, 4), memory.data() + 13);
}

TEST(View, RefusesANegativeSize) {
  float x = 0;
  expect_refused([&] { TensorView<float>(&x, {1, -3, 7, 5}, {0, 0, 5, 1}); }, {"size", -3, 0});
  expect_refused([&] { TensorView<float, 3>(&x, {1, 1, -7}, {0, 0, 1}); }, {"size", -7, 0});
}

TEST(View, RefusesAnInnerStrideOtherThanOne) {
  float x = 0;
  expect_refused([&] { TensorView<float>(&x, {1, 3, 7, 5}, {0, 0, 5, 2}); }, {"stride", 2, 1});
  expect_refused([&] { TensorView<float>(&x, {1, 3, 7, 5}, {0, 0, 5, 0}); }, {"stride", 0, 1});
}

// ---- empty --------------------------------------------------------------------------------------

TEST(View, MadeOfNothingIsEmpty) {
  const TensorView<const float> view;
  EXPECT_TRUE(view.empty());
  EXPECT_EQ(view.data(), nullptr);
  EXPECT_EQ(view.batch() + view.heads() + view.len() + view.dim(), 0);
}

TEST(View, IsEmptyWhenAnyAxisIs) {
  float x = 0;
  EXPECT_TRUE(TensorView<float>(&x, {0, 3, 7, 5}, {1, 1, 1, 1}).empty());
  EXPECT_TRUE(TensorView<float>(&x, {2, 3, 0, 5}, {1, 1, 1, 1}).empty());
  EXPECT_TRUE((TensorView<float, 3>(&x, {2, 0, 7}, {1, 1, 1}).empty()));
  EXPECT_FALSE(TensorView<float>(&x, {1, 1, 1, 1}, {1, 1, 1, 1}).empty());
}

// ---- slice --------------------------------------------------------------------------------------

TYPED_TEST(View, SliceIsThoseRows) {
  Random random(6);
  const auto x = random.tensor<TypeParam>(2, 3, 7, 5);
  const auto part = view_of(x).slice(2, 4);
  EXPECT_EQ(part.sizes(), (std::array<Index, 4>{2, 3, 4, 5}));
  for (Index i = 0; i < 4; ++i) EXPECT_EQ(part.row(1, 2, i), &x(1, 2, 2 + i, 0));
}

TYPED_TEST(View, SliceOfASliceCountsFromItsBegin) {
  Random random(7);
  const auto x = random.tensor<TypeParam>(1, 2, 7, 5);
  EXPECT_EQ(view_of(x).slice(2, 5).slice(3, 2).row(0, 1, 1), &x(0, 1, 6, 0));
}

TEST(View, SliceOfARankThreeView) {
  Random random(8);
  const auto x = random.scores(2, 3, 7);
  const auto part = TensorView<const float, 3>(x).slice(3, 4);
  EXPECT_EQ(part.len(), 4);
  EXPECT_EQ(&part.at(1, 2, 3), &x(1, 2, 6));
}

TEST(View, SliceOfNothingIsEmptyAnywhere) {
  const Tensor4<float> x(1, 2, 7, 5);
  for (Index begin : {0, 3, 7}) EXPECT_TRUE(view_of(x).slice(begin, 0).empty());
}

TEST(View, SliceRefusesWhatLiesBeyondTheEnd) {
  const Tensor4<float> x(1, 2, 7, 5);
  expect_refused([&] { (void)view_of(x).slice(3, 5); }, {5, 4});
  expect_refused([&] { (void)view_of(x).slice(8, 0); }, {8, 7});
}

TEST(View, SliceRefusesNegativeNumbers) {
  const Tensor4<float> x(1, 2, 7, 5);
  expect_refused([&] { (void)view_of(x).slice(-1, 2); }, {"begin", -1, 0});
  expect_refused([&] { (void)view_of(x).slice(3, -2); }, {"count", -2, 0});
}

TEST(View, SliceRefusesACountThatWouldOverflow) {
  const Tensor4<float> x(1, 2, 7, 5);
  const Index largest = std::numeric_limits<Index>::max();
  expect_refused([&] { (void)view_of(x).slice(1, largest); }, {largest, 6});
  expect_refused([&] { (void)view_of(x).slice(largest, 1); }, {largest, 7});
}

}  // namespace
