// A batch of attention calls as lists of items of work, which workers take one after the other.
// run_calls() of attention.hpp makes the plan in each call and runs it.
//
//   item      some panels of a head, or a token's rows of a head, or of several; over all keys, or
//             over a part of them
//   panels    a head with many panels of query rows is cut into groups of them, each over all keys
//   parts     many keys are cut into parts, always and by their number alone (KeyParts). Where
//             groups keep the workers busy, one item attends to all parts and joins them
//             (joins_parts). Where they do not, each part is an item, and the last loop joins them.
//             Both give the same bits, so a sequence's results depend neither on the workers nor on
//             the other sequences of a batch. Decode, and lists with few panels, always have an
//             item for each part
//   blocks    if keys are too few for parts, each block is packed once for all groups, by items of
//             their own: packing a block takes longer than a panel's attention to it
//             (tuning::packing_panels), and 16 workers with a panel each would repeat it
//
// There are at most three parallel loops over all calls of a batch: pack blocks, attend to them,
// join parts. The costliest items are begun first.
#pragma once

#include <quoka/attention/key_sets.hpp>
#include <quoka/attention/parts.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- memory that items of a call share ----------------------------------------------------------

// Blocks of each head's keys that are packed once for all of its panels.
struct SharedBlocks {
  struct Block {
    BlockRows k, v;
    PackedBlock packed;
  };

  SharedBlocks() = default;
  SharedBlocks(Arena& arena, const AttentionCall& call, Index blocks_of_a_head)
      : count(blocks_of_a_head),
        key_bytes(round_up(call.arithmetic->key_bytes(call.q.dim()), 64)),
        value_bytes(round_up(call.arithmetic->value_bytes(call.v_dim), 64)),
        mixed_k_floats(call.mixed_k_floats()),
        mixed_v_floats(call.mixed_v_floats()),
        blocks(arena.take<Block>(call.heads() * count)),
        keys(arena.take<std::byte>(call.heads() * count * key_bytes)),
        values(arena.take<std::byte>(call.heads() * count * value_bytes)),
        mixed_k(arena.take<float>(call.heads() * mixed_k_floats)),
        mixed_v(arena.take<float>(call.heads() * mixed_v_floats)) {}

  Index count = 0;  // of a head; 0: none are packed before
  Index key_bytes = 0, value_bytes = 0, mixed_k_floats = 0, mixed_v_floats = 0;
  Block* blocks = nullptr;
  std::byte *keys = nullptr, *values = nullptr;
  float *mixed_k = nullptr, *mixed_v = nullptr;  // the one block of two formats, widened
};

// ---- items --------------------------------------------------------------------------------------

// A call, and how it is cut.
struct CallPlan {
  const AttentionCall* call;
  Driver attend = nullptr;   // run_calls() sets it
  double cost = 0;           // of a head, in multiply-adds, or what takes as long
  Index item_panels = 0;     // at first, those of a head
  Index item_heads = 1;      // of an item of decode, which take turns
  Index parts = 1;           // of a head's keys, each of them an item
  bool joins_parts = false;  // does an item attend to all of several parts and join them itself?
  Index blocks = 0;          // of a head's keys that are packed before; 0: none are
  // The most that `item_heads` and `parts` become, however long the cache grows. A single call
  // takes memory for as many, so that a decode loop does not allocate.
  Index most_heads = 1, most_parts = 1;
  SharedBlocks shared = {};
  Partials partials = {};

  double item_cost() const {
    const Index groups = ceil_div(call->panels(), item_panels);
    return cost * static_cast<double>(item_heads) / static_cast<double>(parts * groups);
  }
  // Takes memory that items share, with room for `most` parts: even if there is only one so far.
  void take(Arena& arena, Index most) {
    partials = most > 1 ? Partials(arena, *call, most) : Partials();
    if (blocks > 0) shared = SharedBlocks(arena, *call, blocks);
  }
};

// One block of a head's keys, or of its values, is packed.
struct PackItem {
  const CallPlan* plan;
  Index head;  // b * kv_heads + kv_head
  Index block;
  bool values;
};

// Some panels of a head's rows attend to one part of its keys, or to all of them. In decode it is a
// token's rows of several heads.
struct AttendItem {
  const CallPlan* plan;
  Index head, heads;  // the first one, and how many
  Index first_panel, panels;
  Index part;
};

