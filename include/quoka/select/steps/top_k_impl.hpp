// Definitions of top_k.hpp.
#pragma once

#include <quoka/select/steps/top_k.hpp>
#include <quoka/kernels/compact.hpp>
#include <quoka/simd/tuning.hpp>

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
  for_each_place(kv_len, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(x + before, select_finite(score, score, at.broadcast(-simd::infinity)));
  });
  std::fill_n(x + before + kv_len, size - before - kv_len, -simd::infinity);
  Index span = 1;
  while (span < window) {
    const Index step = std::min(span, window - span);
    for_each_place(size - step, [&](auto at) QUOKA_INLINE_LAMBDA {
      at.store(x, simd::max(at.load(x), at.load(x + step)));
    });
    span += step;
  }
  for_each_place(kv_len, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto score = at.load(scores);
    at.store(x, select_finite(score, at.load(x), score));
  });
  return x;
}

// Unsigned integers in the order of floats without a NaN.
QUOKA_INLINE std::uint32_t rank_of(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x + 0.0f);  // -0 becomes +0
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

// The k-th largest value, and how many are larger.
struct KthLargest {
  float value;
  Index above;
};

// Of x[0, n) without a NaN, 0 < k <= n, which is overwritten: a histogram between the least and the
// largest finds the bin of the k-th, whose members are looked at again until they are few.
inline KthLargest kth_by_bins(float* x, Index n, Index k) {
  constexpr int bins = 256;
  Index above = 0;
  while (n > 32) {
    std::uint32_t least = rank_of(x[0]), largest = least;
    for (Index i = 1; i < n; ++i) {
      least = std::min(least, rank_of(x[i]));
      largest = std::max(largest, rank_of(x[i]));
    }
    if (least == largest) break;
    const int shift = std::max(0, static_cast<int>(std::bit_width(largest - least)) - 8);
    const auto bin_of = [=](float value)
                            QUOKA_INLINE_LAMBDA { return (rank_of(value) - least) >> shift; };
    std::array<Position, bins> count{};
    for (Index i = 0; i < n; ++i) ++count[bin_of(x[i])];
    std::uint32_t bin = bins - 1;
    for (; count[bin] < k; --bin) k -= count[bin], above += count[bin];
    Index members = 0;
    for (Index i = 0; i < n; ++i) {
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

// Of x[0, n) without a NaN, 0 < k <= n. bucket [n + compact_slack].
inline KthLargest kth_largest(const float* x, Index n, Index k, float* bucket) {
  assert(0 < k && k <= n);
  const Index samples = tuning::top_k_samples;
  if (n > 4 * samples) {
    for (Index i = 0; i < samples; ++i) bucket[i] = x[i * (n / samples)];
    // In a fair sample as many are among the k best, give or take the root of it.
    const double share =
        static_cast<double>(k) * static_cast<double>(samples) / static_cast<double>(n);
    const Index rank = static_cast<Index>(share + 3.5 * std::sqrt(share)) + 4;
    if (rank < samples) {
      const float pivot = kth_by_bins(bucket, samples, rank).value;
      const Index count = values_at_least(x, n, pivot, bucket);
      if (count >= k) return kth_by_bins(bucket, count, k);
    }
  }
  std::copy_n(x, n, bucket);  // few keys, or a sample that was not fair
  return kth_by_bins(bucket, n, k);
}

// The k best of x[0, n) without a NaN, 0 < k <= n, as ascending positions counted from `first`.
// Equal ones in their order. positions [n + compact_slack]; returns its first k.
inline const Position* k_best(const float* x, Index n, Index k, Position first, float* bucket,
                              Position* positions) {
  const auto [least, above] = kth_largest(x, n, k, bucket);
  const Index count =
      positions_where(n, first, positions, [&, least = least](auto at) QUOKA_INLINE_LAMBDA {
        return simd::not_less(at.load(x), at.broadcast(least));
      });
  if (count == k) return positions;
  Index ties = k - above;  // more are equal than fit: the later ones go
  (void)std::remove_if(positions, positions + count, [&, least = least](Position at) {
    return x[at - first] == least && ties-- <= 0;
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
    for_each_place(candidates, [&, from = scores + first](auto at) QUOKA_INLINE_LAMBDA {
      const auto score = at.load(from);
      at.store(ordered, select_finite(score, score, at.broadcast(-simd::infinity)));
    });
    const Position* const best = k_best(ordered, candidates, free, static_cast<Position>(first),
                                        s.bucket.data(), s.positions.data());
    out = std::copy_n(best, free, out);
  }
  for (Index i = kv_len - last; i < kv_len; ++i) *out++ = static_cast<Position>(i);
}

QUOKA_FUNC void check_top_k(Index k, const TopKOptions& options) {
  require_at_least("k", k, 0);
  require_at_least("window", options.window, 1);
  require_at_least("keep_first", options.keep_first, 0);
  require_at_least("keep_last", options.keep_last, 0);
}

QUOKA_FUNC void select_top_k(const float* scores, Index batch, Index kv_heads, Index kv_len,
                             Index k, const TopKOptions& options, Selection& selection,
                             WorkerScratch<TopKScratch>& scratch, ExecutorRef executor) {
  if (k >= kv_len) return selection.select_all(batch, kv_heads, kv_len);
  SelectionWriter writer(selection, batch, kv_heads, kv_len, k);
  executor.run(batch * kv_heads, [&](Index head, int worker) {
    top_k_head(scores + head * kv_len, kv_len, options,
               writer.row(head / kv_heads, head % kv_heads), scratch[worker]);
  });
  writer.commit();
}

QUOKA_FUNC void select_counted(const float* scores, Index batch, Index kv_heads, Index kv_len,
                               const Index* counts, const TopKOptions& options,
                               Selection& selection, WorkerScratch<TopKScratch>& scratch,
                               ExecutorRef executor) {
  const Index most = *std::max_element(counts, counts + batch * kv_heads);
  SelectionWriter writer(selection, batch, kv_heads, kv_len, most);
  executor.run(batch * kv_heads, [&](Index head, int worker) {
    const Index b = head / kv_heads, kv_head = head % kv_heads;
    top_k_head(scores + head * kv_len, kv_len, options,
               writer.row(b, kv_head).first(static_cast<std::size_t>(counts[head])),
               scratch[worker]);
    writer.set_count(b, kv_head, counts[head]);
  });
  writer.commit();
}

// The scores that top_k_head orders by, of keys that are not forced.
struct Ordered {
  const float* scores;
  Index first, end;  // not forced: [first, end)
};
inline Ordered ordered_scores(const float* scores, Index kv_len, const TopKOptions& options,
                              TopKScratch& s) {
  const Index first = std::min(options.keep_first, kv_len);
  if (options.window > 1) scores = pool_window(scores, kv_len, options.window, s.pooled.data());
  return {scores, first, kv_len - std::min(options.keep_last, kv_len - first)};
}
inline Index count_not_below(const Ordered& x, Index kv_len, double least) {
  Index count = kv_len - (x.end - x.first);
  for (Index t = x.first; t < x.end; ++t)
    count += std::isfinite(x.scores[t]) && static_cast<double>(x.scores[t]) >= least ? 1 : 0;
  return count;
}

QUOKA_FUNC Index count_at_least(const float* scores, Index kv_len, float least,
                                const TopKOptions& options, TopKScratch& s) {
  return count_not_below(ordered_scores(scores, kv_len, options, s), kv_len,
                         static_cast<double>(least));
}

QUOKA_FUNC Index count_relative(const float* scores, Index kv_len, double alpha,
                                const TopKOptions& options, TopKScratch& s) {
  float best = -simd::infinity;
  for (Index t = 0; t < kv_len; ++t) best = std::max(best, ordered_score(scores[t]));
  const Ordered x = ordered_scores(scores, kv_len, options, s);
  const double top = static_cast<double>(best);
  return count_not_below(x, kv_len, top - (1.0 - alpha) * std::abs(top));
}

QUOKA_FUNC Index count_mass(const float* scores, Index kv_len, double share,
                            const TopKOptions& options, TopKScratch& s) {
  const Ordered x = ordered_scores(scores, kv_len, options, s);
  const auto own = [&](Index t) {
    return std::isfinite(scores[t]) ? static_cast<double>(scores[t]) : 0.0;
  };
  double total = 0.0, sum = 0.0;
  for (Index t = 0; t < kv_len; ++t) {
    total += own(t);
    if (t < x.first || t >= x.end) sum += own(t);
  }
  // What is left to sum; a rounding error of `total` must not ask for every key.
  double left = share * total - sum - 1e-13 * total;
  Index count = kv_len - (x.end - x.first);
  if (left <= 0.0) return count;
  // The digits of the last score that is taken, from the highest: of each digit's bins all above it
  // are taken whole.
  constexpr int digit_bits = 8;
  constexpr std::size_t bins = std::size_t{1} << digit_bits;
  std::uint32_t prefix = 0, known = 0;  // the bits found, and which
  const auto rank = [&](Index t) { return rank_of(ordered_score(x.scores[t])); };
  for (int shift = 32 - digit_bits; shift >= 0; shift -= digit_bits) {
    std::array<double, bins> mass{};
    std::array<Index, bins> members{};
    for (Index t = x.first; t < x.end; ++t) {
      const std::uint32_t bits = rank(t);
      if ((bits & known) != prefix) continue;
      const std::size_t bin = (bits >> shift) & (bins - 1);
      mass[bin] += own(t), ++members[bin];
    }
    std::size_t bin = bins - 1;
    for (; bin > 0 && mass[bin] < left; --bin) left -= mass[bin], count += members[bin];
    prefix |= static_cast<std::uint32_t>(bin) << shift;
    known |= static_cast<std::uint32_t>(bins - 1) << shift;
  }
  for (Index t = x.first; t < x.end && left > 0.0; ++t)  // equal ones in their order
    if (rank(t) == prefix) left -= own(t), ++count;
  return count;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
