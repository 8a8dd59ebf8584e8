// The first and the last stages of a KV head's chain in QuokaScorer::select: its queries to q_bar, and behind all that
// a layer does with the keys the sketch of those that came.
#pragma once

#include <quoka/select/quoka.hpp>

#include <algorithm>
#include <optional>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The first stages of each KV head's chain: its queries to q_bar.
class QueryStages {
 public:
  QueryStages(const SelectorInput& input, const QuokaOptions& options, QuokaScorer::State& state,
              int workers)
      : input_(input),
        options_(options),
        state_(state),
        n_(std::min(options.n_queries.per_head(input.group()), input.q.len())),
        parts_(workers == 1 ? 1 : std::min<Index>(n_, 4)),
        subselect_{options.query_choice, input.group()} {
    const Rows &q = input.q, &k = input.k;
    state.positions.reserve(q.batch() * q.heads() * n_);
    state.subselect.reserve(workers, &q.format(), q.dim(), q.len());
    state.rows.reserve(workers, q);
    state.q_bar.reserve(k.batch() * k.heads() *
                        aggregated_rows(n_, input.group(), options.group_mode) * k.dim());
  }

  void add_to(Chains& chains) {
    // A token, or a chunk of few, keeps all of its queries in order.
    if (n_ < input_.q.len()) chains.add_member<&QueryStages::choose>(input_.group(), *this);
    chains.add_member<&QueryStages::aggregate>(parts_, *this);
  }

 private:
  void choose(Index task, int, Index member, int worker) {
    subselect_head(input_.q, n_, subselect_, state_.positions.data(),
                   task * input_.group() + member, state_.subselect[worker]);
  }
  void aggregate(Index task, int, Index part, int worker) {
    pre_aggregate_head(
        {input_.q, n_ < input_.q.len() ? state_.positions.data() : nullptr, n_, input_.k.heads(),
         options_.group_mode, options_.domain == Domain::softmax, state_.q_bar.data()},
        task, part * n_ / parts_, (part + 1) * n_ / parts_, state_.rows[worker]);
  }

  const SelectorInput& input_;
  const QuokaOptions& options_;
  QuokaScorer::State& state_;
  Index n_, parts_;  // of a head: queries that are kept, and tasks that see to some of them
  SubselectOptions subselect_;
};

// What follows a selection, and behind it the sketch of the keys that came to the cache by it.
class SketchAfter final : public AfterSelection {
 public:
  // sketch: null, where the State keeps none.
  SketchAfter(AfterSelection& after, KeySketch* sketch) : after_(after), sketch_(sketch) {}

  bool add_to(Chains& chains, const Selection& chosen, int workers) override {
    if (!after_.add_to(chains, chosen, workers)) return false;
    if (sketch_ == nullptr) return true;
    const SelectorInput input = after_.appended();
    appending_.emplace(*sketch_, input.k, input.capacity, workers);
    chains.add_member<&SketchAfter::append>(appending_->parts(), *this);
    return true;
  }
  SelectorInput appended() const override { return after_.appended(); }
  void finish() {
    if (appending_) appending_->finish();
  }

 private:
  void append(Index head, int, Index part, int worker) { appending_->run(head, part, worker); }

  AfterSelection& after_;
  KeySketch* sketch_;
  std::optional<KeySketch::Appending> appending_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
