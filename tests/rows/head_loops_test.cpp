// runtime/head_loops.hpp: every part of every head once, phase after phase, by any executor; memory that phases of a
// head share is not another head's at the time.

#include <quoka/runtime/head_loops.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/failing_executor.hpp"
#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::detail::HeadLoops;
using quoka::detail::HeadPlan;

// Three phases of 1, 5 and 2 parts. Each part finds all of the phase before done, in its head's slot.
void expect_phases(Index heads, ExecutorRef executor) {
  const HeadPlan plan(heads, executor);
  struct Slot {
    std::atomic<Index> head{-1}, done{0};
  };
  std::deque<Slot> slots(uz(plan.slots()));
  std::deque<std::atomic<int>> times(uz(heads * 8));
  std::atomic<int> wrong{0};
  const auto part = [&](Index head, Index number, int worker, Index before) {
    Slot& slot = slots[uz(plan.slot(head, worker))];
    if (before == 0) slot.done = 0, slot.head = head;
    if (slot.head != head || slot.done < before) ++wrong;
    ++times[uz(head * 8 + number)], ++slot.done;
  };
  plan.run([&](const HeadLoops& on) {
    on.each(1, [&](Index head, Index, int worker) { part(head, 0, worker, 0); });
    on.each(5, [&](Index head, Index i, int worker) { part(head, 1 + i, worker, 1); });
    on.each(0, [&](Index, Index, int) { ++wrong; });
    on.each(2, [&](Index head, Index i, int worker) { part(head, 6 + i, worker, 6); });
  });
  EXPECT_EQ(wrong, 0);
  for (const auto& count : times) EXPECT_EQ(count, 1);
}

TEST(HeadLoops, RunEachPartOnceAfterThePhaseBefore) {
  for (const int workers : {1, 2, 3, 5, 8, 16}) {
    quoka::ThreadPool pool(workers);
    for (const Index heads : {0, 1, 2, 3, 4, 7, 8, 12, 25, 33}) {
      SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(workers) + " workers");
      expect_phases(heads, pool);
      expect_phases(heads, InTurns{workers});
    }
  }
}

TEST(HeadLoops, AreOneRunWhereHeadsSuffice) {
  const auto runs_of = [](Index heads, int workers) {
    int runs = 0;
    InTurns executor{workers, &runs};
    HeadPlan(heads, executor).run([](const HeadLoops& on) {
      on.each(2, [](Index, Index, int) {});
      on.each(3, [](Index, Index, int) {});
    });
    return runs;
  };
  EXPECT_EQ(runs_of(8, 1), 1);
  EXPECT_EQ(runs_of(8, 2), 1);
  EXPECT_EQ(runs_of(8, 5), 1) << "two rounds, of which the second has three heads";
  EXPECT_EQ(runs_of(8, 6), 2) << "two rounds, of which the second has two heads";
  EXPECT_EQ(runs_of(1, 2), 2);
}

TEST(HeadLoops, HandAnErrorToTheCaller) {
  quoka::ThreadPool pool(3);
  for (const Index heads : {1, 30})
    EXPECT_THROW(HeadPlan(heads, pool).run([&](const HeadLoops& on) {
      on.each(4, [&](Index head, Index part, int) {
        if (head == heads - 1 && part == 3) throw Failure();
      });
    }),
                 Failure);
}

}  // namespace
