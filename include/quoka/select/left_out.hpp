// Behind a selection: what stands for the keys that it leaves out (cache/past_sums.hpp), in the same parallel run where
// there is one.
#pragma once

#include <quoka/select/after_selection.hpp>
#include <quoka/select/selector.hpp>

#include <string>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class LeftOut final : public AfterSelection {
 public:
  // wanted: QuokaOptions::rest. own: sums that the selector's State keeps. after: what follows; null: nothing. Throws
  // std::invalid_argument for values that do not fit the keys, and for ALiBi.
  LeftOut(const SelectorInput& input, bool wanted, PastSums& own, Selection& selection,
          AfterSelection* after)
      : input_(input),
        wanted_(wanted && !input.v.empty() && input.k.len() > 0),
        keeps_(input.sums != nullptr || input.sketch == nullptr),
        sums_(input.sums != nullptr ? *input.sums : own),
        selection_(selection),
        after_(after) {
    if (!wanted_) return;
    require_sizes("v", input.v.sizes(),
                  {input.k.batch(), input.k.heads(), input.k.len(), input.v.dim()});
    if (input.logits && !input.logits->alibi_slopes.empty())
      fail_because("there are " + std::to_string(input.logits->alibi_slopes.size()) +
                   " alibi_slopes, and a mean of keys has no position: select without "
                   "QuokaOptions::rest");
  }

  AfterSelection* if_any() { return wanted_ && after_ != nullptr ? this : after_; }
  bool add_to(Chains& chains, const Selection& chosen, int workers) override {
    begin(chosen, workers);
    chains.add_member<&LeftOut::stage>(1, *this);
    return after_->add_to(chains, chosen, workers);
  }
  SelectorInput appended() const override { return after_->appended(); }
  // The selection is done.
  void finish(ExecutorRef executor) {
    if (!wanted_ || selection_.is_all()) return;
    if (!begun_) {
      begin(selection_, executor.workers());
      executor.run(selection_.rest().heads(),
                   [&](Index head, int worker) { stage(head, 0, 0, worker); });
    }
    keeps_ ? sums_.finish() : sums_.truncate(0);
  }

 private:
  void begin(const Selection& chosen, int workers) {
    if (!keeps_) sums_.truncate(0);
    sums_.begin(input_.k, input_.v, input_.capacity, workers);
    selection_.rest().reshape(chosen.batch() * chosen.kv_heads(), input_.k.dim(), input_.v.dim());
    begun_ = true;
  }
  void stage(Index head, int, Index, int worker) {
    const Index heads = input_.k.heads();
    sums_.rest(head, selection_.row(head / heads, head % heads), selection_.rest().row(head),
               worker);
  }

  const SelectorInput& input_;
  bool wanted_, keeps_;
  PastSums& sums_;
  Selection& selection_;
  AfterSelection* after_;
  bool begun_ = false;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
