// Selectors that evict: what is dropped from the retained set never returns.
//
//   select     the retained set, as it is
//   appended   C = retained + the chunk's keys; beyond the budget the best of C stay
//
// Retention per sequence and KV head. The driver's cache keeps every key, and a truncate() rewinds:
// each position remembers the cache length at which it was dropped, so the state at any earlier
// length comes back exactly as it was. (In the middle of a chunk: as it was before that chunk, plus
// the chunk's part; up to a chunk more than the budget.) The memory itself is not given back: this
// measures what eviction costs in accuracy and gains in time. 8 bytes per key and KV head.
//
//   struct MyEviction {
//     struct Options { Budget budget; Index keep_first; ... };
//     struct Scratch { void reserve(Index candidates, Index rows, Index dim); Index bytes() const;
//     }; explicit MyEviction(const Options&);
//     // Scores of the candidate positions of one KV head; returns how many of the last ones stay
//     // whatever their score.
//     template <class T>
//     Index score(const SelectorInput<T>&, Index b, Index kv_head, std::span<const Position>,
//                 float* scores, Scratch&) const;
//   };
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/select/concepts.hpp>
#include <quoka/select/top_k.hpp>

#include <limits>

namespace quoka::inline QUOKA_ABI {

template <class S>
class EvictingSelector {
 public:
  using Options = typename S::Options;

  struct State {
    RowStore<Position> dropped_at;  // [batch, kv_heads, kv_len, 1] cache length; never: the largest
    RowStore<Position> retained;    // [batch, kv_heads, count, 1] ascending
    Buffer<float> scores;           // [batch, kv_heads, candidates]
    Buffer<Position> best;          // [batch, kv_heads, budget] indices of candidates
    WorkerScratch<typename S::Scratch> scratch;
    WorkerScratch<detail::TopKScratch> top_k;

    void truncate(Index kv_len) {
      if (kv_len >= dropped_at.len()) return;
      dropped_at.truncate(kv_len);
      Index count = 0;
      const auto survives = [&](Index b, Index head, Index t) {
        return *dropped_at.row(b, head, t) > kv_len;
      };
      for (Index t = 0; t < kv_len; ++t) count += survives(0, 0, t) ? 1 : 0;
      retained.resize(count);  // the same for every head: they drop as many at the same time
      for (Index b = 0; b < dropped_at.batch(); ++b) {
        for (Index head = 0; head < dropped_at.heads(); ++head) {
          for (Index t = 0, i = 0; t < kv_len; ++t) {
            if (!survives(b, head, t)) continue;
            *dropped_at.row(b, head, t) = never;
            *retained.row(b, head, i++) = static_cast<Position>(t);
          }
        }
      }
    }
    Index kept_bytes() const { return dropped_at.bytes() + retained.bytes(); }
    Index bytes() const {
      return dropped_at.bytes() + retained.bytes() + scores.bytes() + best.bytes() +
             scratch.bytes() + top_k.bytes();
    }
  };

  // Throws std::invalid_argument for a negative keep_first and what the method refuses.
  explicit EvictingSelector(const Options& options = {}) : options_(options), method_(options) {
    detail::require_at_least("keep_first", options.keep_first, 0);
  }

  const Options& options() const { return options_; }

  // Throws std::invalid_argument when shapes do not fit together.
  template <class T>
  void select(const SelectorInput<T>& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    detail::check_selector_input(input);
    const TensorView<const T>& k = input.k;
    if (state.dropped_at.len() < k.len())
      update(SelectorInput<T>{{}, k}, state, executor);  // nobody told
    const Index count = k.len() == 0 ? 0 : state.retained.len();
    if (count == k.len()) return selection.select_all(k.batch(), k.heads(), k.len());
    selection.resize(k.batch(), k.heads(), k.len(), count);
    for (Index b = 0; b < k.batch(); ++b)
      for (Index head = 0; head < k.heads(); ++head)
        std::copy_n(state.retained.row(b, head, 0), count, selection.mutable_row(b, head).data());
  }

  template <class T>
  void appended(const SelectorInput<T>& input, State& state, ExecutorRef executor) const {
    update(input, state, executor);
  }

 private:
  static constexpr Position never = std::numeric_limits<Position>::max();

  template <class T>
  void update(const SelectorInput<T>& input, State& s, ExecutorRef executor) const {
    const TensorView<const T>& k = input.k;
    const Index heads = k.heads(), kv_len = k.len();
    s.dropped_at.reshape(k.batch(), heads, 1);
    s.retained.reshape(k.batch(), heads, 1);
    const Index known = std::min(s.dropped_at.len(), kv_len), kept = s.retained.len();
    const Index candidates = kept + kv_len - known, budget = options_.budget.keys(kv_len);
    s.dropped_at.reserve(input.capacity);
    s.dropped_at.resize(kv_len);
    s.retained.resize(candidates);
    for (Index b = 0; b < k.batch(); ++b) {
      for (Index head = 0; head < heads; ++head) {
        for (Index t = known; t < kv_len; ++t) {
          *s.dropped_at.row(b, head, t) = never;
          *s.retained.row(b, head, kept + t - known) = static_cast<Position>(t);
        }
      }
    }
    if (candidates <= budget) return;

    const Index tasks = k.batch() * heads,
                rows = input.q.len() * std::max<Index>(1, input.q.heads() / heads);
    float* scores = s.scores.reserve_amortised(tasks * candidates);
    Position* best = s.best.reserve_amortised(tasks * budget);
    s.scratch.reserve(executor.workers(), candidates, rows, k.dim());
    s.top_k.reserve(executor.workers(), candidates, 1);
    executor.run(tasks, [&](Index task, int worker) {
      const Index b = task / heads, head = task % heads;
      Position* const positions = s.retained.row(b, head, 0);
      const std::span<const Position> list(positions, static_cast<std::size_t>(candidates));
      float* const of_task = scores + task * candidates;
      const Index last = method_.score(input, b, head, list, of_task, s.scratch[worker]);
      const std::span<Position> kept_best(best + task * budget, static_cast<std::size_t>(budget));
      // The first candidates are the first keys, unless a budget below keep_first dropped some.
      const TopKOptions forced{.keep_first = options_.keep_first, .keep_last = last};
      detail::top_k_head(of_task, candidates, forced, kept_best, s.top_k[worker]);
      for (const Position position : list)
        *s.dropped_at.row(b, head, position) = static_cast<Position>(kv_len);
      for (Index i = 0; i < budget; ++i) {
        positions[i] = positions[kept_best[static_cast<std::size_t>(i)]];  // ascending: in place
        *s.dropped_at.row(b, head, positions[i]) = never;
      }
    });
    s.retained.truncate(budget);
  }

  Options options_;
  S method_;
};

}  // namespace quoka::inline QUOKA_ABI
