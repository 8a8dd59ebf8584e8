// Bootstrap intervals against the mean's known distribution.
#include "support/bootstrap.hpp"

#include "support/fixtures.hpp"

#include <cmath>
#include <random>
#include <vector>

namespace {

using namespace quoka_examples;

std::vector<double> ones_of(Index ones, Index samples) {
  std::vector<double> values(static_cast<std::size_t>(samples), 0.0);
  std::fill_n(values.begin(), ones, 1.0);
  return values;
}

// The mean of resampled zeros and ones is Binomial(n, p) / n.
TEST(Bootstrap, OfAShareIsTheBinomialsInterval) {
  const Bootstrap bootstrap(200);
  const Interval half = bootstrap.of_mean(ones_of(100, 200));
  EXPECT_NEAR(half.low, 0.430, 0.006);  // scipy.stats.binom.ppf(0.025, 200, 0.5) / 200
  EXPECT_NEAR(half.high, 0.570, 0.006);
  const Interval most = bootstrap.of_mean(ones_of(190, 200));
  EXPECT_NEAR(most.low, 0.920, 0.006);
  EXPECT_NEAR(most.high, 0.980, 0.006);
}

TEST(Bootstrap, OfMeasuredValuesIsTheNormalsInterval) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(3.0, 2.0);
  std::vector<double> values(1000);
  for (double& value : values) value = normal(random);
  double variance = 0.0;
  for (const double value : values) variance += std::pow(value - mean(values), 2) / 1000.0;
  const double half_width = 1.96 * std::sqrt(variance / 1000.0);
  const Interval interval = Bootstrap(1000).of_mean(values);
  EXPECT_NEAR(interval.low, mean(values) - half_width, 0.05 * half_width);
  EXPECT_NEAR(interval.high, mean(values) + half_width, 0.05 * half_width);
}

// Errors that two selectors have in common cancel: here the same samples are right, except ten.
TEST(Bootstrap, OfAPairedDifferenceIsNarrowerThanOfEither) {
  const Bootstrap bootstrap(200);
  const auto a = ones_of(100, 200), b = ones_of(90, 200);
  const Interval difference = bootstrap.of_difference(a, b), alone = bootstrap.of_mean(a);
  EXPECT_GT(difference.low, 0.0);
  EXPECT_LT(difference.high - difference.low, 0.5 * (alone.high - alone.low));
  EXPECT_EQ(bootstrap.of_difference(a, a).low, 0.0);
  EXPECT_EQ(bootstrap.of_difference(a, a).high, 0.0);
}

// Its draws are uniform over the samples: the mean over all resamples is the samples' mean.
TEST(Bootstrap, DrawsEverySampleAlike) {
  constexpr Index samples = 50;
  const Bootstrap bootstrap(samples, 4001);
  for (const Index i : {Index{0}, Index{24}, samples - 1}) {
    std::vector<double> values(samples, 0.0);
    values[static_cast<std::size_t>(i)] = 1.0;
    // Poisson of 1 over 50: at most 3 of 50 in 97.5 % of the resamples.
    EXPECT_EQ(bootstrap.of_mean(values).low, 0.0);
    EXPECT_NEAR(bootstrap.of_mean(values).high, 3.0 / samples, 1e-12);
  }
}

TEST(Bootstrap, IsThatOfItsSeed) {
  const auto values = ones_of(31, 127);
  const Interval a = Bootstrap(127, 501, 1).of_mean(values),
                 b = Bootstrap(127, 501, 2).of_mean(values);
  EXPECT_EQ(Bootstrap(127, 501, 1).of_mean(values).low, a.low);
  EXPECT_NE(a.low + 2 * a.high, b.low + 2 * b.high);
  EXPECT_NEAR(a.low, b.low, 0.03);
  EXPECT_NEAR(a.high, b.high, 0.03);
}

TEST(Bootstrap, RefusesOtherSizesNamingBoth) {
  using quoka_test::expect_refused;
  expect_refused([] { Bootstrap(0); }, {0, 1});
  expect_refused([] { Bootstrap(10, 39); }, {39, 40});
  expect_refused([] { Bootstrap(65537, 40); }, {65537, 65536});
  expect_refused([] { (void)mean({}); }, {0, 1});
  const Bootstrap bootstrap(5, 40);
  expect_refused([&] { (void)bootstrap.of_difference(ones_of(1, 5), ones_of(1, 6)); }, {5, 6});
  expect_refused([&] { (void)bootstrap.of_mean(ones_of(1, 6)); }, {6, 5});
}

}  // namespace
