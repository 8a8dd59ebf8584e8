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
#include <quoka/kernels/compact.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- the k-th largest, which top-k compares with ---------------------------------------------------
//
//   sampled_pivot   a guess from below, from a sample: what does not reach it is out
//   kth_by_bins     exact, of what is left: a histogram finds the bin of the k-th, whose members are
//                   looked at again until they are few
//   reach_kth       both, and which elements reach it
//
// Values are floats without a NaN. -0 and +0 are equal.

// Unsigned integers in the order of floats without a NaN, and back.
QUOKA_INLINE std::uint32_t rank_of(float x) {
  // Denormals are what comparisons take them for. -0 becomes +0: by the sum, but when rounding down.
  const std::uint32_t sum = std::bit_cast<std::uint32_t>(x + 0.0f);
  const std::uint32_t bits = sum == 0x80000000u ? 0u : sum;
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}
QUOKA_INLINE float value_of_rank(std::uint32_t rank) {
  return std::bit_cast<float>(rank ^ (((rank >> 31) - 1u) | 0x80000000u));
}

// The k-th largest value, and how many are larger.
struct KthLargest {
  float value;
  Index above;
};

// The least and the largest of the ranks of x[0, n), n > 0. In integers: a system that takes denormals for
// zeros must not change them.
struct RankExtent {
  std::uint32_t least, largest;
};
inline RankExtent rank_extent(const float* x, Index n) {
  constexpr Index width = 16;  // known to the compiler, which makes packets of it
  std::array<std::uint32_t, width> least, largest;
  least.fill(rank_of(x[0])), largest.fill(rank_of(x[0]));
  const auto take = [&](float value, std::size_t lane) QUOKA_INLINE_LAMBDA {
    const std::uint32_t rank = rank_of(value);
    least[lane] = std::min(least[lane], rank), largest[lane] = std::max(largest[lane], rank);
  };
  Index i = 0;
  for (; i + width <= n; i += width)
    for (Index lane = 0; lane < width; ++lane) take(x[i + lane], static_cast<std::size_t>(lane));
  for (; i < n; ++i) take(x[i], 0);
  return {*std::min_element(least.begin(), least.end()),
          *std::max_element(largest.begin(), largest.end())};
}

// The k-th largest of x[0, n), 0 < k <= n; x is overwritten.
inline KthLargest kth_by_bins(float* x, Index n, Index k) {
  constexpr std::size_t bins = 256, lists = 4;  // counters that do not wait for each other
  Index above = 0;
  while (n > 32) {
    const auto [least_rank, largest] = rank_extent(x, n);
    const std::uint32_t least = least_rank;  // C++20's lambdas capture no binding in Clang 14
    if (least == largest) break;
    const int shift = std::max(0, static_cast<int>(std::bit_width(largest - least)) - 8);
    const auto bin_of = [=](float value)
                            QUOKA_INLINE_LAMBDA { return (rank_of(value) - least) >> shift; };
    std::array<std::array<Position, bins>, lists> counts{};
    Index i = 0;
    for (; i + Index{lists} <= n; i += lists)
      for (std::size_t list = 0; list < lists; ++list)
        ++counts[list][bin_of(x[i + static_cast<Index>(list)])];
    for (; i < n; ++i) ++counts[0][bin_of(x[i])];
    for (std::size_t list = 1; list < lists; ++list)
      for (std::size_t bin = 0; bin < bins; ++bin) counts[0][bin] += counts[list][bin];
    const auto& count = counts[0];
    std::uint32_t bin = bins - 1;
    for (; count[bin] < k; --bin) k -= count[bin], above += count[bin];
    // Its members: at least `from`, and below `end` where a bin lies above. Bounds that are denormal might
    // be taken for zeros.
    const std::uint32_t begin = least + (bin << shift);
    const bool topmost = largest - begin < std::uint32_t{1} << shift;
    const float from = value_of_rank(begin),
                end = topmost ? -simd::infinity : value_of_rank(begin + (1u << shift));
    Index members = 0;
    if (std::min(std::abs(from), std::abs(end)) >= std::numeric_limits<float>::min())
      for_each_compared(n, [&](auto at) QUOKA_INLINE_LAMBDA {
        const auto value = at.load(x);
        const unsigned in = simd::not_less(value, at.broadcast(from)) &
                            (topmost ? ~0u : simd::less(value, at.broadcast(end)));
        members += simd::store_compressed(x + members, in, value);
      });
    else
      for (i = 0; i < n; ++i) {
        const float value = x[i];
        x[members] = value;
        members += bin_of(value) == bin ? 1 : 0;
      }
    n = members;
  }
  for (Index i = 1; i < n; ++i) {  // few are left: descending, by insertion
    const float value = x[i];
    Index at = i;
    for (; at > 0 && x[at - 1] < value; --at) x[at] = x[at - 1];
    x[at] = value;
  }
  const float value = x[k - 1];
  for (Index i = 0; i < k - 1 && x[i] > value; ++i) ++above;
  return {value, above};
}

// A value that some more than k of the n values at(i) reach, by a sample of them; minus infinity where there are too
// few to tell. bucket [top_k_samples].
template <class At>
float sampled_pivot(Index n, Index k, float* bucket, At&& at) {
  const Index samples = tuning::top_k_samples;
  if (n <= 4 * samples) return -simd::infinity;
  // In a fair sample as many are among the k best, give or take the root of it.
  const double share =
      static_cast<double>(k) * static_cast<double>(samples) / static_cast<double>(n);
  const Index rank = static_cast<Index>(share + 3.5 * std::sqrt(share)) + 4, step = n / samples;
  if (rank >= samples) return -simd::infinity;
  for (Index i = 0; i < samples; ++i) bucket[i] = at(i * step);
  return kth_by_bins(bucket, samples, rank).value;
}

// The k-th largest of x[0, n), 0 < k <= n, and the positions, counted from `first`, of the `count` ones that reach it.
// bucket, positions [n + compact_slack].
struct Reaching {
  KthLargest kth;
  Index count;
};
inline Reaching reach_kth(const float* x, Index n, Index k, Position first, float* bucket,
                          Position* positions) {
  assert(0 < k && k <= n);
  PositionList list{positions};
  const float pivot = sampled_pivot(n, k, bucket, [x](Index i) { return x[i]; });
  if (pivot > -simd::infinity)
    for_each_compared(n, [&](auto at) QUOKA_INLINE_LAMBDA {
      const auto value = at.load(x);
      const unsigned reaches = simd::not_less(value, at.broadcast(pivot));
      simd::store_compressed(bucket + list.count, reaches, value);
      list.add(at, reaches, first);
    });
  if (list.count < k) {  // few keys, or a sample that was not fair
    std::copy_n(x, n, bucket);
    const KthLargest kth = kth_by_bins(bucket, n, k);
    return {kth, positions_where(n, first, positions, [&](auto at) QUOKA_INLINE_LAMBDA {
              return simd::not_less(at.load(x), at.broadcast(kth.value));
            })};
  }
  const KthLargest kth = kth_by_bins(bucket, list.count, k);
  Index count = 0;
  for (Index i = 0; i < list.count; ++i) {  // without a branch that nobody foresees
    positions[count] = positions[i];
    count += x[positions[i] - first] >= kth.value ? 1 : 0;
  }
  return {kth, count};
}

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
