// How rows of float, half and bfloat16 are read and written.
//
// A row type is a format in its raw form. Channels are counted from the row's beginning; load and
// store take `lanes` of them, from any address.
#pragma once

#include <quoka/rows/format.hpp>
#include <quoka/simd/simd.hpp>

#include <type_traits>

namespace Eigen {
struct half;
struct bfloat16;
}  // namespace Eigen

namespace quoka {
inline namespace QUOKA_ABI {
namespace formats {

// Rows of format_of<float>().
struct FloatRow {
  static constexpr const char* name = "float";
  static constexpr bool is_float = true;
  static constexpr float rounding = 0.0f;
  static constexpr Index element_bytes = 4;
  static Index bytes(const RowShape& shape) { return shape.dim * 4; }
  QUOKA_INLINE static const float* channel(ConstRow row, Index c) {
    return reinterpret_cast<const float*>(row) + c;
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape&) {
    return simd::load_unaligned(channel(row, c));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape&) { return *channel(row, c); }
  QUOKA_INLINE static void store(std::byte* row, Index c, const simd::Packet& x, const RowShape&) {
    simd::store_unaligned(reinterpret_cast<float*>(row) + c, x);
  }
  QUOKA_INLINE static void put(std::byte* row, Index c, float x, const RowShape&) {
    reinterpret_cast<float*>(row)[c] = x;
  }
};

struct AsHalf;
// Numbers of 16 bits, converted by As.
template <class As>
struct ShortRow {
  static constexpr const char* name = As::name;
  static constexpr bool is_float = false;
  static constexpr bool is_bfloat16 = As::is_bfloat16, is_half = std::is_same_v<As, AsHalf>;
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
  QUOKA_INLINE static void store(std::byte* row, Index c, const simd::Packet& x, const RowShape&) {
    As::store(reinterpret_cast<std::uint16_t*>(row) + c, x);
  }
  QUOKA_INLINE static void put(std::byte* row, Index c, float x, const RowShape&) {
    reinterpret_cast<std::uint16_t*>(row)[c] = As::from_float(x);
  }
};

struct AsHalf {
  static constexpr const char* name = "half";
  static constexpr bool is_bfloat16 = false;
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
  static constexpr bool is_bfloat16 = true;
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
