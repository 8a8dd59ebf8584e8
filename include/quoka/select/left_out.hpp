// Behind a selection: what stands for the keys that it leaves out (rest_of_head.hpp), in the same parallel run where
// there is one.
#pragma once

#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/after_selection.hpp>
#include <quoka/select/rest_of_head.hpp>
#include <quoka/select/selector.hpp>

#include <string>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class LeftOut final : public AfterSelection {
 public:
  // wanted: QuokaOptions::rest. after: what follows; null: nothing. Throws std::invalid_argument for values that do not
  // fit the keys, and for ALiBi.
  LeftOut(const SelectorInput& input, bool wanted, WorkerScratch<RestScratch>& scratch,
          Selection& selection, AfterSelection* after)
      : input_(input),
        wanted_(wanted && !input.v.empty() && input.k.len() > 0),
        scratch_(scratch),
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
    begin(workers);
    chosen_ = &chosen;
    chains.add_member<&LeftOut::stage>(1, *this);
    return after_->add_to(chains, chosen, workers);
  }
  SelectorInput appended() const override { return after_->appended(); }
  // The selection is done.
  void finish(ExecutorRef executor) {
    if (!wanted_ || chosen_ != nullptr || selection_.is_all()) return;
    begin(executor.workers());
    chosen_ = &selection_;
    executor.run(input_.k.batch() * input_.k.heads(),
                 [&](Index head, int worker) { stage(head, 0, 0, worker); });
  }

 private:
  void begin(int workers) {
    scratch_.reserve(workers, input_);
    selection_.rest().reshape(input_.q.batch() * input_.q.heads(), input_.k.dim(), input_.v.dim());
  }
  void stage(Index head, int, Index, int worker) {
    const Index heads = input_.k.heads();
    RestOfHead(input_, head, scratch_[worker])
        .run(chosen_->row(head / heads, head % heads), selection_.rest());
  }

  const SelectorInput& input_;
  bool wanted_;
  WorkerScratch<RestScratch>& scratch_;
  Selection& selection_;
  AfterSelection* after_;
  const Selection* chosen_ = nullptr;  // once it is
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
