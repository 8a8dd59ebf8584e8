// kernels/token_codes.hpp: the values of one token's coded queries, and their products with keys
// that are codes.

#include <quoka/base/buffer.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/kernels/token_codes.hpp>

#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::ConstRow;
using quoka::detail::TokenCodeGroup;
namespace simd = quoka::simd;

constexpr Index rows = quoka::detail::token_code_rows;

struct Coded {
  Index dim;
  quoka::Buffer<std::byte> memory;
  bool fits;

  Coded(const std::vector<float>& queries, Index d) : dim(d) {
    memory.reserve(quoka::detail::token_code_bytes(dim));
    fits = quoka::detail::code_token_queries(queries.data(), dim, memory.data());
  }
  const TokenCodeGroup& group(Index g) const {
    return reinterpret_cast<const TokenCodeGroup*>(memory.data())[g];
  }
  float unit(Index i) const {
    const Index groups = quoka::ceil_div(dim, simd::code_group);
    return reinterpret_cast<const float*>(memory.data() +
                                          groups * static_cast<Index>(sizeof(TokenCodeGroup)))[i];
  }
  // Channel c of query r, as it is coded.
  double channel(Index r, Index c) const {
    const Index at = r * 16 + c % 16, half = c % 32 / 16;
    return static_cast<double>(unit(r)) *
           (128 * group(c / 32).high[half][at] + group(c / 32).low[half][at]);
  }
};

std::vector<float> normal_queries(Index dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> queries(static_cast<std::size_t>(rows * dim));
  for (float& x : queries) x = normal(random);
  return queries;
}

TEST(TokenCodes, AreTheQueriesToFifteenBits) {
  for (const Index dim : {16, 32, 80, 128, 144}) {
    auto queries = normal_queries(dim, 1);
    queries[3] = 1e4f, queries[static_cast<std::size_t>(dim)] = -3e30f;  // alone in their rows
    for (Index c = 0; c < dim; ++c) queries[static_cast<std::size_t>(2 * dim + c)] = 0.0f;
    const Coded coded(queries, dim);
    ASSERT_TRUE(coded.fits);
    for (Index r = 0; r < rows; ++r) {
      double largest = 0.0;
      for (Index c = 0; c < dim; ++c)
        largest =
            std::max(largest, std::abs(double{queries[static_cast<std::size_t>(r * dim + c)]}));
      for (Index c = 0; c < dim; ++c)
        ASSERT_NEAR(coded.channel(r, c), queries[static_cast<std::size_t>(r * dim + c)],
                    largest / 32638 * 1.01)
            << "query " << r << ", channel " << c << " of " << dim;
      for (Index i = r; i < 16; i += rows) EXPECT_EQ(coded.unit(i), coded.unit(r));
      for (Index c = dim; c < quoka::round_up(dim, Index{32}); ++c)
        EXPECT_EQ(coded.channel(r, c), 0.0);
    }
  }
}

TEST(TokenCodes, OfWhatIntegersCannotHoldAreRefused) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float x : {infinity, -infinity, std::nanf("")}) {
    auto queries = normal_queries(64, 2);
    queries.back() = x;
    EXPECT_FALSE(Coded(queries, 64).fits);
  }
  std::vector<float> tiny(rows * 64, 1e-38f);
  EXPECT_FALSE(Coded(tiny, 64).fits);
  EXPECT_TRUE(Coded(std::vector<float>(rows * 64), 64).fits) << "zeros";
}

// Rows of q8_0 that lie anywhere, with any bytes.
struct Keys {
  static constexpr Index block_bytes = 34;
  Index count, bytes;
  std::vector<std::byte> memory;

  Keys(Index n, Index dim, std::mt19937& random)
      : count(n), bytes(quoka::ceil_div(dim, Index{32}) * block_bytes) {
    for (Index i = 0; i < n * bytes; ++i) memory.push_back(static_cast<std::byte>(random()));
  }
  void set_scale(Index i, Index g, std::uint16_t half) {
    std::memcpy(memory.data() + i * bytes + g * block_bytes, &half, 2);
  }
  double code(Index i, Index c) const {
    return static_cast<std::int8_t>(
        memory[static_cast<std::size_t>(i * bytes + c / 32 * block_bytes + 2 + c % 32)]);
  }
  // count rounded up to fours, [key][4]
  std::vector<float> logits(const Coded& coded, Index dim) const {
    std::vector<float> x(static_cast<std::size_t>(quoka::round_up(count, Index{4}) * 4), 7.0f);
    const quoka::RowRun run{memory.data(), bytes, nullptr, nullptr};
    quoka::detail::token_code_logits<quoka::formats::Q8_0Row::Group>(
        run, count, {dim}, coded.memory.data(), x.data(), nullptr);
    return x;
  }
};

