// Work that meets often: chains of stages in one parallel run.
//
// A KV head's work is a chain: queries, then scores of ranges of keys, then a threshold, and so on. The tasks
// of a stage may run at once, once those of the stage before are done, whatever other heads do. One run
// for all chains has one barrier in place of one for each stage. Chain c shares the memory of slot c % slots()
// with chains c - slots(), c + slots(), ...: it begins when the one before it is done.
//
// Workers take a task that may start, of their own slot first. A worker waits only for tasks that others are
// running, so any executor will do: one that runs its tasks one after the other, too. An executor with a
// graph of its own may have a member run_chains(const Chains&).
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/base/version.hpp>

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

class Chains {
 public:
  static constexpr int most_stages = 512;  // of a chain
  static constexpr Index most_slots = 64;  // chains begun and not done

  // `chains` of them, at most `at_once` begun and not done.
  Chains(Index chains, Index at_once)
      : chains_(chains), slots_(std::min({chains, std::max<Index>(at_once, 1), most_slots})) {}

  // The next stage of every chain: f(chain, task, worker) for every task in [0, tasks). f must outlive the
  // run.
  template <class F>
  void add(Index tasks, F& f) {
    add(tasks, std::addressof(f), [](void* object, Index chain, int, Index task, int worker) {
      (*static_cast<F*>(object))(chain, task, worker);
    });
  }
  // The same of a member: (object.*member)(chain, stage, task, worker), with the stage's number.
  template <auto member, class T>
  void add_member(Index tasks, T& object) {
    add(tasks, std::addressof(object),
        [](void* owner, Index chain, int stage, Index task, int worker) {
          (static_cast<T*>(owner)->*member)(chain, stage, task, worker);
        });
  }

  Index count() const { return chains_; }  // chains
  Index slots() const { return slots_; }   // that are begun and not done at most
  int stages() const { return count_; }    // of each chain
  Index tasks(int stage) const { return end(stage) - begin(stage); }  // of a stage of one chain
  Index tasks_of_chain() const { return per_chain_; }                 // of all stages
  Index most_tasks() const { return most_tasks_; }                    // of a stage
  // The first task of a stage, counted through those of a chain.
  Index begin(int stage) const { return stages_[static_cast<std::size_t>(stage)].begin; }
  // The one after its last.
  Index end(int stage) const { return stage + 1 < count_ ? begin(stage + 1) : per_chain_; }
  // Where worker `worker` of `workers` looks for a task, in this order: i in [0, slots()). Workers share some
  // slots, and the later ones have work for them while the first is between two stages.
  Index slot(Index worker, Index workers, Index i) const {
    Index shared = 1;
    for (const Index n : {4, 2})
      if (slots_ % n == 0) {
        shared = n;
        break;
      }
    const Index groups = slots_ / shared, own = worker * groups / workers;
    return (own + i / shared) % groups + i % shared * groups;
  }
  // Runs one task.
  void operator()(Index chain, int stage, Index task, int worker) const {
    const Stage& at = stages_[static_cast<std::size_t>(stage)];
    at.call(at.f, chain, stage, task, worker);
  }

 private:
  using Call = void (*)(void* f, Index chain, int stage, Index task, int worker);
  struct Stage {
    Index begin;
    void* f;
    Call call;
  };

  [[gnu::noinline]] void add(Index tasks, const void* f, Call call) {
    assert(count_ < most_stages);
    stages_[static_cast<std::size_t>(count_++)] = {per_chain_, const_cast<void*>(f), call};
    per_chain_ += tasks;
    most_tasks_ = std::max(most_tasks_, tasks);
  }

  Index chains_, slots_, per_chain_ = 0, most_tasks_ = 0;
  int count_ = 0;
  std::array<Stage, most_stages> stages_;
};

namespace detail {
// Slots that share their scratch memory with the workers: one worker does one chain after the other.
constexpr Index chains_at_once(int workers) { return workers; }
}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka
