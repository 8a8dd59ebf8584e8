// Selection where some queries do not see some cells of the past: other sequences' cells, padding,
// holes, a prefix that only a part of the chunk sees.
//
//   const AttentionOptions options{.mask = mask};         // rows/mask.hpp
//   select_visible(selector, {.q = q, .k = past_k, .logits = options}, mask, state, selection,
//                  executor);
//   attention(q, {past_k, past_v, selection}, {k, v}, out, options, executor);
//
// The selector considers the cells that every query of the chunk may see, and reads no other cell's
// key. Cells that only some queries may see are kept as well, outside the budget: attention's mask
// says which queries see them. Selection uses only which cells a mask hides: numbers that the mask
// adds to the logits of visible cells change no score.
#pragma once

#include <quoka/rows/mask.hpp>
#include <quoka/select/selector.hpp>

#include <algorithm>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// Empties a State now and when this ends: in between it is scratch.
template <class State>
struct AsScratch {
  State& state;

  explicit AsScratch(State& used) : state(used) { state.truncate(0); }
  ~AsScratch() { state.truncate(0); }
  AsScratch(const AsScratch&) = delete;
  AsScratch& operator=(const AsScratch&) = delete;
};

// Uses the State as scratch only: some of its keys are hidden, so the others have moved up.
template <class S>
void select_by_scratch(const S& selector, const SelectorInput& input, typename S::State& state,
                       Selection& selection, ExecutorRef executor) {
  // This State keeps nothing per key. Layers that share a choice would lose it by truncate(0).
  if constexpr (!requires { state.kept_bytes(); }) {
    selector.select(input, state, selection, executor);
  } else if (state.kept_len() > 0 && state.kept_bytes() > 0) {
    typename S::State own;
    selector.select(input, own, selection, executor);
  } else {
    const AsScratch<typename S::State> scratch(state);
    selector.select(input, state, selection, executor);
  }
}

}  // namespace detail

// input.k [1, kv_heads, past_len, head_dim] is the whole past, as for select(); selection is of its
// cells.
//
// A State covers all cells, in the order of the past: appended() adds them, whatever masks hide. If
// all queries see all cells, select() uses what the State keeps of them. Otherwise the selector
// recomputes its data of the visible cells in each call, and the State's own data stay as they are.
// That is slower, and allocates; a sketch of the cache (SelectorInput::sketch) serves any cells.
// Throws std::invalid_argument as select() does, if `visible` is of more cells than there are, and
// if cells are hidden from a method that evicts, because its dropped keys cannot be restored.
template <Selector S>
void select_visible(const S& selector, SelectorInput input, const VisibleCells& visible,
                    typename S::State& state, Selection& selection,
                    ExecutorRef executor = SerialExecutor{}) {
  const Rows past = input.k;
  const Index len = past.len(), to_all = std::ssize(visible.to_all),
              to_some = std::ssize(visible.to_some), heads = past.heads();
  detail::require_equal("k's batch", past.batch(), "one sequence", 1);
  for (const auto* cells : {&visible.to_all, &visible.to_some})
    if (!cells->empty())
      detail::require_at_most("a visible cell", cells->back(), "the last", len - 1);
  if (input.logits) input.logits->masked = false;  // from here on every query sees every key
  if (to_all == len) return selector.select(input, state, selection, executor);
  if constexpr (requires { requires S::evicts; })
    detail::fail("the number of cells that all queries see", to_all,
                 "but a method that evicts goes by what it retains of all cells (attend without a "
                 "State, or take a method that scores): it must be",
                 "the past's len", len);

  Selection chosen;
  std::vector<float> norms;
  std::vector<Position> joined;  // where the past is a list itself
  if (to_all > 0) {
    const bool prefix = visible.to_all.back() == to_all - 1;
    const auto in_sight = [&](const Rows& rows) {
      return prefix ? rows.slice(0, to_all) : rows.gathered(visible.to_all, joined);
    };
    input.k = in_sight(past);
    if (!input.inverse_norms.absent() && prefix) {
      input.inverse_norms = input.inverse_norms.slice(0, to_all);
    } else if (!input.inverse_norms.absent()) {
      norms.reserve(static_cast<std::size_t>(heads * to_all));
      for (Index head = 0; head < heads; ++head)
        for (const Position cell : visible.to_all)
          norms.push_back(input.inverse_norms.at(0, head, cell));
      input.inverse_norms = {norms.data(), {1, heads, to_all}, {heads * to_all, to_all, 1}};
    }
    detail::select_by_scratch(selector, input, state, chosen, executor);
  } else {
    chosen.select_none(1, heads, 0);
  }
  SelectionWriter writer(selection, 1, chosen.heads(), len,
                         (chosen.is_all() ? to_all : chosen.max_count()) + to_some);
  std::vector<Position> cells;
  for (Index head = 0; head < chosen.heads(); ++head) {
    cells.clear();
    if (chosen.is_all())
      cells = visible.to_all;
    else
      for (const Position i : chosen.row(0, head))
        cells.push_back(visible.to_all[static_cast<std::size_t>(i)]);
    std::merge(cells.begin(), cells.end(), visible.to_some.begin(), visible.to_some.end(),
               writer.row(0, head).begin());
    writer.set_count(0, head, std::ssize(cells) + to_some);
  }
  writer.commit();
}

// The same by a mask of the sequence, over the past's columns first; absent: every query sees every
// cell, and the batch is as select() takes it.
template <Selector S>
void select_visible(const S& selector, const SelectorInput& input, const Mask& mask,
                    typename S::State& state, Selection& selection,
                    ExecutorRef executor = SerialExecutor{}) {
  if (mask.absent()) return selector.select(input, state, selection, executor);
  select_visible(selector, input, VisibleCells(mask, input.k.len(), 0, executor), state, selection,
                 executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
