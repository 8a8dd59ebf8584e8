// A pool of threads, for programs that have none.
//
// Tasks are handed out one by one, so uneven tasks balance. The first exception a task throws is
// rethrown by run() after all workers have stopped; tasks not begun by then are not run. A
// steady-state run() does not allocate. Several threads may share a pool; a task must not call
// run() on the pool that runs it.
#pragma once

#include <quoka/runtime/executor.hpp>

#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

// `workers` threads, the calling one included.
class ThreadPool {
 public:
  // Throws std::invalid_argument for fewer than one worker.
  explicit ThreadPool(int workers);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int workers() const { return workers_; }

  template <class F>
  void run(Index tasks, F&& f) {
    run_tasks(tasks, TaskRef(f));
  }

 private:
  struct Threads;

  void run_tasks(Index tasks, const TaskRef& f);

  int workers_;
  std::unique_ptr<Threads> threads_;
};

static_assert(Executor<ThreadPool>);

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#if defined(__unix__)
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A run() takes one of a few places for jobs and increments a counter, on which idle helpers spin
// and then sleep. Waking all of them takes one system call, or none while they spin. A helper joins
// a job, takes tasks by a counter and leaves, without a lock. A run() that finds no free place runs
// its tasks by itself.

// Waits a moment for another thread: a few instructions at first, by the scheduler later.
class Pause {
 public:
  void operator()() {
    if (count_ == spins) return std::this_thread::yield();  // the other thread may need this core
    const int hints = ++count_ < 16 ? 1 : 8;
    for (int i = 0; i < hints; ++i) QUOKA_SPIN_HINT();
  }

 private:
  static constexpr int spins = 48;  // some 10 us

  int count_ = 0;
};

// One run() at a time. Places outlive the jobs, so that a helper may look at one at any moment.
class PoolPlace {
 public:
  // For the caller of run(), which is worker 0. False: the place is taken.
  bool open(Index tasks, const TaskRef& f, int most_helpers) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    tasks_ = tasks, f_ = &f;
    seats_ = std::min(static_cast<std::uint32_t>(most_helpers), is_open / seat - 1);
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    gate_.store(is_open + seats_ * seat, std::memory_order_release);
    return true;
  }
  // Until no task is left to begin.
  void work(int worker) {
    for (;;) {
      const Index task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks_) return;
      try {
        (*f_)(task, worker);
      } catch (...) {
        if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
        next_.store(tasks_, std::memory_order_relaxed);
      }
    }
  }
  // Waits for the helpers; returns what a task threw, if one did.
  std::exception_ptr close() {
    std::uint32_t gate = gate_.fetch_and(~is_open, std::memory_order_acquire) & ~is_open;
    Pause pause;
    for (int looks = 0; gate % seat != 0; gate = gate_.load(std::memory_order_acquire))
      if (++looks <= most_looks)
        pause();
      else
        gate_.wait(gate, std::memory_order_acquire);
    std::exception_ptr error = std::exchange(error_, nullptr);
    taken_.store(false, std::memory_order_release);
    return error;
  }
  // For a helper: joins the job, if there is one with a free seat, and works.
  bool help() {
    std::uint32_t gate = gate_.load(std::memory_order_relaxed);
    do {
      if (gate < is_open + seat) return false;
    } while (!gate_.compare_exchange_weak(gate, gate - seat + 1, std::memory_order_acquire,
                                          std::memory_order_relaxed));
    const std::uint32_t left = (gate - is_open) / seat;
    work(static_cast<int>(seats_ - left) + 1);
    if ((gate_.fetch_sub(1, std::memory_order_release) & (is_open | (seat - 1))) == 1)
      gate_.notify_one();  // it was closed, and this helper was the last
    return true;
  }

  // How often a waiting thread looks before it sleeps: for about 0.1 ms.
  static constexpr int most_looks = 200;

 private:
  // The gate: helpers at work, free seats, and whether helpers may take one.
  static constexpr std::uint32_t seat = 1u << 15, is_open = 1u << 31;

  alignas(64) std::atomic<std::uint32_t> gate_{0};
  std::atomic<bool> taken_{false};
  Index tasks_ = 0;
  const TaskRef* f_ = nullptr;
  std::uint32_t seats_ = 0;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  alignas(64) std::atomic<Index> next_{0};
};

}  // namespace detail

struct ThreadPool::Threads {
  ~Threads() {
    stopping.store(true, std::memory_order_relaxed);
    posted.fetch_add(1, std::memory_order_release);
    posted.notify_all();
    for (Helper& helper : helpers)
      if (process() == started_by)
        helper.thread.join();
      else
        helper.thread.detach();  // after a fork() they are not there
  }
  void start(int count) {
    helpers.reserve(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) helpers.push_back({std::thread([this, i] { help(i); })});
  }

  void run(Index tasks, const TaskRef& f, int most_helpers) {
    detail::PoolPlace* mine = nullptr;
    for (detail::PoolPlace& place : places)
      if (place.open(tasks, f, most_helpers)) {
        mine = &place;
        break;
      }
    if (mine == nullptr) return SerialExecutor{}.run(tasks, f);
    posted.fetch_add(1, std::memory_order_release);
    if (most_helpers > 2)
      posted.notify_all();
    else
      for (int i = 0; i < most_helpers; ++i) posted.notify_one();
    mine->work(0);
    if (const std::exception_ptr error = mine->close()) std::rethrow_exception(error);
  }

 private:
  // A type of the library's, so that the vector's functions are the library's as well
  // (version.hpp).
  struct Helper {
    std::thread thread;
  };

  static long process() {
#if defined(__unix__)
    return static_cast<long>(::getpid());
#else
    return 0;
#endif
  }

  void help(int number) {
    // Spins for longer where that has been worth it: one call's runs follow each other at once.
    int looks = detail::PoolPlace::most_looks;
    for (;;) {
      const std::uint32_t seen = posted.load(std::memory_order_acquire);
      if (stopping.load(std::memory_order_relaxed)) return;
      bool helped = false;
      for (std::size_t i = 0; i < places.size(); ++i)
        helped = places[(i + static_cast<std::size_t>(number)) % places.size()].help() || helped;
      if (helped) continue;
      detail::Pause pause;
      int left = looks;
      while (left > 0 && posted.load(std::memory_order_relaxed) == seen) --left, pause();
      looks = left > 0 ? std::min(2 * looks, detail::PoolPlace::most_looks)
                       : std::max(looks / 2, least_looks);
      if (left == 0) posted.wait(seen, std::memory_order_acquire);
    }
  }

  static constexpr int least_looks = 12;

  alignas(64) std::atomic<std::uint32_t> posted{0};  // jobs begun
  std::atomic<bool> stopping{false};
  std::array<detail::PoolPlace, 8> places;
  const long started_by = process();
  std::vector<Helper> helpers;
};

QUOKA_FUNC ThreadPool::ThreadPool(int workers)
    : workers_((detail::require_at_least("ThreadPool's workers", workers, 1), workers)),
      threads_(std::make_unique<Threads>()) {
  threads_->start(workers - 1);  // if it throws, those begun are stopped
}

QUOKA_FUNC ThreadPool::~ThreadPool() = default;

QUOKA_FUNC void ThreadPool::run_tasks(Index tasks, const TaskRef& f) {
  const int helpers = static_cast<int>(std::min<Index>(workers(), tasks)) - 1;
  if (helpers < 1) return SerialExecutor{}.run(tasks, f);
  threads_->run(tasks, f, helpers);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
