// The arithmetics that this machine has.
#pragma once

#include <quoka/kernels/panel_arithmetic.hpp>

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/kernels/float_panels.hpp>
#include <quoka/kernels/int8_panels.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC const PanelArithmetic& float_panels();

// The unit for `products` products of bfloat16, 1 to 3; null where none is faster than float.
template <int products>
const PanelArithmetic* bfloat16_of_here();

// Kernels for a call in 8 bits; null if it is computed otherwise. Packing keys to 8 bits takes
// longer, so few rows are computed otherwise. With AMX all are, since tiles multiply bfloat16
// faster than vectors multiply 8 bits.
QUOKA_FUNC const PanelArithmetic* int8_of_here(Index rows);

#if QUOKA_DEFINES_KERNELS

QUOKA_FUNC const PanelArithmetic& float_panels() {
  static constexpr FloatPanels panels;
  return panels;
}

template <int products>
const PanelArithmetic* bfloat16_of_here() {
  if constexpr (simd::has_tiles)
    if (tiles_work()) return &bfloat16_panels<TileUnit<simd::Tiles>, products>();
  if constexpr (simd::has_bfloat16_squares && products < 3)
    return &bfloat16_panels<SquareUnit<simd::Bfloat16Square, simd::Bfloat16Eight>, products>();
  if constexpr (simd::has_bfloat16_sums && products == 1)
    if (simd::bfloat16_sums_pay())
      return &bfloat16_panels<PairUnit<simd::DotBfloat16Sums>, products>();
  return nullptr;
}

// Not instantiated where no instruction adds up four products of 8 bits.
template <bool has = simd::has_quad_sums>
const PanelArithmetic* quad_panels([[maybe_unused]] Index rows) {
  if constexpr (has) {
    const bool packed_sooner = rows < tuning::int8_rows_beside_float ||
                               (rows < tuning::int8_rows && bfloat16_of_here<1>() != nullptr);
    if (!packed_sooner && !tiles_work()) return &int8_panels<simd::QuadSums>();
  }
  return nullptr;
}
QUOKA_FUNC const PanelArithmetic* int8_of_here(Index rows) { return quad_panels(rows); }

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
