// Executors run every task once, with a worker index that is exclusive and in range, and pass
// errors on. Loops over the parts of heads (runtime/head_loops.hpp) run every part of every head once, phase after phase,
// by any executor; memory that phases of a head share is not another head's at the time.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/executors.hpp"
#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <deque>
#include <thread>
#include <vector>

#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace {

using namespace quoka_test;
using quoka::SerialExecutor;
using quoka::ThreadPool;

// Some microseconds of arithmetic, more for some tasks, so that workers meet.
double work(Index task) {
  double x = 1.0 + static_cast<double>(task);
  for (int i = 0; i < 200 * (1 + static_cast<int>(task % 7)); ++i) x = std::sqrt(x + 1.0);
  return x;
}

// Tasks run `counts` times each, and a worker index never held twice at a time.
struct Record {
  Record(Index tasks, int workers) : counts(uz(tasks)), busy(uz(workers)) {}

  void operator()(Index task, int worker) {
    if (worker < 0 || worker >= static_cast<int>(busy.size())) {
      ++out_of_range;
      return;
    }
    if (busy[uz(worker)].exchange(true)) ++shared;
    sum += work(task) > 0 ? 1 : 0;
    ++counts[uz(task)];
    busy[uz(worker)] = false;
  }

  void expect_each_once() const {
    for (std::size_t task = 0; task < counts.size(); ++task)
      EXPECT_EQ(counts[task], 1) << "task " << task;
    EXPECT_EQ(out_of_range, 0) << "tasks under a worker index out of range";
    EXPECT_EQ(shared, 0) << "tasks under a worker index in use";
  }

  std::vector<std::atomic<int>> counts;
  std::vector<std::atomic<bool>> busy;
  std::atomic<int> out_of_range = 0, shared = 0, sum = 0;
};

// ---- SerialExecutor -----------------------------------------------------------------------------

// Errors are the caller's at once.
TEST(SerialExecutor, RunsTheTasksInOrderAsWorkerZero) {
  for (const Index end : {0, 3, 37}) {
    std::vector<Index> tasks;
    const auto run = [&] {
      SerialExecutor{}.run(37, [&](Index task, int worker) {
        EXPECT_EQ(worker, 0);
        if (task == end) throw Failure();
        tasks.push_back(task);
      });
    };
    if (end < 37)
      EXPECT_THROW(run(), Failure);
    else
      run();
    EXPECT_EQ(tasks, oracle::range(0, end));
  }
  SerialExecutor{}.run(0, [](Index, int) { ADD_FAILURE(); });
}

// ---- ThreadPool ---------------------------------------------------------------------------------

// f(id) by this many threads at once.
void by_threads(int count, const std::function<void(int)>& f) {
  std::vector<std::thread> users;
  for (int id = 0; id < count; ++id) users.emplace_back(f, id);
  for (std::thread& thread : users) thread.join();
}

// By one thread, by a few, and by more than the pool has places for jobs. Errors, of one task or of all, are its own
// user's; each worker stops at its own at the latest; and then the pool serves on.
TEST(ThreadPool, RunsEveryTaskOnceOrHandsAnErrorBackToEachOfItsUsers) {
  constexpr std::pair<int, int> all[] = {{1, 1}, {2, 1}, {3, 1}, {7, 1}, {3, 4}, {32, 20}};
  for (const auto& [workers, users] : all) {
    ThreadPool pool(workers);
    EXPECT_EQ(pool.workers(), workers);
    by_threads(users, [&](int id) {
      for (const Index tasks : {0, 1, 2, 3, 7, 37, 127, 501}) {
        SCOPED_TRACE(tasks);
        Record record(tasks, pool.workers());
        std::vector<double> results(uz(tasks),
                                    0.0);  // no atomics: run() itself must order the writes
        pool.run(tasks, [&](Index task, int worker) {
          record(task, worker);
          results[uz(task)] = work(task);
        });
        record.expect_each_once();
        for (Index task = 0; task < tasks; ++task) ASSERT_EQ(results[uz(task)], work(task));
        for (const Index thrower : {Index{0}, tasks / 2, tasks - 1, Index{-1}}) {
          if (tasks == 0 || (users > 1 && thrower != tasks / 2)) continue;
          std::atomic<int> begun = 0, thrown = -1;
          try {
            pool.run(tasks, [&](Index task, int) {
              ++begun;
              if (task == thrower || thrower < 0) throw id;
            });
          } catch (int of) {
            thrown = of;
          }
          EXPECT_EQ(thrown, id);
          if (thrower < 0) {
            EXPECT_LE(begun, pool.workers());
          }
        }
      }
    });
  }
}

