// What all rooms share: one signed type for sizes, positions and strides, one for stored positions,
// constants of float, and the prefetch of memory.
#pragma once

#include <quoka/base/version.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {

// Every size, position and stride.
using Index = std::ptrdiff_t;

// Positions inside a Selection: half the bytes of Index, enough for 2^31 - 1 keys.
using Position = std::int32_t;

// The most keys of a call, past and chunk together, and the most queries: what a Position numbers.
// A call with more is refused before anything is read.
inline constexpr Index max_keys = std::numeric_limits<Position>::max();
// The largest absolute position: Past::first_position and AttentionOptions::q_offset, with the rows
// that follow.
inline constexpr Index max_position = Index{1} << 62;

// a / b rounded up, for a >= 0 and b > 0.
constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
// The least multiple that is not below a, for a >= 0 and multiple > 0.
constexpr Index round_up(Index a, Index multiple) { return ceil_div(a, multiple) * multiple; }

namespace detail {

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float log2_e = 1.44269504088896341f;

// Prefetches a cache line into L2.
QUOKA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Point n of a sequence whose points lie evenly in [0, len), however many there are: the fractions
// of multiples of the golden ratio.
constexpr Index spread_point(std::uint64_t n, Index len) {
  const std::uint64_t fraction = (n * 0x9e3779b97f4a7c15u) >> 32;
  return static_cast<Index>((fraction * static_cast<std::uint64_t>(len)) >> 32);
}

// Keys [begin, end).
struct KeyRange {
  Index begin, end;

  Index count() const { return end - begin; }
  // Those that are of both; without any the count is negative or 0.
  KeyRange common(const KeyRange& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
