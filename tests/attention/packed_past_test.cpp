// attention/packed_past.hpp: what is kept as the cache grows, is cut and goes on elsewhere, and what it takes; what it was
// not told of is found. That every call gives the bits that it gives without one: attention_suite_test.cpp, and of a layer
// prefill_suite_test.cpp.

#include <quoka/attention/packed_past.hpp>
#include <quoka/views/tensor.hpp>

#include "support/attention_fixtures.hpp"

#include <functional>
#include <limits>
#include <stdexcept>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;
using quoka::PackedPast;
using quoka::Past;

// Of int8 chunks of 64 rows a KV head, which are int8 without a packed past, too.
const Arithmetic arithmetics[] = {Arithmetic::automatic,   Arithmetic::single,
                                  Arithmetic::bfloat16,    Arithmetic::bfloat16_x2,
                                  Arithmetic::bfloat16_x3, Arithmetic::int8};

// Are blocks kept in what this comes to for a cache and a chunk of T?
template <class T>
bool keeps(Arithmetic asked) {
  const quoka::Format& format = quoka::format_of<T>();
  return quoka::arithmetic_used(asked, format, format) != Arithmetic::single;
}

template <class T>
Output<T> attend_packed(const Inputs<T>& in, PackedPast* packed, const AttentionOptions& options,
                        ExecutorRef executor = SerialExecutor{}, const Selection* keep = nullptr) {
  auto output = unwritten<T>(in.q, in.past_v.dimension(3));
  quoka::AttentionWorkspace workspace;
  Past past(in.past_k, in.past_v);
  past.keep = keep, past.packed = packed;
  quoka::attention(in.q, past, {in.k, in.v}, {output.out, output.lse}, options, executor,
                   workspace);
  return output;
}

template <class T>
void expect_same_with(const Inputs<T>& in, const AttentionOptions& options, PackedPast& packed,
                      ExecutorRef executor = SerialExecutor{}, const Selection* keep = nullptr) {
  const auto plain = attend_packed<T>(in, nullptr, options, executor, keep);
  for (int times = 0; times < 2; ++times) {  // the second call finds all of it
    const auto output = attend_packed<T>(in, &packed, options, executor, keep);
    EXPECT_TRUE(same_bits(output.out, plain.out));
    EXPECT_TRUE(same_bits(output.lse, plain.lse));
  }
}

template <class T>
Inputs<T> first_keys(const Inputs<T>& in, Index len) {
  const auto cut = [len](const Tensor4<T>& x) {
    Tensor4<T> y(x.dimension(0), x.dimension(1), len, x.dimension(3));
    for (Index b = 0; b < x.dimension(0); ++b)
      for (Index head = 0; head < x.dimension(1); ++head)
        for (Index i = 0; i < len; ++i)
          for (Index c = 0; c < x.dimension(3); ++c) y(b, head, i, c) = x(b, head, i, c);
    return y;
  };
  return {in.q, cut(in.past_k), cut(in.past_v), in.k, in.v};
}

TEST(PackedPast, WhatAnArithmeticCannotHoldIsStillFound) {
  Random random(3);
  auto in = random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 50, .kv_len = 400});
  in.past_k(0, 1, 7, 3) = std::numeric_limits<float>::infinity();
  in.past_k(0, 0, 130, 2) = 3e38f;
  in.past_v(0, 0, 9, 5) = std::nanf("");
  in.past_v(0, 1, 300, 1) = -3e38f;
  in.q(0, 2, 4, 0) = 3e38f;
  for (const Arithmetic arithmetic : arithmetics) {
    PackedPast packed;
    expect_same_with<float>(in, {.arithmetic = arithmetic}, packed);
  }
}

// A mask that hides cells from all lists the others, for its own call alone.
TEST(PackedPast, AMaskThatListsNothingUsesItAfterOneThatDid) {
  if (!keeps<float>(Arithmetic::bfloat16)) GTEST_SKIP() << "blocks are not kept here";
  Random random(17);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 40, .kv_len = 300});
  Tensor4<float> bias(1, 1, 40, 340), hides(1, 1, 40, 340);
  bias.setConstant(0.25f), hides.setZero();
  for (Index i = 0; i < 40; ++i) hides(0, 0, i, 7) = -std::numeric_limits<float>::infinity();
  quoka::AttentionWorkspace workspace;
  PackedPast packed;
  auto output = unwritten<float>(in.q, 16);
  const auto call = [&](const Tensor4<float>& mask) {
    AttentionOptions options{.arithmetic = Arithmetic::bfloat16};
    options.mask = quoka::Mask(quoka::TensorView<const float>(mask));
    quoka::attention(in.q, Past(in.past_k, in.past_v, packed), {in.k, in.v},
                     {output.out, output.lse}, options, SerialExecutor{}, workspace);
  };
  call(hides);
  EXPECT_EQ(packed.len(), 0);
  call(bias);
  EXPECT_GT(packed.len(), 0);
}

