// Top-k (QuoKA, Algorithm 1, last stage): the best keys of each KV head, in ascending position.
//
// Order is (score descending, position ascending): equal scores go to the earlier key, -0 equals
// +0, and scores that are not finite (NaN, either infinity) rank last, earlier first. Forced keys
// count inside k: the first keep_first positions (attention sinks), then the last keep_last; where
// both do not fit, the first ones stay. A window w > 1 replaces each finite score by the maximum of
// the finite scores at positions kv - (w-1)/2 ... kv + w/2 first, so that neighbours of a good key
// come with it.
//
// No sort: a sample of the scores gives a pivot a little below the k-th, one pass keeps what
// reaches it (about 1.6 k), histograms over order-preserving integers narrow those down to the
// k-th, one pass emits. Three reads of kv_len scores and O(k) per KV head.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/options.hpp>
#include <quoka/simd/tuning.hpp>
#include <quoka/views/selection.hpp>

#include <algorithm>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// An output of compaction has room for so many elements beyond the last: the widest packet.
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
  Buffer<float> pooled;        // [kv_len + window], where a window is asked for

  void reserve(Index kv_len, Index window) {
    ordered.reserve_amortised(kv_len);
    bucket.reserve_amortised(kv_len + compact_slack);
    positions.reserve_amortised(kv_len + compact_slack);
    if (window > 1) pooled.reserve_amortised(kv_len + window_span(kv_len, window) - 1);
  }
  // Beyond this span every key sees every other.
  static Index window_span(Index kv_len, Index window) { return std::min(window, 2 * kv_len + 1); }
  Index bytes() const { return bytes_of(ordered, bucket, positions, pooled); }
};

// Throws std::invalid_argument for a negative k, keep_first or keep_last and for window < 1.
void check_top_k(Index k, const TopKOptions& options);

// scores [kv_len] of one head to its k = kept.size() positions, k <= kv_len.
void top_k_head(const float* scores, Index kv_len, const TopKOptions& options,
                std::span<Position> kept, TopKScratch& s);

// Scores [batch, kv_heads, kv_len], contiguous.
struct KeyScores {
  const float* data;
  Index batch, kv_heads, kv_len;

  Index heads() const { return batch * kv_heads; }  // of all sequences
  // Of head b * kv_heads + kv_head.
  const float* of(Index head) const { return data + head * kv_len; }
};

// The k best of each head; all where k >= kv_len. `scratch` is reserved for kv_len and options.window.
void select_top_k(const KeyScores& scores, Index k, const TopKOptions& options,
                  Selection& selection, WorkerScratch<TopKScratch>& scratch, ExecutorRef executor);

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/steps/top_k_impl.hpp>
#endif
