// Attention under threads: calls that share a pool; and scratch memory after a move. That any executor gives the same
// bits, and a workspace after any call, is tested in attention_suite_test.cpp; after memory ran out, in allocation_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <thread>

namespace {

using namespace quoka_test;

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

}  // namespace