TEST(ThreadPool, RethrowsTheFirstOfTwoErrors) {
  ThreadPool pool(2);
  std::atomic<bool> thrown = false;
  try {
    pool.run(2, [&](Index task, int) {
      if (task == 1) {
        thrown = true;
        throw std::runtime_error("first");
      }
      while (!thrown) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      throw std::runtime_error("second");
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
}

TEST(ThreadPool, OfOneWorkerRunsOnTheCallersThread) {
  ThreadPool pool(1);
  const auto caller = std::this_thread::get_id();
  pool.run(7, [&](Index, int worker) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0);
  });
}

// All workers take part, and places for jobs are free again once these are done: in the hundredth run, too, no task
// ends before all three have begun.
TEST(ThreadPool, RunsTasksAtOnceHoweverOftenItIsCalled) {
  ThreadPool pool(3);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> begun = 0, alone = 0;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    pool.run(3, [&](Index, int) {
      for (++begun; begun < 3 && alone == 0; std::this_thread::yield())
        if (std::chrono::steady_clock::now() > end) ++alone;
    });
    ASSERT_EQ(alone, 0) << "one task after the other in round " << round;
  }
}

TEST(ThreadPool, TasksMayUseAnotherPool) {
  ThreadPool outer(3), inner(2);
  std::atomic<int> sum = 0;
  outer.run(7, [&](Index, int) { inner.run(5, [&](Index, int) { ++sum; }); });
  EXPECT_EQ(sum, 35);
}

TEST(ThreadPool, IsMadeAndDestroyedTenThousandTimes) {
  std::atomic<int> sum = 0;
  for (int i = 0; i < 10000; ++i) {
    ThreadPool pool(1 + i % 3);
    if (i % 2 == 0) pool.run(3, [&](Index, int) { ++sum; });
  }
  EXPECT_EQ(sum, 15000);
}

