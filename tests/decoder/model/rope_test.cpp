// Rotary position embedding: what it must leave as it is, and the frequencies of the scalings.
#include "decoder/model/rope.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

namespace quoka_decoder {
namespace {

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// x at `position`, turned by a table that holds it among others.
std::vector<float> turned(const RopeConfig& config, std::vector<float> x, Index position,
                          Index first = 0) {
  RopeTable table(config, {});
  table.set_positions(first, position - first + 1);
  table.rotate(x.data(), 1, std::ssize(x), position - first);
  return x;
}

TEST(Rope, LeavesPositionZeroAlone) {
  for (const RopePairing pairing : {RopePairing::adjacent, RopePairing::halves}) {
    const auto x = random_values(24, 1);
    EXPECT_EQ(turned({.dim = 24, .pairing = pairing}, x, 0), x);
  }
}

TEST(Rope, KeepsNormsAndTurnsRelativeToDistance) {
  for (const RopePairing pairing : {RopePairing::adjacent, RopePairing::halves}) {
    const RopeConfig config{.dim = 20, .base = 500.0f, .pairing = pairing};
    const auto q = random_values(20, 2), k = random_values(20, 3);
    const auto q37 = turned(config, q, 37);
    EXPECT_NEAR(dot(q37, q37), dot(q, q), 1e-4);
    EXPECT_NEAR(dot(turned(config, q, 137), turned(config, k, 101)), dot(q37, turned(config, k, 1)),
                1e-4);
  }
}

TEST(Rope, PairsChannelsAsItIsTold) {
  // One pair turned by a right angle: (a, b) becomes (-b, a).
  const auto right_angle = [](RopePairing pairing) {
    RopeTable table({.dim = 4, .base = 1e30f, .pairing = pairing}, {});  // the second pair stays
    table.set_positions(0, 2);
    std::vector<float> x{1, 2, 3, 4};
    table.rotate(x.data(), 1, 4, 1);
    return x;
  };
  const float c = std::cos(1.0f), s = std::sin(1.0f);
  const auto adjacent = right_angle(RopePairing::adjacent);
  EXPECT_NEAR(adjacent[0], c - 2 * s, 1e-6);
  EXPECT_NEAR(adjacent[1], s + 2 * c, 1e-6);
  EXPECT_EQ(adjacent[2], 3);
  const auto halves = right_angle(RopePairing::halves);
  EXPECT_NEAR(halves[0], c - 3 * s, 1e-6);
  EXPECT_NEAR(halves[2], s + 3 * c, 1e-6);
  EXPECT_EQ(halves[1], 2);
}

TEST(Rope, TurnsTheFirstChannelsOfEachHeadOnly) {
  RopeTable table({.dim = 4}, {});
  table.set_positions(5, 3);
  auto x = random_values(3 * 6, 4);
  const auto before = x;
  table.rotate(x.data(), 3, 6, 2);
  for (std::size_t head = 0; head < 3; ++head) {
    EXPECT_NE(x[head * 6], before[head * 6]);
    EXPECT_EQ(x[head * 6 + 4], before[head * 6 + 4]);
    EXPECT_EQ(x[head * 6 + 5], before[head * 6 + 5]);
  }
}

TEST(Rope, TablesMayBeginAnywhere) {
  const RopeConfig config{.dim = 16};
  const auto x = random_values(16, 5);
  EXPECT_EQ(turned(config, x, 1000, 0), turned(config, x, 1000, 997));
}

TEST(Rope, LinearScalingStretchesPositions) {
  RopeConfig config{.dim = 16};
  const auto x = random_values(16, 6);
  const auto at_5 = turned(config, x, 5);
  config.scaling = RopeScaling::linear;
  config.factor = 4.0f;
  const auto at_20 = turned(config, x, 20);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(at_20[i], at_5[i], 1e-5);
}

TEST(Rope, FactorsDivideFrequencies) {
  const std::vector<float> factors{1.0f, 2.0f, 8.0f};
  const RopeConfig config{.dim = 6, .base = 100.0f};
  const auto plain = rope_frequencies(config, {}), divided = rope_frequencies(config, factors);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    EXPECT_DOUBLE_EQ(plain.radians_per_token[i], std::pow(100.0, -static_cast<double>(i) / 3.0));
    EXPECT_DOUBLE_EQ(divided.radians_per_token[i], plain.radians_per_token[i] / factors[i]);
  }
  EXPECT_THROW((void)rope_frequencies(config, std::span(factors).first(2)), std::invalid_argument);
}

// Qwen2.5's own settings: of 64 pairs the first 24 turn more than 32 times in 32,768 tokens, those
// from 40 on less than once.
TEST(Rope, YarnKeepsFastPairsAndStretchesSlowOnes) {
  RopeConfig config{.dim = 128, .base = 1e6f};
  const auto plain = rope_frequencies(config, {});
  config.scaling = RopeScaling::yarn;
  config.factor = 4.0f;
  config.trained_context = 32768;
  const auto yarn = rope_frequencies(config, {});
  for (std::size_t i = 0; i < 64; ++i) {
    const double share = (static_cast<double>(i) - 23.0) / (40.0 - 23.0);  // that is stretched
    const double s = std::clamp(share, 0.0, 1.0);
    EXPECT_NEAR(yarn.radians_per_token[i] / plain.radians_per_token[i], 1.0 - s + s / 4.0, 1e-9)
        << "pair " << i;
  }
  EXPECT_NEAR(yarn.magnitude, 1.0 + 0.1 * std::log(4.0), 1e-12);
  config.magnitude = 1.5f;  // attn_factor, for every kind of scaling
  EXPECT_NEAR(rope_frequencies(config, {}).magnitude, 1.5 * (1.0 + 0.1 * std::log(4.0)), 1e-12);
  config.factor = 0.5f;
  EXPECT_EQ(rope_frequencies(config, {}).magnitude, 1.5);
  config.scaling = RopeScaling::none;
  EXPECT_EQ(rope_frequencies(config, {}).magnitude, 1.5);
  EXPECT_EQ(plain.magnitude, 1.0);
}

}  // namespace
}  // namespace quoka_decoder
