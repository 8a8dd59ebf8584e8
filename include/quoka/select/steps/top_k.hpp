// Top-k (QuoKA, Algorithm 1, last stage): the best keys of each KV head, in ascending position.
//
// Order is (score descending, position ascending): equal scores go to the earlier key, -0 equals
// +0, and scores that are not finite (NaN, either infinity) rank last, earlier first. Forced keys
// count inside k: the first keep_first positions (attention sinks), then the last keep_last; where
// both do not fit, the first ones stay. A kernel size w > 1 replaces each finite score by the maximum of
// the finite scores at positions kv - (w-1)/2 ... kv + w/2 first, so that neighbours of a good key
// come with it.
//
// No sort: a sample of the scores gives a pivot a little below the k-th, one pass keeps what
// reaches it (about 1.6 k), histograms over order-preserving integers narrow those down to the
// k-th, one pass emits. Three reads of kv_len scores and O(k) per KV head.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/options.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// An output of compaction has room for this many elements beyond the last: the widest packet.
inline constexpr Index compact_slack = 16;

// A head's keys in ranges, each a task of a stage, with room for a list of each range's keys.
struct KeyRanges {
  Index keys, size, count;

  // Ranges of `size` keys.
  static KeyRanges by_size(Index keys, Index size) {
    return {keys, size, std::max<Index>(1, ceil_div(keys, size))};
  }
  // For results that do not depend on the ranges: two for each worker of a head, one where there is but one
  // worker, none of them too small to be worth its task.
  static KeyRanges for_workers(Index keys, Index heads, int workers) {
    if (workers == 1) return by_size(keys, std::max<Index>(keys, 1));
    const Index wanted = std::max<Index>(1, 2 * workers / heads);
    const Index size = std::max(ceil_div(keys, wanted), std::min<Index>(keys, tuning::range_keys));
    return by_size(keys, round_up(std::max<Index>(size, 1), Index{64}));
  }
  std::pair<Index, Index> of(Index r) const {
    return {std::min(r * size, keys), std::min((r + 1) * size, keys)};
  }
};

// Scratch of one worker.
struct TopKScratch {
  Buffer<float> ordered;       // [kv_len]
  Buffer<float> bucket;        // [kv_len] at most
  Buffer<Position> positions;  // [kv_len] at most
  Buffer<float> pooled;        // [kv_len + kernel_size], where kernel_size > 1

  void reserve(Index kv_len, Index kernel_size) {
    ordered.reserve_amortised(kv_len);
    bucket.reserve_amortised(kv_len + compact_slack);
    positions.reserve_amortised(kv_len + compact_slack);
    if (kernel_size > 1) pooled.reserve_amortised(kv_len + pooled_span(kv_len, kernel_size) - 1);
  }
  // Beyond this span every key sees every other.
  static Index pooled_span(Index kv_len, Index kernel_size) {
    return std::min(kernel_size, 2 * kv_len + 1);
  }
  Index bytes() const { return bytes_of(ordered, bucket, positions, pooled); }
};

// Throws std::invalid_argument for a negative k, keep_first or keep_last and for kernel_size < 1.
void check_top_k(Index k, const TopKOptions& options);

// scores [kv_len] of one head to its k = kept.size() positions, k <= kv_len.
void top_k_head(const float* scores, Index kv_len, const TopKOptions& options,
                std::span<Position> kept, TopKScratch& s);

// Scores [batch, kv_heads, kv_len], contiguous.
struct KeyScores {
  const float* data;
  Index batch, kv_heads, kv_len;

  Index heads() const { return batch * kv_heads; }  // of all sequences
  // For head b * kv_heads + kv_head.
  const float* of(Index head) const { return data + head * kv_len; }
};

// The k best of each head; all where k >= kv_len. `scratch` is reserved for kv_len and options.kernel_size.
void select_top_k(const KeyScores& scores, Index k, const TopKOptions& options,
                  Selection& selection, WorkerScratch<TopKScratch>& scratch, ExecutorRef executor);

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/select/steps/kth_largest.hpp>

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

// pooled[kv] = max over kernel_size neighbours; doubling spans, so log2(kernel_size) passes.
inline float* max_pool(const float* scores, Index kv_len, Index kernel_size, float* x) {
  kernel_size = TopKScratch::pooled_span(kv_len, kernel_size);
  const Index before = (kernel_size - 1) / 2, size = kv_len + kernel_size - 1;
  std::fill_n(x, before, -simd::infinity);
  for_each_lanes(kv_len, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(x + before, select_finite(score, score, at.broadcast(-simd::infinity)));
  });
  std::fill_n(x + before + kv_len, size - before - kv_len, -simd::infinity);
  Index span = 1;
  while (span < kernel_size) {
    const Index step = std::min(span, kernel_size - span);
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
    if (options.kernel_size > 1)
      scores = max_pool(scores, kv_len, options.kernel_size, s.pooled.data());
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
  require_at_least("kernel_size", options.kernel_size, 1);
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
#endif  // QUOKA_DEFINES
