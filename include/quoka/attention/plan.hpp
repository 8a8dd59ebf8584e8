// A batch of attention calls as a list of items of work, which workers take one after the other. attention.hpp makes
// the plan in each call; RunItems, below, sends each item to attend_panels(), attend_decode() or attend_lists().
//
//   item      some panels of a head, or a token's rows of a head, or of several; over all keys, or over a part of them
//   panels    a head with many panels of query rows is cut into groups of them, each over all keys
//   parts     where that leaves workers idle, a group over each part of the keys, joined in the end. How keys are cut
//             depends on their number alone (KeyParts), so a sequence's results depend neither on the workers nor on
//             the other sequences of a batch
//   blocks    if keys are too few for parts, each block is packed once for all groups, by items of their own: packing a
//             block takes as long as attending to it with 1.3 panels, and 16 workers with a panel each would repeat it
//
// All blocks are packed before items attend to them, and all parts attended to before they join: three parallel loops
// at most, over all calls of a batch. The costliest items are begun first.
#pragma once

#include <quoka/attention/attend_lists.hpp>
#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/attend_decode.hpp>
#include <quoka/base/sort.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A call, and how it is cut.
struct CallPlan {
  enum class Kind { panels, decode, lists };

  const AttentionCall* call;
  Kind kind = Kind::panels;
  double cost = 0;     // of a head, in multiply-adds, or what takes as long
  Index panels = 0;    // of an item
  Index heads = 1;     // of an item of decode, which take turns
  Index parts = 1;     // of a head's keys, each of them an item
  bool walks = false;  // does an item attend to several parts, one after the other?
  Index blocks = 0;    // of a head's keys that are packed before; 0: none are
  Index most_heads = 1, most_parts = 1;  // when the cache has grown
  // Memory that items share: packed blocks of each head, and partial results.
  SharedBlocks shared = {};
  Partials partials = {};

  bool joins() const { return parts > 1 || kind == Kind::decode; }
  double item_cost() const {
    const Index groups = ceil_div(call->panels(), panels);
    return cost * static_cast<double>(heads) / static_cast<double>(parts * groups);
  }
  // Takes memory that items share, with room for `most` parts.
  void take(Arena& arena, Index most) {
    if (joins()) partials = Partials(arena, *call, most);
    if (blocks > 0) shared = SharedBlocks(arena, *call, blocks);
  }
  // Memory of a worker. alone: with room for what a single call needs when the cache has grown.
  void take_scratch(Arena& arena, bool alone) const {
    if (kind == Kind::decode)
      token_heads(arena, *call, 0, alone ? most_heads : heads);
    else if (kind == Kind::lists)
      ListPanels(arena, *call, 0, 0, panels);
    else
      PanelAttention(arena, *call, 0, 0, panels, walks);
  }
};

struct Item {
  const CallPlan* of;
  Index head;          // b * kv_heads + kv_head; of decode, the first of CallPlan::heads
  Index first, count;  // panels, or a block
  Index part;          // of the keys; of a block: 0 keys, 1 values
};

// The work of a batch of calls, cut into items. Their arithmetic and their visible cells must be set before.
class Plan {
 public:
  // The calls must outlive the plan.
  void make(std::span<const AttentionCall> batch, int workers) {
    calls.clear(), order_.clear(), items_.clear();
    double total = 0;
    for (const AttentionCall& call : batch)
      total += cost_of_a_head(call) * static_cast<double>(call.heads());
    for (const AttentionCall& call : batch) calls.push_back(cut(call, total / workers, workers));
    for (const CallPlan& call : calls) order_.push_back(&call);
    sort(order_.data(), std::ssize(order_), [](const CallPlan* a, const CallPlan* b) {
      const double x = a->item_cost(), y = b->item_cost();
      return x > y || (x == y && a < b);
    });
    if (calls.size() == 1) reserve_items(calls[0]);
    for (const CallPlan* x : order_) add_blocks(*x);
    ends_[0] = items_.size();
    for (const CallPlan* x : order_) add_rows(*x);
    ends_[1] = items_.size();
    for (const CallPlan* x : order_) add_joins(*x);
    ends_[2] = items_.size();
  }

