// How rows of float, half and bfloat16 are read and written.
//
// A row type is a format in its raw form. Channels are counted from the row's beginning; load takes
// `lanes` of them, from any address.
#pragma once

#include <quoka/rows/format.hpp>
#include <quoka/simd/simd.hpp>

#include <algorithm>
#include <type_traits>

namespace Eigen {
struct half;
struct bfloat16;
}  // namespace Eigen

namespace quoka {
inline namespace QUOKA_ABI {
namespace formats {

// What a row type (kernels/format_table.hpp) has unless it says otherwise: members of its Format,
// which says what each means, and the Group of channels that share a scale.
struct AnyRow {
  static constexpr bool is_float = false, is_bfloat16 = false, is_half = false;
  static constexpr float rounding = 0.0f;    // unknown
  static constexpr Index element_bytes = 0;  // not channels side by side alone
  static Index separate_scales(Index) { return 0; }
  using Group = void;  // none
};
// Do channels side by side share a scale?
template <class Row>
concept Grouped = !std::is_void_v<typename Row::Group>;

// Rows of format_of<float>().
struct FloatRow : AnyRow {
  static constexpr const char* name = "float";
  static constexpr bool is_float = true;
  static constexpr Index element_bytes = 4;
  static Index bytes(const RowShape& shape) { return shape.dim * 4; }
  QUOKA_INLINE static const float* channel(ConstRow row, Index c) {
    return reinterpret_cast<const float*>(row) + c;
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape&) {
    return simd::load_unaligned(channel(row, c));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape&) { return *channel(row, c); }
  static void narrow(const float* from, const RowShape& shape, std::byte* row) {
    std::copy_n(from, shape.dim, reinterpret_cast<float*>(row));
  }
};

struct AsHalf;
struct AsBfloat16;
// Numbers of 16 bits, converted by As.
template <class As>
struct ShortRow : AnyRow {
  static constexpr const char* name = As::name;
  static constexpr bool is_bfloat16 = std::is_same_v<As, AsBfloat16>,
                        is_half = std::is_same_v<As, AsHalf>;
  static constexpr float rounding = As::rounding;
  static constexpr Index element_bytes = 2;
  static Index bytes(const RowShape& shape) { return shape.dim * 2; }
  QUOKA_INLINE static const std::uint16_t* channel(ConstRow row, Index c) {
    return reinterpret_cast<const std::uint16_t*>(row) + c;
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape&) {
    return As::load(channel(row, c));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape&) {
    return As::to_float(*channel(row, c));
  }
  static void narrow(const float* from, const RowShape& shape, std::byte* row) {
    auto* const to = reinterpret_cast<std::uint16_t*>(row);
    Index c = 0;
    for (; c + simd::lanes <= shape.dim; c += simd::lanes)
      As::store(to + c, simd::load_unaligned(from + c));
    for (; c < shape.dim; ++c) to[c] = As::from_float(from[c]);
  }
};

struct AsHalf {
  static constexpr const char* name = "half";
  static constexpr float rounding = 0x1p-11f;
  QUOKA_INLINE static simd::Packet load(const std::uint16_t* p) { return simd::load_half(p); }
  QUOKA_INLINE static float to_float(std::uint16_t x) { return simd::half_to_float(x); }
  QUOKA_INLINE static void store(std::uint16_t* p, const simd::Packet& x) {
    simd::store_half(p, x);
  }
  QUOKA_INLINE static std::uint16_t from_float(float x) { return simd::float_to_half(x); }
};
struct AsBfloat16 {
  static constexpr const char* name = "bfloat16";
  static constexpr float rounding = 0x1p-8f;
  QUOKA_INLINE static simd::Packet load(const std::uint16_t* p) { return simd::load_bfloat16(p); }
  QUOKA_INLINE static float to_float(std::uint16_t x) { return simd::bfloat16_to_float(x); }
  QUOKA_INLINE static void store(std::uint16_t* p, const simd::Packet& x) {
    simd::store_bfloat16(p, x);
  }
  QUOKA_INLINE static std::uint16_t from_float(float x) { return simd::float_to_bfloat16(x); }
};

// The row type of an element type: float, Eigen::half or Eigen::bfloat16.
template <class T>
using RowOf = std::conditional_t<
    std::is_same_v<T, float>, FloatRow,
    std::conditional_t<std::is_same_v<T, Eigen::half>, ShortRow<AsHalf>, ShortRow<AsBfloat16>>>;

}  // namespace formats
}  // namespace QUOKA_ABI
}  // namespace quoka
