// The tasks of attention calls: which rows and which keys each of them takes.
//
// A head with many panels of query rows is cut into groups of panels, each over all keys; one with
// few panels, or a single token, over its keys, and the parts are merged (partial_rows.hpp). How a
// head is cut over its keys depends on its own shape alone, so a sequence's results depend neither on
// the workers nor on the other sequences of a batch. Of a batch, the costliest tasks are begun first.
//
// Where workers are so many that groups become small, packing the keys for each of them would cost
// more than it brings. Many keys are then cut into the parts that one worker walks one after the other
// (head_attention.hpp), a task for each; what each has found is joined by a task for each panel. Of few keys
// each block is packed once, by one task, for all panels of its head. Either way some heads at a time go through
// two or three parallel loops.
#pragma once

#include <quoka/attention/attention_rows.hpp>
#include <quoka/attention/attention_scratch.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/views/selection.hpp>

#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
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

// Of one call.
class AttentionTasks {
 public:
  // room_to_grow: room for what the call needs when the cache has grown.
  AttentionTasks(const AttentionCall& call, AttentionScratch& scratch, Partials& partials,
                 int workers, bool room_to_grow)
      : call_(call),
        s_(scratch),
        partials_(partials),
        panels_(ceil_div(call.rows(), tuning::panel_rows)) {
    if (call_.own_keys()) {
      listed_ = &s_.listed_work(call_);
      for (Index b = 0; b < call_.q.batch() && panels_ < tuning::min_panels_per_task; ++b)
        if (const Index parts = parts_of_ranges(b); parts > 1) parts_ = std::max(parts_, parts);
      // Panels of a task lie in one tree.
      const Index tasks = parts_ > 0 ? 1 : tasks_per_head(panels_, heads(), workers);
      panels_per_task_ = parts_ > 0 ? panels_ : ListedWork::most_panels;
      while (ceil_div(panels_, panels_per_task_) < tasks && panels_per_task_ > 1)
        panels_per_task_ /= 2;
      tasks_per_head_ = ceil_div(panels_, panels_per_task_);
      s_.reserve_heads(call_, std::min(panels_, panels_per_task_), workers);
      listed_->reserve(call_, std::min(panels_, panels_per_task_), workers);
    } else if (call_.is_a_token()) {
      together_ =
          !call_.listed() && call_.past_k.heads_side_by_side() && call_.past_v.heads_side_by_side();
      parts_ = parts_of_a_head();
      step_ = together_ ? heads_together(workers) : 1;
      // As many as there may be when the cache has grown.
      s_.reserve_token(call_, together_ ? call_.kv_heads : 1, workers);
    } else if (panels_ < tuning::min_panels_per_task && parts_of_a_head() > 1) {
      parts_ = parts_of_a_head();
      s_.reserve_heads(call_, panels_, workers);
    } else {
      tasks_per_head_ = tasks_per_head(panels_, heads(), workers);
      const Index long_parts = long_parts_of_a_head();
      if (tasks_per_head_ > ceil_div(panels_, tuning::max_panels_per_task)) {
        if (long_parts > 1)
          split_keys(long_parts, workers);
        else
          share_blocks(workers);
      }
      panels_per_task_ = ceil_div(panels_, tasks_per_head_);
      s_.reserve_heads(call_, long_parts_ > 0 ? 0 : panels_per_task_, workers,
                       long_parts > 1 && long_parts_ == 0);
    }
    if (parts_ > 0)
      partials_.reserve(heads(), parts_, call_.rows(), call_.v_dim,
                        room_to_grow ? tuning::max_parts : parts_);
  }

  Index tasks() const {
    return parts_ > 0 ? heads() / heads_per_task() * parts_ : heads() * tasks_per_head_;
  }
  Index merges() const { return parts_ > 0 ? heads() : 0; }
  // Of one task, in multiply-adds, or what takes as long: a token's are bound by memory.
  double cost() const {
    constexpr Index token_rows = 8;  // as if a token's heads had so many
    const Index keys = most_keys(call_.past_k.len()) / std::max<Index>(parts_, 1);
    const Index rows = step_ > 0    ? token_rows * step_
                       : parts_ > 0 ? panels_ * width
                                    : panels_per_task_ * width;
    return static_cast<double>(keys) * static_cast<double>(rows) *
           static_cast<double>(call_.q.dim() + call_.v_dim);
  }

