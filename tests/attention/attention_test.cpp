// attention/attention.hpp by example: calls that share a pool, options that own what their spans refer to. Properties of
// every call are in attention_suite_test.cpp; that memory may run out, in allocation_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <utility>

namespace {

using namespace quoka_test;

// A Past borrows its Selection.
static_assert(std::is_constructible_v<quoka::Past, Rows, Rows, const Selection&>);
static_assert(!std::is_constructible_v<quoka::Past, Rows, Rows, Selection>);

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

// ---- options that are kept ----------------------------------------------------------------------

using quoka::OwnedAttentionOptions;

// Made of spans whose memory is spoilt, copied and moved.
TEST(OwnedAttentionOptions, AreTheirOwn) {
  std::vector<float> sinks{1, 2}, factors{3, 4}, slopes{5, 6};
  std::optional<OwnedAttentionOptions> source(AttentionOptions{.scale = 0.5f,
                                                               .softcap = 3.0f,
                                                               .sinks = sinks,
                                                               .sliding_window = 9,
                                                               .causal = false,
                                                               .mask_factors = factors,
                                                               .alibi_slopes = slopes});
  for (auto* x : {&sinks, &factors, &slopes}) std::fill(x->begin(), x->end(), not_a_number);
  const OwnedAttentionOptions copy(*source);
  OwnedAttentionOptions moved(std::move(*source));
  EXPECT_TRUE(source->view().sinks.empty());  // NOLINT: what was moved from may be used
  source.reset();
  const OwnedAttentionOptions assigned = std::move(moved);
  for (const OwnedAttentionOptions* const owned : {&copy, &assigned}) {
    const AttentionOptions x = owned->view();
    const auto is = [](std::span<const float> of, const std::vector<float>& numbers) {
      return std::equal(of.begin(), of.end(), numbers.begin(), numbers.end());
    };
    EXPECT_TRUE(is(x.sinks, {1, 2}) && is(x.mask_factors, {3, 4}) && is(x.alibi_slopes, {5, 6}));
    EXPECT_TRUE(x.scale == 0.5f && x.softcap == 3.0f && x.sliding_window == 9 && !x.causal);
  }
}

TEST(OwnedAttentionOptions, RefuseWhatIsOneCalls) {
  const std::uint8_t seen[] = {1, 1};
  const Position key = 0;
  const AttentionOptions masked{.mask = quoka::Mask::bytes(seen, {1, 1, 1, 2}, {2, 2, 2})},
      listed{.lists = quoka::IndexLists({&key, {1, 1, 1, 1}})};
  expect_refused([&] { OwnedAttentionOptions{masked}; }, {"mask", "one call's"});
  expect_refused([&] { OwnedAttentionOptions{listed}; }, {"lists", "one call's"});
  expect_refused([] { OwnedAttentionOptions({.q_offset = 17}); }, {"q_offset", 17});
}

}  // namespace
