// A pool of threads, for those who have none.
//
// Tasks are handed out one by one, so uneven tasks balance. The first exception a task throws is
// rethrown by run() after all workers have stopped; tasks not begun by then are not run. A
// steady-state run() does not allocate. Several threads may share a pool; a task must not call run()
// on the pool that runs it.
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

#if !defined(QUOKA_COMPILED)
#include <quoka/runtime/thread_pool_impl.hpp>
#endif
