// What a layer does with a KV head's keys once they are chosen: attention to them, then the chunk's own keys into
// the cache. A selector whose heads are chains takes it along, where it would be three parallel runs more:
//
//   choose ─▶ check ─▶ attend ─▶ append ─▶ sketch     head 0
//   choose ─▶ check ─▶ attend ─▶ append ─▶ sketch     head 1, whatever head 0 does
//
// ChunkedPrefill has one (prefill/layer.hpp); a selector that cannot take it along leaves it alone.
#pragma once

#include <quoka/runtime/chains.hpp>
#include <quoka/views/selection.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

struct SelectorInput;

class AfterSelection {
 public:
  // Adds its stages behind those that choose. Each (batch, KV head) is a chain, in their order; an executor of
  // `workers` will run them. `chosen` has the counts, and a head's positions, checked, once the stages before are
  // done. What the run throws, the selector throws. False, and nothing added, where all heads must be chosen first,
  // or few workers do it sooner in a run of its own.
  // Throws std::invalid_argument for chains or a Selection of another shape.
  virtual bool add_to(Chains& chains, const Selection& chosen, int workers) = 0;
  // What appended() will be told, once stages were added: the chunk's keys are there behind these, and a selector may
  // add stages of its own for what it keeps of them.
  virtual SelectorInput appended() const = 0;

 protected:
  ~AfterSelection() = default;
};

namespace detail {

// Behind the stages that write to `writer`: a head's positions are checked, and `after` follows. null: nothing does.
class AfterWriting {
 public:
  AfterWriting(SelectionWriter& writer, AfterSelection* after) : writer_(writer), after_(after) {}

  void add_to(Chains& chains, int workers) {
    if (after_ == nullptr) return;
    chains.add_member<&AfterWriting::check>(1, *this);
    after_->add_to(chains, writer_.unfinished(), workers);
  }

 private:
  void check(Index head, int, Index, int) const { writer_.check(head); }

  SelectionWriter& writer_;
  AfterSelection* after_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
