// Definitions of top_k.hpp.
#pragma once

#include <quoka/select/steps/kth_largest.hpp>
#include <quoka/select/steps/top_k.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Scores in their order as floats: those that are not finite are minus infinity.
QUOKA_INLINE float ordered_score(float score) {
  const bool finite = (std::bit_cast<std::uint32_t>(score) & 0x7f800000u) != 0x7f800000u;
  return finite ? score : -simd::infinity;
}

// pooled[kv] = max over the window; doubling spans, so log2(window) passes.
inline float* pool_window(const float* scores, Index kv_len, Index window, float* x) {
  window = TopKScratch::window_span(kv_len, window);
  const Index before = (window - 1) / 2, size = kv_len + window - 1;
  std::fill_n(x, before, -simd::infinity);
  for_each_lanes(kv_len, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(x + before, select_finite(score, score, at.broadcast(-simd::infinity)));
  });
  std::fill_n(x + before + kv_len, size - before - kv_len, -simd::infinity);
  Index span = 1;
  while (span < window) {
    const Index step = std::min(span, window - span);
    for_each_lanes(size - step, [&](auto at) QUOKA_INLINE_LAMBDA {
      at.store(x, simd::max(at.load(x), at.load(x + step)));
    });
    span += step;
  }
  for_each_lanes(kv_len, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(x, select_finite(score, at.load(x), score));
  });
  return x;
}

// The k best of x[0, n) without a NaN, 0 < k <= n, as ascending positions counted from `first`.
// Equal ones in their order. positions [n + compact_slack]; returns its first k.
inline const Position* k_best(const float* x, Index n, Index k, Position first, float* bucket,
                              Position* positions) {
  const auto [least, above] = kth_largest(x, n, k, bucket);
  const Index count =
      positions_where(n, first, positions, [&, bound = least](auto at) QUOKA_INLINE_LAMBDA {
        return simd::not_less(at.load(x), at.broadcast(bound));
      });
  if (count == k) return positions;
  Index ties = k - above;  // more are equal than fit: the later ones go
  (void)std::remove_if(positions, positions + count, [&, bound = least](Position at) {
    return x[at - first] == bound && ties-- <= 0;
  });
  return positions;
}

QUOKA_FUNC void top_k_head(const float* scores, Index kv_len, const TopKOptions& options,
                           std::span<Position> kept, TopKScratch& s) {
  const Index k = static_cast<Index>(kept.size());
  assert(k <= kv_len);
  const Index first = std::min(options.keep_first, k),
              last = std::min(options.keep_last, k - first);
  const Index free = k - first - last, candidates = kv_len - first - last;
  Position* out = kept.data();
  for (Index i = 0; i < first; ++i) *out++ = static_cast<Position>(i);
  if (free > 0) {
    if (options.window > 1) scores = pool_window(scores, kv_len, options.window, s.pooled.data());
    float* const ordered = s.ordered.data();
    for_each_lanes(candidates, [&, from = scores + first](auto at) QUOKA_INLINE_LAMBDA {
      const auto score = at.load(from);
      at.store(ordered, select_finite(score, score, at.broadcast(-simd::infinity)));
    });
    const Position* const best = k_best(ordered, candidates, free, static_cast<Position>(first),
                                        s.bucket.data(), s.positions.data());
    out = std::copy_n(best, free, out);
  }
  for (Index i = kv_len - last; i < kv_len; ++i) *out++ = static_cast<Position>(i);
}

QUOKA_FUNC void TopKLists::propose(const KeyRanges& ranges, Index r, Index begin, Index end,
                                   const float* x) {
  float* const found = values.data() + ranges.room(r);
  PositionList list{positions.data() + ranges.room(r)};
  for_each_compared(end - begin, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto value = at.load(x);
    const unsigned reaches = simd::not_less(value, at.broadcast(pivot));
    simd::store_compressed(found + list.count, reaches, value);
    list.add(at, reaches, static_cast<Position>(begin));
  });
  counts.data()[r] = list.count;
}
QUOKA_FUNC Index TopKLists::gather(const KeyRanges& ranges, float* to) const {
  float* end = to;
  for (Index r = 0; r < ranges.count; ++r)
    end = std::copy_n(values.data() + ranges.room(r), counts.data()[r], end);
  return end - to;
}

