// attention/merge.hpp: properties of merging for any parts. That parts give the whole is tested in
// attention_suite_test.cpp.

#include <quoka/attention/merge.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace {

using namespace quoka_test;

constexpr Shape shape{.batch = 2,
                      .q_heads = 6,
                      .kv_heads = 2,
                      .head_dim = 37,
                      .v_dim = 19,
                      .q_len = 7,
                      .kv_len = 501};
template <class T>
using View = TensorView<const T>;

// Attention to the past keys [begin, end) alone.
template <class T>
Output<T> past_part(const Inputs<T>& in, Index begin, Index end) {
  Output<T> part = unwritten<T>(in.q, shape.v_dim);
  const View<T> k(in.past_k), v(in.past_v);
  quoka::attention(in.q, {k.slice(begin, end - begin), v.slice(begin, end - begin)}, {},
                   {part.out, part.lse}, {.causal = false});
  return part;
}
template <class T>
Output<T> merged_parts(Output<T> a, const Output<T>& b) {
  quoka::merge(a.out, a.lse, b.out, b.lse);
  return a;
}
// A part that saw nothing.
template <class T>
Output<T> empty_part(const Inputs<T>& in) {
  Output<T> part = unwritten<T>(in.q, shape.v_dim);
  part.out.setZero();
  part.lse.setConstant(-infinity);
  return part;
}

// Two merges on each side, each with two exponentials and one rounding to T.
TEST(Merge, IsAssociativeUpToRounding) {
  Random random(3);
  const auto in = random_inputs<Element>(random, shape);
  const auto a = past_part(in, 0, 127), b = past_part(in, 127, 400), c = past_part(in, 400, 501);
  const auto merged = merged_parts<Element>;
  const auto left = merged(merged(a, b), c), right = merged(a, merged(b, c));
  for (Index i = 0; i < left.out.size(); ++i) {
    const double x = static_cast<double>(static_cast<float>(left.out.data()[i])),
                 y = static_cast<double>(static_cast<float>(right.out.data()[i]));
    EXPECT_NEAR(x, y, (4 * rounding_error<Element> + 2e-6) * 3.5);
  }
  for (Index i = 0; i < left.lse.size(); ++i)
    EXPECT_NEAR(left.lse.data()[i], right.lse.data()[i], 2e-6f);
}

TEST(Merge, APartThatSawNothingChangesNothing) {
  Random random(4);
  const auto in = random_inputs<Element>(random, shape);
  const auto part = past_part(in, 0, 127), nothing = empty_part(in);
  for (const auto& result : {merged_parts(part, nothing), merged_parts(nothing, part)}) {
    EXPECT_TRUE(same_bits(result.out, part.out));
    EXPECT_TRUE(lse_close(result.lse,
                          std::vector<double>(part.lse.data(), part.lse.data() + part.lse.size()),
                          0x1p-23 * 8));
  }
}

TEST(Merge, TwoPartsThatSawNothingAreNothing) {
  Random random(5);
  const auto in = random_inputs<Element>(random, shape);
  const auto nothing = empty_part(in);
  expect_same(merged_parts(nothing, nothing), nothing);
}

TEST(Merge, APartWithItselfIsItselfWithTwiceTheSum) {
  Random random(6);
  const auto in = random_inputs<Element>(random, shape);
  const auto part = past_part(in, 0, 127), twice = merged_parts(part, part);
  EXPECT_TRUE(same_bits(twice.out, part.out));
  for (Index i = 0; i < part.lse.size(); ++i)
    EXPECT_NEAR(twice.lse.data()[i], part.lse.data()[i] + std::log(2.0f), 2e-6f);
}

TEST(Merge, NaNStaysInItsRow) {
  Random random(8);
  const auto in = random_inputs<Element>(random, shape);
  const auto a = past_part(in, 0, 127), b = past_part(in, 127, 400);
  const auto clean = merged_parts(a, b);
  for (const bool first : {true, false}) {
    auto spoilt_a = a, spoilt_b = b;
    auto& spoilt = first ? spoilt_a : spoilt_b;
    spoilt.lse(1, 3, 5) = not_a_number;
    for (Index c = 0; c < shape.v_dim; ++c) spoilt.out(1, 3, 5, c) = stored<Element>(std::nan(""));
    expect_spoilt(merged_parts(spoilt_a, spoilt_b), clean,
                  [](Index n, Index head, Index i) { return n == 1 && head == 3 && i == 5; });
  }
}

