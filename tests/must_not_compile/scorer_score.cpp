// expect: (constraint failure|constraints not satisfied|no matching function)
// One scorer serves all threads: score() is const.
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

#include "scorer.inc"

struct Mine : RightScorer {
  using RightScorer::RightScorer;
#ifdef QUOKA_VALID
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>,
             quoka::ExecutorRef) const {}
#else
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>, quoka::ExecutorRef) {
  }
#endif
};

quoka::Index len_of(const Layer<Mine>& layer) { return layer.kv_len(); }
