// Attention of one token, and of few rows: cut over their keys, merged, and against the oracle.

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

namespace {

using namespace quoka_test;
namespace tuning = quoka::tuning;

constexpr Index part = tuning::part_blocks * tuning::block_keys;

TEST(TokenAttention, EveryGroup) {
  Random random(1);
  for (const Index group : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33}) {
    SCOPED_TRACE("group " + std::to_string(group));
    expect_as_oracle(random_inputs<Element>(
        random, {.q_heads = 2 * group, .kv_heads = 2, .q_len = 1, .kv_len = 131}));
  }
}

TEST(TokenAttention, EveryHeadDim) {
  for_each_storage([]<class T>() {
    Random random(2);
    for (const Index dim : {1, 3, 8, 15, 16, 17, 56, 64, 80, 100, 128, 130, 256})
      for (const Index v_dim : {dim, Index{24}}) {
        SCOPED_TRACE("head_dim " + std::to_string(dim) + ", v_dim " + std::to_string(v_dim));
        expect_as_oracle(random_inputs<T>(
            random, {.q_heads = 4, .head_dim = dim, .v_dim = v_dim, .q_len = 1, .kv_len = 77}));
      }
  });
}

TEST(TokenAttention, EveryNumberOfKeys) {
  for_each_storage([]<class T>() {
    Random random(3);
    for (const Index kv_len : {Index{0}, Index{1}, tuning::token_block_keys - 1,
                               tuning::token_block_keys, tuning::token_block_keys + 1, part - 1,
                               part, part + 1, 3 * part + 5, tuning::max_parts * part + 7}) {
      SCOPED_TRACE("kv_len " + std::to_string(kv_len));
      expect_as_oracle(
          random_inputs<T>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 1, .kv_len = kv_len}));
    }
  });
}

// Of the past alone, of a selection, with every option.
TEST(TokenAttention, OptionsAndSelections) {
  Random random(4);
  const Index kv_len = 2 * part + 33;
  const auto in = random_inputs<Element>(
      random, {.batch = 2, .q_heads = 6, .kv_heads = 2, .q_len = 1, .kv_len = kv_len});
  const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f, 100.0f, 2.0f};
  for (const Index count : {Index{1}, Index{64}, part + 3}) {
    SCOPED_TRACE("selected " + std::to_string(count));
    const Selection keep = random_selection(random, 2, 2, kv_len, count);
    for (const Index window : {Index{0}, Index{1}, Index{2}, Index{100}, part + 50, kv_len}) {
      SCOPED_TRACE("window " + std::to_string(window));
      const AttentionOptions options{.sink_logits = sinks, .sliding_window = window};
      expect_as_oracle(in, options);
      expect_as_oracle(in, options, &keep);
    }
    expect_as_oracle(in, {.softcap = 5.0f, .sink_logits = sinks}, &keep, 2.0);
  }
  expect_as_oracle(
      random_inputs<Element>(random, {.q_heads = 4, .q_len = 1, .kv_len = part + 9}, false));
}

// Two to a few tokens: panels, cut over the keys.
TEST(TokenAttention, FewTokensAreCutOverTheirKeys) {
  Random random(5);
  for (const Index q_len : {2, 3, 9}) {
    SCOPED_TRACE("q_len " + std::to_string(q_len));
    const auto in = random_inputs<Element>(
        random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 2 * part + 33});
    expect_as_oracle(in);
    expect_as_oracle(in, {.softcap = 5.0f, .sliding_window = part + 5}, nullptr, 2.0);
    expect_as_oracle(in, {.sliding_window = 3});
  }
}

TEST(TokenAttention, ThreadsAndBatchChangeNoBit) {
  Random random(6);
  for (const Index q_len : {1, 5}) {
    const auto in = random_inputs<Element>(
        random, {.batch = 3, .q_heads = 4, .kv_heads = 1, .q_len = q_len, .kv_len = 2 * part + 33});
    const auto serial = attend(in);
    for (const int workers : {2, 3, 7}) {
      quoka::ThreadPool pool(workers);
      expect_same(attend(in, {}, nullptr, pool), serial);
    }
    for (Index b = 0; b < 3; ++b) {
      const auto one = [b](const Tensor4<Element>& x) -> Tensor4<Element> {
        return x.slice(Eigen::array<Index, 4>{b, 0, 0, 0},
                       Eigen::array<Index, 4>{1, x.dimension(1), x.dimension(2), x.dimension(3)});
      };
      const Inputs<Element> alone{one(in.q), one(in.past_k), one(in.past_v), one(in.k), one(in.v)};
      EXPECT_TRUE(same_bits(attend(alone).out, one(serial.out)));
    }
  }
}

