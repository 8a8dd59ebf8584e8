// Top-k (QuoKA, Algorithm 1, last stage): the best keys of each KV head, in ascending position.
//
// Order is (score descending, position ascending): equal scores go to the earlier key, -0 equals
// +0, and scores that are not finite (NaN, either infinity) rank last, earlier first. Forced keys
// count inside k: the first keep_first positions (attention sinks), then the last keep_last; where
// both do not fit, the first ones stay. A window w > 1 replaces each finite score by the maximum of
// the finite scores at positions kv - (w-1)/2 ... kv + w/2 first, so that neighbours of a good key
// come with it.
//
// No sort: scores become integers of the same order, one histogram over their leading bits finds
// the bucket of the k-th, nth_element on that bucket alone finds its exact value, one pass emits.
// Three reads of kv_len scores, O(kv_len + bucket) per KV head.
#pragma once

#include <quoka/core/buffer.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/core/simd.hpp>
#include <quoka/core/view.hpp>
#include <quoka/core/worker_scratch.hpp>
#include <quoka/select/selection.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>

namespace quoka::inline QUOKA_ABI {

struct TopKOptions {
  Index window = 1;      // neighbouring keys that share their maximum; 1: none (paper)
  Index keep_first = 0;  // attention sinks, inside the budget; 0: paper
  Index keep_last = 0;   // most recent keys, inside the budget; 0: paper
};

namespace detail {

// Scratch of one worker.
struct TopKScratch {
  Buffer<std::uint32_t> ranks;   // [kv_len]
  Buffer<std::uint32_t> bucket;  // [kv_len] at most
  Buffer<float> pooled;          // [kv_len + window], where a window is asked for

  void reserve(Index kv_len, Index window) {
    ranks.reserve_amortised(kv_len);
    bucket.reserve_amortised(kv_len + 1);
    if (window > 1) pooled.reserve_amortised(kv_len + window_span(kv_len, window) - 1);
  }
  // Beyond this span every key sees every other.
  static Index window_span(Index kv_len, Index window) { return std::min(window, 2 * kv_len + 1); }
  Index bytes() const { return ranks.bytes() + bucket.bytes() + pooled.bytes(); }
};

// Unsigned integers in the order of the scores; 0 for a score that is not finite, below all others.
QUOKA_INLINE std::uint32_t rank_of(float score) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(score + 0.0f);  // -0 becomes +0
  const std::uint32_t ordered = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
  return (bits & 0x7f800000u) == 0x7f800000u ? 0u : ordered;
}

QUOKA_INLINE float score_of(std::uint32_t rank) {
  if (rank == 0u) return -simd::infinity;
  return std::bit_cast<float>((rank >> 31) != 0u ? rank ^ 0x80000000u : ~rank);
}

// pooled[kv] = max over the window; doubling spans, so log2(window) passes.
inline const float* pool_window(const float* scores, Index kv_len, Index window, float* x) {
  window = TopKScratch::window_span(kv_len, window);
  const Index before = (window - 1) / 2, size = kv_len + window - 1;
  std::fill_n(x, before, -simd::infinity);
  for (Index i = 0; i < kv_len; ++i)
    x[before + i] = std::isfinite(scores[i]) ? scores[i] : -simd::infinity;
  std::fill_n(x + before + kv_len, size - before - kv_len, -simd::infinity);
  Index span = 1;
  while (span < window) {
    const Index step = std::min(span, window - span);
    for (Index i = 0; i + step < size; ++i) x[i] = std::max(x[i], x[i + step]);
    span += step;
  }
  for (Index i = 0; i < kv_len; ++i)
    if (!std::isfinite(scores[i])) x[i] = scores[i];
  return x;
}

// The k-th largest of ranks[0, n), 0 < k <= n, and how many above it are among the k best.
struct KthRank {
  std::uint32_t rank;
  Index above;
};
inline KthRank kth_rank(const std::uint32_t* ranks, Index n, Index k, std::uint32_t* bucket) {
  assert(0 < k && k <= n);
  constexpr int shift = 20;
  // Four of them: equal scores in a row would wait for each other's count.
  std::array<std::array<Position, (1u << (32 - shift))>, 4> histograms{};
  for (Index i = 0; i < n; ++i) ++histograms[static_cast<std::size_t>(i % 4)][ranks[i] >> shift];
  auto& histogram = histograms[0];
  for (std::size_t digit = 0; digit < histogram.size(); ++digit)
    histogram[digit] += histograms[1][digit] + histograms[2][digit] + histograms[3][digit];
  std::uint32_t digit = (1u << (32 - shift)) - 1;
  Index above = 0;
  while (above + histogram[digit] < k) above += histogram[digit--];

  Index members = 0;
  for (Index i = 0; i < n; ++i) {
    bucket[members] = ranks[i];
    members += (ranks[i] >> shift) == digit ? 1 : 0;
  }
  std::uint32_t* const kth = bucket + (k - above - 1);
  std::nth_element(bucket, kth, bucket + members, std::greater<>());
  return {*kth,
          above + std::count_if(bucket, kth, [&](std::uint32_t rank) { return rank > *kth; })};
}

// The k best of ranks[0, n), 0 < k <= n, as ascending positions counted from `offset`.
inline Position* emit_best(const std::uint32_t* ranks, Index n, Index k, Index offset,
                           std::uint32_t* bucket, Position* out) {
  const auto [threshold, above] = kth_rank(ranks, n, k, bucket);
  Index ties = k - above;
  Position* const end = out + k;
  for (Index i = 0; out != end; ++i) {
    if (ranks[i] < threshold) continue;
    if (ranks[i] == threshold && ties-- <= 0) continue;
    *out++ = static_cast<Position>(offset + i);
  }
  return out;
}

// The k-th largest of scores[0, n), 0 <= k <= n; minus infinity if that is not finite, and plus
// infinity for k == 0.
inline float nth_score(const float* scores, Index n, Index k, std::uint32_t* ranks,
                       std::uint32_t* bucket) {
  if (k == 0) return simd::infinity;
  for (Index i = 0; i < n; ++i) ranks[i] = rank_of(scores[i]);
  return score_of(kth_rank(ranks, n, k, bucket).rank);
}

// scores [kv_len] of one head to its k = kept.size() positions.
inline void top_k_head(const float* scores, Index kv_len, const TopKOptions& options,
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
    std::uint32_t* ranks = s.ranks.data();
    for (Index i = 0; i < candidates; ++i) ranks[i] = rank_of(scores[first + i]);
    out = emit_best(ranks, candidates, free, first, s.bucket.data(), out);
  }
  for (Index i = kv_len - last; i < kv_len; ++i) *out++ = static_cast<Position>(i);
}

