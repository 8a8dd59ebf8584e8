// Loops of top-k over floats: compaction, the k-th largest, pooling of neighbours, comparison with
// a threshold.
//
// Compaction writes the elements, or their positions, that pass a test, in order and without a
// branch. Its output has room for compact_slack elements beyond the last.
#pragma once

#include <quoka/kernels/kernels.hpp>

#include <bit>
#include <cstdint>

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/simd.hpp>
#include <quoka/simd/tuning.hpp>
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <type_traits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- the k-th largest, which top-k compares with ------------------------------------------------
//
//   sampled_pivot   a guess from below, from a sample: what does not reach it is out
//   kth_by_bins     exact, of what is left: a histogram finds the bin of the k-th, whose members
//                   are looked at again until they are few
//   reach_kth       both, and which elements reach it
//
// Values are floats without a NaN. -0 and +0 are equal.

// The k-th largest value, and how many are larger.
struct KthLargest {
  float value;
  Index above;
};

// The k-th largest of x[0, n), 0 < k <= n; x is overwritten.
QUOKA_FUNC KthLargest kth_by_bins(float* x, Index n, Index k);

// The k-th largest of x[0, n), 0 < k <= n, and the positions, counted from `first`, of the `count`
// ones that reach it. bucket, positions [n + compact_slack].
struct Reaching {
  KthLargest kth;
  Index count;
};
QUOKA_FUNC Reaching reach_kth(const float* x, Index n, Index k, Position first, float* bucket,
                              Position* positions);

// Scores in their order as floats: those that are not finite are minus infinity.
QUOKA_INLINE float ordered_score(float score) {
  const bool finite = (std::bit_cast<std::uint32_t>(score) & 0x7f800000u) != 0x7f800000u;
  return finite ? score : -infinity;
}

// x[kv] = max over kernel_size neighbours, of scores that are finite; doubling spans, so
// log2(kernel_size) passes. x [kv_len + kernel_size - 1].
QUOKA_FUNC void max_pool(const float* scores, Index kv_len, Index kernel_size, float* x);

// ordered[i] = ordered_score(scores[i]) for i < n.
QUOKA_FUNC void order_scores(const float* scores, Index n, float* ordered);

// The k best of x[0, n) without a NaN, 0 < k <= n, as ascending positions counted from `first`.
// Equal ones in their order. bucket, positions [n + compact_slack]; the first k positions are
// these.
QUOKA_FUNC void k_best(const float* x, Index n, Index k, Position first, float* bucket,
                       Position* positions);

// ---- scores whose neighbours count, against a threshold -----------------------------------------
//
//   value[i] = the largest of scores[i - before] ... scores[i + behind]; a score below 0 stays as
//   it is
//
// Neighbours of the first and of the last are there.

struct PooledScores {
  const float* scores;
  Index count, before, behind;

  // kernel_size: scores that share their maximum, (kernel_size - 1) / 2 of them before.
  static PooledScores of(const float* scores, Index count, Index kernel_size) {
    return {scores, count, (kernel_size - 1) / 2, kernel_size / 2};
  }
};

// How many values lie above a threshold, and how many on it.
struct ThresholdCounts {
  float threshold;
  Index above, equal;
  Index ties;  // that stay of those on it
};

QUOKA_FUNC ThresholdCounts count_against(const PooledScores& x, float threshold);

// sampled_pivot() of the values of some lists as long as the first, whose scores lie `step` apart.
QUOKA_FUNC float pivot_of_lists(const PooledScores& first, Index lists, Index step, Index k,
                                float* bucket);

// The values from `least` on, to out, which has room for compact_slack more; returns how many.
QUOKA_FUNC Index compact_from(const PooledScores& x, float least, float* out);

// The positions, counted from `first`, of those above the threshold and of the first counts.ties on
// it, to out, which has room for compact_slack more; returns how many.
QUOKA_FUNC Index positions_against(const PooledScores& x, const ThresholdCounts& counts,
                                   Position first, Position* out);

// ---- scores of which each has a bound on its error ----------------------------------------------

// slope * error + constant, rounded as positions_within() rounds it.
QUOKA_FUNC float error_bound(float slope, float error, float constant);
// The positions, counted from `first`, of those of n scores that reach `sure`, or `possible` with
// their bounds, to out, which has room for compact_slack more; returns how many.
struct BoundedScores {
  const float *scores, *errors;
  float slope, constant;
};
QUOKA_FUNC Index positions_within(const BoundedScores& x, Index n, float sure, float possible,
                                  Position first, Position* out);

#if QUOKA_DEFINES_KERNELS

QUOKA_PACKET_ARGUMENTS_BEGIN
// `yes` where x is finite.
template <class P>
QUOKA_INLINE P select_finite(const P& x, const P& yes, const P& no) {
  const P size = simd::max(x, simd::sub(simd::zero<P>(), x));
  return simd::select_less(size, simd::broadcast<P>(simd::infinity), yes, no);
}
QUOKA_PACKET_ARGUMENTS_END

