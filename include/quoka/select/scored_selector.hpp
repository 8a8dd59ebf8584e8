// From a score per key to a Selection: budget, forced keys, window and top-k, written once for all
// selectors that score.
//
// A past no longer than the budget is kept whole and not scored; of a budget of 0 nothing is kept.
// Beyond the scorer's own, scratch is 4 bytes of score per key and KV head and 12 bytes per key and
// worker.
#pragma once

#include <quoka/select/concepts.hpp>
#include <quoka/select/top_k.hpp>

namespace quoka::inline QUOKA_ABI {

template <Scorer S>
class ScoredSelector {
 public:
  using Options = typename S::Options;

  struct State {
    typename S::State scorer;
    Buffer<float> scores;  // [batch, kv_heads, kv_len]
    WorkerScratch<detail::TopKScratch> top_k;

    void truncate(Index kv_len) { scorer.truncate(kv_len); }
    Index kept_bytes() const { return kept_bytes_of(scorer); }
    Index bytes() const { return scorer.bytes() + scores.bytes() + top_k.bytes(); }
  };

  // Throws std::invalid_argument for a window < 1, a negative keep_first or keep_last, and what the
  // scorer refuses.
  explicit ScoredSelector(const Options& options = {}) : options_(options), scorer_(options) {
    detail::check_top_k(0, top_k_options());
  }

  const Options& options() const { return options_; }
  const S& scorer() const { return scorer_; }

  // Writes the keys to attend to. Throws std::invalid_argument when shapes do not fit together.
  template <class T>
  void select(const SelectorInput<T>& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    detail::check_selector_input(input);
    const TensorView<const T>& k = input.k;
    const Index budget = options_.budget.keys(k.len());
    if (budget == k.len()) return selection.select_all(k.batch(), k.heads(), k.len());
    if (budget == 0) return selection.resize(k.batch(), k.heads(), k.len(), 0);

    const Index capacity = std::max(k.len(), input.capacity), heads = k.batch() * k.heads();
    selection.reserve(heads * options_.budget.keys(capacity));
    if constexpr (requires { scorer_.choose(input, budget, state.scorer, selection, executor); })
      if (scorer_.choose(input, budget, state.scorer, selection, executor)) return;
    float* scores = state.scores.reserve_amortised(heads * capacity);
    state.top_k.reserve(executor.workers(), capacity, options_.window);
    scorer_.score(input, state.scorer, scores, executor);
    detail::select_top_k(scores, k.batch(), k.heads(), k.len(), budget, top_k_options(), selection,
                         state.top_k, executor);
  }

  template <class T>
  void appended(const SelectorInput<T>& input, State& state, ExecutorRef executor) const {
    if constexpr (requires { scorer_.appended(input, state.scorer, executor); })
      scorer_.appended(input, state.scorer, executor);
  }

  // For a caller's own cache, one call: q [batch, q_heads, q_len, head_dim], past_k [batch,
  // kv_heads, kv_len, head_dim], inverse_norms of past_k [batch, kv_heads, kv_len] or absent. What
  // the method keeps per key is made anew in each call: a method that keeps much is better served
  // by the call above, with a State. Throws as above.
  template <TensorLike Q>
  Selection select(const Q& q, TensorView<const storage_t<Q>> past_k,
                   ExecutorRef executor = SerialExecutor{},
                   TensorView<const float, 3> inverse_norms = {}) const {
    const SelectorInput<storage_t<Q>> input{view_of(q), past_k, inverse_norms, past_k.len()};
    if (past_k.heads() == 0 && past_k.len() == 0) return Selection::all(view_of(q).batch(), 0, 0);
    detail::check_selector_input(input);
    State state;
    Selection selection;
    select(input, state, selection, executor);
    return selection;
  }

 private:
  TopKOptions top_k_options() const {
    return {options_.window, options_.keep_first, options_.keep_last};
  }

  Options options_;
  S scorer_;
};

}  // namespace quoka::inline QUOKA_ABI
