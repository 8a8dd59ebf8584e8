// The tasks of an attention call: which rows and which keys each of them takes.
//
// A head with many panels of query rows is cut into groups of panels, each over all keys; one with
// few panels, or a single token, over its keys, and the parts are merged (partial_rows.hpp). How a
// head is cut over its keys depends on its own shape alone.
#pragma once

#include <quoka/attention/head_attention.hpp>
#include <quoka/attention/token_attention.hpp>
#include <quoka/kernels/fixed_panels.hpp>
#include <quoka/kernels/float_panels.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/views/selection.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Scratch of a call, by the shape it takes.
struct AttentionWorkspace::Parts {
  WorkerScratch<detail::HeadScratch> heads;
  WorkerScratch<detail::TokenScratch> token;
  detail::Partials partials;
};

namespace detail {

// Tasks per KV head: enough of them for the workers, none too small to pay for its packing unless
// workers would stand idle.
inline Index tasks_per_head(Index panels, Index heads, int workers) {
  const Index for_cache = ceil_div(panels, tuning::max_panels_per_task);
  if (workers == 1) return for_cache;
  const Index for_balance = ceil_div(tuning::tasks_per_worker * workers, heads);
  const Index paying = std::max(ceil_div(panels, tuning::min_panels_per_task),
                                std::min(panels, ceil_div(Index{workers}, heads)));
  return std::max(for_cache, std::min(for_balance, paying));
}

class AttentionTasks {
 public:
  AttentionTasks(const AttentionCall& call, const PanelArithmetic& arithmetic,
                 AttentionWorkspace::Parts& parts)
      : call_(call), arithmetic_(arithmetic), s_(parts) {}

  void run(ExecutorRef executor) {
    const Index panels = ceil_div(call_.rows(), tuning::panel_rows);
    if (call_.q.len() == 1 && call_.group <= tuning::token_rows)
      run_tokens(executor);
    else if (panels < tuning::min_panels_per_task && parts() > 1)
      run_parts(panels, executor);
    else
      run_panels(panels, executor);
  }

 private:
  Index heads() const { return call_.q.batch() * call_.kv_heads; }
  KeySequence keys_of(Index head) const {
    return {call_, head / call_.kv_heads, head % call_.kv_heads};
  }

  // The most keys of a head that are in sight.
  Index most_keys(Index past_count) const {
    const Index all = past_count + call_.chunk_k.len();
    if (call_.window >= all) return all;
    return std::min(all, call_.window + call_.q.len() + tuning::block_keys);
  }
  // The most parts that a head is cut into: not always those of the head with the most keys, whose
  // parts may be larger.
  Index parts() const {
    Index most = 1;
    for (Index head = 0; head < (call_.keep != nullptr ? heads() : 1); ++head) {
      const Index keys = most_keys(keys_of(head).past_count());
      most = std::max(most, ceil_div(keys, part_keys(keys)));
    }
    return most;
  }

  // A task: some panels of a head, over all keys.
  void run_panels(Index panels, ExecutorRef executor) {
    const Index tasks = tasks_per_head(panels, heads(), executor.workers());
    const Index per_task = ceil_div(panels, tasks);
    s_.heads.reserve(executor.workers(), arithmetic_, call_, per_task);
    executor.run(heads() * tasks, [&](Index task, int worker) {
      const KeySequence keys = keys_of(task / tasks);
      const Index first = task % tasks * per_task, count = std::min(per_task, panels - first);
      if (count > 0) HeadAttention(arithmetic_, keys, first, count, s_.heads[worker]).run();
    });
  }

  // A task: all panels of a head, over a part of its keys.
  void run_parts(Index panels, ExecutorRef executor) {
    s_.heads.reserve(executor.workers(), arithmetic_, call_, panels);
    merge_parts(executor, 1, [&](Index head, Index part, const KeyRange& range, int worker) {
      HeadAttention(arithmetic_, keys_of(head), 0, panels, s_.heads[worker])
          .run_part(range.begin, range.end, part == 0, s_.partials.part(head, part));
    });
  }

