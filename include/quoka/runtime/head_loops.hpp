// Work on KV heads, in phases that each need all of the one before.
//
// Where there are heads enough for the workers a head is one task, which goes through all phases:
// one parallel run. Otherwise each phase is a parallel loop over the heads and parts of each,
// ranges of keys for instance.
//
//   HeadPlan(heads, executor).run([&](const HeadLoops& on) {
//     on.each(ranges, [&](Index head, Index range, int worker) { ... });
//     on.each(1, [&](Index head, Index, int worker) { ... });
//   });
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A head's keys, cut into ranges of `size` keys; the last may be shorter. Each is a task of a
// phase.
struct KeyRanges {
  Index keys, size, count;

  // Ranges of `size` keys.
  static KeyRanges by_size(Index keys, Index size) {
    return {keys, size, std::max<Index>(1, ceil_div(keys, size))};
  }
  // For results that do not depend on the ranges: two for each worker of a head, or one if there is
  // one worker. A range is large enough to be worth a task.
  static KeyRanges for_workers(Index keys, Index heads, int workers) {
    if (workers == 1) return by_size(keys, std::max<Index>(keys, 1));
    const Index wanted = std::max<Index>(1, 2 * workers / heads);
    const Index size = std::max(ceil_div(keys, wanted), std::min<Index>(keys, tuning::range_keys));
    return by_size(keys, round_up(std::max<Index>(size, 1), Index{64}));
  }
  KeyRange of(Index r) const { return {std::min(r * size, keys), std::min((r + 1) * size, keys)}; }
};

// Some heads, and the executor that runs their tasks.
class HeadLoops {
 public:
  // Heads [0, count), whose tasks the executor runs.
  HeadLoops(Index count, const ExecutorRef& executor) : count_(count), executor_(&executor) {}
  // One head, by the thread that is this worker.
  HeadLoops(Index head, int worker) : first_(head), worker_(worker) {}

  // f(head, part, worker) for each head and each of its parts; returns when all are done.
  template <class F>
  void each(Index parts, F&& f) const {
    if (executor_ == nullptr) {
      for (Index part = 0; part < parts; ++part) f(first_, part, worker_);
      return;
    }
    executor_->run(count_ * parts,
                   [&](Index task, int worker) { f(task / parts, task % parts, worker); });
  }

 private:
  Index first_ = 0, count_ = 1;
  int worker_ = 0;
  const ExecutorRef* executor_ = nullptr;  // null: one head alone
};

class HeadPlan {
 public:
  HeadPlan(Index heads, ExecutorRef executor)
      : heads_(heads), executor_(executor), alone_(suffice(heads, executor.workers())) {}

  // Workers that a head's parts are for: 1 where each head is one task.
  int workers_per_head() const { return alone_ ? 1 : executor_.workers(); }
  // Memory that a head's phases share: how many there are, and which.
  Index slots() const { return alone_ ? executor_.workers() : heads_; }
  Index slot(Index head, int worker) const { return alone_ ? worker : head; }

  // work(on, args...), once for all heads or once for each.
  template <class Work, class... Args>
  void run(Work&& work, const Args&... args) const {
    if (!alone_) return work(HeadLoops(heads_, executor_), args...);
    executor_.run(heads_, [&](Index head, int worker) { work(HeadLoops(head, worker), args...); });
  }

 private:
  // Are the workers busy four fifths of the time, if a head is one task?
  static bool suffice(Index heads, Index workers) {
    return 5 * heads >= 4 * round_up(heads, workers);
  }

  Index heads_;
  ExecutorRef executor_;
  bool alone_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