// The last step of an item of decode or of lists: the sums of these rows become results of a part,
// or the output. Panels write their own.
inline void write_item(const AttendItem& item, const HeadQueries& rows, const RowSums& sums) {
  const AttentionCall& call = *item.plan->call;
  if (item.plan->parts == 1) return write_rows(call, rows, sums);
  const Index head = rows.b * call.kv_heads + rows.kv_head;
  copy(sums, rows.count, call.v_dim, item.plan->partials.part(head, item.part).from(rows.first));
}

// The parts of a panel are joined and written.
struct JoinItem {
  const CallPlan* plan;
  Index head, panel;
};

// The work of a batch of calls, cut into items. Their arithmetic and their visible cells must be
// set before.
class Plan {
 public:
  // The calls must outlive the plan.
  void make(std::span<const AttentionCall> batch, int workers) {
    calls.clear(), packs.clear(), attends.clear(), joins.clear(), order_.clear();
    double total = 0;
    for (const AttentionCall& call : batch) {
      calls.push_back({.call = &call, .cost = cost_of_a_head(call), .item_panels = call.panels()});
      total += calls.back().cost * static_cast<double>(call.heads());
    }
    for (CallPlan& call : calls) cut(total / workers, workers, call);
    for (const CallPlan& call : calls) order_.push_back(&call);
    sort(order_.data(), std::ssize(order_), [](const CallPlan* a, const CallPlan* b) {
      const double x = a->item_cost(), y = b->item_cost();
      return x > y || (x == y && a < b);
    });
    if (calls.size() == 1) reserve_items(calls[0]);
    for (const CallPlan* x : order_) add_items(*x);
  }

  std::vector<CallPlan> calls;
  // Items of the three loops, in the order in which they are begun.
  std::vector<PackItem> packs;
  std::vector<AttendItem> attends;
  std::vector<JoinItem> joins;

 private:
  // Keys that a head attends to, on average over heads: those that are kept and that a window
  // leaves to some query, or as many as its longest list names. For costs alone.
  static Index keys_of_a_head(const AttentionCall& call) {
    Index past = call.past_k.len();
    if (call.leaves_out()) {
      Index kept = 0;
      for (Index head = 0; head < call.heads(); ++head)
        kept += KeySequence(call, head).past_count();
      past = ceil_div(kept, call.heads());
    }
    const Index all = past + call.chunk_k.len();
    if (call.lists != nullptr && call.lists->most() < ceil_div(all, call.lists->block()))
      return call.lists->most() * call.lists->block();
    if (call.logits.window >= all) return all;
    return std::min(all, call.logits.window + call.q.len() + call.block_keys());
  }
  static double cost_of_a_head(const AttentionCall& call) {
    // Decode is bound by memory: it takes as long as this many rows would.
    constexpr Index token_rows = 8;
    const Index rows = call.is_decode() ? token_rows : call.panels() * kernel_sizes().panel_rows;
    return static_cast<double>(keys_of_a_head(call)) * static_cast<double>(rows) *
           static_cast<double>(call.q.dim() + call.v_dim);
  }
  // The largest f(keys) of all heads. They differ in their keys by lists of the past, or where a
  // mask hides all of a sequence's chunk.
  template <class F>
  static Index most_of(const AttentionCall& call, F&& f) {
    const Index heads = call.leaves_out() || call.logits.mask != nullptr ? call.heads() : 1;
    Index most = 1;
    for (Index head = 0; head < heads; ++head)
      most = std::max<Index>(most, f(KeySequence(call, head)));
    return most;
  }
  // Groups of panels of a head: enough of them for the workers, none too small to pay for its
  // packing unless workers would stand idle. workers_of_a_head: that its work keeps busy, if all
  // have as much to do.
  static Index groups_of(Index panels, double workers_of_a_head) {
    const Index for_cache = ceil_div(panels, kernel_sizes().panels_per_task);
    const auto whole = [](double x) { return static_cast<Index>(std::ceil(x)); };
    const Index for_balance = whole(tuning::tasks_per_worker * workers_of_a_head);
    const Index paying = std::max(ceil_div(panels, tuning::min_panels_per_task),
                                  std::min(panels, whole(workers_of_a_head)));
    return std::max(for_cache, std::min(for_balance, paying));
  }

