// Attention and chunked prefill under threads: the same bits whoever runs the tasks, calls that
// share a pool, layers that share a selector, and scratch memory that outlives changing shapes.

#include <quoka/attention/attention.hpp>
#include <quoka/cache/kv_cache.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"
#include "support/sanitized.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <thread>
#include <vector>

namespace {

using namespace quoka_test;
namespace tuning = quoka::tuning;

// The same bits as SerialExecutor's on pools of every size.
template <class T>
void expect_same_on_pools(const Inputs<T>& in, const AttentionOptions& options = {},
                          const Selection* keep = nullptr) {
  const auto serial = attend(in, options, keep);
  for (const int workers : {1, 2, 3, 5, 33}) {
    SCOPED_TRACE(std::to_string(workers) + " workers");
    quoka::ThreadPool pool(workers);
    expect_same(attend(in, options, keep, pool), serial);
    expect_same(attend(in, options, keep, pool), serial);
  }
}

TEST(AttentionThreads, AnyNumberOfThreadsGivesTheSameBits) {
  Random random(1);
  const auto in = random_inputs<Element>(
      random, {.batch = 2, .q_heads = 6, .kv_heads = 3, .q_len = 37, .kv_len = 501});
  expect_same_on_pools(in);
}

TEST(AttentionThreads, OneKvHeadWithManyRowsIsCutAmongThreads) {
  Random random(2);
  const auto in = random_inputs<Element>(random, {.q_heads = 16, .q_len = 127, .kv_len = 127});
  ASSERT_GT(16 * 127, tuning::min_panels_per_task * tuning::panel_rows);
  expect_same_on_pools(in);
}

// Panels that do not divide into the tasks: the last task has fewer, or none.
TEST(AttentionThreads, RowsThatNoThreadCountDivides) {
  Random random(3);
  for (const Index panels : {1, 5, 9, 13, 17}) {
    SCOPED_TRACE(std::to_string(panels) + " panels and a row");
    expect_same_on_pools(random_inputs<Element>(
        random,
        {.q_heads = 1, .head_dim = 3, .v_dim = 5, .q_len = panels * tuning::panel_rows + 1}));
  }
}

TEST(AttentionThreads, SelectionWindowAndSinksOnThreadsGiveTheSameBits) {
  Random random(4);
  const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f};
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 127, .kv_len = 501});
  const Selection keep = random_selection(random, 1, 2, 501, 200);
  expect_same_on_pools(in, {.softcap = 20.0f, .sink_logits = sinks, .sliding_window = 300}, &keep);
}

// Blocks that are packed once for all panels of a head, and keys in parts: with windows that leave the first
// parts out, sinks, lists of different lengths, every arithmetic.
TEST(AttentionThreads, BlocksPackedForAllPanelsGiveTheSameBits) {
  Random random(7);
  for (const Index len : {tuning::long_part_keys - 300, 3 * tuning::long_part_keys + 700}) {
    const auto in = random_inputs<Element>(
        random,
        {.q_heads = 4, .kv_heads = 2, .head_dim = 16, .v_dim = 24, .q_len = 150, .kv_len = len});
    const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f};
    expect_same_on_pools(in, {.sink_logits = sinks});
    expect_same_on_pools(in, {.sink_logits = sinks, .sliding_window = 700});
    expect_same_on_pools(in, {.sliding_window = 2});
    for (const quoka::Arithmetic arithmetic :
         {quoka::Arithmetic::single, quoka::Arithmetic::bfloat16, quoka::Arithmetic::bfloat16_x2,
          quoka::Arithmetic::bfloat16_x3})
      expect_same_on_pools(in, {.arithmetic = arithmetic});
    const Selection keep = random_selection(random, 1, 2, len, 1024);
    expect_same_on_pools(in, {}, &keep);
    std::vector<Position> some, all(static_cast<std::size_t>(len));
    std::iota(all.begin(), all.end(), 0);
    std::copy_if(all.begin(), all.end(), std::back_inserter(some),
                 [](Position i) { return i % 9; });
    const std::vector<Position> lists[] = {some, {3, 5}};
    const Selection uneven = Selection::from_lists(1, 2, len, lists);
    expect_same_on_pools(in, {}, &uneven);
  }
}

// The head with most keys decides for all, whichever it is: how many blocks are packed, how many parts there are.
TEST(AttentionThreads, TheLaterHeadMayHaveMoreKeys) {
  Random random(9);
  for (const Index q_len : {Index{1}, Index{3}, Index{150}})
    for (const Index len : {tuning::long_part_keys - 300, 3 * tuning::long_part_keys + 700}) {
      const auto in = random_inputs<Element>(
          random,
          {.batch = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16, .q_len = q_len, .kv_len = len});
      std::vector<Position> some, all(static_cast<std::size_t>(len));
      std::iota(all.begin(), all.end(), 0);
      std::copy_if(all.begin(), all.end(), std::back_inserter(some),
                   [](Position i) { return i % 9; });
      for (const std::size_t longest : {0u, 1u, 3u}) {
        std::vector<Position> lists[] = {{3, 5}, {}, {7}, {2, 4}};
        lists[longest] = some;
        const Selection uneven = Selection::from_lists(2, 2, len, lists);
        expect_same_on_pools(in, {}, &uneven);
        expect_close(attend(in, {}, &uneven), oracle_attend(in, {}, &uneven), in);
      }
    }
}

