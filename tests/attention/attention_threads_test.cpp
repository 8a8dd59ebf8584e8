// Attention under threads: calls that share a pool; and scratch memory after a failure and a move. That any executor
// gives the same bits is tested in attention_suite_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/kv_cache.hpp>

#include "support/attention_case.hpp"
#include "support/sanitized.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

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

// If memory ran out halfway, the old memory is gone: the next call allocates it again.
TEST(AttentionThreadsWorkspace, ServesOnAfterMemoryRanOut) {
#if defined(QUOKA_TEST_SANITIZED)
  GTEST_SKIP() << "the sanitizer's operator new does not throw";
#endif
  Random random(31);
  for (const Index q_len : {1, 3, 37}) {
    const auto in =
        random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 301});
    const auto alone = attend(in);
    quoka::AttentionWorkspace workspace;
    const auto call = [&](const Rows& past_v, const Rows& v, const quoka::OutputRows& out) {
      quoka::attention(in.q, {in.past_k, past_v}, {in.k, v}, out, {}, SerialExecutor{}, workspace);
    };
    // Rows with more channels than memory can hold; nothing reads them before scratch memory is allocated.
    constexpr Index many = Index{1} << 44;
    const auto nowhere = [](int at) { return reinterpret_cast<float*>(std::uintptr_t{1} << at); };
    const auto rows = [&](int at, Index heads, Index len) {
      return TensorView<float>(nowhere(at), {1, heads, len, many},
                               {heads * len * many, len * many, many, 1});
    };
    auto output = unwritten<float>(in.q, 16);
    for (int times = 0; times < 2; ++times) {
      call(in.past_v, in.v, TensorView<float>(output.out));
      EXPECT_TRUE(same_bits(output.out, alone.out)) << q_len;
      EXPECT_THROW(call(rows(60, 2, 301), rows(61, 2, q_len), rows(62, 4, q_len)), std::bad_alloc);
    }
    call(in.past_v, in.v, TensorView<float>(output.out));
    EXPECT_TRUE(same_bits(output.out, alone.out)) << q_len;
  }
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

// Memory follows the needs of this call, not those of the last one: a token of codes after one of floats,
// larger groups, biased calls, other formats, fewer workers and more.
TEST(AttentionThreadsWorkspace, ServesCallsOfAnyKindInAnyOrder) {
  Random random(29);
  constexpr Index dim = 32, kv_heads = 1;
  std::vector<quoka::KvCache> caches;
  for (const auto& [format, len] : {std::pair{&quoka::float_format(), Index{300}},
                                    {&quoka::format_of<Eigen::half>(), 300},
                                    {&quoka::q8_0_format(), 300},
                                    {&quoka::float_format(), 2500}}) {
    caches.emplace_back(1, kv_heads, dim, dim, *format, *format);
    const auto k = random.tensor<float>(1, kv_heads, len, dim),
               v = random.tensor<float>(1, kv_heads, len, dim);
    caches.back().append(k, v);
  }
  const std::vector<float> slopes(16, 0.125f);
  const auto one_of = [&](auto... all) {
    const Index values[] = {all...};
    return values[random.below(std::ssize(values))];
  };
  quoka::AttentionWorkspace workspace;
  for (int round = 0; round < 1200; ++round) {
    if (round % 4 == 0) workspace = {};  // what it has once, it keeps
    const Index q_heads = kv_heads * one_of(1, 4), q_len = one_of(1, 1, 90);
    const quoka::KvCache& cache = caches[uz(one_of(0, 1, 2, 3))];
    const auto q = random.tensor<float>(1, q_heads, q_len, dim);
    quoka::AttentionOptions options{.causal = false};
    options.arithmetic =
        quoka::Arithmetic::float_;  // that of each format would be memory of its own
    if (one_of(0, 1) == 1) options.alibi_slopes = std::span(slopes).first(uz(q_heads));
    Tensor4<float> own(1, q_heads, q_len, dim), out(1, q_heads, q_len, dim);
    ShuffledExecutor executor(random.bits(), static_cast<int>(one_of(1, 1, 20)));
    const quoka::Past past(cache.k(), cache.v());
    quoka::attention(q, past, {}, quoka::TensorView<float>(own), options, executor);
    quoka::attention(q, past, {}, quoka::TensorView<float>(out), options, executor, workspace);
    ASSERT_TRUE(same_bits(out, own)) << "round " << round << ": " << q_heads << " heads, " << q_len;
  }
}

}  // namespace