TEST(Merge, NaNAndAPartThatSawNothingAreNaN) {
  Random random(12);
  const auto in = random_inputs<Element>(random, shape);
  auto broken = past_part(in, 0, 127);
  broken.lse.setConstant(not_a_number);
  broken.out.setConstant(stored<Element>(std::nan("")));
  const auto everywhere = [](Index, Index, Index) { return true; };
  expect_spoilt(merged_parts(broken, empty_part(in)), broken, everywhere);
  expect_spoilt(merged_parts(empty_part(in), broken), broken, everywhere);
}

// All logits of a part may be -inf beside a value that is not finite: no weight, and NaN all the same.
TEST(Merge, NaNWithoutWeightStays) {
  Random random(13);
  const auto in = random_inputs<Element>(random, shape);
  auto broken = empty_part(in);
  broken.out(1, 3, 5, 2) = stored<Element>(std::nan(""));
  for (const auto& merged :
       {merged_parts(broken, empty_part(in)), merged_parts(empty_part(in), broken)}) {
    for (Index c = 0; c < shape.v_dim; ++c)
      EXPECT_EQ(std::isnan(static_cast<float>(merged.out(1, 3, 5, c))), c == 2) << c;
    EXPECT_EQ(merged.lse(1, 3, 5), -infinity);
    EXPECT_EQ(static_cast<float>(merged.out(1, 3, 4, 2)), 0.0f);
  }
}

// A difference of 1e4 between two log-sum-exps: the smaller part is an exact zero.
TEST(Merge, AFarLargerPartIsTheAnswer) {
  Random random(9);
  const auto in = random_inputs<Element>(random, shape);
  auto large = past_part(in, 0, 127);
  for (Index i = 0; i < large.lse.size(); ++i) large.lse.data()[i] += 1e4f;
  const auto small = past_part(in, 127, 400);
  EXPECT_TRUE(same_bits(merged_parts(large, small).out, large.out));
  EXPECT_TRUE(same_bits(merged_parts(small, large).out, large.out));
}

// Only the difference of two log-sum-exps counts, whatever their size.
TEST(Merge, ALargeLseCostsNoAccuracy) {
  Random random(13);
  const auto in = random_inputs<Element>(random, shape);
  auto a = past_part(in, 0, 127), b = past_part(in, 127, 400);
  for (auto* part : {&a, &b})
    for (Index i = 0; i < part->lse.size(); ++i)
      part->lse.data()[i] = std::round(part->lse.data()[i] * 8.0f) / 8.0f;  // exact below
  const auto near_zero = merged_parts(a, b);
  for (auto* part : {&a, &b})
    for (Index i = 0; i < part->lse.size(); ++i) part->lse.data()[i] += 8192.0f;
  EXPECT_TRUE(elements_close(merged_parts(a, b).out, to_oracle(near_zero.out), 1e-6));
}

// Parts may come in formats of their own.
TEST(Merge, APartInAnotherFormatIsMergedAsItsFloats) {
  for_each_storage([]<class T>() {
    Random random(24);
    const auto in = random_inputs<T>(random, shape);
    const auto a = past_part(in, 0, 127), b = past_part(in, 127, 400);
    const auto floats = [](const Output<T>& part) {
      Output<float> copy{Tensor4<float>(part.out.dimensions()), part.lse};
      for (Index i = 0; i < part.out.size(); ++i)
        copy.out.data()[i] = static_cast<float>(part.out.data()[i]);
      return copy;
    };
    Output<float> expected = floats(a), mixed = floats(a);
    const Output<float> other = floats(b);
    quoka::merge(expected.out, expected.lse, other.out, other.lse);
    quoka::merge(mixed.out, mixed.lse, b.out, b.lse);
    expect_same(mixed, expected);
  });
}

}  // namespace
