// The tasks of an attention call: which rows and which keys each of them takes.
//
// A head with many panels of query rows is cut into groups of panels, each over all keys; one with
// few panels, or a single token, over its keys, and the parts are merged (partial_rows.hpp). How a
// head is cut over its keys depends on its own shape alone.
#pragma once

#include <quoka/attention/head_attention.hpp>
#include <quoka/attention/token_attention.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/core/worker_scratch.hpp>
#include <quoka/select/selection.hpp>

namespace quoka::inline QUOKA_ABI {

// Scratch memory of attention(). Kept by the caller, it makes repeated calls free of allocation.
template <class T>
struct AttentionWorkspace {
  WorkerScratch<detail::AttentionScratch<T>> panels;
  WorkerScratch<detail::TokenScratch<T>> token;
  detail::Partials partials;

  Index bytes() const { return panels.bytes() + token.bytes() + partials.bytes(); }
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

template <class T>
class AttentionTasks {
 public:
  AttentionTasks(const AttentionCall<T>& call, const Selection* keep,
                 AttentionWorkspace<T>& workspace)
      : call_(call), keep_(keep == nullptr || keep->is_all() ? nullptr : keep), s_(workspace) {}

  // Panels: SinglePanels or a FixedPanels.
  template <class Panels>
  void run(ExecutorRef executor) {
    const Index panels = ceil_div(call_.rows(), tuning::panel_rows);
    if (call_.q.len() == 1 && call_.group <= tuning::token_rows)
      run_tokens(executor);
    else if (panels < tuning::min_panels_per_task && parts() > 1)
      run_parts<Panels>(panels, executor);
    else
      run_panels<Panels>(panels, executor);
  }

 private:
  Index heads() const { return call_.q.batch() * call_.kv_heads; }
  KeySequence<T> keys_of(Index head) const {
    const Index b = head / call_.kv_heads, kv_head = head % call_.kv_heads;
    return {.call = call_,
            .b = b,
            .kv_head = kv_head,
            .keep = keep_ == nullptr ? std::span<const Position>{} : keep_->row(b, kv_head),
            .past_count = keep_ == nullptr ? call_.past_k.len() : keep_->count()};
  }

  // The most keys that are in sight of a head's queries, and the parts they are cut into.
  Index most_keys() const {
    const Index all =
        (keep_ == nullptr ? call_.past_k.len() : keep_->count()) + call_.chunk_k.len();
    if (call_.window >= all) return all;
    return std::min(all, call_.window + call_.q.len() + tuning::block_keys);
  }
  Index parts() const { return std::max<Index>(1, ceil_div(most_keys(), part_keys(most_keys()))); }

  // A task: some panels of a head, over all keys.
  template <class Panels>
  void run_panels(Index panels, ExecutorRef executor) {
    const Index tasks = tasks_per_head(panels, heads(), executor.workers());
    const Index per_task = ceil_div(panels, tasks);
    s_.panels.reserve(executor.workers(), Panels{}, per_task, call_.q.dim(), call_.v_dim);
    executor.run(heads() * tasks, [&](Index task, int worker) {
      const KeySequence<T> keys = keys_of(task / tasks);
      const Index first = task % tasks * per_task, count = std::min(per_task, panels - first);
      if (count > 0) HeadAttention<T, Panels>(keys, first, count, s_.panels[worker]).run();
    });
  }

  // A task: all panels of a head, over a part of its keys.
  template <class Panels>
  void run_parts(Index panels, ExecutorRef executor) {
    s_.panels.reserve(executor.workers(), Panels{}, panels, call_.q.dim(), call_.v_dim);
    merge_parts(executor, 1, [&](Index head, Index part, const KeyRange& range, int worker) {
      HeadAttention<T, Panels>(keys_of(head), 0, panels, s_.panels[worker])
          .run_part(range.begin, range.end, part == 0, s_.partials.part(head, part));
    });
  }

  // A task: a token's rows of a head, or of heads side by side, over a part of their keys.
  void run_tokens(ExecutorRef executor) {
    const bool together =
        keep_ == nullptr && side_by_side(call_.past_k) && side_by_side(call_.past_v);
    const Index heads = together ? heads_together(executor.workers()) : 1;
    const Index block = together ? tuning::token_together_keys : tuning::token_block_keys;
    const int per_worker = static_cast<int>(heads);
    s_.token.reserve(executor.workers() * per_worker, call_.group, call_.q.dim(), call_.v_dim,
                     block);
    merge_parts(executor, heads, [&](Index head, Index part, const KeyRange& range, int worker) {
      const auto attention_of = [&](Index i) {
        return TokenAttention<T>(keys_of(head + i),
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
    const Index parts = this->parts(), size = part_keys(most_keys());
    s_.partials.reserve(heads(), parts, call_.rows(), call_.v_dim);
    executor.run(heads() / step * parts, [&](Index task, int worker) {
      const Index head = task / parts * step, part = task % parts;
      const KeyRange all = keys_of(head).in_sight(0, call_.q.len() - 1);
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
      T* const to = call_.out.row(b, q_head, query);
      const float* const from = rows.out + row * call_.v_dim;
      for (Index c = 0; c < call_.v_dim; ++c) to[c] = static_cast<T>(from[c] * share);
      if (!call_.lse.absent())
        call_.lse.at(b, q_head, query) = lse_nat(rows.state[row].max, rows.state[row].sum);
    }
  }

  const AttentionCall<T>& call_;
  const Selection* keep_;
  AttentionWorkspace<T>& s_;
};

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
