// Definitions of thread_pool.hpp.
#pragma once

#include <quoka/runtime/thread_pool.hpp>

#include <unsupported/Eigen/CXX11/ThreadPool>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Eigen's environment under a name of ours: the pool's functions are then ours as well (version.hpp).
struct ThreadEnvironment : Eigen::StlThreadEnvironment {
  struct Task {
    std::function<void()> f;
  };
  Task CreateTask(std::function<void()> f) { return Task{std::move(f)}; }
  void ExecuteTask(const Task& task) { task.f(); }
};

struct PoolJob {
  PoolJob(Index tasks_in, const TaskRef& f_in, unsigned helpers)
      : tasks(tasks_in), f(f_in), helpers_left(helpers) {}

  void work(int worker) {
    for (;;) {
      const Index task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      try {
        f(task, worker);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(tasks, std::memory_order_relaxed);
      }
    }
  }

  const Index tasks;
  const TaskRef& f;
  std::atomic<Index> next{0};
  Eigen::Barrier helpers_left;
  std::mutex error_mutex;
  std::exception_ptr error;
};

}  // namespace detail

struct ThreadPool::Threads {
  explicit Threads(int helpers) : pool(helpers) {}
  Eigen::ThreadPoolTempl<detail::ThreadEnvironment> pool;
};

QUOKA_FUNC ThreadPool::ThreadPool(int workers)
    : workers_((detail::require_at_least("ThreadPool's workers", workers, 1), workers)),
      threads_(std::make_unique<Threads>(workers - 1)) {}

QUOKA_FUNC ThreadPool::~ThreadPool() = default;

QUOKA_FUNC void ThreadPool::run_tasks(Index tasks, const TaskRef& f) {
  const int helpers = static_cast<int>(std::min<Index>(workers(), tasks)) - 1;
  if (helpers < 1) return SerialExecutor{}.run(tasks, f);
  detail::PoolJob job(tasks, f, static_cast<unsigned>(helpers));
  for (int worker = 1; worker <= helpers; ++worker) {
    threads_->pool.Schedule([&job, worker] {  // 16 bytes: inside std::function's own storage
      job.work(worker);
      job.helpers_left.Notify();
    });
  }
  job.work(0);
  job.helpers_left.Wait();
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