  // In this order, each of them a parallel loop.
  enum class Phase { pack, attend, join };
  static constexpr Phase phases[] = {Phase::pack, Phase::attend, Phase::join};
  std::span<const Item> items(Phase phase) const {
    const auto i = static_cast<std::size_t>(phase);
    const std::size_t begin = i > 0 ? ends_[i - 1] : 0;
    return std::span(items_).subspan(begin, ends_[i] - begin);
  }

  std::vector<CallPlan> calls;

 private:
  // A block of keys is packed in the time that this many panels take to attend to it.
  static constexpr double packing_in_panels = 1.3;

  // The most keys of a head that are in sight.
  static Index most_keys(const AttentionCall& call) {
    const Index all = call.past_k.len() + call.chunk_k.len();
    if (call.logits.window >= all) return all;
    return std::min(all, call.logits.window + call.q.len() + call.block_keys());
  }
  static double cost_of_a_head(const AttentionCall& call) {
    // Decode is bound by memory: it takes as long as this many rows would.
    constexpr Index token_rows = 8;
    const Index rows = call.is_decode() ? token_rows : call.panels() * kernel_sizes().panel_rows;
    return static_cast<double>(most_keys(call)) * static_cast<double>(rows) *
           static_cast<double>(call.q.dim() + call.v_dim);
  }
  // The largest f(keys) of all heads. They differ in their keys by lists of the past, or where a mask hides all of a
  // sequence's chunk.
  template <class F>
  static Index most_of(const AttentionCall& call, F&& f) {
    const Index heads = call.gathers() || call.logits.mask != nullptr ? call.heads() : 1;
    Index most = 1;
    for (Index head = 0; head < heads; ++head)
      most = std::max<Index>(most, f(KeySequence(call, head)));
    return most;
  }
  // Groups of panels of a head: enough of them for the workers, none too small to pay for its packing unless workers
  // would stand idle. workers_of_a_head: that its work keeps busy, if all have as much to do.
  static Index groups_of(Index panels, double workers_of_a_head) {
    const Index for_cache = ceil_div(panels, kernel_sizes().panels_per_task);
    const auto whole = [](double x) { return static_cast<Index>(std::ceil(x)); };
    const Index for_balance = whole(tuning::tasks_per_worker * workers_of_a_head);
    const Index paying = std::max(ceil_div(panels, tuning::min_panels_per_task),
                                  std::min(panels, whole(workers_of_a_head)));
    return std::max(for_cache, std::min(for_balance, paying));
  }

  // share: what a worker has to do, in cost.
  static CallPlan cut(const AttentionCall& call, double share, int workers) {
    CallPlan x{.call = &call, .cost = cost_of_a_head(call), .panels = call.panels()};
    const double workers_of_a_head = workers > 1 && share > 0 ? x.cost / share : 0;
    if (call.own_keys()) {
      cut_lists(groups_of(x.panels, workers_of_a_head), x);
    } else if (call.is_decode()) {
      x.kind = CallPlan::Kind::decode;
      x.most_parts = KeyParts::most_small;
      x.parts =
          most_of(call, [](const KeySequence& keys) { return KeyParts::of_decode(keys).count; });
      if (in_turns(call))
        x.most_heads = call.kv_heads, x.heads = heads_in_turns(call, x.parts, workers);
    } else {
      cut_panels(workers_of_a_head, workers, x);
    }
    return x;
  }
  static void cut_panels(double workers_of_a_head, int workers, CallPlan& x) {
    const Index panels = x.panels, for_cache = ceil_div(panels, kernel_sizes().panels_per_task);
    Index groups = for_cache;
    const Index parts = most_of(
        *x.call, [&](const KeySequence& keys) { return KeyParts::of_panels(keys, panels).count; });
    x.walks = parts > 1;
    if (tuning::tasks_per_worker * workers_of_a_head > static_cast<double>(for_cache)) {
      if (parts > 1) {
        x.parts = parts, x.walks = false;
        x.most_parts = panels < tuning::min_panels_per_task ? KeyParts::most_small : parts;
        groups = groups_of_parts(panels, x.call->heads() * parts, workers);
      } else if (groups_of(panels, workers_of_a_head) > for_cache) {
        // Two items for each worker, so that uneven ones balance.
        const auto of_an_item =
            static_cast<Index>(static_cast<double>(panels) / 2 / workers_of_a_head);
        groups = ceil_div(panels, std::clamp<Index>(of_an_item, 1, kernel_sizes().panels_per_task));
        x.blocks = most_of(*x.call, [&](const KeySequence& keys) {
          return ceil_div(keys.in_sight().count(), x.call->block_keys());
        });
      }
    }
    x.panels = ceil_div(panels, groups);
  }
  // Groups of panels by which items of each part take the least time. A panel's share of packing is more with fewer.
  static Index groups_of_parts(Index panels, Index parts_of_all, int workers) {
    const auto seconds = [&](Index groups) {
      return static_cast<double>(ceil_div(parts_of_all * groups, Index{workers})) *
             (static_cast<double>(ceil_div(panels, groups)) + packing_in_panels);
    };
    Index best = ceil_div(panels, kernel_sizes().panels_per_task);
    for (Index groups = best; groups <= panels; ++groups)
      if (seconds(groups) < seconds(best)) best = groups;
    return best;
  }
  static void cut_lists(Index groups, CallPlan& x) {
    x.kind = CallPlan::Kind::lists;
    if (x.panels < tuning::min_panels_per_task) x.parts = ListRanges(*x.call).parts();
    x.most_parts = tuning::max_parts;
    if (x.parts == 1) x.panels = ceil_div(x.panels, groups);
  }
  // As many heads of a token as leave enough items for the workers; results do not depend on it.
  static Index heads_in_turns(const AttentionCall& call, Index parts, int workers) {
    const Index wanted = ceil_div(tuning::tasks_per_worker * workers, call.q.batch() * parts);
    Index heads = std::max<Index>(1, call.kv_heads / wanted);
    while (call.kv_heads % heads != 0) --heads;
    return heads;
  }

