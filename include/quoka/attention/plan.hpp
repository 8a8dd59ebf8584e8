// Who does what: attention calls as a list of items, which workers take one after the other.
//
//   item      some panels of a head, or a token's rows of a head, or of several; over all keys, or over a part of them
//   panels    a head with many panels of query rows is cut into groups of them, each over all keys
//   parts     where that leaves workers idle, a group over each part of the keys, joined in the end. How keys are cut
//             depends on their number alone (KeyParts), so a sequence's results depend neither on the workers nor on
//             the other sequences of a batch
//   blocks    of keys too few for parts are packed once for all groups, by items of their own: packing a block takes as
//             long as attending to it with 1.3 panels, which 16 workers that take a panel each would all do again
//
// All blocks are packed before items attend to them, and all parts attended to before they join: three parallel loops
// at most, over all calls of a batch. The costliest items are begun first.
#pragma once

#include <quoka/attention/attend_lists.hpp>
#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/attend_token.hpp>
#include <quoka/base/sort.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// How a call is cut.
struct Cut {
  enum class Kind { panels, token, lists };

  Kind kind = Kind::panels;
  Index panels = 0;                      // of an item
  Index heads = 1;                       // of a token's item, which take turns
  Index parts = 1;                       // of a head's keys, each of them an item
  Index walked = 1;                      // parts that one item attends to, one after the other
  Index blocks = 0;                      // of a head's keys that are packed before; 0: none are
  double cost = 0;                       // of a head, in multiply-adds, or what takes as long
  Index most_heads = 1, most_parts = 1;  // when the cache has grown

  // Is there something to join?
  bool in_parts() const { return parts > 1; }
};

// What the items of a call share.
struct SharedMemory {
  SharedMemory() = default;
  SharedMemory(Arena& arena, const AttentionCall& call, const Cut& cut, Index parts) {
    if (cut.blocks > 0) {
      blocks = arena.take<SharedBlocks>(call.heads());
      for (Index head = 0; head < call.heads(); ++head) {
        const SharedBlocks of_head(arena, call, cut.blocks);
        if (blocks != nullptr) blocks[head] = of_head;
      }
    }
    if (cut.kind == Cut::Kind::panels && cut.in_parts())
      sums = PanelSums(arena, call, call.heads() * parts * call.panels());
    if (cut.kind == Cut::Kind::token || (cut.kind == Cut::Kind::lists && cut.in_parts()))
      partials = Partials(arena, call, parts);
  }

  SharedBlocks* blocks = nullptr;  // [heads]
  PanelSums sums;                  // [heads, parts, panels]
  Partials partials;               // of a token, and of lists
};

struct Item {
  Index call;          // of the batch
  Index head;          // b * kv_heads + kv_head
  Index first, count;  // panels, heads of a token from `head` on, or a block
  Index part;          // of the keys; of a block: 0 keys, 1 values
};

// Of calls whose arithmetic is known, and what masks leave.
class Plan {
 public:
  void make(std::span<const AttentionCall> calls, int workers) {
    calls_ = calls;
    cuts.clear(), items_.clear(), order_.clear();
    double total = 0;
    for (const AttentionCall& call : calls)
      total += cost_of_a_head(call) * static_cast<double>(call.heads());
    for (const AttentionCall& call : calls) cuts.push_back(cut(call, total / workers, workers));
    if (calls.size() == 1) reserve_items(calls[0], cuts[0]);
    for (Index i = 0; i < std::ssize(calls); ++i) order_.push_back(i);
    sort(order_.data(), std::ssize(order_), [&](Index a, Index b) {
      const double x = item_cost(a), y = item_cost(b);
      return x > y || (x == y && a < b);
    });
    for (const Index i : order_) add_blocks(i);
    ends_[0] = std::ssize(items_);
    for (const Index i : order_) add_rows(i);
    ends_[1] = std::ssize(items_);
    for (const Index i : order_) add_joins(i);
    ends_[2] = std::ssize(items_);
  }

  // In this order, each of them a parallel loop.
  enum class Phase { pack, attend, join };
  static constexpr Phase phases[] = {Phase::pack, Phase::attend, Phase::join};
  // Numbers of a phase's items.
  KeyRange items(Phase phase) const {
    const int i = static_cast<int>(phase);
    return {i > 0 ? ends_[i - 1] : 0, ends_[i]};
  }
  const Item& item(Index i) const { return items_[static_cast<std::size_t>(i)]; }

