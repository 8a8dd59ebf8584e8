// From shares to a Selection: one comparison for all lists of a sequence.
//
//   value[list][t] = the largest share of t and its neighbours
//   selection      = {(list, t) with value[list][t] >= threshold}
//
// The threshold is given, or the k-th largest of all lists x keys; of keys that are equal to it as many stay as make k
// exact, those of lower lists first and in a list the earlier ones. What is dropped is what lies below the threshold,
// over all lists: no other choice of as many pairs drops less. A list that needs few keys leaves its own to those that
// look at many. A key with a NaN or an infinity ranks last, and counts for no neighbour.
#pragma once

#include <quoka/kernels/compact.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/select/mass/head_votes.hpp>
#include <quoka/select/steps/kth_largest.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The values of one list's keys from `first` on.
class ListValues {
 public:
  // kernel_size: keys that share their maximum, (kernel_size - 1) / 2 of them before.
  ListValues(const float* shares, Index first, Index count, Index kernel_size)
      : shares_(shares + first),
        count_(count),
        before_((kernel_size - 1) / 2),
        behind_(kernel_size / 2) {}

  Index count() const { return count_; }
  template <class At>
  QUOKA_INLINE auto operator()(const At& at) const {
    const auto own = at.load(shares_);
    auto value = own;
    for (Index i = -before_; i <= behind_; ++i) value = simd::max(value, at.load(shares_ + i));
    return simd::select_less(own, at.broadcast(0.0f), own, value);
  }
  float at(Index i) const { return (*this)(Lanes<float>{i}); }

 private:
  const float* shares_;
  Index count_, before_, behind_;
};

// How many keys of a list lie above a threshold, and how many on it.
struct ListCounts {
  float threshold;
  Index above, equal;
  Index ties;  // that stay of those on it
};

inline ListCounts count_of_list(const ListValues& values, float threshold) {
  Index above = 0, reached = 0;
  for_each_compared(values.count(), [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto value = values(at);
    above += std::popcount(simd::less(at.broadcast(threshold), value));
    reached += std::popcount(simd::not_less(value, at.broadcast(threshold)));
  });
  return {threshold, above, reached - above, reached - above};
}

// Those that stay, to out, which has room for compact_slack more; returns how many.
inline Index write_list(const ListValues& values, const ListCounts& counts, Position first,
                        Position* out) {
  const float threshold = counts.threshold;
  const bool all_ties = counts.ties == counts.equal;
  Index kept = positions_where(values.count(), first, out, [&](auto at) QUOKA_INLINE_LAMBDA {
    const auto value = values(at), limit = at.broadcast(threshold);
    return all_ties ? simd::not_less(value, limit) : simd::less(limit, value);
  });
  if (all_ties || counts.ties == 0) return kept;
  // Some of those that are equal: few lists have any.
  Index left = counts.ties;
  kept = 0;
  for (Index i = 0; i < values.count(); ++i) {
    const float value = values.at(i);
    if (value > threshold || (value == threshold && left > 0)) {
      left -= value == threshold ? 1 : 0;
      out[kept++] = first + static_cast<Position>(i);
    }
  }
  return kept;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