TEST(TokenCodes, GiveTheLogitsOfTheirIntegers) {
  std::mt19937 random(3);
  const std::uint16_t scales[] = {0x3c00, 0x4000, 0x3800, 0x0000};  // 1, 2, 1/2, 0
  const double values[] = {1.0, 2.0, 0.5, 0.0};
  for (const Index dim : {16, 32, 64, 80, 128, 144})
    for (const Index count : {1, 3, 4, 5, 16}) {
      // Integers, of which the largest is that of the codes: the unit is 1, no query is rounded.
      std::vector<float> queries(static_cast<std::size_t>(rows * dim));
      for (float& q : queries) q = static_cast<float>(static_cast<int>(random() % 32639) - 16319);
      for (Index r = 0; r < rows; ++r)
        queries[static_cast<std::size_t>(r * dim + r)] = r % 2 == 0 ? 16319.0f : -16319.0f;
      const Coded coded(queries, dim);
      ASSERT_TRUE(coded.fits);
      Keys keys(count, dim, random);
      const Index groups = quoka::ceil_div(dim, Index{32});
      for (Index i = 0; i < count; ++i)
        for (Index g = 0; g < groups; ++g)
          keys.set_scale(i, g, scales[static_cast<std::size_t>(i + g) % 4]);
      const auto x = keys.logits(coded, dim);
      for (Index i = 0; i < count; ++i)
        for (Index r = 0; r < rows; ++r) {
          double exact = 0.0, size = 0.0;
          for (Index c = 0; c < dim; ++c) {
            const double product = keys.code(i, c) * values[(i + c / 32) % 4] *
                                   double{queries[static_cast<std::size_t>(r * dim + c)]};
            exact += product, size += std::abs(product);
          }
          ASSERT_NEAR(x[static_cast<std::size_t>(i * rows + r)], exact, 2e-7 * size)
              << "key " << i << " of " << count << ", query " << r << ", dim " << dim;
        }
    }
}

// Every code of a key against the largest query of either sign: nothing saturates.
TEST(TokenCodes, DoNotSaturate) {
  constexpr Index dim = 128;
  std::vector<float> queries;
  for (Index i = 0; i < rows * dim; ++i) queries.push_back(i / dim % 2 == 0 ? 16319.0f : -16319.0f);
  const Coded coded(queries, dim);
  std::mt19937 random(4);
  for (const int code : {-128, -127, 0, 127}) {
    Keys keys(4, dim, random);
    std::fill(keys.memory.begin(), keys.memory.end(), static_cast<std::byte>(code));
    for (Index i = 0; i < 4; ++i)
      for (Index g = 0; g < 4; ++g) keys.set_scale(i, g, 0x3c00);
    const auto x = keys.logits(coded, dim);
    for (Index i = 0; i < 16; ++i)
      EXPECT_EQ(x[static_cast<std::size_t>(i)],
                static_cast<float>(code) * 16319.0f * dim * (i % 2 == 0 ? 1.0f : -1.0f));
  }
}

// ---- which formats have them --------------------------------------------------------------------

struct Silent {};
struct Says {
  static constexpr bool has_codes = true;
};

// Rows {int8 sign of the row; int8 codes[dim]}. A Group with a member named `codes`, which alone does not make its rows
// codes.
template <class Said>
struct SignedRow {
  static constexpr const char* name = "signed";
  static constexpr bool is_float = false;
  static Index bytes(const quoka::RowShape& shape) { return 1 + shape.dim; }
  static float sign(ConstRow row) { return row[0] == std::byte{0} ? 1.0f : -1.0f; }
  struct Group : Said {
    static constexpr Index channels = 32;
    const std::int8_t* codes;
    simd::Packet scale;

    Group(ConstRow row, Index c)
        : codes(reinterpret_cast<const std::int8_t*>(row + 1 + c)),
          scale(simd::broadcast(sign(row))) {}
    simd::Packet load(Index c) const { return simd::mul(scale, simd::load_int8(codes + c)); }
  };
  static simd::Packet load(ConstRow row, Index c, const quoka::RowShape&) {
    return Group(row, c).load(0);
  }
  static float at(ConstRow row, Index c, const quoka::RowShape&) {
    return sign(row) * static_cast<float>(static_cast<std::int8_t>(row[1 + c]));
  }
};

TEST(TokenCodes, AreTakenOfAGroupThatSaysItHasThem) {
  EXPECT_EQ(quoka::format_table<SignedRow<Silent>>().token_code_logits, nullptr);
  EXPECT_EQ(quoka::format_table<SignedRow<Says>>().token_code_logits != nullptr,
            simd::has_token_codes);
  EXPECT_EQ(quoka::q8_0_format().token_code_logits != nullptr, simd::has_token_codes);
}

}  // namespace
