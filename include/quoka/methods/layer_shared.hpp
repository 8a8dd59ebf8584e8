// Selectors that choose at some layers and let the others reuse the choice.
//
//   layer < first_sparse                 dense
//   layer == first_sparse, or
//   0.4 * layer_count, rounded           chooses again from all queries of the chunk
//   any other                            reuses the last choice of this chunk
//
// The choice is an explicit state that the layers of one sequence share: make one SharedChoice and
// hand it to each layer's State. It belongs to one chunk. Layers are called in ascending order;
// each may be called again, and a chunk may start over at its first layers. After a throw the
// choice is as it was. A layer on its own (first_sparse) chooses for itself. Officially attention
// at the choosing layers is dense; here it keeps to the budget like any other method.
//
// LayerSharedSelector<S> makes one of a selector S, which chooses at the layers that do. Its
// options are S::Options, or convert to them; they have budget and plan.
#pragma once

#include <quoka/select/scored_selector.hpp>

#include <algorithm>
#include <memory>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {

// Which layer this is, and where choices are made.
struct LayerPlan {
  Index layer = 2;         // this layer, counted from 0
  Index layer_count = 32;  // of the model
  Index first_sparse = 2;  // the first layer that is not dense

  // The layer that chooses again.
  Index correction_layer() const { return (4 * layer_count + 5) / 10; }
  // Does this layer choose?
  bool chooses() const { return layer == first_sparse || layer == correction_layer(); }
};

// The choice that the layers of one sequence share, for one chunk.
struct SharedChoice {
  Selection selection;         // [batch, kv_heads]
  Index kv_len = -1;           // of the chunk; -1: none
  std::uint64_t sequence = 0;  // the caller's number for it
  Index last_layer = -1;       // called in this chunk
  bool made = false;           // has a layer chosen in this chunk?
  Selection next;              // being made

  void forget() { kv_len = last_layer = -1, made = false; }  // no choice
};

// S chooses at some layers, and the others reuse its choice.
template <Selector S, class OptionsWithPlan = typename S::Options>
class LayerSharedSelector {
 public:
  using Options = OptionsWithPlan;

  struct State {
    std::shared_ptr<SharedChoice> shared = std::make_shared<SharedChoice>();
    typename S::State own;  // of the selector that chooses
    Index len = 0;          // keys that were appended

    // Forgets the choice, unless these are all the keys: a chunk that failed before its keys came
    // may be given again.
    void truncate(Index kv_len) {
      if (kv_len < len || len == 0) shared->forget();
      len = std::min(len, kv_len);
      own.truncate(kv_len);
    }
  };

  // Throws std::invalid_argument for a layer outside [0, layer_count) and what the selector
  // refuses.
  explicit LayerSharedSelector(const Options& options = {}) : options_(options), chooses_(options) {
    const LayerPlan& plan = options.plan;
    detail::require_at_least("layer", plan.layer, 0);
    detail::require_at_most("layer", plan.layer, "the last layer", plan.layer_count - 1);
    detail::require_at_least("first_sparse", plan.first_sparse, 0);
  }

  const Options& options() const { return options_; }

  // Throws std::invalid_argument when shapes do not fit together, and when a choice to reuse is
  // missing. A layer below the last one that was called starts the chunk over.
  void select(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    chooses_.check(input);
    const Rows& k = input.k;
    const LayerPlan& plan = options_.plan;
    SharedChoice& shared = *state.shared;
    bool made = shared.made && shared.kv_len == k.len() && shared.sequence == input.sequence &&
                plan.layer >= shared.last_layer;
    const bool dense = plan.layer < plan.first_sparse || options_.budget.count(k.len()) == k.len();
    if (!dense) {  // of a full cache: then copies in a decode loop do not allocate
      const Index heads = k.batch() * k.heads();
      selection.reserve(heads, heads * options_.budget.count(std::max(k.len(), input.capacity)));
    }
    if (!dense && plan.chooses()) {
      chooses_.select(input, state.own, shared.next, executor);
      selection = shared.next;
      std::swap(shared.selection, shared.next);
      made = true;
    } else if (dense) {
      selection.select_all(k.batch(), k.heads(), k.len());
    } else {
      if (!made)
        detail::fail("layer", plan.layer, "but no layer of this chunk has chosen: first_sparse is",
                     "", plan.first_sparse);
      shared.selection.require_shape(k.batch(), k.heads(), k.len());
      selection = shared.selection;
    }
    shared.kv_len = k.len();
    shared.sequence = input.sequence;
    shared.last_layer = plan.layer;
    shared.made = made;
  }

  void appended(const SelectorInput& input, State& state, ExecutorRef) const {
    state.len = input.k.len();
  }

 private:
  Options options_;
  S chooses_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