TEST(PackedPast, FollowsAGrowingCacheAndIsCutWithIt) {
  Random random(5);
  const auto in = random_inputs<float>(random,
                                       {.q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 900}),
             other = random_inputs<float>(
                 random, {.q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 900});
  for (const Arithmetic arithmetic : arithmetics) {
    const AttentionOptions options{.arithmetic = arithmetic};
    PackedPast packed;
    for (const Index len : {1, 100, 101, 350, 600, 900}) {
      const Index before = packed.len();
      expect_same_with<float>(first_keys(in, len), options, packed);
      EXPECT_GE(packed.len(), before);
    }
    // Another branch from key 450 on.
    auto branch = in;
    for (Index head = 0; head < 2; ++head)
      for (Index i = 450; i < 900; ++i)
        for (Index c = 0; c < 16; ++c) {
          branch.past_k(0, head, i, c) = other.past_k(0, head, i, c);
          branch.past_v(0, head, i, c) = other.past_v(0, head, i, c);
        }
    packed.truncate(450);
    EXPECT_LT(packed.len(), 450);  // no block ends there
    EXPECT_EQ(packed.len() > 0, keeps<float>(arithmetic));
    expect_same_with<float>(branch, options, packed);
    packed.truncate(0);
    EXPECT_EQ(packed.len(), 0);
    expect_same_with<float>(other, options, packed);
  }
  PackedPast packed;
  expect_refused([&] { packed.truncate(-1); }, {"truncate's len", -1, 0});
}

// A past too short for a block, of another shape: nothing of the first one is left to be found.
TEST(PackedPast, OfNoBlockIsEmpty) {
  Random random(14);
  const Shape shape{.q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 500};
  Shape wider = shape, two = shape;
  wider.head_dim = 24, two.batch = 2;
  for (const Arithmetic arithmetic : arithmetics)
    for (Shape other : {wider, two}) {
      other.kv_len = 5;
      PackedPast packed;
      const AttentionOptions options{.arithmetic = arithmetic};
      expect_same_with<float>(random_inputs<float>(random, shape), options, packed);
      const auto few = random_inputs<float>(random, other);
      expect_same_with<float>(few, options, packed);
      EXPECT_EQ(packed.len(), 0) << arithmetic.name();
    }
}

// Blocks that were being packed when it failed are packed anew.
TEST(PackedPast, AFailureKeepsWhatWasThereBefore) {
  struct Fails {
    static int workers() { return 1; }
    static void run(Index, const std::function<void(Index, int)>&) {
      throw std::runtime_error("no more");
    }
  };
  Random random(15);
  const Shape shape{.q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 900};
  const auto in = random_inputs<float>(random, shape);
  Shape wider = shape;
  wider.v_dim = 24;
  const auto other = random_inputs<float>(random, wider);
  for (const Arithmetic arithmetic : arithmetics) {
    if (!keeps<float>(arithmetic)) continue;
    const AttentionOptions options{.arithmetic = arithmetic};
    PackedPast packed;
    expect_same_with<float>(first_keys(in, 500), options, packed);
    const Index len = packed.len();
    EXPECT_THROW(attend_packed<float>(in, &packed, options, Fails{}), std::runtime_error);
    EXPECT_EQ(packed.len(), len);
    expect_same_with<float>(in, options, packed);
    EXPECT_THROW(attend_packed<float>(other, &packed, options, Fails{}), std::runtime_error);
    EXPECT_EQ(packed.len(), 0) << "of another shape";
    expect_same_with<float>(other, options, packed);
  }
}

// The second head's keys, and the second sequence's.
TEST(PackedPast, LooksAtEveryHead) {
  Random random(16);
  auto in = random_inputs<float>(
      random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 500});
  for (const Arithmetic arithmetic : arithmetics) {
    if (!keeps<float>(arithmetic)) continue;
    PackedPast packed;
    expect_same_with<float>(in, {.arithmetic = arithmetic}, packed);
    for (Index b = 0; b < 2; ++b)
      for (Index head = 0; head < 2; ++head) {
        float& last = in.past_k(b, head, packed.len() - 1, 3);
        const float kept = last;
        last += 1.0f;
        expect_refused([&] { attend_packed<float>(in, &packed, {.arithmetic = arithmetic}); },
                       {"position", packed.len() - 1});
        last = kept;
      }
  }
}

