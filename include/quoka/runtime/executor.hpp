// Executors run the tasks of a call. The caller passes one to each call.
//
// An executor runs f(task, worker) for every task in [0, tasks) and returns when all are done.
// `worker` is in [0, workers()). Two tasks never run under the same worker at the same time, so it
// can index scratch memory. Tasks may run in any order: no result depends on it. The library starts
// no threads except in a ThreadPool that the caller constructs. A caller's own pool plugs in by
// these two members:
//
//   struct MyPool {
//     int workers() const;                                      // at least 1
//     template <class F> void run(quoka::Index tasks, F&& f);   // f(Index task, int worker)
//   };
//
// Functions take it as an ExecutorRef: so one compiled copy of each function serves every executor.
#pragma once

#include <quoka/base/check.hpp>

#include <algorithm>
#include <concepts>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {

// Members of an executor: workers() and run(), as MyPool at the top of executor.hpp.
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

template <class Signature>
class FunctionRef;

// A callable of any type, borrowed: it must outlive this. Two pointers; nothing is allocated.
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  // Refers to f, which is not copied.
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> &&
           std::is_invocable_r_v<R, F&, Args...>) FunctionRef(F&& f)
      : f_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* function, Args... args) -> R {
          std::remove_reference_t<F>& callable =
              *static_cast<std::remove_reference_t<F>*>(function);
          if constexpr (std::is_void_v<R>)
            callable(std::forward<Args>(args)...);
          else
            return callable(std::forward<Args>(args)...);
        }) {}

  // Calls it.
  R operator()(Args... args) const { return call_(f_, std::forward<Args>(args)...); }

 private:
  void* f_;
  R (*call_)(void*, Args...);
};

// A task function f(task, worker) of any type, borrowed: what an executor is given. It must outlive
// the run. Three words; nothing is allocated.
class TaskRef {
 public:
  // f is not copied.
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, TaskRef> && std::is_invocable_v<F&, Index, int>)
      TaskRef(F&& f)
      : f_(f) {}

  // Runs this task. Throws std::invalid_argument for a worker outside [0, workers()) of an
  // ExecutorRef that runs it.
  void operator()(Index task, int worker) const {
    if (worker < 0 || worker >= workers_) [[unlikely]]
      detail::fail("the executor's worker", worker, "but must be at least 0 and below",
                   "its workers()", workers_);
    f_(task, worker);
  }

 private:
  friend class ExecutorRef;

  FunctionRef<void(Index, int)> f_;
  int workers_ = std::numeric_limits<int>::max();  // of the executors that run it: the fewest
};

// An executor of any type, borrowed for a call. An executor itself; it does not allocate. Throws
// std::invalid_argument where an executor has no worker, and from run() where it runs a task under
// a worker that it does not have.
class ExecutorRef {
 public:
  // This executor must outlive the call. Throws std::invalid_argument where it has no worker.
  template <Executor E>
  ExecutorRef(E&& executor) requires(!std::same_as<std::remove_cvref_t<E>, ExecutorRef>)
      : executor_(const_cast<void*>(static_cast<const void*>(std::addressof(executor)))),
        workers_(executor.workers()),
        run_(&run_on<std::remove_reference_t<E>>) {
    detail::require_at_least("the executor's workers()", workers_, 1);
  }

  int workers() const { return workers_; }

  // Runs f(task, worker) for every task in [0, tasks). Throws std::invalid_argument for a worker
  // outside [0, workers()), and what f throws, as the executor passes it on.
  void run(Index tasks, TaskRef f) const {
    f.workers_ = std::min(f.workers_, workers_);
    run_(executor_, tasks, f);
  }

 private:
  template <class E>
  static void run_on(void* executor, Index tasks, const TaskRef& task) {
    static_cast<E*>(executor)->run(tasks, task);
  }

  void* executor_;
  int workers_;
  void (*run_)(void* object, Index tasks, const TaskRef& task);
};

static_assert(Executor<SerialExecutor> && Executor<ExecutorRef>);

namespace detail {
inline constexpr Index few_copies = 64;  // rows that one worker copies sooner than several

// As executor.run(tasks, f) over `rows` rows. At most `few` rows run in the calling thread, which
// is faster than waking others.
[[gnu::noinline]] inline void run_rows(const ExecutorRef& executor, Index rows, Index few,
                                       Index tasks, TaskRef f) {
  if (rows <= few)
    SerialExecutor{}.run(tasks, f);
  else
    executor.run(tasks, f);
}
}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka
