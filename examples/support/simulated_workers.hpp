// An executor that records what it is given, and workers that exist on paper to whom it is given again.
#pragma once

#include "support/clock.hpp"

#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/pause.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

namespace quoka_examples {

using quoka::Index;

// One parallel run: chains of stages. The tasks of a stage may run at once, once those of the stage before
// are done. run(tasks, f) is one chain of one stage.
struct Section {
  double alone = 0.0;           // seconds of the calling thread before it
  Index chains = 1, slots = 1;  // a chain begins when the one before it in its slot is done
  // In which order a worker of so many looks at the slots, one after the other.
  std::vector<std::vector<Index>> orders;
  std::vector<Index> tasks;     // of each stage of a chain
  std::vector<double> seconds;  // of each task, chain by chain, stage by stage

  Index chain_tasks() const {
    Index sum = 0;
    for (const Index n : tasks) sum += n;
    return sum;
  }
};

struct Recording {
  std::vector<Section> sections;
  double alone_at_end = 0.0;

  Index tasks() const {
    Index sum = 0;
    for (const Section& section : sections) sum += section.chains * section.chain_tasks();
    return sum;
  }
  double alone() const {
    double sum = alone_at_end;
    for (const Section& section : sections) sum += section.alone;
    return sum;
  }
};

// What f() takes, without what the thread waits for a core that others hold.
template <class F>
double undisturbed_seconds(F&& f) {
  double wall = 0.0;
  const double own = seconds_of([&] { wall = seconds_of(f); }, thread_seconds);
  return std::min(wall, own);
}

// A thread that runs what it is given while the caller waits, both awake. Where there is one core, the caller
// itself.
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

// Claims `workers` and runs every task on one thread. Of several workers it is not the caller's: that does few tasks
// itself then, and finds in its caches what it left there.
class Recorder {
 public:
  Recorder(int workers, OtherThread& worker) : workers_(workers), worker_(worker) {}

  int workers() const { return workers_; }
  template <class F>
  void run(Index tasks, F&& f) {
    if (tasks == 0) return;
    Section& section = begin(1);
    section.tasks = {tasks};
    on_a_worker([&] {
      for (Index task = 0; task < tasks; ++task)
        section.seconds.push_back(undisturbed_seconds([&] { f(task, 0); }));
    });
    watch_.lap();
  }
  void run_chains(const quoka::Chains& chains) {
    if (chains.tasks_of_chain() == 0) return;
    Section& section = begin(chains.count());
    section.slots = chains.slots();
    section.orders.resize(static_cast<std::size_t>(workers_));
    for (Index worker = 0; worker < workers_; ++worker)
      for (Index i = 0; i < chains.slots(); ++i)
        section.orders[static_cast<std::size_t>(worker)].push_back(
            chains.slot(worker, workers_, i));
    for (int stage = 0; stage < chains.stages(); ++stage)
      section.tasks.push_back(chains.tasks(stage));
    on_a_worker([&] {
      for (Index chain = 0; chain < chains.count(); ++chain)
        for (int stage = 0; stage < chains.stages(); ++stage)
          for (Index task = 0; task < chains.tasks(stage); ++task)
            section.seconds.push_back(undisturbed_seconds([&] { chains(chain, stage, task, 0); }));
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
  Section& begin(Index chains) {
    const double alone = watch_.lap();
    Section& section = recording_.sections.emplace_back();
    section.alone = alone, section.chains = chains;
    return section;
  }

  int workers_;
  OtherThread& worker_;
  Recording recording_;
  Stopwatch watch_;
};

// Of recordings of the same call, the least of each number: whatever else happens on the machine can only
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

// What a worker on paper pays, in seconds.
struct Costs {
  double barrier;    // of a parallel run that more than one worker takes part in
  double hand_over;  // of a task, likewise
};

// Each free worker takes the first task that may start, those of its own chain first.
inline double simulated_seconds(const Section& section, int workers, const Costs& costs) {
  const Index per_chain = section.chain_tasks(), all = section.chains * per_chain;
  double sum = 0.0;
  for (const double task : section.seconds) sum += task;
  if (workers == 1 || all <= 1) return section.alone + sum;

  struct Slot {
    Index chain = 0;
    Index next = 0;         // task of the chain
    std::size_t stage = 0;  // that it belongs to
    Index left = 0;         // of this stage, not done
    Index not_begun = 0;    // likewise
  };
  std::vector<Slot> slots(static_cast<std::size_t>(section.slots));
  const auto enter = [&](Slot& slot) {  // the next stage that has a task
    while (slot.stage == section.tasks.size() || section.tasks[slot.stage] == 0) {
      if (slot.stage < section.tasks.size()) {
        ++slot.stage;
      } else if (slot.chain + section.slots < section.chains) {
        slot.chain += section.slots, slot.next = 0, slot.stage = 0;
      } else {
        slot.left = slot.not_begun = 0;
        return;
      }
    }
    slot.left = slot.not_begun = section.tasks[slot.stage];
  };
  for (std::size_t i = 0; i < slots.size(); ++i)
    slots[i].chain = static_cast<Index>(i), enter(slots[i]);
  struct Event {
    double at;
    int worker;
    Index slot;
    bool operator<(const Event& other) const {  // the earliest is on top
      return at > other.at || (at == other.at && worker > other.worker);
    }
  };
  std::priority_queue<Event> running;
  std::vector<int> idle;
  for (int worker = workers - 1; worker >= 0; --worker) idle.push_back(worker);
  double now = 0.0;
  for (;;) {
    // Workers that find nothing wait for the next task to end.
    std::vector<int> still_idle;
    while (!idle.empty()) {
      const int worker = idle.back();
      idle.pop_back();
      bool found = false;
      for (Index i = 0; i < section.slots && !found; ++i) {
        const Index at =
            section.orders.empty()
                ? i
                : section.orders[static_cast<std::size_t>(worker)][static_cast<std::size_t>(i)];
        Slot& slot = slots[static_cast<std::size_t>(at)];
        if (slot.not_begun == 0) continue;
        const auto task = static_cast<std::size_t>(slot.chain * per_chain + slot.next);
        ++slot.next, --slot.not_begun;
        running.push({now + costs.hand_over + section.seconds[task], worker, at});
        found = true;
      }
      if (!found) still_idle.push_back(worker);
    }
    idle.assign(still_idle.rbegin(), still_idle.rend());
    if (running.empty()) break;
    const Event done = running.top();
    running.pop();
    now = done.at;
    idle.push_back(done.worker);
    Slot& slot = slots[static_cast<std::size_t>(done.slot)];
    if (--slot.left == 0) ++slot.stage, enter(slot);
  }
  return section.alone + costs.barrier + now;
}
inline double simulated_seconds(const Recording& recording, int workers, const Costs& costs) {
  double sum = recording.alone_at_end;
  for (const Section& section : recording.sections)
    sum += simulated_seconds(section, workers, costs);
  return sum;
}

}  // namespace quoka_examples