TEST(PackedPast, StaysEmptyWhereItDoesNotServe) {
  Random random(7);
  const auto token =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 1, .kv_len = 500});
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 500});
  const Selection some = random_selection(random, 1, 2, 500, 300), all = Selection::all(1, 2, 500);
  for (const Arithmetic arithmetic : arithmetics) {
    PackedPast packed;
    expect_same_with<float>(token, {.arithmetic = arithmetic}, packed);
    expect_same_with<float>(in, {.arithmetic = arithmetic}, packed, SerialExecutor{}, &some);
    expect_same_with<float>(in, {.sliding_window = 130, .arithmetic = arithmetic}, packed);
    EXPECT_EQ(packed.len(), 0) << arithmetic.name();
    expect_same_with<float>(in, {.arithmetic = arithmetic}, packed, SerialExecutor{}, &all);
    EXPECT_EQ(packed.len() > 0, keeps<float>(arithmetic)) << arithmetic.name();
  }
}

TEST(PackedPast, FindsACacheThatChangedUnheard) {
  Random random(8);
  auto in = random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 500});
  for (const Arithmetic arithmetic : arithmetics) {
    if (!keeps<float>(arithmetic)) continue;
    const AttentionOptions options{.arithmetic = arithmetic};
    PackedPast packed;
    expect_same_with<float>(in, options, packed);
    const Index len = packed.len();
    expect_refused([&] { attend_packed<float>(first_keys(in, 40), &packed, options); },
                   {"length that is packed", len, "truncate()", 40});
    for (auto* const x : {&in.past_k, &in.past_v}) {
      float& last = (*x)(0, 1, len - 1, 3);
      const float kept = last;
      last += 1.0f;
      expect_refused([&] { attend_packed<float>(in, &packed, options); },
                     {"position", len - 1, "packed", len});
      last = kept;
    }
    // A ring buffer that went round: keys in the middle, or values.
    for (auto* const x : {&in.past_k, &in.past_v}) {
      const Tensor4<float> before = *x;
      for (Index head = 0; head < 2; ++head)
        for (Index t = 210; t < 225; ++t)
          for (Index c = 0; c < 16; ++c) (*x)(0, head, t, c) = static_cast<float>(random.normal());
      expect_refused([&] { attend_packed<float>(in, &packed, options); },
                     {x == &in.past_k ? "key at position" : "value at position", "packed", len,
                      "PackedPast::truncate(n)"});
      *x = before;
    }
    expect_same_with<float>(in, options, packed);  // as it was
    EXPECT_EQ(packed.len(), len);
    PackedPast moved = std::move(packed);
    expect_same_with<float>(in, options, moved);
    EXPECT_EQ(packed.len(), 0);  // NOLINT: what was moved from is empty, and may be used
    expect_same_with<float>(in, options, packed);
  }
}

// Whatever was cut: the last key of a block that is left.
TEST(PackedPast, FindsAnotherCacheAfterACut) {
  Random random(10);
  const Shape shape{.q_heads = 4, .kv_heads = 2, .q_len = 32, .kv_len = 700};
  const auto in = random_inputs<float>(random, shape), other = random_inputs<float>(random, shape);
  const AttentionOptions options{.arithmetic = Arithmetic::bfloat16};
  if (!keeps<float>(options.arithmetic)) GTEST_SKIP() << "blocks are kept in no arithmetic here";
  for (const Index cut : {200, 350, 500, 699}) {
    PackedPast packed;
    expect_same_with<float>(in, options, packed);
    packed.truncate(cut);
    EXPECT_THROW(attend_packed<float>(other, &packed, options), std::invalid_argument) << cut;
    EXPECT_LE(packed.len(), cut);
    expect_same_with<float>(in, options, packed);
  }
}

// A key costs what is said: the room in which blocks are packed is not kept with each.
TEST(PackedPast, TakesTheMemoryThatIsSaid) {
  Random random(13);
  const auto in = random_inputs<float>(
      random,
      {.q_heads = 2, .kv_heads = 2, .head_dim = 128, .v_dim = 128, .q_len = 3, .kv_len = 6000});
  for (const Arithmetic arithmetic : arithmetics) {
    if (!keeps<float>(arithmetic)) continue;
    PackedPast packed;
    attend_packed<float>(in, &packed, {.arithmetic = arithmetic});
    const Arithmetic used = quoka::arithmetic_used(arithmetic);
    const double of_key = used == Arithmetic::bfloat16_x3 ? 4 * 256.0
                          : used == Arithmetic::int8      ? 256.0
                                                          : 2 * 256.0;
    const double bytes =
        static_cast<double>(packed.bytes()) / static_cast<double>(2 * packed.len());
    EXPECT_GE(bytes, of_key) << arithmetic.name();
    EXPECT_LE(bytes, of_key * (used == Arithmetic::int8 ? 1.35 : 1.2)) << arithmetic.name();
  }
}

}  // namespace
