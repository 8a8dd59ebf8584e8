// simd/isa/rough_logits.hpp: logits of 16 bits are the rounded ones, their weights' sum needs no exponential,
// and shares lie within the stated error of the exact ones.

#include <quoka/simd/isa/rough_logits.hpp>

#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace {

using quoka::Index;
using quoka_test::Random;
namespace simd = quoka::simd;

constexpr Index pair = 2 * simd::code_block;
constexpr float least = -95.0f;

// Logits of one row with the keys of a pair of blocks.
struct Row {
  alignas(64) float products[pair], units[pair];
  alignas(64) std::uint32_t logits[pair / 2];
  float unit, shift, sum = 0.0f;

  Row(Random& random, double spread, float shift_) : unit(0.003f), shift(shift_) {
    for (Index i = 0; i < pair; ++i) {
      products[i] = std::nearbyint(static_cast<float>(1000.0 * spread * random.normal()));
      units[i] = static_cast<float>(0.5 + random.uniform());
      shift = std::min(shift, 60.0f - products[i] * units[i] * unit);  // as callers see to
    }
  }
  double logit(Index i) const {
    return std::max(static_cast<double>(products[i]) * static_cast<double>(units[i]) *
                            static_cast<double>(unit) +
                        static_cast<double>(shift),
                    static_cast<double>(least));
  }
  template <bool Partial, bool has = simd::has_rough_logits>
  void store() {
    if constexpr (has) {
      simd::Packet total = simd::zero();
      simd::store_rough_logits<Partial>(products, units, unit, shift, least, logits, total);
      sum = simd::reduce_add(total);
    }
  }
  // Keys lie in turns: 0, 16, 1, 17, ...
  int stored(Index i) const {
    std::uint16_t x[pair];
    std::memcpy(x, logits, sizeof x);
    return x[i % 16 * 2 + i / 16];
  }
};

TEST(RoughLogits, AreRoundedAndTheirSumNeedsNoExponential) {
  if (!simd::has_rough_logits) GTEST_SKIP() << "first looks are in float";
  Random random(720);
  double most = 0.0, fewest = 2.0;
  for (int turn = 0; turn < 300; ++turn) {
    Row row(random, turn % 3 == 0 ? 20.0 : 1.5, -3.3f * static_cast<float>(turn % 20));
    row.store<false>();
    double exact = 0.0;
    for (Index i = 0; i < pair; ++i) {
      ASSERT_NEAR(row.stored(i), 128.0 * (row.logit(i) + 127.0), 1.01) << "key " << i;
      exact += std::exp2(row.logit(i));
    }
    most = std::max(most, static_cast<double>(row.sum) / exact);
    fewest = std::min(fewest, static_cast<double>(row.sum) / exact);
  }
  const double rounding = std::exp2(1.01 / 128.0);
  EXPECT_LE(most, 1.0615 * rounding);
  EXPECT_GT(most, 1.05);
  EXPECT_GE(fewest, 1.0 / rounding);
}

TEST(RoughLogits, KeysThatAreNoneCountForNothing) {
  if (!simd::has_rough_logits) GTEST_SKIP() << "first looks are in float";
  Random random(721);
  Row row(random, 1.5, 0.0f);
  row.store<false>();
  const float all = row.sum;
  for (const Index i : {0, 5, 16, 31}) row.units[i] = -1.0f;
  row.store<true>();
  EXPECT_LT(row.sum, all);
  for (const Index i : {0, 5, 16, 31}) EXPECT_EQ(row.stored(i), 0);
  double exact = 0.0;
  for (Index i = 0; i < pair; ++i)
    if (row.units[i] > 0.0f) exact += std::exp2(row.logit(i));
  EXPECT_NEAR(static_cast<double>(row.sum), exact, 0.07 * exact);
}

template <bool has = simd::has_rough_logits>
void expect_best() {
  if constexpr (has) {
    Random random(722);
    for (const Index rows : {1, 2, 7, 20}) {
      std::vector<std::int16_t> x(static_cast<std::size_t>(rows * pair)),
          sums(static_cast<std::size_t>(rows));
      for (auto& value : x) value = static_cast<std::int16_t>(random.below(24000));
      for (auto& value : sums) value = static_cast<std::int16_t>(random.below(32768));
      quoka::Buffer<std::uint32_t> logits;
      std::memcpy(logits.reserve(rows * pair / 2), x.data(), x.size() * sizeof x[0]);
      alignas(64) float best[pair];
      simd::best_rough_logits(logits.data(), sums.data(), rows, best);
      for (Index i = 0; i < pair; ++i) {
        int expected = -40000;
        for (Index m = 0; m < rows; ++m)
          expected =
              std::max(expected, x[static_cast<std::size_t>(m * pair + i % 16 * 2 + i / 16)] -
                                     sums[static_cast<std::size_t>(m)]);
        ASSERT_EQ(best[i], static_cast<float>(expected)) << "key " << i;
      }
    }
  }
}
TEST(RoughLogits, TheLargestShareOfAKeyIsItsBestRows) { expect_best(); }

// The whole: the logarithm of a key's share of a row.
TEST(RoughLogits, SharesAreWithinTheirError) {
  if (!simd::has_rough_logits) GTEST_SKIP() << "first looks are in float";
  Random random(723);
  double worst = 0.0;
  for (int turn = 0; turn < 2000; ++turn) {
    Row row(random, turn % 2 == 0 ? 10.0 : 0.01, -2.0f * static_cast<float>(random.uniform()));
    row.store<false>();
    const int of_sum = simd::rough_logit_of_sum(row.sum);
    double exact = 0.0;
    for (Index i = 0; i < pair; ++i) exact += std::exp2(row.logit(i));
    for (Index i = 0; i < pair; ++i)
      worst = std::max(
          worst, std::abs((row.stored(i) - of_sum) / 128.0 - (row.logit(i) - std::log2(exact))));
  }
  EXPECT_LE(worst, static_cast<double>(simd::rough_logit_error));
  EXPECT_GT(worst, 0.8 * static_cast<double>(simd::rough_logit_error));
}

TEST(RoughLogits, SumsBeyondAllWeightsLeaveNothing) {
  EXPECT_EQ(simd::rough_logit_of_sum(simd::infinity), 32767);
  EXPECT_EQ(simd::rough_logit_of_sum(1.0f), 127 * 128);
  EXPECT_EQ(simd::rough_logit_of_sum(0.0f), 0);
}

}  // namespace
QUOKA_PACKET_ARGUMENTS_END
