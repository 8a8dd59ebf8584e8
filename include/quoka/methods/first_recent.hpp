// First and recent keys: the attention sinks and a window that slides with the prompt. A control
// that looks at neither queries nor keys.
//
//   the first keep_first keys, then the last ones until there are `budget`
//
// kv_heads * budget writes. Source: Xiao et al., "Efficient Streaming Language Models with
// Attention Sinks", arXiv 2309.17453. Deviation: positions are not renumbered inside the window, as
// everywhere in this library.
#pragma once

#include <quoka/select/scored_selector.hpp>

#include <algorithm>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of FirstRecentSelector.
struct FirstRecentOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index keep_first = 4;                // attention sinks; all the others are the last ones
};

// The choice behind FirstRecentSelector.
class FirstRecentScorer {
 public:
  using Options = FirstRecentOptions;
  using State = NoState;

  // Refuses none of the options.
  explicit FirstRecentScorer(const Options& options = {}) : options_(options) {}

  // Writes positions: scores of floats would not tell keys from 2^24 on apart.
  void decide(const SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    const Rows& k = input.k;
    const Budget& budget = options_.budget;
    if (select_unscored(k, budget, selection)) return;
    const Index heads = k.batch() * k.heads(), count = budget.count(k.len()),
                first = std::min(options_.keep_first, count);
    selection.reserve(heads, heads * budget.count(std::max(k.len(), input.capacity)));
    SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), count);
    for (Index head = 0; head < heads; ++head) {
      Position* const list = writer.row(head / k.heads(), head % k.heads()).data();
      std::iota(list, list + first, Position{0});
      std::iota(list + first, list + count, static_cast<Position>(k.len() - count + first));
    }
    writer.commit();
  }

 private:
  Options options_;
};

using FirstRecentSelector = ScoredSelector<FirstRecentScorer>;
static_assert(Selector<FirstRecentSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
