// First and recent keys: the attention sinks and a window that slides with the prompt. A control
// that looks at neither queries nor keys.
//
//   score[t] = t, after keep_first forced ones
//
// kv_heads * kv_len writes. Source: Xiao et al., "Efficient Streaming Language Models with
// Attention Sinks", arXiv 2309.17453. Deviation: positions are not renumbered inside the window, as
// everywhere in this library.
#pragma once

#include <quoka/select/scored_selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of FirstRecentSelector.
struct FirstRecentOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index keep_first = 4;                // attention sinks; all the others are the last ones
};

// The scores behind FirstRecentSelector.
class FirstRecentScorer {
 public:
  using Options = FirstRecentOptions;
  using State = NoState;

  // Its scores need no options.
  explicit FirstRecentScorer(const Options& = {}) {}

  void score(const SelectorInput& input, State&, TensorView<float, 3> scores, ExecutorRef) const {
    for (Index b = 0; b < input.k.batch(); ++b)
      for (Index head = 0; head < input.k.heads(); ++head)
        for (Index t = 0; t < input.k.len(); ++t) scores.at(b, head, t) = static_cast<float>(t);
  }
};

using FirstRecentSelector = ScoredSelector<FirstRecentScorer>;
static_assert(Selector<FirstRecentSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
