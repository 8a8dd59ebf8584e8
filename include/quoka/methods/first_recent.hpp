// First and recent keys: the attention sinks and a window that slides with the prompt. A control
// that looks at neither queries nor keys.
//
//   the first keep_first keys, then the last ones until there are `budget`
//
// kv_heads * budget writes, since all of them are forced keys of top-k; scratch as of any
// ScoredSelector. Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
// arXiv 2309.17453. Deviation: positions are not renumbered inside the window, as everywhere in
// this library.
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
class FirstRecentScorer : public ScorerDefaults {
 public:
  using Options = FirstRecentOptions;
  using State = NoState;
  static constexpr Index keep_last = max_keys;  // as many as fit

  // Refuses none of the options.
  explicit FirstRecentScorer(const Options& = {}) {}

  // No key is chosen by a score.
  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef) const {}
};

using FirstRecentSelector = ScoredSelector<FirstRecentScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