QUOKA_FUNC RangedTopK::RangedTopK(const float* scores, const TopKOptions& options, Index k,
                                  const KeyRanges& ranges, TopKLists& lists, TopKScratch& scratch)
    : scores_(scores),
      options_(options),
      ranges_(ranges),
      lists_(lists),
      s_(scratch),
      first_(std::min(options.keep_first, k)),
      last_(std::min(options.keep_last, k - first_)),
      free_(k - first_ - last_) {}

// One range, or windows that see more than their neighbours: all of it is finish()'s.
QUOKA_FUNC bool RangedTopK::by_ranges() const {
  return ranges_.count > 1 && free_ > 0 && options_.window <= 8;
}

QUOKA_FUNC float RangedTopK::pooled(Index key) const {
  float most = ordered_score(scores_[key]);
  if (options_.window == 1 || most == -simd::infinity) return most;
  const Index begin = std::max<Index>(0, key - (options_.window - 1) / 2);
  const Index end = std::min(ranges_.keys, key + options_.window / 2 + 1);
  for (Index i = begin; i < end; ++i) most = std::max(most, ordered_score(scores_[i]));
  return most;
}

QUOKA_FUNC void RangedTopK::begin() {
  if (!by_ranges()) return;
  const Index before = (options_.window - 1) / 2, n = ranges_.keys - first_ - last_;
  lists_.pivot = sampled_pivot(n, free_, s_.bucket.data(), [&](Index i) {
    const Index key = first_ + i;
    if (key < before || key + options_.window - before > ranges_.keys) return pooled(key);
    float most = -simd::infinity;
    for (Index w = 0; w < options_.window; ++w)
      most = std::max(most, ordered_score(scores_[key - before + w]));
    return most;  // of a key without a score more than it has: no matter in a sample
  });
}

QUOKA_FUNC void RangedTopK::propose(Index range) {
  if (!by_ranges()) return;
  const auto [from, to] = ranges_.of(range);
  const Index begin = std::clamp(from, first_, ranges_.keys - last_);
  const Index end = std::clamp(to, begin, ranges_.keys - last_);
  float* const x = s_.ordered.data();
  const Index before = (options_.window - 1) / 2, after = options_.window / 2;
  if (begin >= before && end + after <= ranges_.keys) {
    for (Index i = 0; i < end - begin + before + after; ++i)
      x[i] = ordered_score(scores_[begin - before + i]);
    for (Index w = 1; w < options_.window; w *= 2) {  // as pool_window
      const Index step = std::min(w, options_.window - w);
      for (Index i = 0; i < end - begin + before + after - step; ++i)
        x[i] = std::max(x[i], x[i + step]);
    }
    if (options_.window > 1)
      for (Index i = 0; i < end - begin; ++i)
        x[i] = ordered_score(scores_[begin + i]) == -simd::infinity ? -simd::infinity : x[i];
  } else {
    for (Index i = begin; i < end; ++i) x[i - begin] = pooled(i);
  }
  lists_.propose(ranges_, range, begin, end, x);
}

