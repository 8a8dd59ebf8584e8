// One KV head's keys by their sketched scores: sure, near, far or out (sketched_top_k.hpp).
#pragma once

#include <quoka/kernels/compact.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/select/sketch/sketch_state.hpp>
#include <quoka/select/steps/tile_scorer.hpp>
#include <quoka/select/steps/top_k_impl.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// One KV head: sketched scores to its best keys.
class SketchedHead {
 public:
  // errors: what the codes of each key miss of its direction. positions: of the keys; null: all.
  SketchedHead(const HeadKeys& keys, Index kv_len, const Position* positions, Index task,
               Index rows, TileScorer& scorer, const float* errors, SketchState& state, int worker)
      : keys_(keys),
        kv_len_(kv_len),
        positions_(positions),
        scorer_(scorer),
        sketched_(state.scores.data() + task * kv_len),
        errors_(errors),
        s_(state.scratch[worker]),
        top_k_(state.top_k[worker]) {
    const float e = state.queries.error.data()[task], longest = state.queries.length.data()[task];
    slope_ = longest + e;
    constant_ = e + static_cast<float>(keys.dim + rows + 16) * 0x1p-23f * longest;
    // Heuristic; changes speed, never the result. Measured: sketches are off by less than e / 8, so
    // e / 4 leaves room.
    slack_ = 0.25f * e;
  }

  void select(const TopKOptions& options, std::span<Position> kept) {
    const Index wanted = std::ssize(kept), kv_len = kv_len_;
    const Index first = std::min(options.keep_first, wanted);
    const Index last = std::min(options.keep_last, wanted - first);
    const Index free = wanted - first - last, candidates = kv_len - first - last;
    Position* out = kept.data();
    if (options.window > 1 && free > 0) return select_windows(options, first, candidates, kept);
    for (Index i = 0; i < first; ++i) *out++ = static_cast<Position>(i);
    if (free > 0) out = select_best(first, candidates, free, out);
    for (Index i = kv_len - last; i < kv_len; ++i) *out++ = static_cast<Position>(i);
  }

 private:
  // The n-th best sketched score; minus infinity where a query is beyond codes and all keys count.
  float nth_best(const float* sketched, Index n, Index wanted) const {
    if (!std::isfinite(slope_)) return -simd::infinity;
    return kth_largest(sketched, n, wanted, top_k_.bucket.data()).value;
  }

  // The `wanted` best of the keys [first, first + n), ascending, to out; returns their end.
  Position* select_best(Index first, Index n, Index wanted, Position* out) {
    const float nth = nth_best(sketched_ + first, n, wanted), level = nth + slack_;
    Position *const members = s_.members.data(), *const sure_at = s_.sure.data();
    auto [sure, near] = sort_proposed(first, n, nth, level);
    const float floor = std::min(score(0, near), level);
    Index count = near + add_far(first, n, nth, floor, members + near);
    score(near, count);
    const float* const exact = s_.exact.data();
    if (sure > 0 && std::count_if(exact, exact + count, [&](float x) {
                      return ordered_score(x) >= level;
                    }) > wanted - sure) {
      std::copy_n(sure_at, sure, members + count);
      score(count, count + sure);
      count += std::exchange(sure, 0);
    }
    keep_best(wanted - sure, count);
    // What is kept has a sketch above the level now: the sure, and what keep_best took.
    const float least = sure > 0 ? level : simd::infinity;
    return std::copy_n(sure_at, propose(first, n, least, sure_at), out);
  }

  // Sets the sketch of the `wanted` best members by their exact scores to infinity, and that of the
  // other members to minus infinity.
  void keep_best(Index wanted, Index count) {
    const Position* const members = s_.members.data();
    float *const exact = s_.exact.data(), *const bucket = s_.ordered.data();
    for (Index i = 0; i < count; ++i) bucket[i] = exact[i] = ordered_score(exact[i]);
    const auto [least, above] =
        wanted > 0 ? kth_by_bins(bucket, count, wanted) : KthLargest{simd::infinity, 0};
    Index equal = 0;
    for (Index i = 0; i < count; ++i) {
      sketched_[members[i]] = exact[i] > least ? simd::infinity : -simd::infinity;
      s_.ties.data()[equal] = members[i];
      equal += exact[i] == least ? 1 : 0;
    }
    // Of equal ones the earliest; near and far members are two ascending lists.
    Position* const ties = s_.ties.data();
    if (equal > wanted - above) sort(ties, equal, [](Position x, Position y) { return x < y; });
    for (Index i = 0; i < wanted - above; ++i) sketched_[ties[i]] = simd::infinity;
  }

