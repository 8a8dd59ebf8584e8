// The block formats against ggml's own library: goldens/block_types.json holds blocks, quantised by
// ggml or of random bits, and the floats that ggml decodes them to. Every bit must agree, but for
// the payload of a NaN. QUOKA_DECODER_GOLDENS must be defined as the path of tests/decoder/goldens.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "decoder/file/block_types.hpp"

namespace {

using namespace quoka_decoder;
using Bytes = std::vector<std::byte>;

constexpr float infinity = std::numeric_limits<float>::infinity();

Bytes from_hex(const std::string& text) {
  Bytes result;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    result.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return result;
}

std::vector<float> floats_from_hex(const std::string& text) {
  const Bytes bytes = from_hex(text);
  std::vector<float> result(bytes.size() / sizeof(float));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

const nlohmann::json& goldens() {
  static const nlohmann::json json = nlohmann::json::parse(
      std::ifstream(std::string(QUOKA_DECODER_GOLDENS) + "/block_types.json"));
  return json;
}

std::vector<float> decoded(TensorType type, const Bytes& blocks, Index count) {
  std::vector<float> result(static_cast<std::size_t>(count), -777.0F);
  dequantize(type, blocks.data(), count, result.data());
  return result;
}

// Equal bits, or NaN and NaN.
void expect_same_bits(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(actual[i]), std::bit_cast<std::uint32_t>(expected[i]))
        << "at " << i << ": " << actual[i] << ", expected " << expected[i];
  }
}

Bytes random_bytes(Index count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes result(static_cast<std::size_t>(count));
  for (std::byte& byte : result) byte = static_cast<std::byte>(random() & 255);
  return result;
}

// Puts the bits of a half at this byte.
void put_half(Bytes& bytes, std::size_t at, std::uint16_t bits) {
  std::memcpy(bytes.data() + at, &bits, sizeof(bits));
}

// Where the halves lie that scale a block.
std::vector<std::size_t> scale_offsets(TensorType type) {
  switch (type) {
    case TensorType::q4_k:
    case TensorType::q5_k:
      return {0, 2};
    case TensorType::q6_k:
      return {208};
    default:
      return {0};
  }
}

class EveryType : public ::testing::TestWithParam<TensorType> {};
class EveryEncoding : public ::testing::TestWithParam<TensorType> {};  // all but F32
class EveryBlock : public ::testing::TestWithParam<TensorType> {};

std::string type_name(const ::testing::TestParamInfo<TensorType>& type) {
  return name_of(type.param);
}

INSTANTIATE_TEST_SUITE_P(BlockTypes, EveryType, ::testing::ValuesIn(readable_types), type_name);
INSTANTIATE_TEST_SUITE_P(BlockTypes, EveryEncoding,
                         ::testing::Values(TensorType::f16, TensorType::bf16, TensorType::q4_0,
                                           TensorType::q8_0, TensorType::q4_k, TensorType::q5_k,
                                           TensorType::q6_k),
                         type_name);
INSTANTIATE_TEST_SUITE_P(BlockTypes, EveryBlock,
                         ::testing::Values(TensorType::q4_0, TensorType::q8_0, TensorType::q4_k,
                                           TensorType::q5_k, TensorType::q6_k),
                         type_name);

TEST_P(EveryEncoding, DecodesAsGgml) {
  const nlohmann::json& golden = goldens().at(name_of(GetParam()));
  const Bytes blocks = from_hex(golden.at("blocks"));
  const std::vector<float> expected = floats_from_hex(golden.at("floats"));
  const auto count = static_cast<Index>(expected.size());
  ASSERT_GE(count, 3 * values_per_block(GetParam()));
  ASSERT_EQ(static_cast<Index>(blocks.size()), bytes_of(GetParam(), count));
  expect_same_bits(decoded(GetParam(), blocks, count), expected);
}

TEST_P(EveryType, BlocksMayHaveAnyAlignment) {
  const Index count = 3 * values_per_block(GetParam());
  const Bytes blocks = random_bytes(bytes_of(GetParam(), count), 5);
  const std::vector<float> expected = decoded(GetParam(), blocks, count);
  for (std::size_t shift = 1; shift < 8; ++shift) {
    Bytes moved(shift);
    moved.insert(moved.end(), blocks.begin(), blocks.end());
    std::vector<float> actual(expected.size());
    dequantize(GetParam(), moved.data() + shift, count, actual.data());
    expect_same_bits(actual, expected);
  }
}