  std::vector<Cut> cuts;  // of each call

 private:
  // A block of keys is packed in the time that so many panels take to attend to it.
  static constexpr double packing_in_panels = 1.3;

  // The most keys of a head that are in sight.
  static Index most_keys(const AttentionCall& call) {
    const Index all = call.past_k.len() + call.chunk_k.len();
    if (call.window >= all) return all;
    return std::min(all, call.window + call.q.len() + call.block_keys());
  }
  static double cost_of_a_head(const AttentionCall& call) {
    constexpr Index token_rows = 8;  // a token is bound by memory, as if its heads had so many
    const Index rows = call.is_a_token() ? token_rows : call.panels() * tuning::panel_rows;
    return static_cast<double>(most_keys(call)) * static_cast<double>(rows) *
           static_cast<double>(call.q.dim() + call.v_dim);
  }
  double item_cost(Index call) const {
    const Cut& x = cuts[static_cast<std::size_t>(call)];
    const Index panels = calls_[static_cast<std::size_t>(call)].panels();
    return x.cost * static_cast<double>(x.heads) /
           static_cast<double>(x.parts * ceil_div(panels, x.panels));
  }
  // f(keys) of each head that may have another number of keys than those before: by lists of the past, or where a mask
  // hides all of a sequence's chunk.
  template <class F>
  static void for_unlike_heads(const AttentionCall& call, F&& f) {
    const Index heads = call.listed() || call.mask != nullptr ? call.heads() : 1;
    for (Index head = 0; head < heads; ++head) f(KeySequence(call, head));
  }
  // Groups of panels of a head: enough of them for the workers, none too small to pay for its packing unless workers
  // would stand idle. workers_of_a_head: that its work keeps busy, if all have as much to do.
  static Index groups_of(Index panels, double workers_of_a_head) {
    const Index for_cache = ceil_div(panels, tuning::max_panels_per_task);
    const auto whole = [](double x) { return static_cast<Index>(std::ceil(x)); };
    const Index for_balance = whole(tuning::tasks_per_worker * workers_of_a_head);
    const Index paying = std::max(ceil_div(panels, tuning::min_panels_per_task),
                                  std::min(panels, whole(workers_of_a_head)));
    return std::max(for_cache, std::min(for_balance, paying));
  }

