// Selectors that evict: keys that are dropped from the retained set never return.
//
//   select     the retained set, as it is
//   appended   C = retained + the chunk's keys; beyond the budget the best of C stay
//
// Retention per sequence and KV head. The driver's cache keeps every key. Each position has the
// cache length at which it was dropped, so truncate() restores the state of any earlier length
// exactly. (In the middle of a chunk it is the set before that chunk, plus the chunk's part: up to
// a chunk more than the budget.) The memory itself is not given back, because this only measures
// eviction's loss of accuracy and gain of time. 4 bytes per key and KV head, and 16 per
// candidate: a retained key or one of the chunk. After a throw the State is as it was.
//
//   struct MyEviction {
//     struct Options { Budget budget; Index keep_first; ... };
//     struct Scratch { ... };  // reused memory of one worker, for score()
//     explicit MyEviction(const Options&);
//     static bool weighs_logits();  // ScorerDefaults
//     // Scores of the candidate positions of one KV head; returns how many of the last ones stay
//     // whatever their score. SelectorInput::capacity becomes the most candidates of later calls.
//     Index score(const SelectorInput&, Index b, Index kv_head, std::span<const Position>,
//                 std::span<float> scores, Scratch&) const;
//   };
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/rows/row_store.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/top_k.hpp>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// The members that EvictingSelector needs of a method: those of MyEviction at the top of
// evicting_selector.hpp.
template <class S>
concept EvictionMethod = requires(const S& method, const SelectorInput& input, Index index,
                                  std::span<const Position> candidates, std::span<float> scores,
                                  typename S::Scratch& scratch, typename S::Options options) {
  S(options);
  { options.budget } -> std::convertible_to<Budget>;
  { options.keep_first } -> std::convertible_to<Index>;
  { method.weighs_logits() } -> std::same_as<bool>;
  { method.score(input, index, index, candidates, scores, scratch) } -> std::convertible_to<Index>;
};

// The retained sets of a method, in the form that ScoredSelector needs.
template <EvictionMethod S>
class EvictingScorer : public ScorerDefaults {
 public:
  using Options = typename S::Options;
  static constexpr bool evicts = true;  // selector.hpp

  struct State {
    RowStore<Position> dropped_at;  // [batch, kv_heads, kv_len, 1] cache length; never: the largest
    RowStore<Position> retained;    // [batch, kv_heads, count, 1] ascending
    Buffer<Position> candidates;    // [batch, kv_heads, candidates] positions
    Buffer<float> scores;           // [batch, kv_heads, candidates]
    Buffer<Position> best;          // [batch, kv_heads, budget] indices of candidates
    std::vector<typename S::Scratch> scratch;  // of each worker
    Arenas workers;                            // of top-k

    void truncate(Index kv_len) {
      if (kv_len >= dropped_at.len()) return;
      dropped_at.truncate(kv_len);
      Index count = 0;
      for (Index task = 0; task < dropped_at.batch() * dropped_at.heads(); ++task) {
        const Index b = task / dropped_at.heads(), head = task % dropped_at.heads();
        count = 0;  // the same for every head: they drop as many at the same time
        for (Index t = 0; t < kv_len; ++t) {
          Position& dropped = *dropped_at.row(b, head, t);
          if (dropped <= kv_len) continue;
          dropped = never;
          *retained.row(b, head, count++) = static_cast<Position>(t);
        }
      }
      retained.resize(count);
    }
    Index kept_len() const { return dropped_at.len(); }
    Index kept_bytes() const { return bytes_of(dropped_at, retained); }
  };

  // Throws what the method refuses.
  explicit EvictingScorer(const Options& options = {}) : options_(options), method_(options) {}

  bool weighs_logits() const { return method_.weighs_logits(); }

