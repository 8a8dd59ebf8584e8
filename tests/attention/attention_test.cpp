// attention/attention.hpp by example: calls that are equal to the last bit, memory that is shared, calls that share a
// pool, scratch memory after a move, options that own what their spans refer to. Properties of every call are in
// attention_suite_test.cpp; that memory may run out, in allocation_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace {

using namespace quoka_test;
namespace tuning = quoka::tuning;

// A Past borrows its Selection.
static_assert(std::is_constructible_v<quoka::Past, Rows, Rows, const Selection&>);
static_assert(!std::is_constructible_v<quoka::Past, Rows, Rows, Selection>);

// How a head is cut over its keys depends on its own count: 16 parts of 4 blocks are the most, and
// one key more makes fewer and larger parts.
TEST(Attention, AHeadsBitsDoNotDependOnTheCountsOfOthers) {
  Random random(37);
  const Index sixteen_parts =
      tuning::max_parts * tuning::part_blocks * quoka::detail::kernel_sizes().block_keys;
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
          lists[head] = random_selection(same, 1, 1, kv_len, own).positions(0, 0);
          lists[1 - head] = random_selection(another, 1, 1, kv_len, others).positions(0, 0);
          const Selection keep = Selection::from_lists(1, 2, kv_len, lists);
          const auto output = attend(in, {}, &keep);
          if (!first) first = output;
          for (Index i = 0; i < q_len; ++i) EXPECT_TRUE(same_row(output, *first, 0, head, i)) << i;
        }
      }
  }
}

// All keys selected, a window over all of them, and a selection of no past: the same bits as without.
TEST(Attention, WhatHidesNothingChangesNoBit) {
  Random random(33);
  const auto in = random_inputs<Element>(
      random, {.batch = 2, .q_heads = 6, .kv_heads = 3, .q_len = 37, .kv_len = 127});
  const auto dense = attend(in);
  const Selection all = Selection::all(2, 3, 127);
  const Selection listed = to_selection(oracle::all_positions(2, 3, 127), 127);
  expect_same(attend(in, {}, &all), dense);
  expect_same(attend(in, {}, &listed), dense);
  constexpr Index most = std::numeric_limits<Index>::max();
  for (const Index window : {Index{127 + 37}, most - 1, most})
    expect_same(attend(in, {.sliding_window = window}), dense);
  // All and none of an empty past are the same Selection for any number of heads.
  auto chunk = in;
  chunk.past_k = chunk.past_v = Tensor4<Element>(2, 3, 0, 16);
  const auto alone = attend(chunk);
  const Selection none = to_selection(oracle::all_positions(2, 3, 0), 127);
  expect_same(attend(in, {}, &none), alone);
  for (const Selection& keep : {Selection::all(2, 3, 0), to_selection({{{}}}, 0), Selection()})
    expect_same(attend(chunk, {}, &keep), alone);
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

// Refusals are in attention_refusals_test.cpp.
class AttentionSharedMemory : public ::testing::Test {
 protected:
  using View = TensorView<float>;
  static constexpr Shape shape{.q_heads = 2, .kv_heads = 2, .q_len = 7, .kv_len = 37};

  quoka::Past past() const { return {in_.past_k, in_.past_v}; }

  Random random_{110};
  Inputs<float> in_ = random_inputs<float>(random_, shape);
};

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
// Keys and values may be the same memory (MLA), and so may the keys of all heads.
TEST_F(AttentionSharedMemory, InputsMayShareMemoryWithEachOther) {
  Tensor4<float> out(1, 2, 7, 16);
  EXPECT_NO_THROW(quoka::attention(in_.q, {in_.past_k, in_.past_k}, {in_.k, in_.k}, out));
}

// The last byte of a mask of bits.
TEST_F(AttentionSharedMemory, AMaskOfBitsEndsWithItsLastByte) {
  std::vector<float> memory(200);
  const quoka::Mask bits =
      quoka::Mask::bits(memory.data(), {1, 1, 7, 44}, {0, 0, 6});  // 42 bytes: 10.5 floats
  Tensor4<float> out(1, 2, 7, 16);
  const auto attend_to = [&](Index at) {
    const TensorView<float, 3> lse(memory.data() + at, {1, 2, 7}, {14, 7, 1});
    quoka::attention(in_.q, past(), {in_.k, in_.v}, {out, lse}, {.mask = bits});
  };
  expect_refused([&] { attend_to(10); }, {"lse shares memory with the mask"});
  EXPECT_NO_THROW(attend_to(11));
}

// ---- threads ------------------------------------------------------------------------------------

TEST(AttentionThreadsShared, TwoThreadsCallOnTheSameInputsThroughOnePool) {
  Random random(10);
  const auto in =
      random_inputs<float>(random, {.q_heads = 8, .kv_heads = 2, .q_len = 37, .kv_len = 501});
  const Selection keep = random_selection(random, 1, 2, 501, 127);
  const auto serial = attend(in), serial_kept = attend(in, {}, &keep);
  quoka::ThreadPool pool(3);
  int wrong[2] = {0, 0};
  const auto caller = [&](int which) {
    for (int round = 0; round < 20; ++round) {
      const bool kept = (round + which) % 2 == 0;
      const auto output = attend(in, {}, kept ? &keep : nullptr, pool);
      if (!same_bits(output.out, (kept ? serial_kept : serial).out)) ++wrong[which];
    }
  };
  std::thread other(caller, 1);
  caller(0);
  other.join();
  EXPECT_EQ(wrong[0], 0);
  EXPECT_EQ(wrong[1], 0);
}

TEST(AttentionThreadsWorkspace, WhatWasMovedFromIsEmptyAndServesOn) {
  Random random(32);
  const auto in = random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .kv_len = 101});
  quoka::AttentionWorkspace a;
  auto output = unwritten<float>(in.q, 16);
  const auto call = [&] {
    quoka::attention(in.q, {in.past_k, in.past_v}, {in.k, in.v}, {output.out, output.lse}, {},
                     SerialExecutor{}, a);
  };
  call();
  const Index bytes = a.bytes();
  const quoka::AttentionWorkspace b(std::move(a));
  EXPECT_EQ(b.bytes(), bytes);
  EXPECT_EQ(a.bytes(), 0);  // NOLINT: what was moved from may be used
  call();
  expect_same(output, attend(in));
  EXPECT_EQ(a.bytes(), bytes);
}