  void select_windows(const TopKOptions& options, Index first, Index candidates,
                      std::span<Position> kept) {
    const Index kv_len = kv_len_;
    const Index last = kv_len - first - candidates;
    float* const pooled = pool_window(sketched_, kv_len, options.window, top_k_.pooled.data());
    for (Index kv = 0; kv < kv_len; ++kv)  // a key without codes may be one without a score
      pooled[kv] = errors_[kv] < simd::infinity ? pooled[kv] : -simd::infinity;
    const float nth = nth_best(pooled + first, candidates, std::ssize(kept) - first - last);
    Position* const members = s_.members.data();
    const Index near = propose(0, kv_len, nth, members);
    const float floor = score(0, near);
    const Index count = near + add_far(0, kv_len, nth, floor, members + near);
    score(near, count);
    std::fill_n(sketched_, kv_len, std::numeric_limits<float>::lowest());
    for (Index i = 0; i < count; ++i) sketched_[members[i]] = s_.exact.data()[i];
    top_k_head(sketched_, kv_len, options, kept, top_k_);
  }

  // Keys of [first, first + n) whose sketch reaches nth: the sure ones to s_.sure, the others, near
  // the threshold, to s_.members; their numbers.
  std::pair<Index, Index> sort_proposed(Index first, Index n, float nth, float level) const {
    const float *const x = sketched_ + first, *const errors = errors_ + first;
    PositionList sure{s_.sure.data()}, near{s_.members.data()};
    walk(n, [&](auto at) QUOKA_INLINE_LAMBDA {
      const auto sketched = at.load(x);
      const auto least = simd::sub(
          sketched, simd::fma(at.broadcast(slope_), at.load(errors), at.broadcast(constant_)));
      const unsigned proposed = simd::not_less(sketched, at.broadcast(nth));
      const unsigned above = proposed & simd::less(at.broadcast(level), least);
      sure.add(at, above, static_cast<Position>(first));
      near.add(at, proposed & ~above, static_cast<Position>(first));
    });
    return {sure.count, near.count};
  }

  // Keys of [first, first + n) whose sketch reaches nth, to out.
  Index propose(Index first, Index n, float nth, Position* out) const {
    const float* const x = sketched_ + first;
    return positions_where(n, static_cast<Position>(first), out, [&](auto at) QUOKA_INLINE_LAMBDA {
      return simd::not_less(at.load(x), at.broadcast(nth));
    });
  }

  // The others whose sketch, with its bound, reaches `floor`.
  Index add_far(Index first, Index n, float nth, float floor, Position* out) const {
    const float *const x = sketched_ + first, *const errors = errors_ + first;
    return positions_where(n, static_cast<Position>(first), out, [&](auto at) QUOKA_INLINE_LAMBDA {
      const auto sketched = at.load(x);
      const auto most = simd::add(
          sketched, simd::fma(at.broadcast(slope_), at.load(errors), at.broadcast(constant_)));
      return simd::less(sketched, at.broadcast(nth)) & simd::not_less(most, at.broadcast(floor));
    });
  }

  // Scores members [begin, end) in float; returns the least score, minus infinity if one is not
  // finite.
  float score(Index begin, Index end) {
    const Position* const members = s_.members.data() + begin;
    float* const exact = s_.exact.data() + begin;
    score_keys_of_head(keys_, {0, members}, end - begin, scorer_, Scoring::cosine, exact);
    float least = simd::infinity;
    for (Index i = 0; i < end - begin; ++i) {
      least = std::min(least, ordered_score(exact[i]));
      require_within_bound(members[i], exact[i]);
    }
    return least;
  }
  // A float score beyond the bound of its sketch is one of another key.
  void require_within_bound(Index kv, float exact) const {
    const float bound = slope_ * errors_[kv] + constant_;
    if (std::abs(exact - sketched_[kv]) > bound) [[unlikely]]
      fail("the key at position", positions_ != nullptr ? positions_[kv] : kv,
           "not the one that was sketched (its cache changed and the sketch was not told, or its "
           "inverse norm is not its own), of",
           "", kv_len_);
  }

  HeadKeys keys_;
  Index kv_len_;
  const Position* positions_;
  TileScorer& scorer_;
  float* sketched_;
  const float* errors_;
  SketchScratch& s_;
  TopKScratch& top_k_;
  float slope_, constant_, slack_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