  // The retained set. Keys that were not appended are judged without their queries.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    const Rows& k = input.k;
    SelectorInput keys_alone = input;
    keys_alone.q = {};
    appended(keys_alone, state, executor);
    const Index count = k.len() == 0 ? 0 : state.retained.len();
    if (count == k.len()) return selection.select_all(k.batch(), k.heads(), k.len());
    const Index heads = k.batch() * k.heads();
    selection.reserve(heads, heads * options_.budget.count(std::max(k.len(), input.capacity)));
    SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), count);
    for (Index b = 0; b < k.batch(); ++b)
      for (Index head = 0; head < k.heads(); ++head)
        std::copy_n(state.retained.row(b, head, 0), count, writer.row(b, head).data());
    writer.commit();
  }

  // Takes in the keys that the State does not have yet, and evicts.
  void appended(const SelectorInput& input, State& s, ExecutorRef executor) const {
    const Rows& k = input.k;
    const Index heads = k.heads(), kv_len = k.len(), tasks = k.batch() * heads;
    if (input.q.len() > 0 && weighs_logits()) (void)input.logit_scale();
    s.dropped_at.reshape(k.batch(), heads, 1);
    s.retained.reshape(k.batch(), heads, 1);
    const Index known = s.dropped_at.len(), kept = s.retained.len();
    if (known == kv_len) return;
    const Index candidates = kept + kv_len - known;
    const Index stay = std::min(candidates, options_.budget.count(kv_len));
    // Of a full cache: then a decode loop does not allocate.
    const Index most_kept = options_.budget.count(std::max(kv_len, input.capacity)),
                most = std::max(candidates, most_kept + kv_len - known);
    s.dropped_at.grow(kv_len, input.capacity);
    // As many as truncate() may bring back.
    s.retained.grow(candidates, input.capacity > kv_len ? most : 0);
    Position* const lists = s.candidates.reserve_amortised(tasks * most);
    Position* const best = s.best.reserve_amortised(tasks * most_kept);
    for (Index task = 0; task < tasks; ++task) {
      Position* const list = lists + task * candidates;
      if (kept > 0) std::copy_n(s.retained.row(task / heads, task % heads, 0), kept, list);
      std::iota(list + kept, list + candidates, static_cast<Position>(known));
    }
    if (stay < candidates)
      choose(input, candidates, stay, most, s, executor);
    else
      for (Index task = 0; task < tasks; ++task)
        std::iota(best + task * stay, best + (task + 1) * stay, Position{0});
    // From here on nothing throws.
    s.dropped_at.resize(kv_len);
    s.retained.resize(stay);
    for (Index task = 0; task < tasks; ++task) {
      const Index b = task / heads, head = task % heads;
      const Position* const list = lists + task * candidates;
      for (Index i = 0; i < candidates; ++i)
        *s.dropped_at.row(b, head, list[i]) = static_cast<Position>(kv_len);
      for (Index i = 0; i < stay; ++i) {
        const Position position = list[best[task * stay + i]];
        *s.retained.row(b, head, i) = position;
        *s.dropped_at.row(b, head, position) = never;
      }
    }
  }

 private:
  static constexpr Position never = std::numeric_limits<Position>::max();

  // Which of the candidates stay, as ascending indices, to s.best. Memory for `most` candidates.
  void choose(const SelectorInput& input, Index candidates, Index stay, Index most, State& s,
              ExecutorRef executor) const {
    const Index heads = input.k.heads(), tasks = input.k.batch() * heads;
    float* const scores = s.scores.reserve_amortised(tasks * most);
    const auto workers = static_cast<std::size_t>(executor.workers());
    if (s.scratch.size() < workers) s.scratch.resize(workers);
    s.workers.reserve(executor.workers(),
                      [&](Arena& arena) { detail::TopKScratch(arena, most, 1); });
    SelectorInput of_head = input;
    of_head.capacity = most;
    executor.run(tasks, [&](Index task, int worker) {
      const auto n = static_cast<std::size_t>(candidates);
      const std::span<const Position> list(s.candidates.data() + task * candidates, n);
      const std::span<float> head_scores(scores + task * candidates, n);
      const Index last = method_.score(of_head, task / heads, task % heads, list, head_scores,
                                       s.scratch[static_cast<std::size_t>(worker)]);
      // The first candidates are the first keys, unless a budget below keep_first dropped some.
      const TopKOptions forced{.keep_first = options_.keep_first, .keep_last = last};
      Arena arena = s.workers[worker];
      detail::top_k_head(head_scores.data(), candidates, forced,
                         {s.best.data() + task * stay, static_cast<std::size_t>(stay)},
                         detail::TopKScratch(arena, candidates, 1));
    });
  }

  Options options_;
  S method_;
};

template <EvictionMethod S>
using EvictingSelector = ScoredSelector<EvictingScorer<S>>;

}  // namespace QUOKA_ABI
}  // namespace quoka
