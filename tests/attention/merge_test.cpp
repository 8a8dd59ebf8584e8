// attention/merge.hpp: attention over shards of a cache, merged, is attention over the whole.

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
// Attention to the past keys [begin, kv_len) and the chunk.
template <class T>
Output<T> last_part(const Inputs<T>& in, Index begin, const AttentionOptions& options = {}) {
  Output<T> part = unwritten<T>(in.q, shape.v_dim);
  const View<T> k(in.past_k), v(in.past_v);
  const Index count = shape.kv_len - begin;
  quoka::attention(in.q, {k.slice(begin, count), v.slice(begin, count)}, {in.k, in.v},
                   {part.out, part.lse}, options);
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

// Every part was rounded to T, and so is the result; a float log-sum-exp of about 7 is off by
// 2^-22 and so are the weights of the parts.
template <class T>
void expect_whole(const Output<T>& output, const oracle::AttentionResult& whole, int parts) {
  const double rounding = rounding_error<T> * parts * 3.5;
  EXPECT_TRUE(elements_close(output.out, whole.out,
                             2 * noise * 3.5 + (std::is_same_v<T, float> ? 0.0 : rounding)));
  EXPECT_TRUE(lse_close(output.lse, whole.lse, 2 * noise));
  if constexpr (std::is_same_v<T, float>) {
    EXPECT_LE(oracle::relative_error(to_oracle(output.out), whole.out), float_error);
  }
}

TEST(Merge, TwoShardsAreTheWhole) {
  for_each_storage([]<class T>() {
    Random random(1);
    const auto in = random_inputs<T>(random, shape);
    const auto whole = oracle_attend(in);
    for (const Index cut : {1, 37, 250, 500, 501}) {
      SCOPED_TRACE("cut at " + std::to_string(cut));
      const auto past = past_part(in, 0, cut), last = last_part(in, cut);
      expect_whole(merged_parts(past, last), whole, 2);
      expect_whole(merged_parts(last, past), whole, 2);
    }
  });
}

TEST(Merge, ThreeShardsAreTheWholeInAnyOrder) {
  Random random(2);
  const auto in = random_inputs<Element>(random, shape);
  const auto whole = oracle_attend(in);
  const auto a = past_part(in, 0, 127), b = past_part(in, 127, 400), c = last_part(in, 400);
  const auto merged = merged_parts<Element>;
  expect_whole(merged(merged(a, b), c), whole, 3);
  expect_whole(merged(a, merged(b, c)), whole, 3);
  expect_whole(merged(merged(c, a), b), whole, 3);
}

// Two merges on each side, each with two exponentials and one rounding to T.
TEST(Merge, IsAssociativeUpToRounding) {
  Random random(3);
  const auto in = random_inputs<Element>(random, shape);
  const auto a = past_part(in, 0, 127), b = past_part(in, 127, 400), c = last_part(in, 400);
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

TEST(Merge, ASinkBelongsToOnePart) {
  Random random(7);
  const std::vector<float> sinks{-3.0f, 0.0f, 2.5f, 8.0f, 1.0f, -1.0f};
  const auto in = random_inputs<Element>(random, shape);
  const auto whole = oracle_attend(in, {.sink_logits = sinks});
  const auto past = past_part(in, 0, 127), last = last_part(in, 127, {.sink_logits = sinks});
  expect_whole(merged_parts(past, last), whole, 2);
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

TEST(Merge, StridedPartsGiveTheSameBits) {
  for_each_storage([]<class T>() {
    Random random(10);
    const auto in = random_inputs<T>(random, shape);
    const auto a = past_part(in, 0, 127), b = past_part(in, 127, 501);
    Strided<T> out_a(a.out), out_b(b.out);
    Tensor3<float> lse = a.lse;
    TensorView<T> out = out_a.view();
    quoka::merge(out, lse, out_b.view(), b.lse);
    const auto dense = merged_parts(a, b);
    EXPECT_TRUE(same_bits(out, dense.out));
    EXPECT_TRUE(same_bits(lse, dense.lse));
    EXPECT_TRUE(out_a.padding_intact());
  });
}

// ---- a sliding window over shards ---------------------------------------------------------------

// Two shards of a past of kv_len keys, cut at `cut`: each says where it begins, and both where the
// queries stand. The chunk goes with the second one.
template <class T>
Output<T> shards_merged(const Inputs<T>& in, Index cut, const AttentionOptions& options,
                        const Selection* first_keep = nullptr,
                        const Selection* second_keep = nullptr) {
  const Index kv_len = in.past_k.dimension(2), v_dim = in.past_v.dimension(3);
  const TensorView<const T> k(in.past_k), v(in.past_v);
  AttentionOptions placed = options;
  placed.query_position = kv_len;
  quoka::Past first(k.slice(0, cut), v.slice(0, cut)),
      second(k.slice(cut, kv_len - cut), v.slice(cut, kv_len - cut));
  first.keep = first_keep, second.keep = second_keep;
  second.first_position = cut;
  Output<T> a = unwritten<T>(in.q, v_dim), b = unwritten<T>(in.q, v_dim);
  quoka::attention(in.q, first, {}, {a.out, a.lse}, placed);
  quoka::attention(in.q, second, {in.k, in.v}, {b.out, b.lse}, placed);
  quoka::merge(a.out, a.lse, b.out, b.lse);
  return a;
}

// A chunk, few rows over parts of the keys, one token; windows that end in each shard, at the cut
// and beyond both.
TEST(MergeWindow, ShardsThatKnowWhereTheyBeginAreTheWhole) {
  Random random(20);
  for (const Index q_len : {71, 3, 1}) {
    const auto in = random_inputs<Element>(
        random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 1201});
    for (const Index window : {0, 1, 30, 700, 701, 702, 1201, 2000}) {
      const AttentionOptions options{.sliding_window = window};
      const auto whole = oracle_attend(in, options);
      for (const Index cut : {1, 500, 1200}) {
        SCOPED_TRACE("q_len " + std::to_string(q_len) + ", cut " + std::to_string(cut) +
                     ", window " + std::to_string(window));
        expect_whole(shards_merged(in, cut, options), whole, 2);
      }
    }
  }
}

TEST(MergeWindow, AShardOutOfTheWindowSeesNothing) {
  Random random(21);
  const auto in = random_inputs<Element>(random, {.q_heads = 2, .q_len = 7, .kv_len = 500}, false);
  auto output = unwritten<Element>(in.q, 16);
  AttentionOptions options{
      .sliding_window = 101, .arithmetic = quoka::Arithmetic::single, .query_position = 600};
  quoka::attention(in.q, {in.past_k, in.past_v}, {}, {output.out, output.lse}, options);
  for (Index i = 0; i < output.out.size(); ++i)
    EXPECT_EQ(static_cast<float>(output.out.data()[i]), 0.0f);
  for (Index i = 0; i < output.lse.size(); ++i) EXPECT_EQ(output.lse.data()[i], -infinity);
  options.sliding_window = 102;  // the first query sees the last key alone
  quoka::attention(in.q, {in.past_k, in.past_v}, {}, {output.out, output.lse}, options);
  EXPECT_NE(output.lse(0, 0, 0), -infinity);
  EXPECT_EQ(output.lse(0, 0, 1), -infinity);
  EXPECT_EQ(output.out(0, 0, 0, 3), in.past_v(0, 0, 499, 3));
}

// A selection of a shard holds positions in the shard.
TEST(MergeWindow, ShardsMayHaveSelections) {
  for_each_storage([]<class T>() {
    Random random(22);
    const Index cut = 500, kv_len = 1201;
    for (const Index q_len : {71, 3, 1}) {
      const auto in =
          random_inputs<T>(random, {.q_heads = 6, .kv_heads = 2, .q_len = q_len, .kv_len = kv_len});
      const Selection first = random_selection(random, 1, 2, cut, 200),
                      second = random_selection(random, 1, 2, kv_len - cut, 301);
      oracle::Positions both = to_positions(first);
      for (Index head = 0; head < 2; ++head)
        for (const Index t : second.positions(0, head)) both[0][uz(head)].push_back(cut + t);
      const Selection whole = to_selection(both, kv_len);
      for (const Index window : {0, 600, 800, 1201}) {
        SCOPED_TRACE("q_len " + std::to_string(q_len) + ", window " + std::to_string(window));
        const AttentionOptions options{.sliding_window = window};
        expect_whole(shards_merged(in, cut, options, &first, &second),
                     oracle_attend(in, options, &whole), 2);
      }
    }
  });
}

// Where the past begins and the queries stand matters to a window alone.
TEST(MergeWindow, WithoutAWindowPositionsChangeNoBit) {
  Random random(23);
  const auto in = random_inputs<Element>(random, {.q_heads = 2, .q_len = 37, .kv_len = 301});
  const auto plain = attend(in);
  auto output = unwritten<Element>(in.q, 16);
  quoka::Past past(in.past_k, in.past_v);
  past.first_position = 1000000;
  quoka::attention(in.q, past, {in.k, in.v}, {output.out, output.lse}, {.query_position = 2000000});
  expect_same(output, plain);
}

// Parts may come in formats of their own.
TEST(MergeWindow, APartInAnotherFormatIsMergedAsItsFloats) {
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

class MergeRefuses : public ::testing::Test {
 protected:
  // a [2, 6, 7, 19]; refused with these fragments, and a is as it was.
  void refused(Eigen::array<Index, 4> out_b, Eigen::array<Index, 3> lse_b,
               std::initializer_list<Fragment> fragments,
               Eigen::array<Index, 3> lse_a = {2, 6, 7}) {
    Random random(11);
    Tensor4<float> a = random.tensor<float>(2, 6, 7, 19), b(out_b);
    Tensor3<float> sums_a(lse_a), sums_b(lse_b);
    b.setConstant(1.0f), sums_a.setConstant(1.0f), sums_b.setConstant(1.0f);
    const Tensor4<float> before = a;
    expect_refused([&] { quoka::merge(a, sums_a, b, sums_b); }, fragments);
    EXPECT_TRUE(same_bits(a, before));
  }
};

TEST_F(MergeRefuses, AnotherBatch) { refused({3, 6, 7, 19}, {3, 6, 7}, {3, 2}); }
TEST_F(MergeRefuses, OtherHeads) { refused({2, 5, 7, 19}, {2, 5, 7}, {5, 6}); }
TEST_F(MergeRefuses, AnotherLength) { refused({2, 6, 8, 19}, {2, 6, 8}, {8, 7}); }
TEST_F(MergeRefuses, AnotherDim) { refused({2, 6, 7, 20}, {2, 6, 7}, {20, 19}); }
TEST_F(MergeRefuses, LseOfBOfAnotherShape) { refused({2, 6, 7, 19}, {2, 6, 9}, {"lse", 9, 7}); }
TEST_F(MergeRefuses, LseOfAOfAnotherShape) {
  refused({2, 6, 7, 19}, {2, 6, 7}, {"lse", 4, 6}, {2, 4, 7});
}

}  // namespace
