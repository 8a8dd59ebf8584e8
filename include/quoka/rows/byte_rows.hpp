// How rows of 8 bits per channel, and rows whose channels do not lie side by side, are read and
// written.
//
// A row type is a format in its raw form; kernels/format_table.hpp has its members, and
// kernels/byte_formats.hpp the guarantees of each. Numbers are rounded to nearest, ties to even.
#pragma once

#include <quoka/rows/element_rows.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace formats {

// ---- parts --------------------------------------------------------------------------------------

// A number at any address.
template <class T>
QUOKA_INLINE T read_as(ConstRow p) {
  T x;
  std::memcpy(&x, p, sizeof(T));
  return x;
}
template <class T>
QUOKA_INLINE void write_as(std::byte* p, T x) {
  std::memcpy(p, &x, sizeof(T));
}
QUOKA_INLINE const std::int8_t* int8_at(ConstRow row, Index c) {
  return reinterpret_cast<const std::int8_t*>(row) + c;
}
QUOKA_INLINE const std::uint8_t* uint8_at(ConstRow row, Index c) {
  return reinterpret_cast<const std::uint8_t*>(row) + c;
}

// x rounded to nearest, ties to even, and kept in [least, most]; 0 for NaN. The sum leaves no bits
// for a fraction: its low bits are the integer.
QUOKA_INLINE int round_to(float x, float least, float most) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23
  if (!(x == x)) return 0;
  const float kept = x < least ? least : most < x ? most : x;
  return static_cast<int>(simd::bits_of(kept + magic)) - static_cast<int>(simd::bits_of(magic));
}
// The largest code of i8 and q8_0; -128 is never written.
inline constexpr float most_code = 127.0f;

// x / scale; 0 for a scale of 0, which turns all codes into 0.
QUOKA_INLINE float quotient(float x, float scale) { return scale == 0.0f ? 0.0f : x / scale; }

// A packet of ones, in place of scales where there are none: a choice of addresses. A branch in the
// loops of a token took 1.4 times as long.
inline constexpr auto ones = [] {
  std::array<float, simd::lanes> all{};
  for (float& one : all) one = 1.0f;
  return all;
}();
// The one scale of a head.
QUOKA_INLINE float head_scale(const RowShape& shape) {
  return *(shape.scales != nullptr ? shape.scales : ones.data());
}

// The least and the largest of x[0, n), n > 0. All is finite if and only if `finite`.
struct Extremes {
  float least, most;
  bool finite;

  Extremes(const float* x, Index n) : least(x[0]), most(x[0]) {
    float poison = 0.0f;  // x * 0 is NaN for NaN and infinity
    for (Index i = 0; i < n; ++i) {
      least = simd::min(least, x[i]);
      most = simd::max(most, x[i]);
      poison += x[i] * 0.0f;
    }
    finite = poison == 0.0f;
  }
};

// ---- q8_0 ---------------------------------------------------------------------------------------

struct Q8_0Row : AnyRow {
  static constexpr const char* name = "q8_0";
  static constexpr float rounding = 0x1p-8f;
  static constexpr Index block = 32, head_bytes = 2, block_bytes = head_bytes + block;
  static_assert(block % simd::lanes == 0, "a packet lies in one block");

  static Index bytes(const RowShape& shape) { return ceil_div(shape.dim, block) * block_bytes; }
  QUOKA_INLINE static ConstRow block_of(ConstRow row, Index c) {
    return row + c / block * block_bytes;
  }
  QUOKA_INLINE static float scale_of(ConstRow block_row) {
    return simd::half_to_float(read_as<std::uint16_t>(block_row));
  }
  // A block, its scale read once.
  struct Group {
    static constexpr Index channels = block;
    static constexpr bool has_codes = true;
    const std::int8_t* codes;
    simd::Packet scale;

    QUOKA_INLINE Group(ConstRow row, Index c)
        : codes(int8_at(block_of(row, c), head_bytes)),
          scale(simd::broadcast(scale_of(block_of(row, c)))) {}
    QUOKA_INLINE simd::Packet load(Index c) const {
      return simd::mul(scale, simd::load_int8(codes + c));
    }
  };
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape&) {
    return Group(row, c).load(c % block);
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape&) {
    const ConstRow here = block_of(row, c);
    return scale_of(here) * static_cast<float>(*int8_at(here, head_bytes + c % block));
  }
  static void narrow(const float* from, const RowShape& shape, std::byte* row) {
    for (Index c = 0; c < shape.dim; c += block, row += block_bytes) {
      const Index n = std::min(block, shape.dim - c);
      const Extremes x(from + c, n);
      const float d = simd::max(simd::max(0.0f, x.most), -x.least) / most_code;  // never -0
      std::uint16_t half = simd::float_to_half(d);
      float inverse = d > 0.0f ? 1.0f / d : 0.0f;
      if (!x.finite || half >= 0x7c00u) half = 0x7e00u, inverse = 0.0f;  // NaN
      write_as(row, half);
      for (Index i = 0; i < block; ++i) {
        const int code = i < n ? round_to(from[c + i] * inverse, -most_code, most_code) : 0;
        row[head_bytes + i] = static_cast<std::byte>(code);
      }
    }
  }
};

// ---- u8 -----------------------------------------------------------------------------------------

struct U8Row : AnyRow {
  static constexpr const char* name = "u8";
  static constexpr Index head_bytes = 8;

