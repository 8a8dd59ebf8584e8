// expect: a Scorer's State needs Index bytes.. const
// lines: 15
// What a State holds is counted: layers add it up.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

#include "scorer.inc"

struct Mine : RightScorer {
  using RightScorer::RightScorer;
  struct State {
    static void truncate(quoka::Index) {}
#ifdef QUOKA_VALID
    static quoka::Index bytes() { return 0; }
#endif
  };
};

quoka::Index len_of(const Layer<Mine>& layer) { return layer.kv_len(); }