TEST_P(EveryType, BlocksAreIndependent) {
  const Index block = values_per_block(GetParam()), blocks = 37;
  const Bytes bytes = random_bytes(bytes_of(GetParam(), blocks * block), 6);
  std::vector<float> one_by_one(static_cast<std::size_t>(blocks * block));
  for (Index i = 0; i < blocks; ++i) {
    dequantize(GetParam(), bytes.data() + bytes_of(GetParam(), i * block), block,
               one_by_one.data() + i * block);
  }
  expect_same_bits(decoded(GetParam(), bytes, blocks * block), one_by_one);
}

TEST_P(EveryType, ZeroBytesAreZeros) {
  const Index count = 2 * values_per_block(GetParam());
  const Bytes blocks(static_cast<std::size_t>(bytes_of(GetParam(), count)));
  for (const float value : decoded(GetParam(), blocks, count)) EXPECT_EQ(value, 0.0F);
}

TEST_P(EveryType, CountZeroWritesNothing) {
  float untouched = 7;
  dequantize(GetParam(), nullptr, 0, &untouched);
  EXPECT_EQ(untouched, 7);
}

TEST_P(EveryType, NegativeCountIsRefused) {
  float out = 0;
  EXPECT_THROW(dequantize(GetParam(), nullptr, -values_per_block(GetParam()), &out),
               std::invalid_argument);
}

// Infinity times zero is NaN, and infinity minus infinity; all else is infinite.
TEST_P(EveryBlock, AnInfiniteScaleGivesNoFiniteValue) {
  const Index count = values_per_block(GetParam());
  for (const std::uint16_t scale : std::initializer_list<std::uint16_t>{0x7c00, 0xfc00}) {
    Bytes block = random_bytes(bytes_of(GetParam(), count), 8);
    for (const std::size_t offset : scale_offsets(GetParam())) put_half(block, offset, 0x3c00);
    const std::vector<float> finite = decoded(GetParam(), block, count);
    put_half(block, scale_offsets(GetParam())[0], scale);
    const std::vector<float> values = decoded(GetParam(), block, count);
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(std::isfinite(finite[i]));
      EXPECT_FALSE(std::isfinite(values[i])) << i;
    }
  }
}

TEST_P(EveryBlock, ANanScaleGivesNan) {
  const Index count = values_per_block(GetParam());
  Bytes block = random_bytes(bytes_of(GetParam(), count), 9);
  for (const std::size_t offset : scale_offsets(GetParam())) put_half(block, offset, 0x7e00);
  for (const float value : decoded(GetParam(), block, count)) EXPECT_TRUE(std::isnan(value));
}

TEST_P(EveryBlock, ACountWithinABlockIsRefusedWithBothNumbers) {
  const Index count = values_per_block(GetParam()) + 1;
  std::vector<float> out(static_cast<std::size_t>(count));
  const Bytes blocks(static_cast<std::size_t>(2 * bytes_per_block(GetParam())));
  try {
    dequantize(GetParam(), blocks.data(), count, out.data());
    FAIL() << "nothing was thrown";
  } catch (const std::invalid_argument& error) {
    EXPECT_EQ(std::string(error.what()),
              std::string(name_of(GetParam())) + " blocks hold " + std::to_string(count - 1) +
                  " values: " + std::to_string(count) + " is no multiple");
  }
}

TEST(BlockTypes, F32IsCopied) {
  const Bytes blocks = random_bytes(4 * 501, 3);
  const std::vector<float> values = decoded(TensorType::f32, blocks, 501);
  EXPECT_EQ(std::memcmp(values.data(), blocks.data(), blocks.size()), 0);
}

TEST(BlockTypes, EveryHalfIsDecoded) {
  Bytes blocks(65536 * 2);
  std::vector<float> expected;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    put_half(blocks, 2 * bits, static_cast<std::uint16_t>(bits));
    const int exponent = static_cast<int>(bits >> 10 & 31),
              fraction = static_cast<int>(bits & 1023);
    const float magnitude =
        exponent == 31  ? (fraction == 0 ? infinity : std::numeric_limits<float>::quiet_NaN())
        : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                        : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    expected.push_back(bits < 32768 ? magnitude : -magnitude);
  }
  expect_same_bits(decoded(TensorType::f16, blocks, 65536), expected);
}

TEST(BlockTypes, EveryBfloat16IsTheUpperHalfOfAFloat) {
  Bytes blocks(65536 * 2);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    put_half(blocks, 2 * bits, static_cast<std::uint16_t>(bits));
  }
  const std::vector<float> values = decoded(TensorType::bf16, blocks, 65536);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(values[bits]), bits << 16);
  }
}

