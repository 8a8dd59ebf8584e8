// Definitions of thread_pool.hpp.
#pragma once

#include <quoka/runtime/thread_pool.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// One run(), on the stack of its caller, who is worker 0.
struct PoolJob {
  PoolJob(Index tasks_in, const TaskRef& f_in, int most_helpers_in)
      : tasks(tasks_in), f(f_in), most_helpers(most_helpers_in) {}

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
  std::mutex error_mutex;
  std::exception_ptr error;

  // Under the pool's mutex.
  const int most_helpers;
  int helpers = 0;           // that have come; the i-th is worker i
  int at_work = 0;           // of these
  PoolJob* later = nullptr;  // in the pool's list
  std::condition_variable done;
};

}  // namespace detail

struct ThreadPool::Threads {
  ~Threads() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (Helper& helper : helpers) helper.thread.join();
  }
  void start(int count) {
    helpers.reserve(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) helpers.push_back({std::thread([this] { help(); })});
  }

  void run(detail::PoolJob& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      detail::PoolJob** end = &jobs;
      while (*end != nullptr) end = &(*end)->later;
      *end = &job;
      posted.fetch_add(1, std::memory_order_relaxed);
    }
    for (int i = 0; i < job.most_helpers; ++i) wake.notify_one();
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex);
    for (detail::PoolJob** at = &jobs; *at != nullptr; at = &(*at)->later)
      if (*at == &job) {  // no task is left for those who did not come
        *at = job.later;
        break;
      }
    while (job.at_work > 0) job.done.wait(lock);
  }

 private:
  // A type of ours, so that the vector's functions are ours as well (version.hpp).
  struct Helper {
    std::thread thread;
  };
  // How often an idle helper looks for the next job before it sleeps, about 0.1 ms: one call's runs
  // follow each other at once, and waking a thread takes longer than many of them.
  static constexpr int looks = 200;

  void help() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      while (jobs == nullptr && !stopping) wait_for_job(lock);
      if (stopping) return;
      detail::PoolJob& job = *jobs;
      const int worker = ++job.helpers;
      if (worker == job.most_helpers) jobs = job.later;
      ++job.at_work;
      lock.unlock();
      job.work(worker);
      lock.lock();
      if (--job.at_work == 0) job.done.notify_one();  // the job is gone once the lock is
    }
  }
  void wait_for_job(std::unique_lock<std::mutex>& lock) {
    const unsigned seen = posted.load(std::memory_order_relaxed);
    lock.unlock();
    for (int i = 0; i < looks && posted.load(std::memory_order_relaxed) == seen; ++i)
      std::this_thread::yield();
    lock.lock();
    if (jobs == nullptr && !stopping) wake.wait(lock);
  }

  std::mutex mutex;
  std::condition_variable wake;
  detail::PoolJob* jobs = nullptr;  // that want helpers, the oldest first
  std::atomic<unsigned> posted{0};  // jobs so far
  bool stopping = false;
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
  detail::PoolJob job(tasks, f, helpers);
  threads_->run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