// Parts of the keys are walked as one piece but for rounding, wherever the chunk and the mask lie.
TEST(AttentionThreads, ManyKeysInPartsAreWhatOnePieceIs) {
  Random random(8);
  const Index len = 2 * tuning::long_part_keys - 40;
  const auto in = random_inputs<float>(
      random, {.q_heads = 2, .kv_heads = 1, .head_dim = 16, .q_len = 140, .kv_len = len});
  for (const Index window : {0, 1, 90, 2100}) {
    const AttentionOptions options{.sliding_window = window};
    expect_close(attend(in, options), oracle_attend(in, options), in);
  }
}

TEST(AttentionThreads, ADecodeStepOnThreadsGivesTheSameBits) {
  Random random(5);
  expect_same_on_pools(
      random_inputs<Element>(random, {.q_heads = 32, .kv_heads = 8, .q_len = 1, .kv_len = 501}));
}

// Where a value is NaN another path is taken, with scratch memory of its own.
TEST(AttentionThreads, NaNOnThreadsStaysWhereItWas) {
  Random random(6);
  auto in = random_inputs<Element>(random, {.q_heads = 8, .q_len = 127, .kv_len = 127});
  const auto clean = attend(in);
  in.k(0, 0, 60, 3) = stored<Element>(std::nan(""));
  in.v(0, 0, 60, 3) = stored<Element>(std::nan(""));
  quoka::ThreadPool pool(3);
  expect_spoilt(attend(in, {}, nullptr, pool), clean,
                [](Index, Index, Index i) { return i >= 60; });
}

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

using Layer = quoka::ChunkedPrefill<quoka::QuokaSelector>;

struct Prompt {
  Tensor4<float> q, k, v;  // [1, heads, len, 16]
};

Tensor4<float> run_layer(Layer& layer, const Prompt& prompt, quoka::ThreadPool& pool) {
  Tensor4<float> out(1, 8, prompt.q.dimension(2), 16);
  layer.prefill(prompt.q, prompt.k, prompt.v, out, 37, pool);
  return out;
}

constexpr quoka::LayerShape layer_shape{.q_heads = 8, .kv_heads = 2, .head_dim = 16};
const quoka::QuokaOptions layer_options{.budget = Budget::keys(37), .n_queries = 7};

TEST(AttentionThreadsShared, LayersOnThreadsOfTheirOwnShareAPool) {
  Random random(11);
  const Prompt prompts[2] = {
      {random.tensor<float>(1, 8, 300, 16), random.tensor<float>(1, 2, 300, 16),
       random.tensor<float>(1, 2, 300, 16)},
      {random.tensor<float>(1, 8, 211, 16), random.tensor<float>(1, 2, 211, 16),
       random.tensor<float>(1, 2, 211, 16)}};
  Tensor4<float> expected[2], got[2];
  quoka::ThreadPool one(1), shared(2);
  for (int i = 0; i < 2; ++i) {
    Layer layer(layer_shape, layer_options);
    expected[i] = run_layer(layer, prompts[i], one);
  }
  Layer first(layer_shape, layer_options), second(layer_shape, layer_options);
  std::thread other([&] { got[1] = run_layer(second, prompts[1], shared); });
  got[0] = run_layer(first, prompts[0], shared);
  other.join();
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(same_bits(got[i], expected[i])) << "layer " << i;
}

TEST(AttentionThreadsShared, OneSelectorServesThreadsWithStatesOfTheirOwn) {
  Random random(12);
  const auto q = random.tensor<float>(1, 8, 37, 16), k = random.tensor<float>(1, 2, 501, 16);
  const quoka::QuokaSelector selector(layer_options);
  const Selection expected = selector.select(q, k, {});
  int wrong[2] = {0, 0};
  const auto caller = [&](int which) {
    quoka::QuokaSelector::State state;
    Selection keep;
    quoka::SerialExecutor executor;
    for (int round = 0; round < 20; ++round) {
      selector.select(quoka::SelectorInput{q, k, LogitOptions{}}, state, keep, executor);
      if (!(keep == expected)) ++wrong[which];
    }
  };
  std::thread other(caller, 1);
  caller(0);
  other.join();
  EXPECT_EQ(wrong[0], 0);
  EXPECT_EQ(wrong[1], 0);
}