  // share: what a worker has to do, in cost.
  static Cut cut(const AttentionCall& call, double share, int workers) {
    Cut x;
    x.cost = cost_of_a_head(call);
    const Index panels = x.panels = call.panels();
    const double workers_of_a_head = share > 0 ? x.cost / share : 1;
    if (call.own_keys()) {
      cut_lists(call, groups_of(panels, workers > 1 ? workers_of_a_head : 0), x);
    } else if (call.is_a_token()) {
      x.kind = Cut::Kind::token;
      x.parts = most_token_parts(call), x.most_parts = tuning::max_parts;
      if (in_turns(call)) {
        x.most_heads = call.kv_heads;
        x.heads = heads_in_turns(call, x.parts, workers);
      }
    } else {
      for_unlike_heads(call, [&](const KeySequence& keys) {
        x.walked = std::max(x.walked, KeyParts::of_panels(keys, panels).count);
      });
      cut_panels(call, workers_of_a_head, workers, x);
    }
    return x;
  }
  static void cut_panels(const AttentionCall& call, double workers_of_a_head, int workers, Cut& x) {
    const Index panels = x.panels, for_cache = ceil_div(panels, tuning::max_panels_per_task);
    const double wanted = tuning::tasks_per_worker * workers_of_a_head;
    Index groups = for_cache;
    if (workers > 1 && wanted > static_cast<double>(for_cache)) {
      if (x.walked > 1) {
        x.parts = x.walked, x.walked = 1;
        x.most_parts = panels < tuning::min_panels_per_task ? tuning::max_parts + 2 : x.parts;
        groups = groups_of_parts(panels, call.heads() * x.parts, workers);
      } else if (groups_of(panels, workers_of_a_head) > for_cache) {
        // Two items for each worker, so that uneven ones balance.
        groups = ceil_div(panels, std::clamp<Index>(static_cast<Index>(static_cast<double>(panels) /
                                                                       (2 * workers_of_a_head)),
                                                    1, tuning::max_panels_per_task));
        for_unlike_heads(call, [&](const KeySequence& keys) {
          x.blocks =
              std::max({x.blocks, Index{1}, ceil_div(keys.in_sight().count(), call.block_keys())});
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
    Index best = ceil_div(panels, tuning::max_panels_per_task);
    for (Index groups = best; groups <= panels; ++groups)
      if (seconds(groups) < seconds(best)) best = groups;
    return best;
  }
  static void cut_lists(const AttentionCall& call, Index groups, Cut& x) {
    x.kind = Cut::Kind::lists;
    if (x.panels < tuning::min_panels_per_task) x.parts = listed_parts(call);
    x.most_parts = tuning::max_parts;
    if (!x.in_parts()) x.panels = ceil_div(x.panels, groups);
  }
  // As many heads of a token as leave enough items for the workers; results do not depend on it.
  static Index heads_in_turns(const AttentionCall& call, Index parts, int workers) {
    const Index wanted = ceil_div(tuning::tasks_per_worker * workers, call.q.batch() * parts);
    Index heads = std::max<Index>(1, call.kv_heads / wanted);
    while (call.kv_heads % heads != 0) --heads;
    return heads;
  }

  // Room for those of a single call when the cache has grown: a decode loop must not allocate.
  void reserve_items(const AttentionCall& call, const Cut& x) {
    if (x.most_parts == 1) return;
    const Index groups = ceil_div(call.panels(), x.panels);
    items_.reserve(
        static_cast<std::size_t>(call.heads() * (groups * x.most_parts + call.panels())));
  }
  void add_blocks(Index call) {
    const Cut& x = cuts[static_cast<std::size_t>(call)];
    for (Index head = 0; x.blocks > 0 && head < calls_[static_cast<std::size_t>(call)].heads();
         ++head)
      for (Index block = 0; block < x.blocks; ++block)
        for (const Index half : {0, 1}) items_.push_back({call, head, block, 1, half});
  }
  void add_rows(Index call) {
    const AttentionCall& of = calls_[static_cast<std::size_t>(call)];
    const Cut& x = cuts[static_cast<std::size_t>(call)];
    if (x.kind == Cut::Kind::token) {
      for (Index head = 0; head < of.heads(); head += x.heads)
        for (Index part = 0; part < x.parts; ++part)
          items_.push_back({call, head, 0, x.heads, part});
      return;
    }
    for (Index head = 0; head < of.heads(); ++head)
      for (Index first = 0; first < of.panels(); first += x.panels)
        for (Index part = 0; part < x.parts; ++part)
          items_.push_back({call, head, first, std::min(x.panels, of.panels() - first), part});
  }
  void add_joins(Index call) {
    const AttentionCall& of = calls_[static_cast<std::size_t>(call)];
    const Cut& x = cuts[static_cast<std::size_t>(call)];
    if (!x.in_parts() && x.kind != Cut::Kind::token) return;
    const Index panels = x.kind == Cut::Kind::panels ? of.panels() : 1;
    for (Index head = 0; head < of.heads(); ++head)
      for (Index p = 0; p < panels; ++p) items_.push_back({call, head, p, 1, 0});
  }

  std::span<const AttentionCall> calls_;
  std::vector<Item> items_;
  Index ends_[3] = {};        // of the phases
  std::vector<Index> order_;  // of the calls, those with the costliest items first
};

// One of them, by a worker with its memory.
inline void run_item(const AttentionCall& call, const Cut& cut, const SharedMemory& shared,
                     const Item& x, Plan::Phase phase, Arena arena) {
  const auto sums_of = [&](Index part) {
    return shared.sums.from((x.head * cut.parts + part) * call.panels());
  };
  switch (phase) {
    case Plan::Phase::pack:
      return pack_shared(call, x.head, x.first, x.part == 1, shared.blocks[x.head], arena);
    case Plan::Phase::join:
      if (cut.kind == Cut::Kind::panels)
        return join_parts(call, x.head, x.first, sums_of(0), arena);
      return join_partials(call, shared.partials, x.head);
    case Plan::Phase::attend:
      break;
  }
  if (cut.kind == Cut::Kind::token)
    return attend_token(call, x.head, x.count, x.part, shared.partials, arena);
  if (cut.kind == Cut::Kind::lists)
    return attend_lists(call, x.head, x.first, x.count, x.part, shared.partials, arena);
  if (cut.in_parts())
    return attend_part(call, x.head, x.first, x.count, x.part, sums_of(x.part), arena);
  attend_panels(call, x.head, x.first, x.count, cut.blocks > 0 ? &shared.blocks[x.head] : nullptr,
                arena);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
