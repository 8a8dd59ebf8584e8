// expect: a Scorer needs struct Options with a member Budget budget
// lines: 15
// Without a budget there is nothing to select.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

#include "scorer.inc"

struct Mine : RightScorer {
  struct Options {
#ifdef QUOKA_VALID
    quoka::Budget budget = quoka::Budget::keys(1024);
#else
    quoka::Index keys = 1024;
#endif
  };
  explicit Mine(const Options&) {}
};

quoka::Index len_of(const Layer<Mine>& layer) { return layer.kv_len(); }
