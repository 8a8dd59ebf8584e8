// Who runs the tasks of a call: an executor the caller hands in.
//
// An executor runs f(task, worker) for every task in [0, tasks) and returns when all are done;
// `worker` is in [0, workers()) and no two tasks run under the same worker at the same time, so it
// indexes scratch memory. Tasks may run in any order: no result depends on it. The library starts
// no thread of its own. A caller's pool plugs in by these two members:
//
//   struct MyPool {
//     int workers() const;
//     template <class F> void run(quoka::Index tasks, F&& f);   // f(Index task, int worker)
//   };
//
// Functions take it as an ExecutorRef: one compiled copy of them serves every executor.
#pragma once

#include <quoka/core/check.hpp>
#include <quoka/core/types.hpp>

#include <unsupported/Eigen/CXX11/ThreadPool>

#include <atomic>
#include <concepts>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace quoka::inline QUOKA_ABI {

template <class E>
concept Executor = requires(std::remove_reference_t<E>& executor, Index tasks,
                            void (*f)(Index, int)) {
  { executor.workers() } -> std::convertible_to<int>;
  executor.run(tasks, f);
};

// Runs every task on the calling thread, in order.
struct SerialExecutor {
  static constexpr int workers() { return 1; }
  template <class F>
  void run(Index tasks, F&& f) const {
    for (Index task = 0; task < tasks; ++task) f(task, 0);
  }
};

// `workers` threads, the calling one included, on Eigen's non-blocking pool. Tasks are handed out
// one by one, so uneven tasks balance. The first exception a task throws is rethrown by run() after
// all workers have stopped; tasks not begun by then are not run. A steady-state run() does not
// allocate. Several threads may share a pool; a task must not call run() on the pool that runs it.
class ThreadPool {
 public:
  // Throws std::invalid_argument for fewer than one worker.
  explicit ThreadPool(int workers)
      : pool_((detail::require_at_least("ThreadPool's workers", workers, 1), workers - 1)) {}

  int workers() const { return pool_.NumThreads() + 1; }

  template <class F>
  void run(Index tasks, F&& f) {
    const int helpers = static_cast<int>(std::min<Index>(workers(), tasks)) - 1;
    if (helpers < 1) return SerialExecutor{}.run(tasks, f);
    Job<F> job(tasks, f, static_cast<unsigned>(helpers));
    for (int worker = 1; worker <= helpers; ++worker) {
      pool_.Schedule([&job, worker] {  // 16 bytes: inside std::function's own storage
        job.work(worker);
        job.helpers_left.Notify();
      });
    }
    job.work(0);
    job.helpers_left.Wait();
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  template <class F>
  struct Job {
    Job(Index tasks_in, F& f_in, unsigned helpers)
        : tasks(tasks_in), f(f_in), helpers_left(helpers) {}

    void work(int worker) {
      for (;;) {
        const Index task = next.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks) return;
        try {
          f(task, worker);
        } catch (...) {
          const std::lock_guard lock(error_mutex);
          if (!error) error = std::current_exception();
          next.store(tasks, std::memory_order_relaxed);
        }
      }
    }

    const Index tasks;
    F& f;
    std::atomic<Index> next{0};
    Eigen::Barrier helpers_left;
    std::mutex error_mutex;
    std::exception_ptr error;
  };

  Eigen::ThreadPool pool_;
};

// An executor of any type, borrowed for a call. An executor itself; it does not allocate.
class ExecutorRef {
 public:
  template <Executor E>
  ExecutorRef(E&& executor) requires(!std::same_as<std::remove_cvref_t<E>, ExecutorRef>)
      : executor_(address_of(executor)), workers_(executor.workers()), run_(run_on<E>) {}

  int workers() const { return workers_; }

  template <class F>
  void run(Index tasks, F&& f) const {
    run_(executor_, tasks, {address_of(f), call<std::remove_reference_t<F>>});
  }

 private:
  struct Task {
    void operator()(Index task, int worker) const { call(f, task, worker); }

    void* f;
    void (*call)(void* f, Index task, int worker);
  };

  template <class X>
  static void* address_of(X& x) {
    return const_cast<void*>(static_cast<const void*>(std::addressof(x)));
  }
  template <class E>
  static void run_on(void* executor, Index tasks, const Task& task) {
    static_cast<std::remove_reference_t<E>*>(executor)->run(tasks, task);
  }
  template <class F>
  static void call(void* f, Index task, int worker) {
    (*static_cast<F*>(f))(task, worker);
  }

  void* executor_;
  int workers_;
  void (*run_)(void* executor, Index tasks, const Task& task);
};

static_assert(Executor<SerialExecutor> && Executor<ThreadPool> && Executor<ExecutorRef>);

}  // namespace quoka::inline QUOKA_ABI