#if defined(__unix__)
// Helpers that have nothing to do sleep.
TEST(ThreadPool, IdleHelpersUseNoTime) {
  ThreadPool pool(8);
  pool.run(64, [](Index task, int) { work(task); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const std::clock_t before = std::clock();  // of all threads
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC, 0.03);
}

// The child has the pool and none of its helpers.
TEST(ThreadPool, WorksOnAfterAFork) {
  auto pool = std::make_unique<ThreadPool>(4);
  pool->run(37, [](Index task, int) { work(task); });
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::atomic<int> sum = 0;
    pool->run(37, [&](Index, int) { ++sum; });
    pool.reset();
    ThreadPool another(3);
    another.run(5, [&](Index, int) { ++sum; });
    ::_exit(sum == 42 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Record record(37, 4);
  pool->run(37, record);
  record.expect_each_once();
}
#endif

TEST(ThreadPool, RefusesFewerThanOneWorker) {
  expect_refused([] { ThreadPool pool(0); }, {"workers", 0, 1});
  expect_refused([] { ThreadPool pool(-3); }, {"workers", -3, 1});
}

// ---- a caller's own pool ------------------------------------------------------------------------

// A minimal executor: two members. Its threads begin and end with each run.
struct OwnPool {
  int workers() const { return 3; }
  template <class F>
  void run(Index tasks, F&& f) {
    std::vector<std::thread> threads;
    for (int worker = 0; worker < 3; ++worker)
      threads.emplace_back([&, worker] {
        for (Index task = worker; task < tasks; task += 3) f(task, worker);
      });
    for (std::thread& thread : threads) thread.join();
  }
};

struct NoWorkers {
  template <class F>
  void run(Index, F&&) {}
};
struct NoRun {
  int workers() const { return 1; }
};

static_assert(quoka::Executor<OwnPool> && quoka::Executor<OwnPool&>);
static_assert(quoka::Executor<ThreadPool&> && quoka::Executor<const SerialExecutor&>);
static_assert(!quoka::Executor<NoWorkers> && !quoka::Executor<NoRun> && !quoka::Executor<int>);

// Any of them, const ones too, with tasks that only move and errors of theirs.
TEST(ExecutorRef, HandsTasksOnAndErrorsBack) {
  OwnPool own;
  ThreadPool pool(3);
  const SerialExecutor serial;
  const ExecutorRef by_reference = own, copy = by_reference;
  EXPECT_EQ(copy.workers(), 3);
  const auto fails = [](Index task, int) {
    if (task == 17) throw std::out_of_range("task 17");
  };
  for (const ExecutorRef executor : {copy, ExecutorRef(pool), ExecutorRef(serial)}) {
    Record record(37, 3);
    executor.run(37, record);
    record.expect_each_once();
    std::atomic<int> sum = 0;
    executor.run(7, [&, one = std::make_unique<int>(1)](Index, int) { sum += *one; });
    EXPECT_EQ(sum, 7);
  }
  EXPECT_THROW(ExecutorRef(pool).run(37, fails), std::out_of_range);
  EXPECT_THROW(ExecutorRef(serial).run(37, fails), std::out_of_range);
  Record record(37, 3);
  OwnPool{}.run(37, record);  // by the concept alone
  record.expect_each_once();
}

// ---- executors that do not keep their contract --------------------------------------------------

// Runs every task under one worker, which need not be one of those that it says it has.
struct UnderWorker {
  int worker, count = 2;
  int workers() const { return count; }
  template <class F>
  void run(Index tasks, F&& f) const {
    for (Index task = 0; task < tasks; ++task) f(task, worker);
  }
};

// By itself, and in a call of the library, where a worker is an index into scratch memory.
TEST(ExecutorRef, RefusesWorkersThatAreNotThere) {
  Random random(3);
  const auto x = random.tensor<float>(1, 2, 37, 16);
  Tensor4<float> out(1, 2, 37, 16);
  const auto attend = [&](const UnderWorker& executor) {
    quoka::attention(x, {}, {x, x}, out, {}, executor);
  };
  for (const int worker : {-1, 2, 1000}) {
    int ran = 0;
    const UnderWorker executor{worker};
    expect_refused([&] { ExecutorRef(executor).run(3, [&](Index, int) { ++ran; }); },
                   {"worker", worker, 2});
    EXPECT_EQ(ran, 0) << "no task runs under worker " << worker;
    expect_refused([&] { attend(executor); }, {"worker", worker});
  }
  for (const int count : {0, -1}) {
    const UnderWorker none{0, count};
    expect_refused([&] { (void)ExecutorRef(none); }, {"workers()", count, 1});
    expect_refused([&] { attend(none); }, {"workers()", count, 1});
  }
  int ran = 0;
  for (const int worker : {0, 1}) {
    const UnderWorker executor{worker};
    ExecutorRef(executor).run(3, [&](Index, int) { ++ran; });
  }
  EXPECT_EQ(ran, 6);
}

// Hands its tasks to an executor of more workers than it says it has.
struct Through {
  UnderWorker& inner;
  static int workers() { return 1; }
  template <class F>
  void run(Index tasks, F&& f) const {
    ExecutorRef(inner).run(tasks, f);
  }
};

// A task goes through two ExecutorRefs: the fewest workers count, in either order.
TEST(ExecutorRef, RefusesAWorkerThatTheOuterExecutorDoesNotHave) {
  UnderWorker inner{1};
  int ran = 0;
  expect_refused([&] { ExecutorRef(Through{inner}).run(3, [&](Index, int) { ++ran; }); },
                 {"worker", 1, "workers()", 1});
  EXPECT_EQ(ran, 0);
  inner.worker = 0;
  ExecutorRef(Through{inner}).run(3, [&](Index, int) { ++ran; });
  EXPECT_EQ(ran, 3);
}

// ---- loops over heads ---------------------------------------------------------------------------

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
