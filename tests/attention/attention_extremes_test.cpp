// attention/attention.hpp at the ends of float, beside the drawn numbers of attention_suite_test.cpp: the errors that
// underflow, the largest floats and a long cache may cause.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/byte_formats.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <cfenv>
#include <limits>
#include <vector>

namespace {

using namespace quoka_test;

// ---- extremes -----------------------------------------------------------------------------------

// Logits of 0 to -200 nats beside one at 0, as sinks make them, and values down to 2^-24: on no path does anything
// underflow, which would take 150 cycles each time.
TEST(AttentionExtremes, SumsOfTinyWeightsAreNoDenormals) {
  Random random(95);
  for (const Index q_len : {1, 5, 130}) {
    SCOPED_TRACE(q_len);
    auto in = random_inputs<float>(
        random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 1000}, false);
    in.q.setZero(), in.q.chip(0, 3).setConstant(1.0f);
    for (Index row = 0; row < 2000; ++row) {
      in.past_k.data()[row * 16] =
          row % 1000 == 7 ? 0.0f : static_cast<float>(-200 * random.uniform());
      for (Index i = row * 16; i < row * 16 + 16; ++i) {
        const double v = random.normal() * (row % 2 == 0 ? 0x1p-24 : 1.0);
        in.past_v.data()[i] = static_cast<float>(v < 0 ? v - 0x1p-24 : v + 0x1p-24);
      }
    }
    const Selection keep = to_selection({{oracle::range(3, 303), oracle::range(3, 303)}}, 1000);
    for (const Selection* selection : {static_cast<const Selection*>(nullptr), &keep}) {
      std::feclearexcept(FE_ALL_EXCEPT);
      const auto output =
          attend(in, {.scale = 1.0f, .arithmetic = quoka::Arithmetic::float_}, selection);
      EXPECT_EQ(std::fetestexcept(FE_UNDERFLOW), 0);
      EXPECT_TRUE(std::isfinite(output.out(0, 3, q_len - 1, 15)));
    }
  }
}

// Key 0 is the largest of all and its value 0; key 1 lies `below` it and has a value that would count. Chunks,
// few rows, and one token.
float share_of_key_below(float below, Index q_len, quoka::Arithmetic by, float value) {
  Random random(99);
  auto in = random_inputs<float>(random, {.q_heads = 1, .q_len = q_len, .kv_len = 2}, false);
  in.q.setZero(), in.past_k.setZero(), in.past_v.setZero();
  in.q.chip(0, 3).setConstant(1.0f);
  in.past_k(0, 0, 1, 0) = -below;
  in.past_v(0, 0, 1, 5) = value;
  return attend(in, {.scale = 1.0f, .arithmetic = by}).out(0, 0, q_len - 1, 5);
}

TEST(AttentionExtremesFloat, AWeightCountsDownToTheLimitAndMayBeNothingBeyondIt) {
  constexpr float limit = quoka::negligible_below;
  for (const quoka::Arithmetic by :
       {quoka::Arithmetic::float_, quoka::Arithmetic::automatic, quoka::Arithmetic::bf16})
    for (const Index q_len : {1, 2, 130}) {
      SCOPED_TRACE(std::string(arithmetic_name(by)) + ", " + std::to_string(q_len) + " queries");
      const double exact = 1e30 * std::exp(-static_cast<double>(limit));
      EXPECT_NEAR(share_of_key_below(limit, q_len, by, 1e30f) / exact, 1.0, 0.01);
      EXPECT_EQ(share_of_key_below(70.0f, q_len, by, 1e30f), 0.0f);
    }
}

// Queries are not rounded for products of codes, for which `automatic` takes 15 bits: 1/32,638 of a query's
// largest channel, which here outweighs the others.
TEST(AttentionExtremesFloat, SingleIsSingleForOneTokenAndKeysOfBytes) {
  Random random(101);
  constexpr Index dim = 64, len = 300;
  for (const Index group : {1, 3, 4, 7}) {
    auto in = random_inputs<float>(
        random, {.q_heads = group, .head_dim = dim, .q_len = 1, .kv_len = len}, false);
    for (Index h = 0; h < group; ++h) in.q(0, h, 0, 3) = 1000.0f;
    const quoka::Format& format = quoka::q8_0_format();
    const Index row = format.row_bytes({dim});
    std::vector<std::byte> bytes(uz(row * len));
    for (Index t = 0; t < len; ++t) {
      in.past_k(0, 0, t, 3) = 0.0f;
      format.narrow(&in.past_k(0, 0, t, 0), {dim}, bytes.data() + t * row);
      format.widen(bytes.data() + t * row, {dim}, &in.past_k(0, 0, t, 0));
    }
    const Rows k(bytes.data(), format, {1, 1, len, dim}, {row * len, row * len, row});
    const Rows v = in.past_v;
    for (const quoka::Arithmetic by :
         {quoka::Arithmetic::float_, quoka::Arithmetic::bf16, quoka::Arithmetic::automatic}) {
      const AttentionOptions options{.scale = 1.0f, .arithmetic = by};
      auto got = unwritten(in.q, 16);
      quoka::attention(in.q, {k.slice(0, len - 1), v.slice(0, len - 1)},
                       {k.slice(len - 1, 1), v.slice(len - 1, 1)}, {got.out, got.lse}, options);
      const auto exact = oracle_attend(in, options);
      double worst = 0;
      for (Index h = 0; h < group; ++h)
        worst = std::max(worst, std::abs(got.lse(0, h, 0) - exact.lse[uz(h)]));
      if (by == quoka::Arithmetic::automatic) {
        EXPECT_LE(worst, 1000.0 / 32638 * dim * 3.5) << group;  // what arithmetic.hpp says
        EXPECT_EQ(worst > 1e-3, group > 2 && format.token_code_logits != nullptr) << group;
      } else {
        EXPECT_LE(worst, 1e-5) << arithmetic_name(by) << ", " << group;
        expect_close(got, exact, in,
                     8);  // logits up to 25, added up channel by channel without vectors
      }
    }
  }
}

TEST(AttentionExtremesFloat, TheLargestFloatIsReturnedAsItIs) {
  Random random(96);
  auto in = random_inputs<float>(random, {.q_len = 1, .kv_len = 0});
  in.v.setConstant(std::numeric_limits<float>::max());
  const auto output = attend(in);
  for (Index i = 0; i < output.out.size(); ++i)
    EXPECT_EQ(output.out.data()[i], std::numeric_limits<float>::max());
}

// A sum over 32,768 keys, one by one, would be off by about 4e-6; over blocks, and then over their
// sums, it is not.
TEST(AttentionExtremesFloat, ErrorDoesNotGrowWithTheLength) {
  Random random(98);
  for (const float sink :
       {0.0f, 11.0f}) {  // the first key: like the others, or with the weight of all the others
    auto in = random_inputs<float>(
        random, {.q_heads = 1, .head_dim = 4, .v_dim = 16, .q_len = 3, .kv_len = 32768});
    in.q.chip(0, 3).setConstant(1.0f);
    in.past_k.chip(0, 3).setConstant(0.0f);
    in.past_k(0, 0, 0, 0) = 2 * sink;
    expect_close(attend(in), oracle_attend(in), in);
  }
}

}  // namespace