QUOKA_FUNC void RangedTopK::finish(std::span<Position> kept) {
  const Index count = by_ranges() ? lists_.gather(ranges_, s_.bucket.data()) : 0;
  if (count < free_ || !by_ranges())  // the sample was not fair
    return top_k_head(scores_, ranges_.keys, options_, kept, s_);
  const auto [least, above] = kth_by_bins(s_.bucket.data(), count, free_);
  // Of equal ones the earliest: all of a range, or none, but for the range where they run out.
  Index ties = free_ - above;
  PositionList best{s_.positions.data()};
  for (Index r = 0; r < ranges_.count; ++r) {
    const Index n = lists_.counts.data()[r];
    const float* const values = lists_.values.data() + ranges_.room(r);
    const Position* const positions = lists_.positions.data() + ranges_.room(r);
    const Index before = best.count;
    Index larger = 0;
    for_each_compared(n, [&, bound = least](auto at) QUOKA_INLINE_LAMBDA {
      const auto value = at.load(values);
      larger += std::popcount(simd::less(at.broadcast(bound), value));
      best.take(at,
                ties > 0 ? simd::not_less(value, at.broadcast(bound))
                         : simd::less(at.broadcast(bound), value),
                positions);
    });
    const Index equal = best.count - before - larger;
    if (equal <= ties) {
      ties -= equal;
      continue;
    }
    best.count = before;
    for (Index i = 0; i < n; ++i) {
      const bool tie = values[i] == least;
      best.out[best.count] = positions[i];
      best.count += (values[i] > least) | (tie & (ties > 0)) ? 1 : 0;
      ties -= tie ? 1 : 0;
    }
    ties = 0;
  }
  Position* out = kept.data();
  for (Index i = 0; i < first_; ++i) *out++ = static_cast<Position>(i);
  out = std::copy_n(best.out, best.count, out);
  for (Index i = ranges_.keys - last_; i < ranges_.keys; ++i) *out++ = static_cast<Position>(i);
}

QUOKA_FUNC void check_top_k(Index k, const TopKOptions& options) {
  require_at_least("k", k, 0);
  require_at_least("window", options.window, 1);
  require_at_least("keep_first", options.keep_first, 0);
  require_at_least("keep_last", options.keep_last, 0);
}

QUOKA_FUNC TopKStages::TopKStages(const KeyScores& scores, Index k, const TopKOptions& options,
                                  SelectionWriter& writer, WorkerScratch<TopKScratch>& scratch,
                                  const HeadPlan& plan)
    : scores_(scores),
      k_(k),
      options_(options),
      writer_(writer),
      scratch_(scratch),
      plan_(plan),
      ranges_(KeyRanges::for_workers(scores.kv_len, scores.heads(), plan.workers())) {}

QUOKA_FUNC void TopKStages::run(const HeadLoops& on) const {
  if (ranges_.count > 1) {
    on.each(1, [&](Index head, Index, int worker) { of(head, worker).begin(); });
    on.each(ranges_.count,
            [&](Index head, Index range, int worker) { of(head, worker).propose(range); });
  }
  on.each(1, [&](Index head, Index, int worker) {
    of(head, worker).finish(writer_.row(head / scores_.kv_heads, head % scores_.kv_heads));
  });
}

QUOKA_FUNC RangedTopK TopKStages::of(Index head, int worker) const {
  // Several ranges: fewer heads than workers, and so no more slots.
  const Index lists = ranges_.count > 1 ? plan_.slot(head, worker) : worker;
  return RangedTopK(scores_.of(head), options_, k_, ranges_,
                    scratch_[static_cast<int>(lists)].lists, scratch_[worker]);
}

QUOKA_FUNC void select_top_k(const KeyScores& scores, Index k, const TopKOptions& options,
                             Selection& selection, WorkerScratch<TopKScratch>& scratch,
                             ExecutorRef executor) {
  if (k >= scores.kv_len) return selection.select_all(scores.batch, scores.kv_heads, scores.kv_len);
  SelectionWriter writer(selection, scores.batch, scores.kv_heads, scores.kv_len, k);
  const HeadPlan plan(scores.heads(), executor);
  const TopKStages stages(scores, k, options, writer, scratch, plan);
  plan.run([&](const HeadLoops& on) { stages.run(on); });
  writer.commit();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
