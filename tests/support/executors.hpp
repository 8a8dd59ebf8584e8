// Executors that fail at a given place, run tasks in any order, or count runs.
#pragma once

#include <quoka/runtime/executor.hpp>

#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

namespace quoka_test {

struct Failure : std::runtime_error {
  Failure() : std::runtime_error("fails") {}
};

// This many workers, all of them the calling thread. Fails before a given task, or at the end of a
// run: as a thread that throws, and as a pool that cannot wake its threads.
struct FailsAt {
  long left;
  int count_of_workers = 2;

  int workers() const { return count_of_workers; }
  template <class F>
  void run(quoka::Index tasks, F&& f) {
    for (quoka::Index task = 0; task < tasks; ++task) {
      count();
      f(task, static_cast<int>(task % workers()));
    }
    count();
  }

 private:
  void count() {
    if (left-- == 0) throw Failure();
  }
};

// Workers that take turns, and do not fail; counts the runs.
struct InTurns {
  int count_of_workers = 2;
  int* runs = nullptr;

  int workers() const { return count_of_workers; }
  template <class F>
  void run(quoka::Index tasks, F&& f) {
    if (runs != nullptr) ++*runs;
    never().run(tasks, f);
  }

 private:
  FailsAt never() const { return {std::numeric_limits<long>::max(), count_of_workers}; }
};

// Runs tasks in any order by any of this many workers, all on the calling thread.
class ShuffledExecutor {
 public:
  ShuffledExecutor(std::uint64_t seed, int workers) : engine_(seed), workers_(workers) {}
  int workers() const { return workers_; }
  template <class F>
  void run(quoka::Index tasks, F&& f) {
    std::vector<quoka::Index> order;
    for (quoka::Index i = 0; i < tasks; ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), engine_);
    for (const quoka::Index task : order)
      f(task, static_cast<int>(engine_() % static_cast<unsigned>(workers_)));
  }

 private:
  std::mt19937_64 engine_;
  int workers_;
};

}  // namespace quoka_test