inline void check_top_k(Index k, const TopKOptions& options) {
  require_at_least("k", k, 0);
  require_at_least("window", options.window, 1);
  require_at_least("keep_first", options.keep_first, 0);
  require_at_least("keep_last", options.keep_last, 0);
}

// `scratch` is reserved for kv_len and options.window.
template <class E>
void select_top_k(const float* scores, Index batch, Index kv_heads, Index kv_len, Index k,
                  const TopKOptions& options, Selection& selection,
                  WorkerScratch<TopKScratch>& scratch, E&& executor) {
  if (k >= kv_len) return selection.select_all(batch, kv_heads, kv_len);
  selection.resize(batch, kv_heads, kv_len, k);
  executor.run(batch * kv_heads, [&](Index head, int worker) {
    top_k_head(scores + head * kv_len, kv_len, options,
               selection.mutable_row(head / kv_heads, head % kv_heads), scratch[worker]);
  });
}

}  // namespace detail

// scores [batch, kv_heads, kv_len] to the k best of each head; all where k >= kv_len. Throws
// std::invalid_argument for a negative k, keep_first or keep_last and for window < 1.
template <Executor E = SerialExecutor>
Selection top_k(const Tensor<float, 3>& scores, Index k, const TopKOptions& options = {},
                E&& executor = E{}) {
  detail::check_top_k(k, options);
  Selection selection;
  WorkerScratch<detail::TopKScratch> scratch;
  scratch.reserve(executor.workers(), scores.dimension(2), options.window);
  detail::select_top_k(scores.data(), scores.dimension(0), scores.dimension(1), scores.dimension(2),
                       k, options, selection, scratch, executor);
  return selection;
}

}  // namespace quoka::inline QUOKA_ABI