  // share: what a worker has to do, in cost.
  static void cut(double share, int workers, CallPlan& x) {
    const AttentionCall& call = *x.call;
    const double workers_of_a_head = workers > 1 && share > 0 ? x.cost / share : 0;
    if (call.own_keys()) {
      cut_lists(groups_of(x.item_panels, workers_of_a_head), x);
    } else if (call.is_decode()) {
      x.most_parts = KeyParts::most_small;
      x.parts =
          most_of(call, [](const KeySequence& keys) { return KeyParts::of_decode(keys).count; });
      if (call.heads_interleaved())
        x.most_heads = call.kv_heads, x.item_heads = heads_of_an_item(call, x.parts, workers);
    } else {
      cut_panels(workers_of_a_head, workers, x);
    }
  }
  static void cut_panels(double workers_of_a_head, int workers, CallPlan& x) {
    const Index panels = x.item_panels,
                for_cache = ceil_div(panels, kernel_sizes().panels_per_task);
    Index groups = for_cache;
    const Index parts = most_of(
        *x.call, [&](const KeySequence& keys) { return KeyParts::of_panels(keys, panels).count; });
    x.joins_parts = parts > 1;
    if (tuning::tasks_per_worker * workers_of_a_head > static_cast<double>(for_cache)) {
      if (panels < tuning::min_panels_per_task) x.most_parts = KeyParts::most_small;
      if (parts > 1) {
        x.parts = parts, x.joins_parts = false;
        x.most_parts = std::max(x.most_parts, parts);
        groups = groups_of_parts(panels, x.call->heads() * parts, workers);
      } else if (groups_of(panels, workers_of_a_head) > for_cache) {
        // Two items for each worker, so that uneven ones balance.
        const auto of_an_item =
            static_cast<Index>(static_cast<double>(panels) / 2 / workers_of_a_head);
        groups = ceil_div(panels, std::clamp<Index>(of_an_item, 1, kernel_sizes().panels_per_task));
        x.blocks = most_of(*x.call, [&](const KeySequence& keys) {
          return ceil_div(keys.range().count(), x.call->block_keys());
        });
      }
    }
    x.item_panels = ceil_div(panels, groups);
  }
  // Groups of panels by which items of each part take the least time. A panel's share of packing is
  // more with fewer.
  static Index groups_of_parts(Index panels, Index parts_of_all, int workers) {
    const auto seconds = [&](Index groups) {
      return static_cast<double>(ceil_div(parts_of_all * groups, Index{workers})) *
             (static_cast<double>(ceil_div(panels, groups)) + double{tuning::packing_panels});
    };
    Index best = ceil_div(panels, kernel_sizes().panels_per_task);
    for (Index groups = best; groups <= panels; ++groups)
      if (seconds(groups) < seconds(best)) best = groups;
    return best;
  }
  static void cut_lists(Index groups, CallPlan& x) {
    if (x.item_panels < tuning::min_panels_per_task)
      x.parts = ListRanges(*x.call).parts(), x.most_parts = tuning::max_parts;
    if (x.parts == 1) x.item_panels = ceil_div(x.item_panels, groups);
  }
  // As many heads of a token as leave enough items for the workers; results do not depend on it.
  static Index heads_of_an_item(const AttentionCall& call, Index parts, int workers) {
    const Index wanted = ceil_div(tuning::tasks_per_worker * workers, call.q.batch() * parts);
    Index heads = std::max<Index>(1, call.kv_heads / wanted);
    while (call.kv_heads % heads != 0) --heads;
    return heads;
  }

  // Room for those of a single call when the cache or its Selection has grown: a decode loop must
  // not allocate. Groups of few panels depend on the parts.
  void reserve_items(const CallPlan& x) {
    if (x.most_parts == 1) return;
    const Index panels = x.call->panels(), groups = panels < tuning::min_panels_per_task
                                                        ? panels
                                                        : ceil_div(panels, x.item_panels);
    attends.reserve(static_cast<std::size_t>(x.call->heads() * groups * x.most_parts));
    joins.reserve(static_cast<std::size_t>(x.call->heads() * panels));
  }
  void add_items(const CallPlan& x) {
    const Index heads = x.call->heads(), panels = x.call->panels();
    for (Index head = 0; head < heads; ++head)
      for (Index block = 0; block < x.blocks; ++block)
        for (const bool values : {false, true}) packs.push_back({&x, head, block, values});
    for (Index head = 0; head < heads; head += x.item_heads)
      for (Index first = 0; first < panels; first += x.item_panels)
        for (Index part = 0; part < x.parts; ++part)
          attends.push_back(
              {&x, head, x.item_heads, first, std::min(x.item_panels, panels - first), part});
    for (Index head = 0; x.parts > 1 && head < heads; ++head)
      for (Index panel = 0; panel < panels; ++panel) joins.push_back({&x, head, panel});
  }

  std::vector<const CallPlan*> order_;  // those with the costliest items first
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
