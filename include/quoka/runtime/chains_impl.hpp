// Definitions of chains.hpp and of ExecutorRef::run_chains.
#pragma once

#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/pause.hpp>

#include <atomic>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The chains of one parallel run, on the stack of its caller.
class ChainRun {
 public:
  explicit ChainRun(const Chains& chains) : chains_(chains) {}

  // Until no task is left to begin.
  void work(Index number, Index count, int worker) {
    Pause pause;
    for (;;) {
      bool waits = false, worked = false;
      for (Index i = 0; i < chains_.slots(); ++i) {
        const Index slot = chains_.slot(number, count, i);
        Turn turn;
        while ((turn = take(slot, worker)) == Turn::worked) worked = true;
        waits = waits || turn == Turn::waits;
        if (worked) break;  // back to its own slots
      }
      if (failed_.load(std::memory_order_relaxed)) return;
      if (worked)
        pause = Pause();
      else if (waits)
        pause();
      else
        return;
    }
  }

 private:
  enum class Turn { worked, waits, done };

  // Tasks of a slot are counted through its chains.
  struct alignas(64) Slot {
    std::atomic<Index> next{0}, done{0};
    std::atomic<int> stage{0};  // of next, or one before it: where to look
  };

  Turn take(Index slot, int worker) {
    Slot& state = slots_[static_cast<std::size_t>(slot)];
    const Index per_chain = chains_.tasks_of_chain();
    const Index chains = ceil_div(chains_.count() - slot, chains_.slots());
    Index next = state.next.load(std::memory_order_relaxed);
    for (;;) {
      if (next >= chains * per_chain) return Turn::done;
      if (failed_.load(std::memory_order_relaxed)) return Turn::waits;
      const Index turn = next / per_chain, task = next % per_chain;
      int stage = state.stage.load(std::memory_order_relaxed);
      if (task < chains_.begin(stage)) stage = 0;
      while (chains_.end(stage) <= task) ++stage;
      if (state.done.load(std::memory_order_acquire) < turn * per_chain + chains_.begin(stage))
        return Turn::waits;
      if (!state.next.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) continue;
      state.stage.store(stage, std::memory_order_relaxed);
      try {
        chains_(slot + turn * chains_.slots(), stage, task - chains_.begin(stage), worker);
      } catch (...) {
        failed_.store(true, std::memory_order_relaxed);
        throw;
      }
      state.done.fetch_add(1, std::memory_order_release);
      return Turn::worked;
    }
  }

  const Chains& chains_;
  std::atomic<bool> failed_{false};
  std::array<Slot, Chains::most_slots> slots_;
};

QUOKA_FUNC void run_chains(const ExecutorRef& executor, const Chains& chains) {
  if (chains.tasks_of_chain() == 0) return;
  const Index workers = std::min<Index>(executor.workers(), chains.slots() * chains.most_tasks());
  if (workers > 1) {
    ChainRun run(chains);
    return executor.run(workers, [&](Index task, int worker) { run.work(task, workers, worker); });
  }
  executor.run(1, [&](Index, int worker) {
    for (Index chain = 0; chain < chains.count(); ++chain)
      for (int stage = 0; stage < chains.stages(); ++stage)
        for (Index task = 0; task < chains.tasks(stage); ++task) chains(chain, stage, task, worker);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
