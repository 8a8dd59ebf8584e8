// The threads of the session as an executor: the pool that runs its products runs attention, too. A
// pool of the library's beside it would wait for processors on which the session's threads spin.
//
// The runtime does not say how many threads it has, nor which of them runs a task. So a run is a
// few long tasks, one for each worker, which take what is left to do from a counter: a session with
// fewer threads does with fewer of them, one after the other, and those that come late find
// nothing.
#pragma once

#include "ort.hpp"

#include <quoka/runtime/executor.hpp>

#include <atomic>

namespace quoka_onnxruntime {

// The threads of one call of a kernel.
class OrtThreads {
 public:
  OrtThreads(const OrtApi& api, const OrtKernelContext& context, int workers)
      : api_(api), context_(context), workers_(workers) {}

  int workers() const { return workers_; }
  template <class F>
  void run(Index tasks, F&& f) const {
    if (tasks <= 1 || workers_ == 1) return quoka::SerialExecutor{}.run(tasks, f);
    Job job{quoka::TaskRef(f), tasks};
    check(api_, api_.KernelContext_ParallelFor(
                    &context_,
                    [](void* data, std::size_t worker) {
                      static_cast<Job*>(data)->work(static_cast<int>(worker));
                    },
                    static_cast<std::size_t>(std::min<Index>(workers_, tasks)), 0, &job));
    if (job.error != nullptr) std::rethrow_exception(job.error);
  }

 private:
  struct Job {
    quoka::TaskRef f;
    Index tasks;
    std::atomic<Index> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error = nullptr;

    // Until no task is left to begin, or one throws: no exception may reach the runtime's threads.
    void work(int worker) {
      for (Index task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) try {
          f(task, worker);
        } catch (...) {
          if (!failed.exchange(true)) error = std::current_exception();
          next.store(tasks, std::memory_order_relaxed);
        }
    }
  };

  const OrtApi& api_;
  const OrtKernelContext& context_;
  int workers_;
};

}  // namespace quoka_onnxruntime
