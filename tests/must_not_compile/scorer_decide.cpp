// expect: (constraint failure|constraints not satisfied|no matching function)
// It has score(): one of both would never be called.
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

#include "scorer.inc"

struct Mine : RightScorer {
  using RightScorer::RightScorer;
#ifndef QUOKA_VALID
  void decide(const quoka::SelectorInput&, State&, quoka::Selection&, quoka::ExecutorRef) const {}
#endif
};

quoka::Index len_of(const Layer<Mine>& layer) { return layer.kv_len(); }