  static Index bytes(const RowShape& shape) { return head_bytes + shape.dim; }
  QUOKA_INLINE static float scale_of(ConstRow row) { return read_as<float>(row); }
  QUOKA_INLINE static float zero_of(ConstRow row) { return read_as<float>(row + 4); }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape&) {
    const simd::Packet code = simd::load_uint8(uint8_at(row, head_bytes + c));
    return simd::mul(simd::sub(code, simd::broadcast(zero_of(row))),
                     simd::broadcast(scale_of(row)));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape&) {
    return (static_cast<float>(*uint8_at(row, head_bytes + c)) - zero_of(row)) * scale_of(row);
  }
  static void narrow(const float* from, const RowShape& shape, std::byte* row) {
    const Extremes x(from, shape.dim);
    const float range = x.most - x.least;
    float scale = range / 255.0f;
    if (scale == 0.0f) scale = 1.0f;  // one value: min = (0 - -min) * 1
    float zero = -x.least / scale;
    if (!x.finite || !(range < simd::infinity))
      scale = std::numeric_limits<float>::quiet_NaN(), zero = 0.0f;  // and all codes 0
    write_as(row, scale);
    write_as(row + 4, zero);
    // From the least on: x / scale + zero would lose the codes of a row that lies far from 0.
    for (Index c = 0; c < shape.dim; ++c)
      row[head_bytes + c] =
          static_cast<std::byte>(round_to((from[c] - x.least) / scale, 0.0f, 255.0f));
  }
};

// ---- bytes with a scale apart -------------------------------------------------------------------

// A byte a channel, converted by As, times the scale of a head, or of the channel.
template <class As>
struct ScaledByteRow : AnyRow {
  static constexpr const char* name = As::name;
  static constexpr bool by_channel = As::by_channel;
  static constexpr float rounding = 0x1p-8f;  // or more

  static Index bytes(const RowShape& shape) { return shape.dim; }
  static Index separate_scales(Index dim) { return by_channel ? dim : 1; }
  QUOKA_INLINE static float scale_of(Index c, const RowShape& shape) {
    return by_channel && shape.scales != nullptr ? shape.scales[c] : head_scale(shape);
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape& shape) {
    if constexpr (by_channel)
      return simd::mul(
          simd::load_unaligned(shape.scales != nullptr ? shape.scales + c : ones.data()),
          As::load(row + c));
    else
      return simd::mul(simd::broadcast(head_scale(shape)), As::load(row + c));
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape& shape) {
    return scale_of(c, shape) * As::to_float(row[c]);
  }
  static void narrow(const float* from, const RowShape& shape, std::byte* row) {
    const float of_head = head_scale(shape);
    for (Index c = 0; c < shape.dim; ++c)
      row[c] = As::from_float(quotient(from[c], by_channel ? scale_of(c, shape) : of_head));
  }
};

// ---- i8 -----------------------------------------------------------------------------------------

struct AsInt8 {
  static constexpr const char* name = "i8";
  static constexpr bool by_channel = false;
  QUOKA_INLINE static simd::Packet load(ConstRow p) { return simd::load_int8(int8_at(p, 0)); }
  QUOKA_INLINE static float to_float(std::byte x) {
    return static_cast<float>(static_cast<std::int8_t>(x));
  }
  QUOKA_INLINE static std::byte from_float(float x) {
    return static_cast<std::byte>(round_to(x, -most_code, most_code));
  }
};

// Rows of i8_format().
using I8Row = ScaledByteRow<AsInt8>;

struct AsInt8OfChannel : AsInt8 {
  static constexpr const char* name = "i8_channel";
  static constexpr bool by_channel = true;
};
// Rows of i8_channel_format().
using I8ChannelRow = ScaledByteRow<AsInt8OfChannel>;

// ---- e4m3 ---------------------------------------------------------------------------------------

struct AsE4m3 {
  static constexpr const char* name = "e4m3";
  static constexpr bool by_channel = false;
  QUOKA_INLINE static simd::Packet load(ConstRow p) { return simd::load_e4m3(uint8_at(p, 0)); }
  QUOKA_INLINE static float to_float(std::byte x) {
    return simd::e4m3_to_float(static_cast<std::uint8_t>(x));
  }
  QUOKA_INLINE static std::byte from_float(float x) {
    return static_cast<std::byte>(simd::float_to_e4m3(x));
  }
};
// Rows of e4m3_format().
using E4m3Row = ScaledByteRow<AsE4m3>;

// ---- channels apart -----------------------------------------------------------------------------

// Element is the row type of one channel.
template <class Element>
struct ChannelMajorRow : AnyRow {
  static constexpr const char* name = "channel-major";
  static constexpr float rounding = Element::rounding;

  static Index step(const RowShape& shape) {
    return shape.channel_step != 0 ? shape.channel_step : Element::bytes({1});
  }
  static Index bytes(const RowShape& shape) {
    return (shape.dim - 1) * step(shape) + Element::bytes({1});
  }
  QUOKA_INLINE static simd::Packet load(ConstRow row, Index c, const RowShape& shape) {
    alignas(64) float x[simd::lanes];
    for (int i = 0; i < simd::lanes; ++i) x[i] = at(row, c + i, shape);
    return simd::load(x);
  }
  QUOKA_INLINE static float at(ConstRow row, Index c, const RowShape& shape) {
    return Element::at(row + c * step(shape), 0, shape);
  }
};

}  // namespace formats

}  // namespace QUOKA_ABI
}  // namespace quoka
