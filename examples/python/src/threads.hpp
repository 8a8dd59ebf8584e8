// Who runs a call: the library's threads, or those of an OpenMP, with the GIL released, and Ctrl-C looked at by the calling
// thread.
#pragma once

#include "openmp_threads.hpp"

#include <nanobind/nanobind.h>

#include <quoka/runtime/thread_pool.hpp>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <thread>

namespace quoka_python {

namespace nb = nanobind;

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
  // Chains are one run() of long tasks: asked before each of theirs.
  void run_chains(const quoka::Chains& chains) {
    quoka::Chains asked(chains.count(), chains.slots());
    Asking asking{*this, chains};
    for (int stage = 0; stage < chains.stages(); ++stage)
      asked.add_member<&Asking::run>(chains.tasks(stage), asking);
    Plain plain{*this};
    quoka::ExecutorRef(plain).run_chains(asked);
  }

 private:
  struct Asking {
    Interruptible& of;
    const quoka::Chains& chains;

    void run(Index chain, int stage, Index task, int worker) {
      of.look();
      chains(chain, stage, task, worker);
    }
  };
  // Without run_chains.
  struct Plain {
    Interruptible& of;

    int workers() const { return of.workers(); }
    template <class F>
    void run(Index tasks, F&& f) {
      of.pool_.run(tasks, f);
    }
  };
  using Clock = std::chrono::steady_clock;

  void look() {
    if (std::this_thread::get_id() != caller_ || Clock::now() < next_) return;
    next_ = Clock::now() + pause;
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw Interrupted();
  }

  static constexpr std::chrono::milliseconds pause{100};

  quoka::ExecutorRef pool_;
  std::thread::id caller_ = std::this_thread::get_id();
  Clock::time_point next_ = Clock::now() + pause;
};

// The pool of so many threads, made when it is first asked for and kept: with the GIL. 0: as many as there are
// processors, or as set_threads() said.
inline int& default_threads() {
  static int count = 0;
  return count;
}
inline quoka::ThreadPool& pool_of(int threads) {
  // Never destroyed: a program that ends does not wait for its threads.
  static auto& pools = *new std::map<int, std::unique_ptr<quoka::ThreadPool>>;
  if (threads == 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  quoka::detail::require_at_least("threads", threads, 1);
  auto& pool = pools[threads];
  if (pool == nullptr) pool = std::make_unique<quoka::ThreadPool>(threads);
  return *pool;
}

// The OpenMP whose threads run calls in place of the library's: with the GIL.
inline std::optional<OpenMp>& openmp() {
  static std::optional<OpenMp> one;
  return one;
}

// f(executor) without the GIL. Calls of as many threads as the OpenMP has run in those.
template <class F>
void run_by(int threads, F&& f) {
  if (threads == 0) threads = default_threads();
  std::optional<OpenMpThreads> shared;
  if (openmp() && openmp()->usable()) {
    const int there = openmp()->threads();
    if (threads == 0 || threads == there) shared.emplace(*openmp(), there);
  }
  Interruptible executor(shared ? quoka::ExecutorRef(*shared)
                                : quoka::ExecutorRef(pool_of(threads)));
  try {
    const nb::gil_scoped_release release;
    f(quoka::ExecutorRef(executor));
  } catch (const Interrupted&) {
    throw nb::python_error();
  }
}

}  // namespace quoka_python