  // Is it parallel loops of its own, or a list of tasks and one of merges?
  bool in_loops() const { return blocks_ > 0 || long_parts_ > 0; }
  // Those loops, over as many heads at a time as have memory for what their workers share.
  void run_loops(ExecutorRef executor) {
    const Index at_once = std::min(heads(), heads_at_once(executor.workers()));
    if (long_parts_ > 0) {
      s_.parted.at_least(at_once);
      for (Index i = 0; i < at_once; ++i) s_.parted[i].reserve(call_, panels_, long_parts_);
    } else {
      s_.shared.at_least(at_once);
      for (Index i = 0; i < at_once; ++i) s_.shared[i].reserve(call_, blocks_);
    }
    for (Index first = 0; first < heads(); first += at_once) {
      const Index count = std::min(at_once, heads() - first);
      // f(head, its number among these, task of the head, worker)
      const auto loop = [&](Index tasks, auto&& f) {
        executor.run(count * tasks, [&](Index task, int worker) {
          f(first + task / tasks, task / tasks, task % tasks, worker);
        });
      };
      if (long_parts_ > 0) {
        loop(panels_, [&](Index head, Index i, Index panel, int worker) {
          pack_panel(head, s_.parted[i], panel, worker);
        });
        loop(long_parts_ * tasks_per_head_, [&](Index head, Index i, Index task, int worker) {
          attend_long_part(head, s_.parted[i], task, worker);
        });
        loop(panels_, [&](Index head, Index i, Index panel, int worker) {
          join_long_parts(head, s_.parted[i], panel, worker);
        });
      } else {
        loop(2 * blocks_, [&](Index head, Index i, Index task, int worker) {
          pack_half_block(head, s_.shared[i], task, worker);
        });
        loop(tasks_per_head_, [&](Index head, Index i, Index task, int worker) {
          attend_to_blocks(head, s_.shared[i], task, worker);
        });
      }
    }
  }

  // Some panels of a head over all keys, or all of them over a part of the keys.
  void run(Index task, int worker) {
    if (parts_ > 0) return run_part(task, worker);
    // Where queries have keys of their own, heads in turn: many of them see the same keys.
    const bool in_turn = listed_ != nullptr;
    const KeySequence keys = keys_of(in_turn ? task % heads() : task / tasks_per_head_);
    const Index first = (in_turn ? task / heads() : task % tasks_per_head_) * panels_per_task_;
    const Index count = std::min(panels_per_task_, panels_ - first);
    if (listed_ != nullptr) return listed_->run(keys, first, count, s_.heads[worker], worker);
    if (count <= 0) return;
    HeadAttention head(keys, first, count, s_.heads[worker]);
    const KeyRange in_sight = head.in_sight();
    SequenceBlocks blocks(keys, in_sight.end, s_.heads[worker].blocks);
    head.pack_panels();
    head.attend(blocks, in_sight, long_parts_of(keys).size, true);
    head.finish();
  }
  // After all tasks have run.
  void merge(Index head) const { write(head, partials_.merged(head)); }

 private:
  static constexpr Index width = tuning::panel_rows;
  // A block of keys is packed in the time that so many panels take to attend to it.
  static constexpr double packing_in_panels = 1.3;

