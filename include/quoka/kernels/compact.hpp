// Compaction: the elements, or their positions, that pass a test, in order and without a branch.
#pragma once

#include <quoka/simd/simd.hpp>
#include <quoka/base/index.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Some elements of arrays of floats, from i on: a packet of them, or a single one.
template <class P>
struct Lanes {
  static constexpr int lanes = std::is_same_v<P, float> ? 1 : simd::lanes;
  Index i;
  QUOKA_INLINE P load(const float* x) const {
    if constexpr (std::is_same_v<P, float>)
      return x[i];
    else
      return simd::load_unaligned(x + i);
  }
  QUOKA_INLINE void store(float* x, const P& value) const {
    if constexpr (std::is_same_v<P, float>)
      x[i] = value;
    else
      simd::store_unaligned(x + i, value);
  }
  QUOKA_INLINE static P broadcast(float x) { return simd::broadcast<P>(x); }
};

// f(Lanes) over [0, n): by packets, then one by one.
QUOKA_PACKET_ARGUMENTS_BEGIN
template <bool packets = (simd::lanes > 1), class F>
QUOKA_INLINE void for_each_lanes(Index n, F&& f) {
  Index i = 0;
  if constexpr (packets)
    for (; i + simd::lanes <= n; i += simd::lanes) f(Lanes<simd::Packet>{i});
  for (; i < n; ++i) f(Lanes<float>{i});
}

// `yes` where x is finite.
template <class P>
QUOKA_INLINE P select_finite(const P& x, const P& yes, const P& no) {
  const P size = simd::max(x, simd::sub(simd::zero<P>(), x));
  return simd::select_less(size, simd::broadcast<P>(simd::infinity), yes, no);
}

// for_each_lanes(), by packets only where their comparisons give masks.
template <class F>
QUOKA_INLINE void for_each_compared(Index n, F&& f) {
  for_each_lanes<simd::has_lane_masks>(n, f);
}
QUOKA_PACKET_ARGUMENTS_END

// Positions that passed a test, in order: out has room for compact_slack more than it will hold.
struct PositionList {
  Position* out;
  Index count = 0;

  // first + the elements of `at`, those that are set in `mask`.
  template <class At>
  QUOKA_INLINE void add(const At& at, unsigned mask, Position first) {
    count +=
        simd::store_compressed<At::lanes>(out + count, mask, first + static_cast<Position>(at.i));
  }
  // Those of `from` at the elements of `at`; out may be `from`.
  template <class At>
  QUOKA_INLINE void take(const At& at, unsigned mask, const Position* from) {
    count += simd::store_compressed<At::lanes>(out + count, mask, from + at.i);
  }
};

// first + i for each i < n for which test(lanes) is set, to out; returns how many.
template <class Test>
QUOKA_INLINE Index positions_where(Index n, Position first, Position* out, Test&& test) {
  PositionList list{out};
  for_each_compared(n,
                    [&](auto lanes) QUOKA_INLINE_LAMBDA { list.add(lanes, test(lanes), first); });
  return list.count;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
