// The layouts are structs of bytes, so that a block is read in place at any alignment. (Copied into
// a local struct first, Q8_0 ran at a sixth of the speed: the loads straddle the stores.) Bytes may
// alias anything; __restrict says that they do not overlap `out`. The loops over values are 32 long
// and without branches: GCC 12 vectorises these, and 16-long ones badly or not at all.
//
// The formulas may be evaluated in any order, fused or not, with the same bits: in floats of 24
// bits the products are exact (for Q6_K 11 bits of d, 7 of the scale, 5 of the value), so that
// nothing rounds but the subtraction of the minimum.

#include "decoder/file/block_types.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

namespace quoka_decoder {
namespace {

static_assert(std::endian::native == std::endian::little, "blocks are little-endian");

constexpr float max_half = 65504;

// In integers and masks, so that a loop over it vectorises for every instruction set. Every half
// is a float, so nothing rounds; a NaN keeps its payload.
float half_to_float(std::uint16_t half) {
  constexpr std::uint32_t bias = (127 - 15) << 23;  // between the exponents of float and half
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
  const std::int32_t magnitude = half & 0x7fff;
  const std::uint32_t if_subnormal = 0U - static_cast<std::uint32_t>(magnitude < 0x400);
  const std::uint32_t if_not_finite = 0U - static_cast<std::uint32_t>(magnitude >= 0x7c00);
  const std::uint32_t normal =
      (static_cast<std::uint32_t>(magnitude) << 13) + bias + (if_not_finite & bias);
  const auto subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
  return std::bit_cast<float>(sign | (normal & ~if_subnormal) | (subnormal & if_subnormal));
}

float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

using Byte = std::uint8_t;

std::uint16_t read_u16(const Byte* at) {
  std::uint16_t result;
  std::memcpy(&result, at, sizeof(result));
  return result;
}

struct BlockQ4_0 {
  Byte d[2];
  Byte q[16];  // value i in the low 4 bits of q[i], value 16 + i in the high ones
};

struct BlockQ8_0 {
  Byte d[2];
  Byte q[32];  // as signed numbers
};

// Eight runs of 32 values; two neighbouring runs share 32 bytes of q, as low and high 4 bits.
struct BlockQ4_K {
  Byte d[2], d_min[2];
  Byte scales[12];  // see read_scales
  Byte q[4][32];
};

struct BlockQ5_K {
  Byte d[2], d_min[2];
  Byte scales[12];
  Byte fifth[32];  // bit r of fifth[i] is the fifth bit of value i of run r
  Byte q[4][32];
};

// Two halves of four runs of 32 values, 16 to a scale. In a half, runs 0 and 1 are the low 4 bits
// of low[0] and low[1], runs 2 and 3 the high 4 bits; run r has bits 2r, 2r + 1 of high above them.
struct BlockQ6_K {
  Byte low[2][2][32];
  Byte high[2][32];
  Byte scales[2][4][2];  // as signed numbers
  Byte d[2];
};

void decode(const BlockQ4_0& block, float* __restrict out) {
  const float d = half_to_float(read_u16(block.d));
  Byte q[32];
  std::memcpy(q, block.q, 16);
  std::memcpy(q + 16, block.q, 16);
  for (int i = 0; i < 32; ++i) {
    const int value = i < 16 ? q[i] & 15 : q[i] >> 4;
    out[i] = d * static_cast<float>(value - 8);
  }
}

void decode(const BlockQ8_0& block, float* __restrict out) {
  const float d = half_to_float(read_u16(block.d));
  for (int i = 0; i < 32; ++i) {
    out[i] = d * static_cast<float>(static_cast<std::int8_t>(block.q[i]));
  }
}

// The scale and the minimum of each of 8 runs.
struct Scales {
  float scale[8], min[8];
};

// Sixteen numbers of 6 bits in 12 bytes: bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3, with
// the upper 2 bits of scales and minima 4-7 on top; bytes 8-11 hold the lower 4 bits of these.
Scales read_scales(const Byte (&packed)[12], float d, float d_min) {
  Scales result;
  for (int i = 0; i < 4; ++i) {
    const int scale = packed[i], min = packed[4 + i], low = packed[8 + i];
    result.scale[i] = d * static_cast<float>(scale & 63);
    result.min[i] = d_min * static_cast<float>(min & 63);
    result.scale[4 + i] = d * static_cast<float>((low & 15) | (scale >> 6 << 4));
    result.min[4 + i] = d_min * static_cast<float>((low >> 4) | (min >> 6 << 4));
  }
  return result;
}

template <class Block>
Scales read_scales(const Block& block) {
  return read_scales(block.scales, half_to_float(read_u16(block.d)),
                     half_to_float(read_u16(block.d_min)));
}

void decode(const BlockQ4_K& block, float* __restrict out) {
  const Scales runs = read_scales(block);
  for (int pair = 0; pair < 4; ++pair) {
    const int even = 2 * pair, odd = even + 1;
    for (int i = 0; i < 32; ++i) {
      const int low = block.q[pair][i] & 15;
      out[32 * even + i] = runs.scale[even] * static_cast<float>(low) - runs.min[even];
    }
    for (int i = 0; i < 32; ++i) {
      const int high = block.q[pair][i] >> 4;
      out[32 * odd + i] = runs.scale[odd] * static_cast<float>(high) - runs.min[odd];
    }
  }
}

void decode(const BlockQ5_K& block, float* __restrict out) {
  const Scales runs = read_scales(block);
  for (int pair = 0; pair < 4; ++pair) {
    const int even = 2 * pair, odd = even + 1;
    for (int i = 0; i < 32; ++i) {
      const int q = (block.q[pair][i] & 15) | ((block.fifth[i] >> even & 1) << 4);
      out[32 * even + i] = runs.scale[even] * static_cast<float>(q) - runs.min[even];
    }
    for (int i = 0; i < 32; ++i) {
      const int q = (block.q[pair][i] >> 4) | ((block.fifth[i] >> odd & 1) << 4);
      out[32 * odd + i] = runs.scale[odd] * static_cast<float>(q) - runs.min[odd];
    }
  }
}

template <int run>
void decode_run(const BlockQ6_K& block, int half, float d, float* __restrict out) {
  const Byte* low = block.low[half][run % 2];
  const Byte* high = block.high[half];
  const Byte* scales = block.scales[half][run];
  const float first = d * static_cast<float>(static_cast<std::int8_t>(scales[0]));
  const float second = d * static_cast<float>(static_cast<std::int8_t>(scales[1]));
  for (int i = 0; i < 32; ++i) {
    const int q = (low[i] >> run / 2 * 4 & 15) | ((high[i] >> 2 * run & 3) << 4);
    out[i] = (i < 16 ? first : second) * static_cast<float>(q - 32);
  }
}

void decode(const BlockQ6_K& block, float* __restrict out) {
  const float d = half_to_float(read_u16(block.d));
  for (int half = 0; half < 2; ++half, out += 128) {
    decode_run<0>(block, half, d, out);
    decode_run<1>(block, half, d, out + 32);
    decode_run<2>(block, half, d, out + 64);
    decode_run<3>(block, half, d, out + 96);
  }
}

template <class Block>
void decode_blocks(TensorType type, const std::byte* from, Index count, float* out) {
  const Index values = values_per_block(type);
  const auto* blocks = reinterpret_cast<const Block*>(from);
  for (Index i = 0; i < count / values; ++i) decode(blocks[i], out + i * values);
}

template <class Block>
constexpr bool is_layout_of(TensorType type) {
  return sizeof(Block) == bytes_per_block(type) && alignof(Block) == 1;
}
static_assert(is_layout_of<BlockQ4_0>(TensorType::q4_0) &&
              is_layout_of<BlockQ8_0>(TensorType::q8_0) &&
              is_layout_of<BlockQ4_K>(TensorType::q4_k) &&
              is_layout_of<BlockQ5_K>(TensorType::q5_k) &&
              is_layout_of<BlockQ6_K>(TensorType::q6_k));

template <float (*widen)(std::uint16_t)>
void decode_u16(const std::byte* from, Index count, float* __restrict out) {
  const auto* bytes = reinterpret_cast<const Byte*>(from);
  for (Index i = 0; i < count; ++i) out[i] = widen(read_u16(bytes + 2 * i));
}

void check_count(TensorType type, Index count) {
  const Index block = values_per_block(type);
  if (count >= 0 && count % block == 0) return;
  throw std::invalid_argument(std::string(name_of(type)) + " blocks hold " + std::to_string(block) +
                              " values: " + std::to_string(count) + " is no multiple");
}

}  // namespace

const char* name_of(TensorType type) { return ggml_type_name(static_cast<std::uint32_t>(type)); }

const char* ggml_type_name(std::uint32_t number) {
  static constexpr const char* names[] = {
      "F32",   "F16",        "Q4_0",       "Q4_1",       "Q4_2",     "Q4_3",     "Q5_0",
      "Q5_1",  "Q8_0",       "Q8_1",       "Q2_K",       "Q3_K",     "Q4_K",     "Q5_K",
      "Q6_K",  "Q8_K",       "IQ2_XXS",    "IQ2_XS",     "IQ3_XXS",  "IQ1_S",    "IQ4_NL",
      "IQ3_S", "IQ2_S",      "IQ4_XS",     "I8",         "I16",      "I32",      "I64",
      "F64",   "IQ1_M",      "BF16",       "Q4_0_4_4",   "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",
      "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",    "NVFP4",    "Q1_0",
      "Q2_0"};
  return number < std::size(names) ? names[number] : "unknown";
}

bool is_readable(std::uint32_t number) {
  return std::ranges::find(readable_types, static_cast<TensorType>(number)) !=
         std::ranges::end(readable_types);
}

void dequantize(TensorType type, const std::byte* blocks, Index count, float* out) {
  check_count(type, count);
  switch (type) {
    case TensorType::f32:
      if (count != 0) std::memcpy(out, blocks, static_cast<std::size_t>(count) * sizeof(float));
      return;
    case TensorType::f16:
      return decode_u16<half_to_float>(blocks, count, out);
    case TensorType::bf16:
      return decode_u16<bfloat16_to_float>(blocks, count, out);
    case TensorType::q4_0:
      return decode_blocks<BlockQ4_0>(type, blocks, count, out);
    case TensorType::q8_0:
      return decode_blocks<BlockQ8_0>(type, blocks, count, out);
    case TensorType::q4_k:
      return decode_blocks<BlockQ4_K>(type, blocks, count, out);
    case TensorType::q5_k:
      return decode_blocks<BlockQ5_K>(type, blocks, count, out);
    case TensorType::q6_k:
      return decode_blocks<BlockQ6_K>(type, blocks, count, out);
  }
}

void quantize_q8_0(const float* values, Index count, std::byte* blocks) {
  check_count(TensorType::q8_0, count);
  for (Index i = 0; i < count; i += 32, values += 32, blocks += sizeof(BlockQ8_0)) {
    float largest = 0;
    bool finite = true;
    for (int j = 0; j < 32; ++j) {
      largest = std::max(largest, std::abs(values[j]));
      finite = finite && std::isfinite(values[j]);
    }
    const float d = largest / 127;
    if (!finite || d > max_half) {
      throw std::invalid_argument(
          "Q8_0 holds finite values up to 127 * 65504; the block at value " + std::to_string(i) +
          " has another");
    }
    BlockQ8_0 block;
    const auto rounded = static_cast<Eigen::half>(d);
    std::memcpy(block.d, &rounded, sizeof(block.d));
    // 1 / d overflows for d = 0 and the least subnormals; d is then 0 as a half, as is every value.
    const float reciprocal = 1 / d;
    const float inverse = std::isfinite(reciprocal) ? reciprocal : 0;
    for (int j = 0; j < 32; ++j) {
      const float scaled = values[j] * inverse;
      const int whole = static_cast<int>(scaled);
      const float rest = scaled - static_cast<float>(whole);
      block.q[j] = static_cast<Byte>(whole + (rest >= 0.5F) - (rest <= -0.5F));
    }
    std::memcpy(blocks, &block, sizeof(block));
  }
}

}  // namespace quoka_decoder
