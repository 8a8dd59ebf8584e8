// Top-k (QuoKA, Algorithm 1, last stage): the best keys of each KV head, in ascending position.
//
// Order is (score descending, position ascending): equal scores go to the earlier key, -0 equals
// +0, and scores that are not finite (NaN, either infinity) rank last, earlier first. Forced keys
// count inside k: the first keep_first positions (attention sinks), then the last keep_last; where
// both do not fit, the first ones stay. A kernel size w > 1 replaces each finite score by the
// maximum of the finite scores at positions kv - (w-1)/2 ... kv + w/2 first, so that neighbours of
// a good key come with it.
//
// Nothing is sorted. A sample of the scores gives a pivot a little below the k-th, and one pass
// keeps the scores that reach it, about 1.6 k. Histograms over order-preserving integers find the
// k-th among those, and one pass writes. Three reads of kv_len scores and O(k) per KV head.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/rows/tensor_view.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/options.hpp>

#include <algorithm>
#include <span>

#if QUOKA_DEFINES
#include <quoka/kernels/compact.hpp>

#include <cassert>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// How many keys of a list of k are forced: first ones, then as many of the last ones as fit.
struct ForcedKeys {
  // options: TopKOptions, or a selector's.
  template <class Options>
  ForcedKeys(const Options& options, Index k)
      : first(std::min(options.keep_first, k)), last(std::min(options.keep_last, k - first)) {}

  Index first;  // how many first ones
  Index last;   // how many last ones
};

namespace detail {

// Scratch of one worker.
struct TopKScratch {
  TopKScratch(Arena& arena, Index kv_len, Index kernel_size)
      : ordered(arena.take<float>(kv_len)),
        bucket(arena.take<float>(kv_len + compact_slack)),
        positions(arena.take<Position>(kv_len + compact_slack)),
        pooled(kernel_size > 1 ? arena.take<float>(kv_len + pooled_span(kv_len, kernel_size) - 1)
                               : nullptr) {}
  // Beyond this span every key sees every other.
  static Index pooled_span(Index kv_len, Index kernel_size) {
    return std::min(kernel_size, 2 * kv_len + 1);
  }

  float* ordered;       // [kv_len]
  float* bucket;        // [kv_len] at most
  Position* positions;  // [kv_len] at most
  float* pooled;        // [kv_len + kernel_size], where kernel_size > 1
};

// Throws std::invalid_argument for a negative k, keep_first or keep_last and for kernel_size < 1.
void check_top_k(Index k, const TopKOptions& options);

// scores [kv_len] of one head to its k = kept.size() positions, k <= kv_len.
void top_k_head(const float* scores, Index kv_len, const TopKOptions& options,
                std::span<Position> kept, const TopKScratch& s);

// scores [batch, kv_heads, kv_len] to the k best of each head; all where k >= kv_len.
void select_top_k(TensorView<const float, 3> scores, Index k, const TopKOptions& options,
                  Selection& selection, Arenas& workers, ExecutorRef executor);

#if QUOKA_DEFINES

QUOKA_FUNC void top_k_head(const float* scores, Index kv_len, const TopKOptions& options,
                           std::span<Position> kept, const TopKScratch& s) {
  const Index k = static_cast<Index>(kept.size());
  assert(k <= kv_len);
  const auto [first, last] = ForcedKeys(options, k);
  const Index free = k - first - last, candidates = kv_len - first - last;
  Position* out = kept.data();
  for (Index i = 0; i < first; ++i) *out++ = static_cast<Position>(i);
  if (free > 0) {
    if (options.kernel_size > 1) {
      max_pool(scores, kv_len, TopKScratch::pooled_span(kv_len, options.kernel_size), s.pooled);
      scores = s.pooled;
    }
    order_scores(scores + first, candidates, s.ordered);
    k_best(s.ordered, candidates, free, static_cast<Position>(first), s.bucket, s.positions);
    out = std::copy_n(s.positions, free, out);
  }
  for (Index i = kv_len - last; i < kv_len; ++i) *out++ = static_cast<Position>(i);
}

QUOKA_FUNC void check_top_k(Index k, const TopKOptions& options) {
  require_at_least("k", k, 0);
  require_at_least("kernel_size", options.kernel_size, 1);
  require_at_least("keep_first", options.keep_first, 0);
  require_at_least("keep_last", options.keep_last, 0);
}

QUOKA_FUNC void select_top_k(TensorView<const float, 3> scores, Index k, const TopKOptions& options,
                             Selection& selection, Arenas& workers, ExecutorRef executor) {
  const Index batch = scores.batch(), heads = scores.heads(), kv_len = scores.len();
  if (k >= kv_len) return selection.select_all(batch, heads, kv_len);
  const auto scratch_in = [&](Arena& arena) {
    return TopKScratch(arena, kv_len, options.kernel_size);
  };
  workers.reserve(executor.workers(), scratch_in);
  SelectionWriter writer(selection, batch, heads, kv_len, k);
  executor.run(batch * heads, [&](Index task, int worker) {
    Arena arena = workers[worker];
    const Index b = task / heads, head = task % heads;
    top_k_head(scores.row(b, head, 0), kv_len, options, writer.row(b, head), scratch_in(arena));
  });
  writer.commit();
}

#endif  // QUOKA_DEFINES

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
