// attention/attention.hpp by example: what is equal to the last bit, and memory that is shared. What holds for every
// call: attention_suite_test.cpp.

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace {

using namespace quoka_test;
namespace tuning = quoka::tuning;

TEST(Attention, RankThreeIsBatchOne) {
  Random random(12);
  const auto in = random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2});
  const auto drop = [](const Tensor4<Element>& x) {
    Tensor3<Element> y(x.dimension(1), x.dimension(2), x.dimension(3));
    std::copy_n(x.data(), x.size(), y.data());
    return y;
  };
  const auto q = drop(in.q), past_k = drop(in.past_k), past_v = drop(in.past_v), k = drop(in.k),
             v = drop(in.v);
  Tensor3<Element> out(4, 7, 16);
  quoka::attention(q, {past_k, past_v}, {k, v}, out);
  EXPECT_TRUE(same_bits(out, attend(in).out));
}

TEST(Attention, SelectionIsAttentionOverTheGatheredPast) {
  Random random(32);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 501});
  const Selection keep = random_selection(random, 1, 2, 501, 127);
  const auto gathered = [&](const Tensor4<Element>& x) {
    Tensor4<Element> y(1, 2, 127, 16);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 127; ++i)
        for (Index c = 0; c < 16; ++c)
          y(0, head, i, c) = x(0, head, keep.positions(0, head)[uz(i)], c);
    return y;
  };
  expect_same(attend(in, {}, &keep),
              attend<Element>({in.q, gathered(in.past_k), gathered(in.past_v), in.k, in.v}));
}

TEST(Attention, AllSelectedIsNoSelectionBitForBit) {
  Random random(33);
  const auto in = random_inputs<Element>(
      random, {.batch = 2, .q_heads = 6, .kv_heads = 3, .q_len = 37, .kv_len = 127});
  const auto dense = attend(in);
  const Selection all = Selection::all(2, 3, 127);
  const Selection listed = to_selection(oracle::all_positions(2, 3, 127), 127);
  expect_same(attend(in, {}, &all), dense);
  expect_same(attend(in, {}, &listed), dense);
}

TEST(Attention, NothingSelectedIsTheChunkAloneBitForBit) {
  Random random(34);
  auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 127});
  const Selection none = to_selection(oracle::all_positions(1, 2, 0), 127);
  const auto selected = attend(in, {}, &none);
  in.past_k = Tensor4<Element>(1, 2, 0, 16);
  in.past_v = Tensor4<Element>(1, 2, 0, 16);
  expect_same(selected, attend(in));
}

// A count for each KV head, 0 and all among them.
Selection ragged_selection(Random& random, const std::vector<Index>& counts, Index batch,
                           Index kv_heads, Index kv_len) {
  oracle::Positions lists = oracle::all_positions(batch, kv_heads, 0);
  for (Index b = 0; b < batch; ++b)
    for (Index head = 0; head < kv_heads; ++head) {
      auto& list = lists[uz(b)][uz(head)];
      list = random.permutation(kv_len);
      list.resize(uz(counts[uz(b * kv_heads + head)]));
      std::sort(list.begin(), list.end());
    }
  return to_selection(lists, kv_len);
}

// How a head is cut over its keys depends on its own count: 16 parts of 4 blocks are the most, and
// one key more makes fewer and larger parts.
TEST(Attention, AHeadsBitsDoNotDependOnTheCountsOfOthers) {
  Random random(37);
  constexpr Index sixteen_parts = tuning::max_parts * tuning::part_blocks * tuning::block_keys;
  const Index kv_len = 2 * sixteen_parts;
  for (const Index q_len : {150, 71, 3, 1}) {
    const auto in = random_inputs<Element>(
        random,
        {.q_heads = 2, .kv_heads = 2, .head_dim = 8, .v_dim = 8, .q_len = q_len, .kv_len = kv_len});
    for (const Index head : {0, 1})  // before the other one, and behind it
      for (const Index own : {Index{0}, Index{100}, Index{1000}, sixteen_parts - q_len}) {
        std::optional<Output<Element>> first;
        for (const Index others : {own, Index{0}, Index{1000}, sixteen_parts - q_len + 1, kv_len}) {
          SCOPED_TRACE("q_len " + std::to_string(q_len) + ", head " + std::to_string(head) +
                       ", count " + std::to_string(own) + ", the other's " +
                       std::to_string(others));
          Random same(38), another(39);
          std::vector<Position> lists[2];
          lists[head] = ragged_selection(same, {own}, 1, 1, kv_len).positions(0, 0);
          lists[1 - head] = ragged_selection(another, {others}, 1, 1, kv_len).positions(0, 0);
          const Selection keep = Selection::from_lists(1, 2, kv_len, lists);
          const auto output = attend(in, {}, &keep);
          if (!first) first = output;
          for (Index i = 0; i < q_len; ++i) EXPECT_TRUE(same_row(output, *first, 0, head, i)) << i;
        }
      }
  }
}

