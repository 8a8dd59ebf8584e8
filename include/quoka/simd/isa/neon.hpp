// NEON of AArch64: 4 floats, 32 registers, fused multiply-add, conversions of half.
#pragma once

#include <quoka/simd/isa/floats.hpp>

#include <arm_neon.h>

QUOKA_INTRINSICS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

using Packet = float32x4_t;
inline constexpr int lanes = 4;
inline constexpr int registers = 32;
inline constexpr bool has_lane_masks = false;

QUOKA_INLINE Packet broadcast_packet(float x) { return vdupq_n_f32(x); }
QUOKA_INLINE Packet load_packet(const float* p) { return vld1q_f32(p); }
QUOKA_INLINE Packet load_unaligned(const float* p) { return vld1q_f32(p); }
QUOKA_INLINE void store(float* p, Packet x) { vst1q_f32(p, x); }
QUOKA_INLINE void store_unaligned(float* p, Packet x) { vst1q_f32(p, x); }

QUOKA_INLINE Packet add(Packet a, Packet b) { return vaddq_f32(a, b); }
QUOKA_INLINE Packet sub(Packet a, Packet b) { return vsubq_f32(a, b); }
QUOKA_INLINE Packet mul(Packet a, Packet b) { return vmulq_f32(a, b); }
QUOKA_INLINE Packet div(Packet a, Packet b) { return vdivq_f32(a, b); }
QUOKA_INLINE Packet fma(Packet a, Packet b, Packet c) { return vfmaq_f32(c, a, b); }
// NaN where either is NaN.
QUOKA_INLINE Packet max(Packet a, Packet b) { return vmaxq_f32(a, b); }
QUOKA_INLINE Packet min(Packet a, Packet b) { return vminq_f32(a, b); }
QUOKA_INLINE Packet sqrt(Packet x) { return vsqrtq_f32(x); }
QUOKA_INLINE Packet select_less(Packet a, Packet b, Packet yes, Packet no) {
  return vbslq_f32(vcltq_f32(a, b), yes, no);
}
QUOKA_INLINE Packet opaque(Packet x) {
  asm("" : "+w"(x));
  return x;
}
QUOKA_INLINE Packet power_of_rounded_bits(Packet shifted) {
  const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
  return vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(0x3f800000u)));
}

// --- half and bfloat16 ------------------------------------------------------------------------

QUOKA_INLINE Packet load_half(const std::uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
QUOKA_INLINE void store_half(std::uint16_t* p, Packet x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
QUOKA_INLINE Packet load_bfloat16(const std::uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
QUOKA_INLINE void store_bfloat16(std::uint16_t* p, Packet x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1u));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fffu));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000u));
  vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}

// --- 8 bits -----------------------------------------------------------------------------------

QUOKA_INLINE uint8x8_t load_bytes(const void* p) {  // 4 of them
  std::uint32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return vreinterpret_u8_u32(vdup_n_u32(four));
}
QUOKA_INLINE Packet load_int8(const std::int8_t* p) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_bytes(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
QUOKA_INLINE uint32x4_t load_codes(const std::uint8_t* p) {
  return vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(p))));
}
QUOKA_INLINE Packet load_uint8(const std::uint8_t* p) { return vcvtq_f32_u32(load_codes(p)); }
// The steps of e4m3_to_float.
QUOKA_INLINE Packet load_e4m3(const std::uint8_t* p) {
  const uint32x4_t code = load_codes(p), magnitude = vandq_u32(code, vdupq_n_u32(0x7fu));
  const uint32x4_t sign = vshlq_n_u32(veorq_u32(code, magnitude), 24);
  const uint32x4_t normal = vaddq_u32(vshlq_n_u32(magnitude, 20), vdupq_n_u32(120u << 23));
  const uint32x4_t denormal = vreinterpretq_u32_f32(vmulq_n_f32(vcvtq_f32_u32(magnitude), 0x1p-9f));
  const uint32x4_t bits = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(8u)), denormal, normal);
  const uint32x4_t nan =
      vandq_u32(vceqq_u32(magnitude, vdupq_n_u32(0x7fu)), vdupq_n_u32(0x7fc00000u));
  return vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(sign, bits), nan));
}

// --- across lanes -----------------------------------------------------------------------------

QUOKA_INLINE float reduce_max(Packet x) { return vmaxvq_f32(x); }
// (x[0] + x[1]) + (x[2] + x[3]).
QUOKA_INLINE float reduce_add(Packet x) { return vaddvq_f32(x); }

struct Square {
  Packet packet[lanes];
};

// Pairs of lanes, as one element of 64 bits.
QUOKA_INLINE Packet lower_pairs(Packet a, Packet b) {
  return vreinterpretq_f32_u64(vtrn1q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b)));
}
QUOKA_INLINE Packet upper_pairs(Packet a, Packet b) {
  return vreinterpretq_f32_u64(vtrn2q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b)));
}

// In place. 8 shuffles.
QUOKA_INLINE void transpose(Square& square) {
  Packet(&x)[lanes] = square.packet;
  const Packet a = vtrn1q_f32(x[0], x[1]), b = vtrn2q_f32(x[0], x[1]);
  const Packet c = vtrn1q_f32(x[2], x[3]), d = vtrn2q_f32(x[2], x[3]);
  x[0] = lower_pairs(a, c), x[1] = lower_pairs(b, d);
  x[2] = upper_pairs(a, c), x[3] = upper_pairs(b, d);
}

// Pairs twice: 6 shuffles.
template <class Op>
QUOKA_INLINE Packet reduce_each(const Square& square, Op&& op) {
  const Packet(&x)[lanes] = square.packet;
  const auto pairs = [&](Packet a, Packet b) QUOKA_INLINE_LAMBDA {
    return op(Packet(vuzp1q_f32(a, b)), Packet(vuzp2q_f32(a, b)));
  };
  return pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_INTRINSICS_END
