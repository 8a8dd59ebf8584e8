// expect: a Scorer's bar.. must be float bar.. const
// lines: 15
// Taken for absent, a budget by scores would be refused.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

#include "scorer.inc"

struct Mine : RightScorer {
  using RightScorer::RightScorer;
#ifdef QUOKA_VALID
  float bar() const { return 0.5f; }
#else
  float bar(quoka::Index) const { return 0.5f; }
#endif
};

quoka::Index len_of(const Layer<Mine>& layer) { return layer.kv_len(); }