  // A task: a token's rows of a head, or of heads side by side, over a part of their keys.
  void run_tokens(ExecutorRef executor) {
    const bool together = call_.keep == nullptr && call_.past_k.heads_side_by_side() &&
                          call_.past_v.heads_side_by_side();
    const Index heads = together ? heads_together(executor.workers()) : 1;
    const Index block = together ? tuning::token_together_keys : tuning::token_block_keys;
    const int per_worker = static_cast<int>(heads);
    // As many as there may be when the cache has grown.
    const auto most = static_cast<int>(together ? call_.kv_heads : 1);
    s_.token.reserve(executor.workers() * most, call_, block);
    merge_parts(executor, heads, [&](Index head, Index part, const KeyRange& range, int worker) {
      const auto attention_of = [&](Index i) {
        return TokenAttention(keys_of(head + i),
                              s_.token[worker * per_worker + static_cast<int>(i)], block);
      };
      const Index begin = std::min(std::max(range.begin, keys_of(head).begin_for(0)), range.end);
      const Index own = std::clamp(call_.past_k.len(), begin, range.end);  // the chunk's begins
      for (Index i = 0; i < heads; ++i) attention_of(i).start(part == 0);
      if (together)
        attend_together(call_, head / call_.kv_heads, head % call_.kv_heads, heads, begin, own,
                        attention_of);
      for (Index i = 0; i < heads; ++i) {
        attention_of(i).attend(together ? own : begin, range.end);
        attention_of(i).finish(s_.partials.part(head + i, part));
      }
    });
  }

  // As many heads as leave enough tasks for the workers; results do not depend on it.
  Index heads_together(int workers) const {
    const Index wanted = ceil_div(tuning::tasks_per_worker * workers, call_.q.batch() * parts());
    Index heads = std::max<Index>(1, call_.kv_heads / wanted);
    while (call_.kv_heads % heads != 0) --heads;
    return heads;
  }

  // attend(head, part, keys, worker) for every part of every `step`-th head, then their merging.
  template <class Attend>
  void merge_parts(ExecutorRef executor, Index step, Attend&& attend) {
    const Index parts = this->parts();
    s_.partials.reserve(heads(), parts, call_.rows(), call_.v_dim);
    executor.run(heads() / step * parts, [&](Index task, int worker) {
      const Index head = task / parts * step, part = task % parts;
      const KeySequence keys = keys_of(head);
      const KeyRange all = keys.in_sight(0, call_.q.len() - 1);
      const Index size = part_keys(most_keys(keys.past_count()));  // of this head alone
      const Index begin = std::min(all.begin + part * size, all.end);
      const Index end = part + 1 == parts ? all.end : std::min(begin + size, all.end);
      attend(head, part, KeyRange{begin, end}, worker);
    });
    executor.run(heads(), [&](Index head, int) { write(head, s_.partials.merged(head)); });
  }

  void write(Index head, const PartialRows& rows) const {
    const Index b = head / call_.kv_heads, first = head % call_.kv_heads * call_.group;
    for (Index row = 0; row < call_.rows(); ++row) {
      const Index q_head = first + row % call_.group, query = row / call_.group;
      const float share = rows.state[row].inverse_sum();
      float* const of_row = rows.out + row * call_.v_dim;
      for (Index c = 0; c < call_.v_dim; ++c) of_row[c] *= share;
      call_.out.format().narrow(of_row, call_.v_dim, call_.out.row(b, q_head, query));
      if (!call_.lse.absent())
        call_.lse.at(b, q_head, query) = lse_nat(rows.state[row].max, rows.state[row].sum);
    }
  }

  const AttentionCall& call_;
  const PanelArithmetic& arithmetic_;
  AttentionWorkspace::Parts& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
