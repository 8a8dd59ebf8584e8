// Loops over arrays of floats: by packets, then one by one.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/simd/simd.hpp>

#include <type_traits>

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

// for_each_lanes(), by packets only where their comparisons give masks.
template <class F>
QUOKA_INLINE void for_each_compared(Index n, F&& f) {
  for_each_lanes<simd::has_lane_masks>(n, f);
}
QUOKA_PACKET_ARGUMENTS_END

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
