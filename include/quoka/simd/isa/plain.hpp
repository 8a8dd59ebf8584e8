// No vector unit: a packet is one float, and all its functions are those of shared.hpp.
#pragma once

#include <quoka/simd/isa/shared.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using Packet = float;
inline constexpr int lanes = 1;
inline constexpr int registers = 16;
inline constexpr bool has_lane_masks = false;

QUOKA_INLINE Packet broadcast_packet(float x) { return x; }
QUOKA_INLINE Packet load_packet(const float* p) { return *p; }
QUOKA_INLINE Packet load_unaligned(const float* p) { return *p; }
QUOKA_INLINE void store(float* p, Packet x) { *p = x; }
QUOKA_INLINE void store_unaligned(float* p, Packet x) { *p = x; }

QUOKA_INLINE Packet load_half(const std::uint16_t* p) { return half_to_float(*p); }
QUOKA_INLINE Packet load_bfloat16(const std::uint16_t* p) { return bfloat16_to_float(*p); }
QUOKA_INLINE void store_half(std::uint16_t* p, Packet x) { *p = float_to_half(x); }
QUOKA_INLINE void store_bfloat16(std::uint16_t* p, Packet x) { *p = float_to_bfloat16(x); }

QUOKA_INLINE Packet load_int8(const std::int8_t* p) { return static_cast<float>(*p); }
QUOKA_INLINE Packet load_uint8(const std::uint8_t* p) { return static_cast<float>(*p); }
QUOKA_INLINE Packet load_e4m3(const std::uint8_t* p) { return e4m3_to_float(*p); }

QUOKA_INLINE float reduce_max(Packet x) { return x; }
QUOKA_INLINE float reduce_add(Packet x) { return x; }

struct Square {
  Packet packet[lanes];
};
QUOKA_INLINE void transpose(Square&) {}
template <class Op>
QUOKA_INLINE Packet reduce_each(const Square& square, Op&&) {
  return square.packet[0];
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