  Index heads() const { return call_.q.batch() * call_.kv_heads; }
  Index heads_per_task() const { return std::max<Index>(step_, 1); }
  KeySequence keys_of(Index head) const { return {call_, head}; }
  // Heads that may have another number of keys than head 0: by lists, or where a mask hides all of a sequence's
  // chunk.
  Index unlike_heads() const { return call_.listed() || call_.mask != nullptr ? heads() : 1; }
  // Parts of a head's keys begin at multiples of `size`, wherever the keys in sight do. The first of the `count`
  // that there are is that of key 0, which has the sinks; the others are those in sight.
  struct LongParts {
    Index size, first, count;
    Index part(Index i) const { return i == 0 ? 0 : first + i; }
  };
  LongParts long_parts_of(const KeySequence& keys) const {
    const KeyRange all = all_keys(keys);
    Index size = round_up(tuning::long_part_keys, call_.block_keys());
    while (ceil_div(all.end - all.begin, size) > tuning::most_long_parts) size *= 2;
    const Index first = std::max<Index>(all.begin / size - 1, 0);
    return {size, first, std::max<Index>(ceil_div(all.end, size) - first, 1)};
  }
  // Of the head that has most.
  [[gnu::noinline]] Index long_parts_of_a_head() const {
    Index most = 1;
    for (Index head = 0; head < unlike_heads(); ++head)
      most = std::max(most, long_parts_of(keys_of(head)).count);
    return most;
  }
  // A task for each part of the keys, or several, each of some panels, where it is done sooner so. A panel's share
  // of packing is more then.
  void split_keys(Index parts, int workers) {
    long_parts_ = parts;
    Index whole_parts = 0;  // of all heads, rounded: what is left of the others hardly counts
    for (Index head = 0; head < heads(); ++head) {
      const KeySequence keys = keys_of(head);
      const KeyRange all = all_keys(keys);
      const Index size = long_parts_of(keys).size;
      whole_parts += (all.end - all.begin + size / 2) / size;
    }
    const auto seconds = [&](Index groups) {
      return static_cast<double>(ceil_div(whole_parts * groups, Index{workers})) *
             (static_cast<double>(ceil_div(panels_, groups)) + packing_in_panels);
    };
    tasks_per_head_ = ceil_div(panels_, tuning::max_panels_per_task);
    for (Index groups = tasks_per_head_; groups <= panels_; ++groups)
      if (seconds(groups) < seconds(tasks_per_head_)) tasks_per_head_ = groups;
  }
  // How many heads go through the loops together.
  Index heads_at_once(int workers) const {
    if (blocks_ > 0) return workers;
    // Each of them has memory for all of its parts: no more than workers need.
    constexpr Index few = 16, most_floats = Index{1} << 24;
    const Index floats = long_parts_ * panels_ * width * call_.arithmetic->sum_rows(call_.v_dim);
    return std::max(ceil_div(2 * Index{workers}, long_parts_ * tasks_per_head_),
                    std::min(few, most_floats / floats));
  }
  void pack_panel(Index head, PartedHead& parted, Index panel, int worker) {
    const KeySequence keys = keys_of(head);
    HeadAttention(keys, panel, 1, parted.queries, parted.parts[0], s_.heads[worker]).pack_panels();
  }
  void attend_long_part(Index head, PartedHead& parted, Index task, int worker) {
    const KeySequence keys = keys_of(head);
    const Index i = task / tasks_per_head_, first = task % tasks_per_head_ * panels_per_task_;
    const Index panels = std::min(panels_per_task_, panels_ - first);
    if (panels <= 0) return;
    const LongParts parts = long_parts_of(keys);
    HeadAttention attention(keys, first, panels, parted.queries, parted.parts[i], s_.heads[worker]);
    const KeyRange all = attention.in_sight();
    const Index part = parts.part(i);
    const KeyRange range{std::max(all.begin, part * parts.size),
                         std::min(all.end, (part + 1) * parts.size)};
    SequenceBlocks blocks(keys, range.end, s_.heads[worker].blocks);
    attention.attend(blocks, range, HeadAttention::whole, part == 0);
  }
  void join_long_parts(Index head, PartedHead& parted, Index panel, int worker) {
    const KeySequence keys = keys_of(head);
    HeadAttention(keys, panel, 1, parted.queries, parted.parts[0], s_.heads[worker])
        .join_parts(parted.parts.begin(), long_parts_);
  }

  // Each block packed once for all panels of a head. Two tasks for each worker, so that uneven ones balance.
  void share_blocks(int workers) {
    for (Index head = 0; head < unlike_heads(); ++head)
      blocks_ = std::max(blocks_, blocks_of(keys_of(head)));
    const Index panels =
        std::clamp<Index>(panels_ * heads() / (2 * Index{workers}), 1, tuning::max_panels_per_task);
    tasks_per_head_ = ceil_div(panels_, panels);
  }
  KeyRange all_keys(const KeySequence& keys) const { return keys.in_sight(0, call_.q.len() - 1); }
  Index blocks_of(const KeySequence& keys) const {
    const KeyRange all = all_keys(keys);
    return std::max<Index>(1, ceil_div(all.end - all.begin, call_.block_keys()));
  }
  void pack_half_block(Index head, SharedHead& shared, Index task, int worker) {
    const KeySequence keys = keys_of(head);
    const KeyRange all = all_keys(keys);
    const Index block = task / 2, begin = all.begin + block * call_.block_keys();
    const KeyRange block_keys{begin, std::min(begin + call_.block_keys(), all.end)};
    if (block_keys.count() <= 0) return;
    SharedBlock& to = shared.blocks[block];
    const ArithmeticScope scope(*call_.arithmetic, s_.heads[worker].panel);
    if (task % 2 == 0)
      to.pack_keys(keys, block_keys);
    else
      to.pack_values(keys, block_keys);
  }
  void attend_to_blocks(Index head, SharedHead& shared, Index task, int worker) {
    const KeySequence keys = keys_of(head);
    const Index first = task * panels_per_task_;
    const Index panels = std::min(panels_per_task_, panels_ - first);
    if (panels <= 0) return;
    const KeyRange all = all_keys(keys);
    SharedBlocks blocks(call_, all, shared.blocks.begin());
    HeadAttention attention(keys, first, panels, s_.heads[worker]);
    attention.pack_panels();
    attention.attend(blocks, all, HeadAttention::whole, true);
    attention.finish();
  }
  // Of sequence b, where each query has keys of its own.
  Index parts_of_ranges(Index b) const {
    return std::clamp<Index>(listed_->ranges(call_, b), 1, tuning::max_parts);
  }
  // The most keys of a head that are in sight.
  Index most_keys(Index past_count) const {
    const Index all = past_count + call_.chunk_k.len();
    if (call_.window >= all) return all;
    return std::min(all, call_.window + call_.q.len() + call_.block_keys());
  }
  // The most parts that a head is cut into: not always those of the head with the most keys, whose
  // parts may be larger.
  [[gnu::noinline]] Index parts_of_a_head() const {
    Index most = 1;
    for (Index head = 0; head < (call_.listed() ? heads() : 1); ++head) {
      const Index keys = most_keys(keys_of(head).past_count());
      most = std::max(most, ceil_div(keys, size_of_parts(keys)));
    }
    return most;
  }
  Index size_of_parts(Index keys) const {
    return call_.is_a_token()
               ? part_keys(keys, 1,
                           std::max(tuning::token_part_keys,
                                    ceil_div(keys * call_.kv_heads, tuning::token_parts)))
               : part_keys(keys, call_.block_keys(), tuning::part_blocks * call_.block_keys());
  }
  // As many heads as leave enough tasks for the workers; results do not depend on it.
  Index heads_together(int workers) const {
    const Index wanted = ceil_div(tuning::tasks_per_worker * workers, call_.q.batch() * parts_);
    Index heads = std::max<Index>(1, call_.kv_heads / wanted);
    while (call_.kv_heads % heads != 0) --heads;
    return heads;
  }

