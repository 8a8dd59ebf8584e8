// The selector that selects everything: dense attention through the same driver.
#pragma once

#include <quoka/select/selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

class DenseSelector {
 public:
  struct Options {};
  using State = NoState;

  DenseSelector() = default;
  explicit DenseSelector(const Options&) {}  // there is nothing to choose

  void select(const SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    check_selector_input(input);
    selection.select_all(input.k.batch(), input.k.heads(), input.k.len());
  }
  void appended(const SelectorInput&, State&, ExecutorRef) const {}
};

static_assert(Selector<DenseSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
