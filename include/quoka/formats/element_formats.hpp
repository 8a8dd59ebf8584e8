// How rows of float, half and bfloat16 are read and written.
//
// A row type is a format in its raw form. Channels are counted from the row's beginning; load and
// store take `lanes` of them, from any address.
#pragma once

#include <quoka/formats/format.hpp>
#include <quoka/simd/simd.hpp>

#include <cstring>

namespace Eigen {
struct half;
struct bfloat16;
}  // namespace Eigen

namespace quoka {
inline namespace QUOKA_ABI {
namespace formats {

struct FloatRow {
  static constexpr const char* name = "float";
  static constexpr bool is_float = true;
  static Index bytes(Index dim) { return dim * 4; }
  QUOKA_INLINE static const float* channel(ConstRow row, Index c) {
    return reinterpret_cast<const float*>(row) + c;
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c) {
    return simd::load_unaligned(channel(row, c));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c) { return *channel(row, c); }
  QUOKA_INLINE static void store(std::byte* row, Index c, const simd::Packet& x) {
    simd::store_unaligned(reinterpret_cast<float*>(row) + c, x);
  }
  QUOKA_INLINE static void put(std::byte* row, Index c, float x) {
    reinterpret_cast<float*>(row)[c] = x;
  }
};

struct HalfRow {
  static constexpr const char* name = "half";
  static constexpr bool is_float = false;
  static Index bytes(Index dim) { return dim * 2; }
  QUOKA_INLINE static const std::uint16_t* channel(ConstRow row, Index c) {
    return reinterpret_cast<const std::uint16_t*>(row) + c;
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c) {
    return simd::load_half(channel(row, c));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c) {
    return simd::half_to_float(*channel(row, c));
  }
  QUOKA_INLINE static void store(std::byte* row, Index c, const simd::Packet& x) {
    simd::store_half(reinterpret_cast<std::uint16_t*>(row) + c, x);
  }
  QUOKA_INLINE static void put(std::byte* row, Index c, float x) {
    reinterpret_cast<std::uint16_t*>(row)[c] = simd::float_to_half(x);
  }
};

struct Bfloat16Row {
  static constexpr const char* name = "bfloat16";
  static constexpr bool is_float = false;
  static Index bytes(Index dim) { return dim * 2; }
  QUOKA_INLINE static const std::uint16_t* channel(ConstRow row, Index c) {
    return reinterpret_cast<const std::uint16_t*>(row) + c;
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c) {
    return simd::load_bfloat16(channel(row, c));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c) {
    return simd::bfloat16_to_float(*channel(row, c));
  }
  QUOKA_INLINE static void store(std::byte* row, Index c, const simd::Packet& x) {
    simd::store_bfloat16(reinterpret_cast<std::uint16_t*>(row) + c, x);
  }
  QUOKA_INLINE static void put(std::byte* row, Index c, float x) {
    reinterpret_cast<std::uint16_t*>(row)[c] = simd::float_to_bfloat16(x);
  }
};

// The row type of an element type.
template <class T>
struct RowOf;
template <>
struct RowOf<float> {
  using type = FloatRow;
};
template <>
struct RowOf<Eigen::half> {
  using type = HalfRow;
};
template <>
struct RowOf<Eigen::bfloat16> {
  using type = Bfloat16Row;
};

}  // namespace formats
}  // namespace QUOKA_ABI
}  // namespace quoka