// A Selection of nothing selects nothing, whatever its heads.
TEST(Attention, ASelectionOfNoPast) {
  Random random(39);
  const auto in = random_inputs<float>(
      random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 7, .kv_len = 0});
  const auto without = attend(in);
  for (const Selection& keep : {Selection::all(2, 2, 0), to_selection({{{}}}, 0), Selection()}) {
    auto output = unwritten<float>(in.q, 16);
    quoka::attention(in.q, {in.past_k, in.past_v, keep}, {in.k, in.v}, {output.out, output.lse});
    expect_same(output, without);
  }
}

TEST(Attention, AWindowOverEverythingIsNoWindowBitForBit) {
  Random random(63);
  const auto in = random_inputs<Element>(random, {.q_len = 37, .kv_len = 127});
  expect_same(attend(in, {.sliding_window = 127 + 37}), attend(in));
  expect_same(attend(in, {.sliding_window = std::numeric_limits<Index>::max()}), attend(in));
  expect_same(attend(in, {.sliding_window = std::numeric_limits<Index>::max() - 1}), attend(in));
}

TEST(Attention, AWindowOfOneCopiesTheOwnValueExactly) {
  for_each_storage([]<class T>() {
    Random random(64);
    const auto in = random_inputs<T>(random, {.q_heads = 3, .q_len = 127, .kv_len = 501});
    const auto output = attend(in, {.sliding_window = 1, .arithmetic = quoka::Arithmetic::single});
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 127; ++i)
        for (Index c = 0; c < 16; ++c) EXPECT_EQ(output.out(0, head, i, c), in.v(0, 0, i, c)) << i;
  });
}

TEST(Attention, OneKeyForAllByStrideZero) {
  Random random(72);
  const auto in = random_inputs<Element>(random, {.q_len = 3, .kv_len = 1}, false);
  const TensorView<const Element> k(in.past_k.data(), {1, 1, 127, 16}, {0, 0, 0, 1}),
      v(in.past_v.data(), {1, 1, 127, 16}, {0, 0, 0, 1});
  Tensor4<Element> out(1, 2, 3, 16);
  quoka::attention(in.q, {k, v}, {}, out, {.causal = false});
  EXPECT_TRUE(elements_close(out, oracle_attend(in).out, noise * 3.5));
}

// ---- memory that is shared ----------------------------------------------------------------------

// q, k, v, past and out of one head size; `memory` is a copy of everything, to see what was written.
class AttentionSharedMemory : public ::testing::Test {
 protected:
  using View = TensorView<float>;
  static constexpr Shape shape{.q_heads = 2, .kv_heads = 2, .q_len = 7, .kv_len = 37};

  static View view(Tensor4<float>& x) { return x; }

  // Refused for `reason`, and no input has another bit.
  void refused(const quoka::Past& past, const quoka::AttentionOutput& output,
               std::initializer_list<Fragment> reason, const char* file = __builtin_FILE(),
               int line = __builtin_LINE()) {
    const Inputs<float> before = in_;
    expect_refused(
        [&] {
          quoka::attention(in_.q, past, {in_.k, in_.v}, output);
        },
        reason, file, line);
    EXPECT_TRUE(same_bits(in_.q, before.q));
    EXPECT_TRUE(same_bits(in_.k, before.k));
    EXPECT_TRUE(same_bits(in_.v, before.v));
    EXPECT_TRUE(same_bits(in_.past_k, before.past_k));
    EXPECT_TRUE(same_bits(in_.past_v, before.past_v));
  }
  quoka::Past past() const { return {in_.past_k, in_.past_v}; }

