// Loops with constant bounds, unrolled by the compiler from -O2 on.
//
// One body that the compiler copies, not one instantiation per index. Instantiations were inlined
// one by one, before any optimisation, and took a quarter of all compile time. Same code either
// way.
#pragma once

#include <quoka/base/version.hpp>

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
#pragma GCC unroll 64
  for (int i = 0; i < Count; ++i) f(i);
}

// f(i, j) for all i < Rows, j < Columns.
template <int Rows, int Columns, class F>
QUOKA_INLINE void unroll(F&& f) {
#pragma GCC unroll 64
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 64
    for (int j = 0; j < Columns; ++j) f(i, j);
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
