// First and recent keys: the attention sinks and a window that slides with the prompt. A control
// that looks at neither queries nor keys.
//
//   score[t] = t, after keep_first = 4 forced ones
//
// kv_heads * kv_len writes. Source: Xiao et al., "Efficient Streaming Language Models with
// Attention Sinks", arXiv 2309.17453. Deviation: positions are not renumbered inside the window, as
// everywhere in this library.
#pragma once

#include <quoka/select/scored_selector.hpp>

namespace quoka::inline QUOKA_ABI {

struct FirstRecentOptions {
  Budget budget = 1024;
  Index window = 1;      // of no effect here
  Index keep_first = 4;  // attention sinks, inside the budget
  Index keep_last = 0;   // all the others are the last ones anyway
};

class FirstRecentScorer {
 public:
  using Options = FirstRecentOptions;
  using State = NoState;

  explicit FirstRecentScorer(const Options& = {}) {}

  template <class T>
  void score(const SelectorInput<T>& input, State&, float* scores, ExecutorRef) const {
    const Index kv_len = input.k.len();
    for (Index head = 0; head < input.k.batch() * input.k.heads(); ++head)
      for (Index t = 0; t < kv_len; ++t) scores[head * kv_len + t] = static_cast<float>(t);
  }
};

using FirstRecentSelector = ScoredSelector<FirstRecentScorer>;
static_assert(Selector<FirstRecentSelector>);

}  // namespace quoka::inline QUOKA_ABI