  // All rows of a head, or a token's rows of heads side by side, over a part of their keys.
  void run_part(Index task, int worker) {
    const Index head = task / parts_ * heads_per_task(), part = task % parts_;
    const KeySequence keys = keys_of(head);
    if (listed_ != nullptr) {
      const Index ranges = listed_->ranges(call_, keys.b()), parts = parts_of_ranges(keys.b());
      const KeyRange own{ranges * std::min(part, parts) / parts,
                         ranges * std::min(part + 1, parts) / parts};
      return listed_->run_part(keys, panels_, own, part == 0, partials_.part(head, part),
                               s_.heads[worker], worker);
    }
    const KeyRange all = all_keys(keys);
    const Index size = size_of_parts(most_keys(keys.past_count()));  // of this head alone
    const Index begin = std::min(all.begin + part * size, all.end);
    const Index end = part + 1 == parts_ ? all.end : std::min(begin + size, all.end);
    if (step_ > 0) return run_token(head, part, {begin, end}, worker);
    SequenceBlocks blocks(keys, end, s_.heads[worker].blocks);
    HeadAttention attention(keys, 0, panels_, s_.heads[worker]);
    attention.pack_panels();
    attention.attend(blocks, {begin, end}, HeadAttention::whole, part == 0);
    attention.keep(partials_.part(head, part));
  }

  void run_token(Index head, Index part, const KeyRange& range, int worker) {
    const auto attention_of = [&](Index i) {
      return TokenAttention(keys_of(head + i), s_.token[worker].heads[i]);
    };
    const Index begin = std::min(std::max(range.begin, keys_of(head).begin_for(0)), range.end);
    const Index own = std::clamp(call_.past_k.len(), begin, range.end);  // the chunk's begins
    for (Index i = 0; i < step_; ++i) attention_of(i).start(part == 0);
    if (together_)
      attend_together(call_, head / call_.kv_heads, head % call_.kv_heads, step_, {begin, own},
                      attention_of);
    for (Index i = 0; i < step_; ++i) {
      attention_of(i).attend(together_ ? own : begin, range.end);
      attention_of(i).finish(partials_.part(head + i, part));
    }
  }

  void write(Index head, const PartialRows& rows) const {
    for (Index row = 0; row < call_.rows(); ++row)
      write_row(call_, head / call_.kv_heads, head % call_.kv_heads, row, rows.state[row],
                rows.out + row * call_.v_dim);
  }

  const AttentionCall& call_;
  AttentionScratch& s_;
  Partials& partials_;
  ListedWork* listed_ = nullptr;  // where each query has keys of its own
  Index panels_;                  // of a head
  Index tasks_per_head_ = 0, panels_per_task_ = 0;
  Index long_parts_ = 0;   // of a head's many keys; 0: not cut
  Index blocks_ = 0;       // of a head, packed once; 0: each task packs
  Index parts_ = 0;        // of a head's keys; 0: they are not cut
  Index step_ = 0;         // heads of a token that a task takes; 0: it is no token
  bool together_ = false;  // in turns
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
