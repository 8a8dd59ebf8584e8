// expect: (constraint failure|constraints not satisfied|no matching function)
// Taken for absent, the shorter way would never be used.
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

#include "scorer.inc"

struct Mine : RightScorer {
  using RightScorer::RightScorer;
#ifdef QUOKA_VALID
  bool select(const quoka::SelectorInput&, quoka::Index, State&, quoka::Selection&,
              quoka::ExecutorRef) const {
    return false;
  }
#else
  bool select(const quoka::SelectorInput&, State&, quoka::Selection&, quoka::ExecutorRef) const {
    return false;
  }
#endif
};

quoka::Index len_of(const Layer<Mine>& layer) { return layer.kv_len(); }
