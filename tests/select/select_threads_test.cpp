// Selection under threads: the same Selection by any executor and number of threads.

#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/quoka.hpp>

#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

namespace {

using namespace quoka_test;
using quoka::MassSelector;

// A head whose keys are too long for codes has its mass in float, after that of the others.
TEST(SelectThreads, AHeadThatCodesCannotStandForIsThatOfFloat) {
  Random random(505);
  const Index len = 9000, dim = 32;
  auto k = random.tensor<float>(1, 2, len, dim);
  const auto q = random.tensor<float>(1, 8, 130, dim);
  for (Index t = 0; t < len; ++t)
    for (Index c = 0; c < dim; ++c) k(0, 1, t, c) *= 1e13f;
  quoka::ThreadPool pool(16);
  for (MassOptions options :
       {MassOptions::balanced(Budget::keys(100)), softmax_options(Budget::keys(100))}) {
    options.sketch = quoka::Sketch::on;
    const MassSelector selector(options);
    const quoka::SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}, .capacity = len};
    Selection serial;
    for (const bool by_pool : {false, true}) {
      MassSelector::State state;
      Selection keep;
      selector.appended(input, state, SerialExecutor{});
      selector.select(input, state, keep, by_pool ? ExecutorRef(pool) : SerialExecutor{});
      EXPECT_EQ(keep.sum_of_counts(), 100 * keep.heads());
      EXPECT_EQ(state.scorer.logit_error(1), std::numeric_limits<float>::infinity());
      EXPECT_LT(state.scorer.logit_error(0), 4.0f);
      if (!by_pool) serial = keep;
      EXPECT_EQ(keep, serial);
    }
  }
}

// After a failure halfway the next call reserves again: the memory that grows is freed first.
TEST(WorkerScratchTest, AFailureHalfwayIsNoReservation) {
  struct Part {
    Index has = 0;
    void reserve(int* const& fails, Index count) {
      if (count <= has) return;
      has = 0;
      if ((*fails)-- == 0) throw std::bad_alloc();
      has = count;
    }
    Index bytes() const { return has; }
  };
  int left = 100;
  quoka::WorkerScratch<Part> scratch;
  scratch.reserve(2, &left, Index{5});
  left = 1;
  EXPECT_THROW(scratch.reserve(2, &left, Index{8}), std::bad_alloc);
  EXPECT_EQ(scratch[0].has, 8);
  EXPECT_EQ(scratch[1].has, 0);
  left = 100;
  scratch.reserve(2, &left, Index{5});
  EXPECT_EQ(scratch[1].has, 5);
}

TEST(WorkerScratchTest, WhatWasMovedFromHasNothing) {
  struct Part {
    Index has = 0;
    void reserve(Index count) { has = std::max(has, count); }
    Index bytes() const { return has; }
  };
  quoka::WorkerScratch<Part> a, c;
  a.reserve(2, Index{5});
  quoka::WorkerScratch<Part> b(std::move(a));
  EXPECT_EQ(b.bytes(), 10);
  EXPECT_EQ(a.bytes(), 0);  // NOLINT: what was moved from may be used
  a.at_least(2);            // without memory
  a.reserve(2, Index{5});
  EXPECT_EQ(a.bytes(), 10);
  c = std::move(a);
  EXPECT_EQ(c.bytes(), 10);
  EXPECT_EQ(a.bytes(), 0);  // NOLINT
  a.at_least(2);            // without memory
  a.reserve(2, Index{4});
  EXPECT_EQ(a[1].has, 4);
}

// More workers find what the first ones have, and those have it still.
TEST(WorkerScratchTest, MoreWorkersKeepWhatTheOthersHave) {
  struct Part {
    int times = 0;
    Index has = 0;
    void reserve(Index count) { times += count > has ? 1 : 0, has = std::max(has, count); }
    Index bytes() const { return has; }
  };
  quoka::WorkerScratch<Part> scratch;
  scratch.reserve(2, Index{5});
  scratch.reserve(4, Index{5});
  for (int worker = 0; worker < 4; ++worker) {
    EXPECT_EQ(scratch[worker].times, 1) << worker;
    EXPECT_EQ(scratch[worker].has, 5) << worker;
  }
}

}  // namespace
