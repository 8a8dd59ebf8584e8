// How rows of 8-bit integers with a power of two as their scale are read and written. A product
// with the scale is exact: the only error is rounding to the integers.
#pragma once

#include <quoka/rows/byte_rows.hpp>

#include <bit>

namespace quoka {
inline namespace QUOKA_ABI {
namespace formats {

struct I8Pow2Row : AnyRow {
  static constexpr const char* name = "i8_pow2";
  static constexpr Index head_bytes = 1;

  static Index bytes(const RowShape& shape) { return head_bytes + shape.dim; }
  // 2^(exponent - 127); 0 for 0, and infinity for 255: 0 times that is NaN.
  QUOKA_INLINE static float power(std::uint32_t exponent) {
    return std::bit_cast<float>(exponent << 23);
  }
  QUOKA_INLINE static float scale_of(ConstRow row) { return power(read_as<std::uint8_t>(row)); }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape&) {
    return simd::mul(simd::broadcast(scale_of(row)), simd::load_int8(int8_at(row, head_bytes + c)));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape&) {
    return scale_of(row) * static_cast<float>(*int8_at(row, head_bytes + c));
  }
  static void narrow(const float* from, const RowShape& shape, std::byte* row) {
    const Extremes x(from, shape.dim);
    const float most = simd::max(simd::max(0.0f, x.most), -x.least);  // never -0
    // The sum rounds up to a power of two.
    std::uint32_t exponent = (std::bit_cast<std::uint32_t>(most / most_code) + 0x7fffffu) >> 23;
    float inverse = power(254 - exponent);
    if (!x.finite) exponent = 255, inverse = 0.0f;  // NaN: round_to() gives 0, as for 0
    row[0] = static_cast<std::byte>(exponent);
    for (Index c = 0; c < shape.dim; ++c)
      row[head_bytes + c] =
          static_cast<std::byte>(round_to(from[c] * inverse, -most_code, most_code));
  }
};

}  // namespace formats
}  // namespace QUOKA_ABI
}  // namespace quoka