// ---- options that are kept ----------------------------------------------------------------------

using quoka::OwnedAttentionOptions;

// Of options whose spans refer to memory that is spoilt before this returns.
std::unique_ptr<OwnedAttentionOptions> owned() {
  std::vector<float> sinks{1, 2, 3}, factors{4, 5, 6}, slopes{7, 8, 9};
  auto options = std::make_unique<OwnedAttentionOptions>(AttentionOptions{.scale = 0.5f,
                                                                          .softcap = 3.0f,
                                                                          .sinks = sinks,
                                                                          .sliding_window = 9,
                                                                          .causal = false,
                                                                          .mask_factors = factors,
                                                                          .alibi_slopes = slopes});
  for (auto* x : {&sinks, &factors, &slopes}) std::fill(x->begin(), x->end(), not_a_number);
  return options;
}
void expect_as_given(const OwnedAttentionOptions& options) {
  const AttentionOptions x = options.view();
  const auto same = [](std::span<const float> a, const std::vector<float>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  EXPECT_TRUE(same(x.sinks, {1, 2, 3}));
  EXPECT_TRUE(same(x.mask_factors, {4, 5, 6}));
  EXPECT_TRUE(same(x.alibi_slopes, {7, 8, 9}));
  EXPECT_EQ(x.scale, 0.5f);
  EXPECT_EQ(x.softcap, 3.0f);
  EXPECT_EQ(x.sliding_window, 9);
  EXPECT_FALSE(x.causal);
}

// The source is another, and then gone.
TEST(OwnedAttentionOptions, CopiesHaveTheirOwnAndMovesTakeThem) {
  auto source = owned();
  expect_as_given(*source);
  const OwnedAttentionOptions copy(*source);
  OwnedAttentionOptions assigned, moved_to;
  assigned = *source;
  for (const OwnedAttentionOptions* const x : {&copy, &std::as_const(assigned)}) {
    EXPECT_NE(x->view().sinks.data(), source->view().sinks.data());
    EXPECT_NE(x->view().mask_factors.data(), source->view().mask_factors.data());
    EXPECT_NE(x->view().alibi_slopes.data(), source->view().alibi_slopes.data());
  }
  OwnedAttentionOptions moved(std::move(*source));
  EXPECT_TRUE(source->view().sinks.empty());  // NOLINT: what was moved from may be used
  EXPECT_TRUE(source->view().mask_factors.empty());
  EXPECT_TRUE(source->view().alibi_slopes.empty());
  source.reset();
  moved_to = std::move(moved);
  expect_as_given(copy), expect_as_given(assigned), expect_as_given(moved_to);
}

TEST(OwnedAttentionOptions, RefuseWhatIsOneCalls) {
  const std::uint8_t seen[] = {1, 1};
  expect_refused(
      [&] {
        OwnedAttentionOptions({.mask = quoka::Mask::bytes(seen, {1, 1, 1, 2}, {2, 2, 2})});
      },
      {"mask", "one call's"});
  expect_refused([] { OwnedAttentionOptions({.q_offset = 17}); }, {"q_offset", 17});
  const Position key = 0;
  expect_refused(
      [&] {
        OwnedAttentionOptions({.lists = quoka::IndexLists({&key, {1, 1, 1, 1}})});
      },
      {"lists", "one call's"});
}

}  // namespace