// first + the elements of `at` that are set in `mask`, side by side; returns how many.
template <class At>
QUOKA_INLINE int store_positions(Position* out, const At& at, unsigned mask, Position first) {
  return simd::store_compressed<At::count>(out, mask, first + static_cast<Position>(at.i));
}

// first + i for each i < n for which test(at) is set, to out; returns how many.
template <class Test>
QUOKA_INLINE Index positions_where(Index n, Position first, Position* out, Test&& test) {
  Index count = 0;
  simd::for_each_compared(n, [&](auto at) QUOKA_INLINE_LAMBDA {
    count += store_positions(out + count, at, test(at), first);
  });
  return count;
}

// ---- the k-th largest, which top-k compares with ------------------------------------------------

// Unsigned integers in the order of floats without a NaN, and back.
QUOKA_INLINE std::uint32_t rank_of(float x) {
  // Denormals are what comparisons take them for. -0 becomes +0: by the sum, but when rounding
  // down.
  const std::uint32_t sum = std::bit_cast<std::uint32_t>(x + 0.0f);
  const std::uint32_t bits = sum == 0x80000000u ? 0u : sum;
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}
QUOKA_INLINE float value_of_rank(std::uint32_t rank) {
  return std::bit_cast<float>(rank ^ (((rank >> 31) - 1u) | 0x80000000u));
}

// The least and the largest of the ranks of x[0, n), n > 0. In integers: a system that takes
// denormals for zeros must not change them.
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

QUOKA_FUNC KthLargest kth_by_bins(float* x, Index n, Index k) {
  constexpr std::size_t bins = 256, rows = 4;  // of counters that do not wait for each other
  Index above = 0;
  while (n > 32) {
    const auto [least_rank, largest] = rank_extent(x, n);
    const std::uint32_t least = least_rank;  // C++20's lambdas capture no binding in Clang 14
    if (least == largest) break;
    const int shift = std::max(0, static_cast<int>(std::bit_width(largest - least)) - 8);
    const auto bin_of = [=](float value)
                            QUOKA_INLINE_LAMBDA { return (rank_of(value) - least) >> shift; };
    std::array<std::array<Position, bins>, rows> counts{};
    Index i = 0;
    for (; i + Index{rows} <= n; i += rows)
      for (std::size_t row = 0; row < rows; ++row)
        ++counts[row][bin_of(x[i + static_cast<Index>(row)])];
    for (; i < n; ++i) ++counts[0][bin_of(x[i])];
    for (std::size_t row = 1; row < rows; ++row)
      for (std::size_t bin = 0; bin < bins; ++bin) counts[0][bin] += counts[row][bin];
    const auto& count = counts[0];
    std::uint32_t bin = bins - 1;
    for (; count[bin] < k; --bin) k -= count[bin], above += count[bin];
    // Its members: at least `from`, and below `end` where a bin lies above. Bounds that are
    // denormal might be taken for zeros.
    const std::uint32_t begin = least + (bin << shift);
    const bool topmost = largest - begin < std::uint32_t{1} << shift;
    const float from = value_of_rank(begin),
                end = topmost ? -simd::infinity : value_of_rank(begin + (1u << shift));
    Index members = 0;
    if (std::min(std::abs(from), std::abs(end)) >= std::numeric_limits<float>::min())
      simd::for_each_compared(n, [&](auto at) QUOKA_INLINE_LAMBDA {
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

// A value that somewhat more than k of the n values at(i) reach, estimated by a sample of them;
// minus infinity if n is too small. bucket [top_k_samples].
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

QUOKA_FUNC Reaching reach_kth(const float* x, Index n, Index k, Position first, float* bucket,
                              Position* positions) {
  assert(0 < k && k <= n);
  Index reaching = 0;
  const float pivot = sampled_pivot(n, k, bucket, [x](Index i) { return x[i]; });
  if (pivot > -simd::infinity)
    simd::for_each_compared(n, [&](auto at) QUOKA_INLINE_LAMBDA {
      const auto value = at.load(x);
      const unsigned reaches = simd::not_less(value, at.broadcast(pivot));
      simd::store_compressed(bucket + reaching, reaches, value);
      reaching += store_positions(positions + reaching, at, reaches, first);
    });
  if (reaching < k) {  // few keys, or a sample that was not fair
    std::copy_n(x, n, bucket);
    const KthLargest kth = kth_by_bins(bucket, n, k);
    return {kth, positions_where(n, first, positions, [&](auto at) QUOKA_INLINE_LAMBDA {
              return simd::not_less(at.load(x), at.broadcast(kth.value));
            })};
  }
  const KthLargest kth = kth_by_bins(bucket, reaching, k);
  Index count = 0;
  for (Index i = 0; i < reaching; ++i) {  // without a branch that nobody foresees
    positions[count] = positions[i];
    count += x[positions[i] - first] >= kth.value ? 1 : 0;
  }
  return {kth, count};
}

QUOKA_FUNC void max_pool(const float* scores, Index kv_len, Index kernel_size, float* x) {
  const Index before = (kernel_size - 1) / 2, size = kv_len + kernel_size - 1;
  std::fill_n(x, before, -simd::infinity);
  simd::for_each_lanes(kv_len, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(x + before, select_finite(score, score, at.broadcast(-simd::infinity)));
  });
  std::fill_n(x + before + kv_len, size - before - kv_len, -simd::infinity);
  Index span = 1;
  while (span < kernel_size) {
    const Index step = std::min(span, kernel_size - span);
    simd::for_each_lanes(size - step, [&](auto at) QUOKA_INLINE_LAMBDA {
      at.store(x, simd::max(at.load(x), at.load(x + step)));
    });
    span += step;
  }
  simd::for_each_lanes(kv_len, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(x, select_finite(score, at.load(x), score));
  });
}

QUOKA_FUNC void order_scores(const float* scores, Index n, float* ordered) {
  simd::for_each_lanes(n, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(ordered, select_finite(score, score, at.broadcast(-simd::infinity)));
  });
}

QUOKA_FUNC void k_best(const float* x, Index n, Index k, Position first, float* bucket,
                       Position* positions) {
  const auto [kth, count] = reach_kth(x, n, k, first, bucket, positions);
  if (count == k) return;
  Index ties = k - kth.above;  // more are equal than fit: the later ones go
  (void)std::remove_if(positions, positions + count, [&, least = kth.value](Position at) {
    return x[at - first] == least && ties-- <= 0;
  });
}

// ---- scores whose neighbours count, against a threshold -----------------------------------------

// The values at the elements of `at`.
template <class At>
QUOKA_INLINE auto pooled_values(const PooledScores& x, const At& at) {
  const auto own = at.load(x.scores);
  auto value = own;
  for (Index i = -x.before; i <= x.behind; ++i) value = simd::max(value, at.load(x.scores + i));
  return simd::select_less(own, at.broadcast(0.0f), own, value);
}

QUOKA_INLINE float pooled_value(const PooledScores& x, Index i) {
  return pooled_values(x, simd::Lanes<float>{i});
}

QUOKA_FUNC ThresholdCounts count_against(const PooledScores& x, float threshold) {
  Index above = 0, reached = 0;
  simd::for_each_compared(x.count, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto value = pooled_values(x, at);
    above += std::popcount(simd::less(at.broadcast(threshold), value));
    reached += std::popcount(simd::not_less(value, at.broadcast(threshold)));
  });
  return {threshold, above, reached - above, reached - above};
}