  // Room for those of a single call when the cache has grown: a decode loop must not allocate.
  void reserve_items(const CallPlan& x) {
    if (x.most_parts == 1) return;
    const Index panels = x.call->panels(), groups = ceil_div(panels, x.panels);
    items_.reserve(static_cast<std::size_t>(x.call->heads() * (groups * x.most_parts + panels)));
  }
  void add_blocks(const CallPlan& x) {
    for (Index head = 0; x.blocks > 0 && head < x.call->heads(); ++head)
      for (Index block = 0; block < x.blocks; ++block)
        for (const Index half : {0, 1}) items_.push_back({&x, head, block, 1, half});
  }
  void add_rows(const CallPlan& x) {
    const Index panels = x.call->panels();
    for (Index head = 0; head < x.call->heads(); head += x.heads)
      for (Index first = 0; first < panels; first += x.panels)
        for (Index part = 0; part < x.parts; ++part)
          items_.push_back({&x, head, first, std::min(x.panels, panels - first), part});
  }
  // One for each panel.
  void add_joins(const CallPlan& x) {
    for (Index head = 0; x.joins() && head < x.call->heads(); ++head)
      for (Index i = 0; i < x.call->panels(); ++i) items_.push_back({&x, head, i, 1, 0});
  }

  std::vector<Item> items_;
  std::size_t ends_[3] = {};            // of the phases
  std::vector<const CallPlan*> order_;  // those with the costliest items first
};

// Items of a phase, as an executor runs them.
struct RunItems {
  std::span<const Item> items;
  Plan::Phase phase;
  const Arenas& workers;  // scratch of each

  void operator()(Index i, int worker) const {
    const auto& [plan, head, first, count, part] = items[static_cast<std::size_t>(i)];
    const AttentionCall& call = *plan->call;
    const SharedBlocks shared = plan->shared.of_head(head);
    const Arena arena = workers[worker];
    if (phase == Plan::Phase::pack)
      pack_shared(call, head, first, part == 1, shared);
    else if (phase == Plan::Phase::join)
      join_parts(call, plan->partials, head, first * kernel_sizes().panel_rows,
                 kernel_sizes().panel_rows);
    else if (plan->kind == CallPlan::Kind::decode)
      attend_decode(call, head, plan->heads, part, plan->partials, arena);
    else if (plan->kind == CallPlan::Kind::lists)
      call.attend_lists()(call, head, first, count, part, plan->partials, arena);
    else
      attend_panels(call, head, first, count, part, plan->partials, shared, arena);
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
