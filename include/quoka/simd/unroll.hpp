// Loops with constant arguments, unrolled at every optimisation level.
#pragma once

#include <quoka/version.hpp>

#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

// The constant i as an argument. Not std::integral_constant: without optimisation its conversion is
// a function that units built with different flags would share.
template <int i>
struct Constant {
  static constexpr int value = i;
  QUOKA_INLINE constexpr operator int() const { return i; }
};

// f(0), f(1), ..., f(Count - 1): arrays of packets indexed by the argument live in registers.
template <int Count, class F>
QUOKA_INLINE void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) QUOKA_INLINE_LAMBDA { (f(Constant<i>{}), ...); }
  (std::make_integer_sequence<int, Count>{});
}

// f(i, j) for all i < Rows, j < Columns.
template <int Rows, int Columns, class F>
QUOKA_INLINE void unroll(F&& f) {
  unroll<Rows>([&](auto i) QUOKA_INLINE_LAMBDA {
    unroll<Columns>([&](auto j) QUOKA_INLINE_LAMBDA { f(i, j); });
  });
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
