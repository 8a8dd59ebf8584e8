// What an AttentionWorkspace is made of: memory, the calls at hand and their tasks; and how these are run.
//
// A call whose heads are cut far has parallel loops of its own. The tasks of all others are one list, and then their
// merges are.
#pragma once

#include <quoka/attention/attention_tasks.hpp>
#include <quoka/attention/call_memory.hpp>
#include <quoka/base/sort.hpp>

#include <algorithm>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Everything that calls reuse.
struct AttentionWorkspace::State {
  detail::AttentionScratch scratch;
  detail::GrowingArray<detail::Partials> partials;    // of each sequence
  detail::GrowingArray<detail::VisiblePast> visible;  // likewise
  std::vector<detail::AttentionCall> calls;
  std::vector<detail::OutputMemory> outputs;
  std::vector<detail::AttentionTasks> tasks;
  std::vector<Index> order, ends;  // of the calls, the costliest first, and of their tasks

  void begin(std::size_t sequences) {
    partials.at_least(static_cast<Index>(sequences));
    visible.at_least(static_cast<Index>(sequences));
    tasks.clear();
    calls.clear();
    calls.reserve(sequences);
    tasks.reserve(sequences);
  }
  // With one call, whose arithmetic is to be set.
  detail::AttentionCall& begin_one(const detail::AttentionCall& call) {
    begin(1);
    return calls.emplace_back(call);
  }
  Index bytes() const { return bytes_of(scratch, partials, visible); }

  // All calls, each in its own arithmetic. The order of their tasks decides nothing but who works when.
  void run(ExecutorRef executor) {
    for (Index i = 0; i < std::ssize(calls); ++i) {
      detail::AttentionCall& call = calls[static_cast<std::size_t>(i)];
      if (call.mask != nullptr && !call.own_keys()) {
        visible[i].find(*call.mask, call.keep, call.q.batch(), call.kv_heads, call.past_k.len(),
                        executor);
        call.visible = &visible[i];
      }
      if (call.lists != nullptr) call.note_lists();
      add_tasks(call, i, executor.workers(), calls.size() == 1);
    }
    order.clear();
    for (Index i = 0; i < std::ssize(tasks); ++i)
      if (of(i).in_loops())
        of(i).run_loops(executor);
      else
        order.push_back(i);
    if (order.empty()) return;
    detail::sort(order.data(), std::ssize(order), [&](Index a, Index b) {
      const double x = of(a).cost(), y = of(b).cost();
      return x > y || (x == y && a < b);
    });
    for (const bool merges : {false, true}) {
      ends.clear();
      Index total = 0;
      for (const Index i : order) ends.push_back(total += merges ? of(i).merges() : of(i).tasks());
      if (total == 0) continue;
      executor.run(total, [&](Index task, int worker) {
        const auto end = std::upper_bound(ends.begin(), ends.end(), task);
        const auto at = static_cast<std::size_t>(end - ends.begin());
        detail::AttentionTasks& call = of(order[at]);
        const Index of_call = task - (at > 0 ? ends[at - 1] : 0);
        if (merges)
          call.merge(of_call);
        else
          call.run(of_call, worker);
      });
    }
  }

 private:
  void add_tasks(const detail::AttentionCall& call, Index i, int workers, bool room_to_grow) {
    tasks.emplace_back(call, scratch, partials[i], workers, room_to_grow);
  }
  detail::AttentionTasks& of(Index call) { return tasks[static_cast<std::size_t>(call)]; }
};

}  // namespace QUOKA_ABI
}  // namespace quoka