  Random random_{110};
  Inputs<float> in_ = random_inputs<float>(random_, shape);
};

TEST_F(AttentionSharedMemory, OutInTheQueriesIsRefused) {
  refused(past(), view(in_.q), {"out shares memory with q"});
}
TEST_F(AttentionSharedMemory, OutInTheChunkIsRefused) {
  refused(past(), view(in_.k), {"out shares memory with the chunk's keys"});
  refused(past(), view(in_.v), {"out shares memory with the chunk's values"});
}
TEST_F(AttentionSharedMemory, OutInThePastIsRefused) {
  refused(past(), view(in_.past_k).slice(30, 7), {"out shares memory with the past's keys"});
  refused(past(), view(in_.past_v).slice(0, 7), {"out shares memory with the past's values"});
}
// One float is enough: the last of one is the first of the other.
TEST_F(AttentionSharedMemory, OutThatOverlapsByOneElementIsRefused) {
  std::vector<float> memory(uz(2 * in_.q.size()), -12345.0f);
  const auto before = memory;
  std::copy_n(in_.q.data(), in_.q.size(), memory.data());
  const View q(memory.data(), {1, 2, 7, 16}, {224, 112, 16, 1});
  for (const Index begin : {in_.q.size() - 1, in_.q.size()}) {
    const View out(memory.data() + begin, {1, 2, 7, 16}, {224, 112, 16, 1});
    const auto call = [&] { quoka::attention(q, past(), {in_.k, in_.v}, out); };
    if (begin < in_.q.size()) {
      expect_refused(call, {"out shares memory with q"});
      EXPECT_EQ(memory.back(), before.back());
    } else {
      EXPECT_NO_THROW(call());
    }
  }
}
TEST_F(AttentionSharedMemory, LseInOutIsRefused) {
  Tensor4<float> out(1, 2, 7, 16);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  // One float of each row of out.
  refused(past(), {view(out), TensorView<float, 3>(out.data() + 3, {1, 2, 7}, {224, 112, 16})},
          {"lse shares memory with out"});
  EXPECT_TRUE(same_bits(out, before));
}
TEST_F(AttentionSharedMemory, LseInAnInputIsRefused) {
  Tensor4<float> out(1, 2, 7, 16);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  const auto refused_in = [&](Tensor4<float>& x, const char* name) {
    refused(past(), {view(out), TensorView<float, 3>(x.data(), {1, 2, 7}, {14, 7, 1})},
            {std::string("lse shares memory with ") + name});
  };
  refused_in(in_.q, "q");
  refused_in(in_.k, "the chunk's keys");
  refused_in(in_.v, "the chunk's values");
  refused_in(in_.past_k, "the past's keys");
  refused_in(in_.past_v, "the past's values");
  EXPECT_TRUE(same_bits(out, before));
}
TEST_F(AttentionSharedMemory, AChunkInsideThePastIsRefused) {
  Tensor4<float> out(1, 2, 7, 16);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  const View k(in_.past_k), v(in_.past_v);
  expect_refused(
      [&] {
        quoka::attention(in_.q, past(), {k.slice(30, 7), in_.v}, out);
      },
      {"chunk's keys lie in the past's"});
  expect_refused(
      [&] {
        quoka::attention(in_.q, past(), {in_.k, v.slice(30, 7)}, out);
      },
      {"chunk's values lie in the past's"});
  EXPECT_TRUE(same_bits(out, before));
}
// An engine appends first and attends then: the past is sliced.
TEST_F(AttentionSharedMemory, AChunkBehindThePastInOneCacheIsTheSame) {
  const View k(in_.past_k), v(in_.past_v);
  Tensor4<float> chunk_k(1, 2, 7, 16), chunk_v(1, 2, 7, 16), past_k(1, 2, 30, 16),
      past_v(1, 2, 30, 16);
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 37; ++i)
      for (Index c = 0; c < 16; ++c) {
        (i < 30 ? past_k(0, head, i, c) : chunk_k(0, head, i - 30, c)) = in_.past_k(0, head, i, c);
        (i < 30 ? past_v(0, head, i, c) : chunk_v(0, head, i - 30, c)) = in_.past_v(0, head, i, c);
      }
  const auto expected = attend<float>({in_.q, past_k, past_v, chunk_k, chunk_v});
  auto output = unwritten<float>(in_.q, 16);
  quoka::attention(in_.q, {k.slice(0, 30), v.slice(0, 30)}, {k.slice(30, 7), v.slice(30, 7)},
                   {output.out, output.lse});
  expect_same(output, expected);
}
// [len, q | k | v | out, heads, dim]: extents overlap, no byte does.
TEST_F(AttentionSharedMemory, OneFusedBufferIsAccepted) {
  const auto expected = attend(in_);
  constexpr Index heads = 2, dim = 16, token = 4 * heads * dim;
  std::vector<float> memory(uz(7 * token), -12345.0f);
  const auto part = [&](Index which) {
    return View(memory.data() + which * heads * dim, {1, heads, 7, dim},
                {7 * token, dim, token, 1});
  };
  const Tensor4<float>* const from[] = {&in_.q, &in_.k, &in_.v};
  for (Index which = 0; which < 3; ++which)
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < 7; ++i)
        std::copy_n(&(*from[which])(0, head, i, 0), dim, part(which).row(0, head, i));
  quoka::attention(part(0), past(), {part(1), part(2)}, part(3));
  EXPECT_TRUE(same_bits(part(3), expected.out));
  EXPECT_TRUE(same_bits(part(0), in_.q));
  // One head further, and out lies in the next token's queries.
  const View shifted(memory.data() + 3 * heads * dim + dim, {1, heads, 6, dim},
                     {6 * token, dim, token, 1});
  expect_refused(
      [&] {
        quoka::attention(part(0).slice(1, 6), past(), {part(1).slice(1, 6), part(2).slice(1, 6)},
                         shifted);
      },
      {"out shares memory with q"});
}
// Rows in the order of memory backwards are found, too.
TEST_F(AttentionSharedMemory, ANegativeStrideIsFollowed) {
  const View backwards(&in_.q(0, 0, 6, 0), {1, 2, 7, 16}, {224, 112, -16, 1});
  refused(past(), backwards, {"out shares memory with q"});
}
// Keys and values may be the same memory (MLA), and so may the keys of all heads.
TEST_F(AttentionSharedMemory, InputsMayShareMemoryWithEachOther) {
  Tensor4<float> out(1, 2, 7, 16);
  EXPECT_NO_THROW(quoka::attention(in_.q, {in_.past_k, in_.past_k}, {in_.k, in_.k}, out));
}