QUOKA_FUNC float pivot_of_lists(const PooledScores& first, Index lists, Index step, Index k,
                                float* bucket) {
  return sampled_pivot(first.count * lists, k, bucket, [&](Index i) {
    PooledScores list = first;
    list.scores += i / first.count * step;
    return pooled_value(list, i % first.count);
  });
}

QUOKA_FUNC Index compact_from(const PooledScores& x, float least, float* out) {
  Index count = 0;
  simd::for_each_compared(x.count, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto value = pooled_values(x, at);
    count += simd::store_compressed(out + count, simd::not_less(value, at.broadcast(least)), value);
  });
  return count;
}

QUOKA_FUNC Index positions_against(const PooledScores& x, const ThresholdCounts& counts,
                                   Position first, Position* out) {
  const float threshold = counts.threshold;
  const bool all_ties = counts.ties == counts.equal;
  Index kept = positions_where(x.count, first, out, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto value = pooled_values(x, at), limit = at.broadcast(threshold);
    return all_ties ? simd::not_less(value, limit) : simd::less(limit, value);
  });
  if (all_ties || counts.ties == 0) return kept;
  // Some of those that are equal: few lists have any.
  Index left = counts.ties;
  kept = 0;
  for (Index i = 0; i < x.count; ++i) {
    const float value = pooled_value(x, i);
    if (value > threshold || (value == threshold && left > 0)) {
      left -= value == threshold ? 1 : 0;
      out[kept++] = first + static_cast<Position>(i);
    }
  }
  return kept;
}

// ---- scores of which each has a bound on its error ----------------------------------------------

QUOKA_FUNC float error_bound(float slope, float error, float constant) {
  return simd::fma(slope, error, constant);
}

QUOKA_FUNC Index positions_within(const BoundedScores& x, Index n, float sure, float possible,
                                  Position first, Position* out) {
  return positions_where(n, first, out, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(x.scores);
    const auto most = simd::add(
        score, simd::fma(at.broadcast(x.slope), at.load(x.errors), at.broadcast(x.constant)));
    return simd::not_less(score, at.broadcast(sure)) | simd::not_less(most, at.broadcast(possible));
  });
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
