// Selection of one node: what it remembers of the keys of each sequence of its batch.
//
// The runtime may run a session in several threads at once, each with other caches, and does not
// identify them to a node. So one call at a time uses the kept codes, and others do without. If
// keys turn out to be others than those kept (select/key_checksums.hpp), all are coded again.
#pragma once

#include "call.hpp"

#include <quoka/select/any_selector.hpp>

#include <deque>
#include <mutex>

namespace quoka_onnxruntime {

class Selecting {
 public:
  // The kept codes that a call may use.
  class Turn {
   public:
    explicit Turn(Selecting& of)
        : of_(of), lock_(of.mutex_, std::try_to_lock), states_(lock_ ? of.states_ : own_) {}

    // Which of one sequence's past keys, which lie in a cache with room for `capacity`, the queries
    // q attend to, whose own keys are chunk_k; all of them where the budget holds them.
    void select(const Rows& q, const Rows& past_k, const Rows& chunk_k, Index b, Index capacity,
                const quoka::LogitOptions& logits, quoka::ExecutorRef executor,
                quoka::Selection& selection) {
      const quoka::SelectorInput input{
          .q = q, .k = past_k, .logits = logits, .capacity = capacity, .chunk_k = chunk_k};
      while (std::ssize(states_) <= b) states_.emplace_back();
      auto& state = states_[static_cast<std::size_t>(b)];
      state.truncate(past_k.len());
      try {
        choose(input, state, selection, executor);
      } catch (
          const std::invalid_argument&) {  // another sequence's keys; or an error that comes again
        state.truncate(0);
        choose(input, state, selection, executor);
      }
    }

   private:
    void choose(const quoka::SelectorInput& input, quoka::AnySelector::State& state,
                quoka::Selection& selection, quoka::ExecutorRef executor) {
      of_.selector_.appended({.q = {}, .k = input.k, .capacity = input.capacity}, state, executor);
      of_.selector_.select(input, state, selection, executor);
    }

    Selecting& of_;
    std::unique_lock<std::mutex> lock_;
    std::deque<quoka::AnySelector::State> own_;
    std::deque<quoka::AnySelector::State>& states_;  // [batch]
  };

  explicit Selecting(const quoka::SelectionOptions& options) : selector_(options) {}

 private:
  const quoka::AnySelector selector_;
  std::mutex mutex_;
  std::deque<quoka::AnySelector::State> states_;  // [batch]
};

}  // namespace quoka_onnxruntime
