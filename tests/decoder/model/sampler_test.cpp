// From logits to tokens.
#include "decoder/sampling/sampler.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace quoka_decoder {
namespace {

constexpr std::array logits{1.0f, 3.0f, -2.0f, 3.0f, 0.5f};

std::array<int, 5> counts(const SamplingOptions& options, int draws) {
  Sampler sample(options);
  std::array<int, 5> result{};
  for (int i = 0; i < draws; ++i) ++result[static_cast<std::size_t>(sample(logits))];
  return result;
}

TEST(Sampler, TakesTheFirstOfTheMostProbableAtTemperatureZero) {
  EXPECT_EQ(counts({}, 10), (std::array{0, 10, 0, 0, 0}));
}

TEST(Sampler, DrawsByTheSoftmax) {
  constexpr int draws = 20000;
  const auto drawn = counts({.temperature = 2.0, .top_k = 0, .top_p = 1.0}, draws);
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit / 2.0);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] / 2.0) / sum;
    // Five standard deviations of a binomial count.
    EXPECT_NEAR(drawn[i], draws * p, 5.0 * std::sqrt(draws * p * (1.0 - p))) << "token " << i;
  }
}

TEST(Sampler, CutsToTopKAndToTheNucleus) {
  const auto two = counts({.temperature = 5.0, .top_k = 2, .top_p = 1.0}, 500);
  EXPECT_EQ(two[1] + two[3], 500);
  EXPECT_GT(two[1], 0);
  EXPECT_GT(two[3], 0);
  // The two most probable hold 0.85 of it at temperature 1: either alone is less than 0.5.
  const auto nucleus = counts({.temperature = 1.0, .top_k = 0, .top_p = 0.5}, 500);
  EXPECT_EQ(nucleus[1] + nucleus[3], 500);
  const auto one = counts({.temperature = 1.0, .top_k = 0, .top_p = 0.3}, 500);
  EXPECT_EQ(one[1], 500);
}

TEST(Sampler, RepeatsItselfForASeed) {
  const SamplingOptions options{.temperature = 1.0, .seed = 7};
  EXPECT_EQ(counts(options, 1000), counts(options, 1000));
  EXPECT_NE(counts(options, 1000), counts({.temperature = 1.0, .seed = 8}, 1000));
}

TEST(Sampler, RefusesOptionsOutOfRange) {
  EXPECT_THROW(Sampler({.temperature = -1.0}), std::invalid_argument);
  EXPECT_THROW(Sampler({.top_k = -1}), std::invalid_argument);
  EXPECT_THROW(Sampler({.top_p = 0.0}), std::invalid_argument);
  EXPECT_THROW(Sampler({.top_p = 1.5}), std::invalid_argument);
}

TEST(Sampler, RefusesLogitsThatAreNoNumbers) {
  const std::array bad{1.0f, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_THROW((void)most_probable(bad), std::invalid_argument);
  EXPECT_THROW((void)most_probable({}), std::invalid_argument);
}

TEST(LogProbabilities, AreThoseOfTheSoftmax) {
  const auto p = log_probabilities(logits);
  double sum = 0.0;
  for (const double value : p) sum += std::exp(value);
  EXPECT_NEAR(sum, 1.0, 1e-12);
  EXPECT_NEAR(p[0] - p[2], 3.0, 1e-12);
  // Logits so large that their exponentials are not finite.
  const std::array large{1000.0f, 999.0f};
  EXPECT_NEAR(log_probabilities(large)[1], -1.0 - std::log1p(std::exp(-1.0)), 1e-9);
}

}  // namespace
}  // namespace quoka_decoder
