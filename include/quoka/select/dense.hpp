// The selector that selects everything: dense attention through the same driver.
#pragma once

#include <quoka/select/concepts.hpp>

namespace quoka::inline QUOKA_ABI {

class DenseSelector {
 public:
  struct Options {};
  using State = NoState;

  DenseSelector() = default;
  explicit DenseSelector(const Options&) {}

  template <class T>
  void select(const SelectorInput<T>& input, State&, Selection& selection, ExecutorRef) const {
    detail::check_selector_input(input);
    selection.select_all(input.k.batch(), input.k.heads(), input.k.len());
  }
  template <class T>
  void appended(const SelectorInput<T>&, State&, ExecutorRef) const {}
};

static_assert(Selector<DenseSelector>);

}  // namespace quoka::inline QUOKA_ABI
