// Selectors that evict: what is dropped from the retained set never returns.
//
//   select     the retained set, as it is
//   appended   C = retained + the chunk's keys; beyond the budget the best of C stay
//
// Retention per sequence and KV head. The driver's cache keeps every key, and a truncate() rewinds:
// each position remembers the cache length at which it was dropped, so the state at any earlier
// length comes back exactly as it was. (In the middle of a chunk: as it was before that chunk, plus
// the chunk's part; up to a chunk more than the budget.) The memory itself is not given back: this
// measures what eviction costs in accuracy and gains in time. 10 bytes per key and KV head. After a throw the
// State is as it was.
//
//   struct MyEviction {
//     struct Options { Budget budget; Index keep_first; ... };
//     struct Scratch {
//       void reserve(const SelectorInput&, Index candidates);
//       Index bytes() const;
//     };
//     explicit MyEviction(const Options&);
//     // Scores of the candidate positions of one KV head; returns how many of the last ones stay
//     // whatever their score.
//     Index score(const SelectorInput&, Index b, Index kv_head, std::span<const Position>,
//                 std::span<float> scores, Scratch&) const;
//   };
#pragma once

#include <quoka/rows/row_store.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/steps/top_k.hpp>

#include <algorithm>
#include <limits>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// What EvictingSelector asks of a method: as MyEviction at the top of evicting_selector.hpp.
template <class S>
concept EvictionMethod = requires(const S& method, const SelectorInput& input, Index index,
                                  std::span<const Position> candidates, std::span<float> scores,
                                  typename S::Scratch& scratch, typename S::Options options) {
  S(options);
  { options.budget } -> std::convertible_to<Budget>;
  { options.keep_first } -> std::convertible_to<Index>;
  scratch.reserve(input, index);
  { scratch.bytes() } -> std::convertible_to<Index>;
  { method.score(input, index, index, candidates, scores, scratch) } -> std::convertible_to<Index>;
};

template <EvictionMethod S>
class EvictingSelector {
 public:
  using Options = typename S::Options;
  static constexpr bool evicts = true;  // selector.hpp

  struct State {
    RowStore<Position> dropped_at;  // [batch, kv_heads, kv_len, 1] cache length; never: the largest
    RowStore<Position> retained;    // [batch, kv_heads, count, 1] ascending
    KeysIdentity keys;
    Buffer<Position> candidates;  // [batch, kv_heads, candidates] positions
    Buffer<float> scores;         // [batch, kv_heads, candidates]
    Buffer<Position> best;        // [batch, kv_heads, budget] indices of candidates
    WorkerScratch<typename S::Scratch> scratch;
    WorkerScratch<detail::TopKScratch> top_k;

    void truncate(Index kv_len) {
      keys.truncate(kv_len);
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
    Index kept_bytes() const { return bytes_of(dropped_at, retained); }
    Index bytes() const {
      return kept_bytes() + candidates.bytes() + scores.bytes() + best.bytes() + scratch.bytes() +
             top_k.bytes();
    }
  };

  // Throws std::invalid_argument for a negative keep_first and what the method refuses.
  explicit EvictingSelector(const Options& options = {}) : options_(options), method_(options) {
    detail::require_at_least("keep_first", options.keep_first, 0);
  }

  const Options& options() const { return options_; }

  // Throws std::invalid_argument when shapes do not fit together, and when the State was told of other
  // keys (KeysIdentity::look_up).
  void select(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    detail::check_choice_input(input, method_);
    const Rows& k = input.k;
    SelectorInput keys_alone = input;  // nobody told of the last ones: judged without their queries
    keys_alone.q = {};
    update(keys_alone, state, executor);
    const Index count = k.len() == 0 ? 0 : state.retained.len();
    if (count == k.len()) return selection.select_all(k.batch(), k.heads(), k.len());
    SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), count);
    for (Index b = 0; b < k.batch(); ++b)
      for (Index head = 0; head < k.heads(); ++head)
        std::copy_n(state.retained.row(b, head, 0), count, writer.row(b, head).data());
    writer.commit();
  }

  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    update(input, state, executor);
  }

 private:
  static constexpr Position never = std::numeric_limits<Position>::max();

  // Takes the keys in that the State does not know yet, and evicts. Nothing of the State changes
  // before all that may throw is done.
  void update(const SelectorInput& input, State& s, ExecutorRef executor) const {
    const Rows& k = input.k;
    const Index heads = k.heads(), kv_len = k.len(), tasks = k.batch() * heads;
    if (input.q.len() > 0 && detail::weighs_logits(method_)) (void)input.logit_scale();
    s.keys.look_up(input);
    const Index known = s.dropped_at.len(), kept = s.retained.len();
    if (known == kv_len) return;
    detail::require_keys("kv_len", kv_len);
    const Index candidates = kept + kv_len - known;
    const Index stay = std::min(candidates, options_.budget.count(kv_len));
    s.dropped_at.reshape(k.batch(), heads, 1);
    s.retained.reshape(k.batch(), heads, 1);
    s.dropped_at.grow(kv_len, input.capacity);
    s.retained.grow(candidates);  // as many as truncate() may bring back
    Position* const lists = s.candidates.reserve_amortised(tasks * candidates);
    Position* const best = s.best.reserve_amortised(tasks * stay);
    for (Index task = 0; task < tasks; ++task) {
      Position* const list = lists + task * candidates;
      if (kept > 0) std::copy_n(s.retained.row(task / heads, task % heads, 0), kept, list);
      for (Index t = known; t < kv_len; ++t) list[kept + t - known] = static_cast<Position>(t);
    }
    if (stay < candidates) choose(input, candidates, stay, s, executor);
    s.keys.take(input, kv_len);
    // From here on nothing throws.
    s.dropped_at.resize(kv_len);
    s.retained.resize(stay);
    for (Index task = 0; task < tasks; ++task) {
      const Index b = task / heads, head = task % heads;
      const Position* const list = lists + task * candidates;
      for (Index i = 0; i < candidates; ++i)
        *s.dropped_at.row(b, head, list[i]) =
            stay < candidates ? static_cast<Position>(kv_len) : never;
      for (Index i = 0; i < stay; ++i) {
        const Position position = stay < candidates ? list[best[task * stay + i]] : list[i];
        *s.retained.row(b, head, i) = position;
        *s.dropped_at.row(b, head, position) = never;
      }
    }
  }

  // Which of the candidates stay, as ascending indices, to s.best.
  void choose(const SelectorInput& input, Index candidates, Index stay, State& s,
              ExecutorRef executor) const {
    const Index heads = input.k.heads(), tasks = input.k.batch() * heads;
    float* const scores = s.scores.reserve_amortised(tasks * candidates);
    s.scratch.reserve(executor.workers(), input, candidates);
    s.top_k.reserve(executor.workers(), candidates, 1);
    executor.run(tasks, [&](Index task, int worker) {
      const auto n = static_cast<std::size_t>(candidates);
      const std::span<const Position> list(s.candidates.data() + task * candidates, n);
      const std::span<float> head_scores(scores + task * candidates, n);
      const Index last =
          method_.score(input, task / heads, task % heads, list, head_scores, s.scratch[worker]);
      // The first candidates are the first keys, unless a budget below keep_first dropped some.
      const TopKOptions forced{.keep_first = options_.keep_first, .keep_last = last};
      detail::top_k_head(head_scores.data(), candidates, forced,
                         {s.best.data() + task * stay, static_cast<std::size_t>(stay)},
                         s.top_k[worker]);
    });
  }

  Options options_;
  S method_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
