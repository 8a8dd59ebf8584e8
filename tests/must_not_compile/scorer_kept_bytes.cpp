// expect: (constraint failure|constraints not satisfied|no matching function)
// Taken for absent, such a State would be handed the keys of another sequence.
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

#include "scorer.inc"

struct Mine : RightScorer {
  using RightScorer::RightScorer;
  struct State {
    static void truncate(quoka::Index) {}
#ifdef QUOKA_VALID
    quoka::Index kept_bytes() const { return 0; }
    quoka::Index kept_len() const { return 0; }
#else
    quoka::Index kept_bytes() { return 0; }
#endif
  };
};

quoka::Index len_of(const Layer<Mine>& layer) { return layer.kv_len(); }
