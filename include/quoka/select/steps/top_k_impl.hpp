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
// Equal ones in their order. bucket, positions [n + compact_slack]; the first k positions are these.
inline void k_best(const float* x, Index n, Index k, Position first, float* bucket,
                   Position* positions) {
  const auto [kth, count] = reach_kth(x, n, k, first, bucket, positions);
  if (count == k) return;
  Index ties = k - kth.above;  // more are equal than fit: the later ones go
  (void)std::remove_if(positions, positions + count, [&, least = kth.value](Position at) {
    return x[at - first] == least && ties-- <= 0;
  });
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
    k_best(ordered, candidates, free, static_cast<Position>(first), s.bucket.data(),
           s.positions.data());
    out = std::copy_n(s.positions.data(), free, out);
  }
  for (Index i = kv_len - last; i < kv_len; ++i) *out++ = static_cast<Position>(i);
}

QUOKA_FUNC void check_top_k(Index k, const TopKOptions& options) {
  require_at_least("k", k, 0);
  require_at_least("window", options.window, 1);
  require_at_least("keep_first", options.keep_first, 0);
  require_at_least("keep_last", options.keep_last, 0);
}

QUOKA_FUNC void select_top_k(const KeyScores& scores, Index k, const TopKOptions& options,
                             Selection& selection, WorkerScratch<TopKScratch>& scratch,
                             ExecutorRef executor) {
  if (k >= scores.kv_len) return selection.select_all(scores.batch, scores.kv_heads, scores.kv_len);
  SelectionWriter writer(selection, scores.batch, scores.kv_heads, scores.kv_len, k);
  executor.run(scores.heads(), [&](Index head, int worker) {
    top_k_head(scores.of(head), scores.kv_len, options,
               writer.row(head / scores.kv_heads, head % scores.kv_heads), scratch[worker]);
  });
  writer.commit();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