// In [len, heads, dim] order heads take turns at blocks of keys; rows lie between NaNs. As the oracle,
// with the same bits for any number of threads, which decides how many heads a task takes.
TEST(TokenAttention, HeadsSideBySide) {
  Random random(8);
  constexpr Index block = tuning::token_together_keys;
  const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f, 100.0f, 2.0f,
                                 0.0f, 1.0f,  2.0f, 0.5f, -2.0f,  1.0f};
  for (const Index kv_len : {Index{0}, Index{1}, block - 1, block, block + 1, 2 * part + 33}) {
    for (const AttentionOptions& options :
         {AttentionOptions{}, AttentionOptions{.sink_logits = sinks, .sliding_window = part + 50},
          AttentionOptions{.softcap = 5.0f, .sliding_window = 1}}) {
      SCOPED_TRACE("kv_len " + std::to_string(kv_len) + ", window " +
                   std::to_string(options.sliding_window));
      const auto in = random_inputs<Element>(random, {.batch = 2,
                                                      .q_heads = 12,
                                                      .kv_heads = 6,
                                                      .head_dim = 19,
                                                      .v_dim = 40,
                                                      .q_len = 1,
                                                      .kv_len = kv_len});
      const Strided<Element> past_k(in.past_k), past_v(in.past_v);
      const auto on = [&](ExecutorRef executor) {
        auto output = unwritten<Element>(in.q, 40);
        quoka::attention(in.q, {past_k.view(), past_v.view()}, {in.k, in.v},
                         {output.out, output.lse}, options, executor);
        return output;
      };
      const auto serial = on(quoka::SerialExecutor{});
      expect_close(serial, oracle_attend(in, options), in, 2.0);
      for (const int workers : {2, 3, 7}) expect_same(on(quoka::ThreadPool(workers)), serial);
    }
  }
}

// A past in a short format whose heads lie side by side, and a token's own key and value in float.
TEST(TokenAttentionFormats, HeadsSideBySideInAnotherFormatThanTheChunk) {
  Random random(9);
  for (const Index kv_len : {Index{1}, tuning::token_together_keys + 1, 2 * part + 33}) {
    SCOPED_TRACE("kv_len " + std::to_string(kv_len));
    const auto in = random_inputs<Eigen::half>(
        random,
        {.q_heads = 12, .kv_heads = 6, .head_dim = 19, .v_dim = 40, .q_len = 1, .kv_len = kv_len});
    const auto floats_of = [](const Tensor4<Eigen::half>& x) {
      Tensor4<float> y(x.dimensions());
      for (Index i = 0; i < x.size(); ++i) y.data()[i] = static_cast<float>(x.data()[i]);
      return y;
    };
    const Inputs<float> floats{random.tensor<float>(1, 12, 1, 19), floats_of(in.past_k),
                               floats_of(in.past_v), random.tensor<float>(1, 6, 1, 19),
                               random.tensor<float>(1, 6, 1, 40)};
    const Strided<Eigen::half> short_k(in.past_k), short_v(in.past_v);
    const Strided<float> past_k(floats.past_k), past_v(floats.past_v);
    auto output = unwritten<float>(floats.q, 40), expected = output;
    quoka::attention(floats.q, {short_k.view(), short_v.view()}, {floats.k, floats.v},
                     {output.out, output.lse});
    quoka::attention(floats.q, {past_k.view(), past_v.view()}, {floats.k, floats.v},
                     {expected.out, expected.lse});
    expect_same(output, expected);
    expect_close(output, oracle_attend(floats), floats);
  }
}

// A key beyond the window, or in another part, spoils nothing.
TEST(TokenAttention, NanStaysInItsHead) {
  for_each_storage([]<class T>() {
    Random random(7);
    const Index kv_len = part + 40;
    auto in = random_inputs<T>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 1, .kv_len = kv_len});
    const auto clean = attend(in, {.sliding_window = 50});
    in.past_v(0, 0, kv_len - 60, 3) = stored<T>(std::nan(""));
    in.past_k(0, 1, 5, 0) = stored<T>(std::nan(""));
    expect_same(attend(in, {.sliding_window = 50}), clean);
    const auto spoiled = attend(in);
    for (Index head = 0; head < 2; ++head) {
      EXPECT_TRUE(std::isnan(static_cast<float>(spoiled.out(0, head, 0, 3))));
      EXPECT_FALSE(std::isnan(static_cast<float>(spoiled.out(0, head, 0, 2))));
    }
    for (Index head = 2; head < 4; ++head)
      for (Index c = 0; c < 16; ++c)
        EXPECT_TRUE(std::isnan(static_cast<float>(spoiled.out(0, head, 0, c))));
  });
}

}  // namespace
