// The formats in which a GGUF file stores a tensor's values: plain floats of 32 and 16 bits, and
// blocks of 32 or 256 values that share scales.
//
//   type     values  bytes  a value is
//   F32           1      4  itself
//   F16, BF16     1      2  itself
//   Q8_0         32     34  d * q                              q of 8 bits, signed
//   Q4_0         32     18  d * (q - 8)                        q of 4 bits
//   Q4_K        256    144  d * scale * q - dmin * min         q of 4 bits; 8 runs of 32 values,
//   Q5_K        256    176  the same                           q of 5     each its 6-bit scale, min
//   Q6_K        256    210  d * scale * (q - 32)               q of 6; 16 runs of 16, 8-bit scales
//
// d and dmin are halves. The byte layouts are ggml's (ggml-common.h); each is written out in
// block_types.cpp. Rows of a matrix are whole blocks, so a row never shares one with the next.
#pragma once

#include <quoka/base/index.hpp>

#include <cstddef>
#include <cstdint>

namespace quoka_decoder {

using quoka::Index;

// The numbers are those of GGUF files (enum ggml_type).
enum class TensorType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};

inline constexpr TensorType readable_types[] = {
    TensorType::f32,  TensorType::f16,  TensorType::bf16, TensorType::q4_0,
    TensorType::q8_0, TensorType::q4_k, TensorType::q5_k, TensorType::q6_k};

// Is it the number of one of the types above?
bool is_readable(std::uint32_t number);

// "F32", "Q4_K".
const char* name_of(TensorType type);

// The name of any of ggml's types, readable here or not, retired ones too; "unknown" for a number
// that ggml gives to no type (42, Q2_0, is the last known here).
const char* ggml_type_name(std::uint32_t number);

constexpr Index values_per_block(TensorType type) {
  switch (type) {
    case TensorType::f32:
    case TensorType::f16:
    case TensorType::bf16:
      return 1;
    case TensorType::q4_0:
    case TensorType::q8_0:
      return 32;
    case TensorType::q4_k:
    case TensorType::q5_k:
    case TensorType::q6_k:
      return 256;
  }
  return 1;
}

constexpr Index bytes_per_block(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return 4;
    case TensorType::f16:
    case TensorType::bf16:
      return 2;
    case TensorType::q4_0:
      return 18;
    case TensorType::q8_0:
      return 34;
    case TensorType::q4_k:
      return 144;
    case TensorType::q5_k:
      return 176;
    case TensorType::q6_k:
      return 210;
  }
  return 4;
}

// Bytes that `count` values take; count must be a multiple of values_per_block(type).
constexpr Index bytes_of(TensorType type, Index count) {
  return count / values_per_block(type) * bytes_per_block(type);
}

// out[0, count) = the values of the first count / values_per_block(type) blocks. `blocks` may have
// any alignment. Throws std::invalid_argument if count is negative or not a multiple of the block.
void dequantize(TensorType type, const std::byte* blocks, Index count, float* out);

// Blocks of Q8_0 from 32 values each: d = max |value| / 127, q = round(value / d), half away from
// zero, d then rounded to a half (ggml's quantize_row_q8_0_ref). Writes bytes_of(q8_0, count) bytes.
// Values must be finite. Throws std::invalid_argument if count is negative or not a multiple of 32.
void quantize_q8_0(const float* values, Index count, std::byte* blocks);

}  // namespace quoka_decoder
