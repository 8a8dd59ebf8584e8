// An executor that records what it is given, and workers that exist on paper to whom it is given
// again.
#pragma once

#include "support/clock.hpp"

#include <quoka/runtime/executor.hpp>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <numeric>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

namespace quoka_examples {

using quoka::Index;

// One parallel run, whose tasks may run at once.
struct Section {
  double alone = 0.0;           // seconds of the calling thread before it
  std::vector<double> seconds;  // of each task
};

struct Recording {
  std::vector<Section> sections;
  double alone_at_end = 0.0;

  Index tasks() const {
    Index sum = 0;
    for (const Section& section : sections) sum += std::ssize(section.seconds);
    return sum;
  }
  double alone() const {
    double sum = alone_at_end;
    for (const Section& section : sections) sum += section.alone;
    return sum;
  }
};

// The time of f(), without waiting for a core that others hold.
template <class F>
double undisturbed_seconds(F&& f) {
  double wall = 0.0;
  const double own = seconds_of([&] { wall = seconds_of(f); }, thread_seconds);
  return std::min(wall, own);
}

// A thread that runs what it is given while the caller waits, both awake. Where there is one core,
// the caller itself.
class OtherThread {
 public:
  using Work = quoka::FunctionRef<void()>;

  OtherThread() {
    if (std::thread::hardware_concurrency() > 1) thread_ = std::thread([this] { serve(); });
  }
  ~OtherThread() {
    if (!thread_.joinable()) return;
    work_ = nullptr;
    begun_.fetch_add(1);
    thread_.join();
  }
  OtherThread(const OtherThread&) = delete;
  OtherThread& operator=(const OtherThread&) = delete;

  // Throws what f throws.
  template <class F>
  void run(F&& f) {
    if (!thread_.joinable()) return f();
    const Work work(f);
    work_ = &work;
    const int turn = begun_.fetch_add(1) + 1;
    while (done_.load() != turn) QUOKA_SPIN_HINT();
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void serve() {
    for (int turn = 1;; ++turn) {
      while (begun_.load() < turn) QUOKA_SPIN_HINT();
      if (work_ == nullptr) return;
      try {
        (*work_)();
      } catch (...) {
        error_ = std::current_exception();
      }
      done_.store(turn);
    }
  }

  std::atomic<int> begun_{0}, done_{0};
  const Work* work_ = nullptr;
  std::exception_ptr error_;
  std::thread thread_;
};

// Claims `workers` and runs every task on one thread. With several workers that thread is not the
// caller's, because the caller would do few tasks itself then and find its own data in its caches.
class Recorder {
 public:
  Recorder(int workers, OtherThread& worker) : workers_(workers), worker_(worker) {}

  int workers() const { return workers_; }
  template <class F>
  void run(Index tasks, F&& f) {
    if (tasks == 0) return;
    Section& section = recording_.sections.emplace_back();
    section.alone = watch_.lap();
    on_a_worker([&] {
      for (Index task = 0; task < tasks; ++task)
        section.seconds.push_back(undisturbed_seconds([&] { f(task, 0); }));
    });
    watch_.lap();
  }
  // When the call is over.
  Recording finished() {
    recording_.alone_at_end = watch_.lap();
    return std::move(recording_);
  }

 private:
  template <class F>
  void on_a_worker(F&& f) {
    if (workers_ == 1)
      f();
    else
      worker_.run(f);
  }

  int workers_;
  OtherThread& worker_;
  Recording recording_;
  Stopwatch watch_;
};

// The least of each number over recordings of the same call: other work on the machine can only
// make a task slower.
inline Recording least_of(const std::vector<Recording>& all) {
  Recording result = all.front();
  for (const Recording& other : all) {
    for (std::size_t s = 0; s < result.sections.size(); ++s) {
      Section& to = result.sections[s];
      const Section& from = other.sections.at(s);
      to.alone = std::min(to.alone, from.alone);
      for (std::size_t i = 0; i < to.seconds.size(); ++i)
        to.seconds[i] = std::min(to.seconds[i], from.seconds.at(i));
    }
    result.alone_at_end = std::min(result.alone_at_end, other.alone_at_end);
  }
  return result;
}

// The overhead of a simulated worker, in seconds.
struct Costs {
  double barrier;    // of a parallel run that more than one worker takes part in
  double hand_over;  // of a task
};

// Each free worker takes the next task.
inline double simulated_seconds(const Section& section, int workers, const Costs& costs) {
  if (workers == 1 || section.seconds.size() <= 1)
    return section.alone + std::accumulate(section.seconds.begin(), section.seconds.end(), 0.0);
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int worker = 0; worker < workers; ++worker) free_at.push(0.0);
  double end = 0.0;
  for (const double task : section.seconds) {
    const double done = free_at.top() + costs.hand_over + task;
    free_at.pop(), free_at.push(done);
    end = std::max(end, done);
  }
  return section.alone + costs.barrier + end;
}
inline double simulated_seconds(const Recording& recording, int workers, const Costs& costs) {
  double sum = recording.alone_at_end;
  for (const Section& section : recording.sections)
    sum += simulated_seconds(section, workers, costs);
  return sum;
}

}  // namespace quoka_examples
