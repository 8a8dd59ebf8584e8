// The k-th largest of some scores: what top-k compares with.
//
//   sampled_pivot   a guess from below, from a sample: what does not reach it is out
//   kth_by_bins     exact, of what is left: a histogram finds the bin of the k-th, whose members are
//                   looked at again until they are few
//   reach_kth       both, and which elements reach it
//
// Values are floats without a NaN. -0 and +0 are equal.
#pragma once

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

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