TEST(AttentionThreadsWorkspace, ReuseOverChangingShapesAndThreadsGivesTheSameBits) {
  Random random(13);
  quoka::AttentionWorkspace workspace;
  quoka::ThreadPool pools[] = {quoka::ThreadPool(3), quoka::ThreadPool(1), quoka::ThreadPool(2)};
  int round = 0;
  for (const Shape& shape :
       {Shape{.q_heads = 6, .kv_heads = 2, .head_dim = 64, .v_dim = 80, .q_len = 37, .kv_len = 127},
        Shape{.q_heads = 1, .head_dim = 3, .v_dim = 1, .q_len = 1, .kv_len = 0},
        Shape{.q_heads = 16, .head_dim = 128, .v_dim = 64, .q_len = 127, .kv_len = 1},
        Shape{.batch = 3,
        .q_heads = 4,
        .kv_heads = 4,
        .head_dim = 7,
        .v_dim = 256,
        .q_len = 3,
        .kv_len = 501},
        Shape{.q_heads = 6,
        .kv_heads = 2,
        .head_dim = 64,
        .v_dim = 80,
        .q_len = 37,
        .kv_len = 127}}) {
    SCOPED_TRACE("shape " + std::to_string(round));
    const auto in = random_inputs<float>(random, shape);
    auto output = unwritten<float>(in.q, shape.v_dim);
    quoka::attention(in.q, {in.past_k, in.past_v}, {in.k, in.v}, {output.out, output.lse}, {},
                     pools[round++ % 3], workspace);
    expect_same(output, attend(in));
  }
  EXPECT_GT(workspace.bytes(), 0);
}

// Keys and values of the past and of the chunk have formats of their own: a block of both is widened, of keys or of
// values alone, in memory that the calls before it did not need.
TEST(AttentionThreadsWorkspace, ServesValuesOfAnotherFormatThanTheKeys) {
  Random random(30);
  const auto in = random_inputs<float>(random, {.q_len = 50, .kv_len = 301});
  const auto halves = [](const Tensor4<float>& x) {
    return Tensor4<Eigen::half>(x.cast<Eigen::half>());
  };
  const Tensor4<Eigen::half> half_k = halves(in.past_k), half_v = halves(in.past_v),
                             half_chunk_v = halves(in.v);
  const Rows pasts_k[] = {in.past_k, half_k}, pasts_v[] = {in.past_v, half_v},
             chunks_v[] = {in.v, half_chunk_v};
  const auto expect_same_in = [&](quoka::AttentionWorkspace& workspace, int kinds) {
    const Rows k = pasts_k[kinds % 2], v = pasts_v[kinds / 2 % 2], own_v = chunks_v[kinds / 4];
    auto output = unwritten<float>(in.q, 16), alone = output;
    quoka::attention(in.q, {k, v}, {in.k, own_v}, {output.out, output.lse}, {}, SerialExecutor{},
                     workspace);
    quoka::attention(in.q, {k, v}, {in.k, own_v}, {alone.out, alone.lse});
    expect_same(output, alone);
  };
  for (int first = 0; first < 8; ++first)
    for (int second = 0; second < 8; ++second) {
      SCOPED_TRACE(std::to_string(first) + ", then " + std::to_string(second));
      quoka::AttentionWorkspace workspace;
      expect_same_in(workspace, first);
      expect_same_in(workspace, second);
    }
}

// Where memory ran out halfway, what there was before is gone: the next call makes it anew.
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
      // may_repeat: nobody looks for copies of the chunk, which takes memory, too.
      quoka::attention(in.q, {in.past_k, past_v}, {in.k, v}, out, {.may_repeat = true},
                       SerialExecutor{}, workspace);
    };
    // Rows that nobody reads before there is memory for them, of so many channels that there is none.
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

// So many workers take the tasks in turns, on one thread.
struct InTurns {
  int claimed;
  int workers() const { return claimed; }
  template <class F>
  void run(Index tasks, F&& f) const {
    for (Index task = 0; task < tasks; ++task) f(task, static_cast<int>(task % claimed));
  }
  void run_chains(const quoka::Chains& chains) const {
    for (Index chain = 0; chain < chains.count(); ++chain)
      for (int stage = 0; stage < chains.stages(); ++stage)
        run(chains.tasks(stage),
            [&](Index task, int worker) { chains(chain, stage, task, worker); });
  }
};

// Memory is asked for by what a call needs, not by what the last one was: a token of codes after one of floats,
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
        quoka::Arithmetic::single;  // that of each format would be memory of its own
    if (one_of(0, 1) == 1) options.alibi_slopes = std::span(slopes).first(uz(q_heads));
    Tensor4<float> own(1, q_heads, q_len, dim), out(1, q_heads, q_len, dim);
    const InTurns executor{static_cast<int>(one_of(1, 1, 20))};
    const quoka::Past past(cache.k(), cache.v());
    quoka::attention(q, past, {}, quoka::TensorView<float>(own), options, executor);
    quoka::attention(q, past, {}, quoka::TensorView<float>(out), options, executor, workspace);
    ASSERT_TRUE(same_bits(out, own)) << "round " << round << ": " << q_heads << " heads, " << q_len;
  }
}

}  // namespace