TEST(BlockTypes, AllNumbersOfGgmlHaveANameAndEightAreRead) {
  EXPECT_STREQ(ggml_type_name(16), "IQ2_XXS");
  EXPECT_STREQ(ggml_type_name(3), "Q4_1");
  EXPECT_STREQ(ggml_type_name(39), "MXFP4");
  EXPECT_STREQ(ggml_type_name(42), "Q2_0");
  EXPECT_STREQ(ggml_type_name(43), "unknown");
  EXPECT_STREQ(ggml_type_name(0xffffffff), "unknown");
  int readable = 0;
  for (std::uint32_t number = 0; number < 100; ++number) readable += is_readable(number);
  EXPECT_EQ(readable, 8);
  for (const TensorType type : readable_types) {
    EXPECT_TRUE(is_readable(static_cast<std::uint32_t>(type)));
    EXPECT_STREQ(name_of(type), ggml_type_name(static_cast<std::uint32_t>(type)));
  }
}

// ---- Q8_0, written ------------------------------------------------------------------------------

Bytes quantized(const std::vector<float>& values) {
  const auto count = static_cast<Index>(values.size());
  Bytes result(static_cast<std::size_t>(bytes_of(TensorType::q8_0, count)));
  quantize_q8_0(values.data(), count, result.data());
  return result;
}

TEST(QuantizeQ8, MakesGgmlsBytes) {
  const Bytes made = quantized(floats_from_hex(goldens().at("Q8_0 of")));
  Bytes expected = from_hex(goldens().at("Q8_0").at("blocks"));
  ASSERT_LT(made.size(), expected.size());  // blocks of random bits follow in the file
  expected.resize(made.size());
  EXPECT_EQ(made, expected);
}

// Half a step of rounding, and d as a half, which is off by up to 2^-11 of each value.
TEST(QuantizeQ8, IsWithinHalfAStep) {
  std::mt19937 random(31);
  std::normal_distribution<float> normal;
  std::vector<float> values(32 * 127);
  for (float& value : values) value = normal(random);
  const std::vector<float> back =
      decoded(TensorType::q8_0, quantized(values), static_cast<Index>(values.size()));
  for (std::size_t block = 0; block < values.size(); block += 32) {
    float largest = 0;
    for (std::size_t i = block; i < block + 32; ++i)
      largest = std::max(largest, std::abs(values[i]));
    for (std::size_t i = block; i < block + 32; ++i) {
      EXPECT_LE(std::abs(values[i] - back[i]), largest / 127 / 2 * 1.0001F + largest / 2048) << i;
    }
  }
}

TEST(QuantizeQ8, HalvesAreRoundedAwayFromZero) {
  std::vector<float> values(32);
  values[0] = 127;  // d = 1
  values[1] = 2.5F;
  values[2] = -2.5F;
  values[3] = 0.5F;
  values[4] = std::nextafter(0.5F, 0.0F);
  values[5] = -3.5F;
  const std::vector<float> back = decoded(TensorType::q8_0, quantized(values), 32);
  EXPECT_EQ(back[0], 127);
  EXPECT_EQ(back[1], 3);
  EXPECT_EQ(back[2], -3);
  EXPECT_EQ(back[3], 1);
  EXPECT_EQ(back[4], 0);
  EXPECT_EQ(back[5], -4);
}

TEST(QuantizeQ8, ZerosAndSubnormalsAreZeros) {
  for (const float value : {0.0F, -0.0F, std::numeric_limits<float>::denorm_min(), 1e-37F}) {
    const std::vector<float> values(32, value);
    for (const float back : decoded(TensorType::q8_0, quantized(values), 32)) EXPECT_EQ(back, 0);
  }
}

TEST(QuantizeQ8, WhatAHalfCannotScaleIsRefusedWithItsPlace) {
  for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 8.4e6F}) {
    std::vector<float> values(96, 1.0F);
    values[64 + 17] = bad;
    try {
      quantized(values);
      ADD_FAILURE() << bad << " was taken";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("block at value 64"), std::string::npos)
          << error.what();
    }
  }
}

TEST(QuantizeQ8, ACountWithinABlockIsRefused) {
  const std::vector<float> values(33);
  Bytes blocks(68);
  EXPECT_THROW(quantize_q8_0(values.data(), 33, blocks.data()), std::invalid_argument);
}

}  // namespace