TEST(AttentionSharedMemoryWithAMask, IsRefused) {
  Random random(29);
  const auto in = random_inputs<float>(
      random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 7, .kv_len = 37});
  Tensor4<float> added = random.tensor<float>(2, 4, 7, 44);
  const Tensor4<float> before = added;
  const TensorView<float> out(added.data() + 100, {2, 4, 7, 16}, {448, 112, 16, 1});
  expect_refused(
      [&] {
        quoka::attention(in.q, {in.past_k, in.past_v}, {in.k, in.v}, out, {.mask = added});
      },
      {"out shares memory with the mask"});
  Tensor4<float> apart(2, 4, 7, 16);
  const TensorView<float, 3> lse(added.data() + 100, {2, 4, 7}, {28, 7, 1});
  expect_refused(
      [&] {
        quoka::attention(in.q, {in.past_k, in.past_v}, {in.k, in.v}, {apart, lse}, {.mask = added});
      },
      {"lse shares memory with the mask"});
  EXPECT_TRUE(same_bits(added, before));
  // The last byte of a mask of bits.
  const std::vector<std::uint8_t> bits(16, 0xff);
  auto* const memory = reinterpret_cast<float*>(added.data());
  const quoka::Mask of_bits =
      quoka::Mask::bits(memory, {1, 1, 7, 44}, {0, 0, 6});  // 42 bytes: 10.5 floats
  const auto one_row = [&](Index at) {
    return TensorView<float, 3>(memory + at, {2, 4, 7}, {28, 7, 1});
  };
  expect_refused(
      [&] {
        quoka::attention(in.q, {in.past_k, in.past_v}, {in.k, in.v}, {apart, one_row(10)},
                         {.mask = of_bits});
      },
      {"lse shares memory with the mask"});
  EXPECT_NO_THROW(quoka::attention(in.q, {in.past_k, in.past_v}, {in.k, in.v}, {apart, one_row(11)},
                                   {.mask = of_bits}));
}

}  // namespace
