// Threads of a call: the library's, or those of an OpenMP, with the GIL released; the calling
// thread checks for Ctrl-C. Which objects calls may share: scratch memory, and objects that one
// call at a time may change.
#pragma once

#include "openmp_threads.hpp"

#include <nanobind/nanobind.h>

#include <quoka/runtime/thread_pool.hpp>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

namespace quoka_python {

namespace nb = nanobind;

// ---- the end of the interpreter -----------------------------------------------------------------

// An interpreter that ends does not wait for daemon threads: one that asks for the GIL afterwards
// is ended in the middle of its C++ frames, which ends the process by std::terminate(). So from the
// interpreter's atexit on, no thread but the one that ends it asks for the GIL here: a call that is
// done, or begins, sleeps until the process is gone, as threads of Python 3.14 and later do.
class InterpreterUse {
 public:
  // A thread begins to need the GIL. False: it may not any more.
  static bool try_enter() {
    users().fetch_add(1);
    if (!ended().load() || std::this_thread::get_id() == ended_by()) return true;
    users().fetch_sub(1);
    return false;
  }
  static void enter_or_sleep() {
    while (!try_enter()) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  static void leave() { users().fetch_sub(1); }

  // By atexit, with the GIL: threads that need the GIL at this moment get it once more, for a
  // second at most.
  static void end() {
    ended_by() = std::this_thread::get_id();
    ended().store(true);
    const nb::gil_scoped_release release;
    for (int looks = 0; users().load() > 0 && looks < 1000; ++looks)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  static std::atomic<int>& users() {
    static std::atomic<int> count{0};
    return count;
  }
  static std::atomic<bool>& ended() {
    static std::atomic<bool> so{false};
    return so;
  }
  static std::thread::id& ended_by() {
    static std::thread::id thread;
    return thread;
  }
};

// A function of the module runs, with the GIL.
class InModule {
 public:
  InModule() {
    if (InterpreterUse::try_enter()) return;
    PyEval_SaveThread();
    InterpreterUse::enter_or_sleep();
  }
  ~InModule() { InterpreterUse::leave(); }
  InModule(const InModule&) = delete;
  InModule& operator=(const InModule&) = delete;
};

// In a function of the module, without the GIL.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) { InterpreterUse::leave(); }
  ~WithoutGil() {
    InterpreterUse::enter_or_sleep();
    PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// ---- what calls share ---------------------------------------------------------------------------

// The calls that use an object at this moment: any number that read it, or one that changes it.
// Looked at with the GIL.
class Users {
 public:
  class Hold {
   public:
    Hold(Users& of, const char* name, bool changes) : of_(of), changes_(changes) {
      if (of.changing_ || (changes && of.reading_ > 0))
        throw std::runtime_error(
            std::string("quoka: this ") + name +
            (of.changing_ ? " is changed by another call that is not done"
                          : " is read by another call that is not done, and cannot be changed") +
            ": one call at a time, of all threads and signal handlers");
      if (changes)
        of.changing_ = true;
      else
        ++of.reading_;
    }
    ~Hold() {
      if (changes_)
        of_.changing_ = false;
      else
        --of_.reading_;
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Users& of_;
    bool changes_;
  };

 private:
  int reading_ = 0;
  bool changing_ = false;
};

// Scratch memory of the calling thread, kept. A signal's handler may call while its thread is in a
// call: each has its own.
template <class T>
class Scratch {
 public:
  Scratch() : level_(level()++) {
    if (std::ssize(kept()) <= level_) kept().emplace_back();
  }
  ~Scratch() { --level(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T& operator*() const { return kept()[static_cast<std::size_t>(level_)]; }

 private:
  static std::deque<T>& kept() {
    thread_local std::deque<T> list;
    return list;
  }
  static Index& level() {
    thread_local Index count = 0;
    return count;
  }

  Index level_;
};

// ---- threads ------------------------------------------------------------------------------------

// A signal's handler raised: the exception waits in the calling thread.
struct Interrupted {};

// An executor whose calling thread asks ten times a second whether a signal came.
class Interruptible {
 public:
  explicit Interruptible(quoka::ExecutorRef pool) : pool_(pool) {}

  int workers() const { return pool_.workers(); }
  template <class F>
  void run(Index tasks, F&& f) {
    pool_.run(tasks, [&](Index task, int worker) {
      look();
      f(task, worker);
    });
  }

 private:
  using Clock = std::chrono::steady_clock;

  void look() {
    if (std::this_thread::get_id() != caller_ || Clock::now() < next_) return;
    next_ = Clock::now() + pause;
    if (!InterpreterUse::try_enter()) return;
    bool raised = false;
    {
      const nb::gil_scoped_acquire gil;
      raised = PyErr_CheckSignals() != 0;
    }
    InterpreterUse::leave();
    if (raised) throw Interrupted();
  }

  static constexpr std::chrono::milliseconds pause{100};

  quoka::ExecutorRef pool_;
  std::thread::id caller_ = std::this_thread::get_id();
  Clock::time_point next_ = Clock::now() + pause;
};

// 0: as many as there are processors, or as set_threads() said.
inline int& default_threads() {
  static int count = 0;
  return count;
}

// `workers` of a pool's workers, at most all of them.
class SomeWorkers {
 public:
  SomeWorkers(std::shared_ptr<quoka::ThreadPool> pool, int workers)
      : pool_(std::move(pool)), workers_(workers) {}

  int workers() const { return workers_; }
  template <class F>
  void run(Index tasks, F&& f) {
    if (pool_ == nullptr) return quoka::SerialExecutor{}.run(tasks, f);
    if (pool_->workers() == workers_) return pool_->run(tasks, f);
    // One task of the pool's for each worker, which takes tasks of f until none is left, or one
    // throws.
    std::atomic<Index> next{0};
    pool_->run(std::min<Index>(tasks, workers_), [&](Index worker, int) {
      try {
        for (Index task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
          f(task, static_cast<int>(worker));
      } catch (...) {
        next.store(tasks, std::memory_order_relaxed);
        throw;
      }
    });
  }

 private:
  std::shared_ptr<quoka::ThreadPool> pool_;  // none: the calling thread alone
  int workers_;
};

inline int processors() {
  static const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return count;
}
// Throws std::invalid_argument for another number of threads than one pool may have.
inline void require_threads(int threads) {
  quoka::detail::require_at_least("threads", threads, 1);
  quoka::detail::require_at_most("threads", threads, "what one pool may have",
                                 std::max(1024, processors()));
}

// The one pool, which is made when it is first asked for, kept, and made again if it has too few
// threads, and in the child of a fork(), where its threads are not: with the GIL.
inline SomeWorkers workers_of_pool(int threads) {
  if (threads == 0) threads = processors();
  require_threads(threads);
  if (threads == 1) return {nullptr, 1};
  // Never destroyed: a program that ends does not wait for its threads.
  static auto& pool = *new std::shared_ptr<quoka::ThreadPool>;
  static pid_t process = getpid();
  if (process != getpid()) {
    static_cast<void>(new std::shared_ptr(pool));  // it would wait for a call of the parent's
    pool = nullptr, process = getpid();
  }
  // Calls that are not done keep the one that was there.
  if (pool == nullptr || pool->workers() < threads)
    pool = std::make_shared<quoka::ThreadPool>(threads);
  return {pool, threads};
}

// The OpenMP whose threads run calls in place of the library's: with the GIL.
inline std::optional<OpenMp>& openmp() {
  static std::optional<OpenMp> one;
  return one;
}

// The calling thread's run_by(), in which a signal's handler may call again.
class Nesting {
 public:
  Nesting() : nested_(level()++ > 0) {}
  ~Nesting() { --level(); }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

  bool nested() const { return nested_; }

 private:
  static int& level() {
    thread_local int count = 0;
    return count;
  }

  bool nested_;
};

// f(executor) without the GIL. Calls of as many threads as the OpenMP has run in those. A call by a
// signal's handler, within a task of its thread's other call, whose pool waits for it, runs in its
// thread alone.
template <class F>
void run_by(int threads, F&& f) {
  const Nesting here;
  if (threads == 0) threads = default_threads();
  std::optional<OpenMpThreads> shared;
  std::optional<SomeWorkers> own;
  if (!here.nested() && openmp() && openmp()->usable()) {
    const int there = openmp()->threads();
    if (threads == 0 || threads == there) shared.emplace(*openmp(), there);
  }
  if (!shared) own.emplace(workers_of_pool(here.nested() ? 1 : threads));
  Interruptible executor(shared ? quoka::ExecutorRef(*shared) : quoka::ExecutorRef(*own));
  try {
    const WithoutGil released;
    f(quoka::ExecutorRef(executor));
  } catch (const Interrupted&) {
    throw nb::python_error();
  }
}

}  // namespace quoka_python
