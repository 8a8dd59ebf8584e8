// rows/mask.hpp by example: what hides, holes of a cache, sequences of which one is hidden in part; and the cells that a
// mask leaves to a selection. Properties of every mask are in attention_suite_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_case.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::Mask;

// The numbers that are added to the logits: [batch or 1, q_heads or 1, q_len, keys].
using Added = Tensor4<float>;

// Biases of k / 8, of which half and bfloat16 are exact, in some places, -infinity in others.
Added random_mask(Random& random, Index batch, Index heads, Index q_len, Index keys,
                  double hidden = 0.3, double biased = 0.3) {
  Added x(batch, heads, q_len, keys);
  for (Index i = 0; i < x.size(); ++i) {
    const double kind = random.uniform();
    x.data()[i] = kind < hidden            ? -infinity
                  : kind < hidden + biased ? static_cast<float>(random.below(33) - 16) / 8
                                           : 0.0f;
  }
  return x;
}

// One rule for every format: minus infinity and all at or below -60,000 hide; what lies above is a bias.
template <class T>
void expect_hides_from_60000(float last_hidden, float first_bias) {
  const std::vector<float> numbers = {
      -infinity,  static_cast<float>(std::numeric_limits<T>::lowest()),
      -65504.0f,  last_hidden,
      first_bias, -50000.0f,
      0.0f,       1.0f};
  const Index keys = std::ssize(numbers);
  Tensor4<T> added(1, 1, 1, keys);
  for (Index i = 0; i < keys; ++i) added(0, 0, 0, i) = static_cast<T>(numbers[uz(i)]);
  const Mask mask(added);
  std::vector<float> read(numbers.size());
  mask.read(0, 0, 0, {nullptr, 0, keys}, read.data());
  for (Index i = 0; i < keys; ++i) {
    const bool hides = i < 4;
    EXPECT_EQ(read[uz(i)] == -infinity, hides) << numbers[uz(i)];
    EXPECT_EQ(mask.any_visible(0, 0, 0, {nullptr, i, 1}), !hides) << numbers[uz(i)];
  }
}

TEST(Mask, HidesFromTheSameNumberOnInEveryFormat) {
  expect_hides_from_60000<float>(-60000.0f, -59999.0f);
  expect_hides_from_60000<Eigen::half>(-60000.0f, -59968.0f);
  expect_hides_from_60000<Eigen::bfloat16>(-60160.0f, -59904.0f);
}

// ---- visible cells ------------------------------------------------------------------------------

TEST(VisibleCells, ByWhoSeesThem) {
  Random random(26);
  for (const Index kv_len : {0, 7, 1500}) {
    Added added = random_mask(random, 2, 3, 5, kv_len + 5, 0.05, 0.3);
    for (Index b = 0; b < 2; ++b)
      for (Index t = b; t < kv_len; t += 6)
        for (Index head = 0; head < 3; ++head)
          for (Index i = 0; i < 5; ++i) added(b, head, i, t) = t % 4 < 2 ? -infinity : 0.5f;
    for (const StoredMask::Kind kind :
         {StoredMask::Kind::single, StoredMask::Kind::half, StoredMask::Kind::bits})
      for (Index b = 0; b < 2; ++b) {
        // A kind without biases hides what has one.
        const auto seen = [&](Index t, Index head, Index i) {
          const float x = added(b, head, i, t);
          return kind == StoredMask::Kind::bits ? x == 0.0f : x > -infinity;
        };
        std::vector<Position> to_all, to_some;
        for (Index t = 0; t < kv_len; ++t) {
          Index count = 0;
          for (Index head = 0; head < 3; ++head)
            for (Index i = 0; i < 5; ++i) count += seen(t, head, i) ? 1 : 0;
          if (count == 15) to_all.push_back(static_cast<Position>(t));
          if (count > 0 && count < 15) to_some.push_back(static_cast<Position>(t));
        }
        const StoredMask kept(added, kind);
        const quoka::VisibleCells cells(kept.mask(), kv_len, b);
        EXPECT_EQ(cells.to_all, to_all);
        EXPECT_EQ(cells.to_some, to_some);
        quoka::ThreadPool pool(2);
        EXPECT_EQ(quoka::VisibleCells(kept.mask(), kv_len, b, pool).to_all, to_all);
      }
  }
}

TEST(VisibleCells, RefusesWhatTheMaskHasNot) {
  Random random(27);
  const Added added = random_mask(random, 2, 1, 5, 20), one = random_mask(random, 1, 1, 5, 20);
  expect_refused([&] { (void)quoka::VisibleCells(added, 21); }, {21, 20});
  expect_refused([&] { (void)quoka::VisibleCells(added, -1); }, {-1, 0});
  expect_refused([&] { (void)quoka::VisibleCells(added, 20, 2); }, {2, 1});
  expect_refused([&] { (void)quoka::VisibleCells(added, 20, -1); }, {-1, 0});
  EXPECT_NO_THROW(quoka::VisibleCells(one, 20, 7));  // the same for all
}

// Masks of bytes with any values, runs and beginnings: eight bytes are read at a time.
TEST(MaskBytes, AreReadOneByOneAndInRuns) {
  Random random(47);
  constexpr Index keys = 67;
  std::vector<std::uint8_t> bytes(keys);
  for (const auto& values :
       std::vector<std::vector<std::uint8_t>>{{0}, {1}, {0, 1}, {0, 1, 2, 255}, {128}}) {
    for (Index i = 0; i < keys; ++i) {
      const Index run = random.below(20) + 1;
      const std::uint8_t value = values[static_cast<std::size_t>(random.below(std::ssize(values)))];
      for (const Index end = std::min(i + run, keys); i < end; ++i)
        bytes[static_cast<std::size_t>(i)] = value;
      --i;
    }
    const Mask mask = Mask::bytes(bytes.data(), {1, 1, 1, keys}, {keys, keys, keys});
    for (Index first = 0; first <= keys; ++first)
      for (const Index count : {Index{0}, Index{1}, Index{8}, Index{17}, keys}) {
        if (first + count > keys) continue;
        std::vector<float> read(static_cast<std::size_t>(count) + 1, 7.0f);
        mask.read(0, 0, 0, {nullptr, first, count}, read.data());
        for (Index i = 0; i < count; ++i)
          ASSERT_EQ(read[static_cast<std::size_t>(i)],
                    bytes[static_cast<std::size_t>(first + i)] != 0 ? 0.0f : -infinity);
        EXPECT_EQ(read.back(), 7.0f);
        std::vector<std::uint8_t> visibility(static_cast<std::size_t>(count) + 1, 0);
        mask.join_visibility(0, 0, 0, first, count, visibility.data());
        for (Index i = 0; i < count; ++i)
          ASSERT_EQ(visibility[static_cast<std::size_t>(i)],
                    bytes[static_cast<std::size_t>(first + i)] != 0 ? quoka::visible_to_some
                                                                    : quoka::hidden_from_some);
        EXPECT_EQ(visibility.back(), 0);
        EXPECT_EQ(mask.any_visible(0, 0, 0, {nullptr, first, count}),
                  std::count(read.begin(), read.end() - 1, 0.0f) > 0);
      }
  }
}

}  // namespace
