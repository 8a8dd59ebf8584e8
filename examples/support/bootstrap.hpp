// Percentile bootstrap (Efron 1979) of the mean over samples: how much a mean would differ had
// other samples been drawn.
//
//   resample r:  mean of values[i], i drawn n times from 0 .. n - 1 with replacement
//   interval:    from the 2.5th to the 97.5th percentile of these means
//
// The draws depend only on the number of samples and the seed, so every set of values is resampled
// in the same way. The interval of a paired difference is that of the samples' differences. If all
// values are equal the interval has no width. n samples without an error only show that the error
// is below about 3 / n. Cost: n * resamples additions an interval.
#pragma once

#include "support/require.hpp"
#include "support/statistics.hpp"

#include <quoka/base/index.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <vector>

namespace quoka_examples {

using quoka::Index;

struct Interval {
  double low = 0.0, high = 0.0;
};

inline double mean(std::span<const double> values) {
  require_at_least("the number of samples", std::ssize(values), 1);
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

class Bootstrap {
 public:
  // Throws std::invalid_argument for no samples, for more than 65,536, and for fewer than 40
  // resamples, whose percentiles would be the extremes.
  explicit Bootstrap(Index samples, Index resamples = 10000, std::uint32_t seed = 1)
      : samples_(samples), resamples_(resamples) {
    require_at_least("the number of samples", samples, 1);
    require_at_most("the number of samples", samples, "the most there may be", 1 << 16);
    require_at_least("the number of resamples", resamples, 40);
    std::mt19937 random(seed);
    drawn_.resize(static_cast<std::size_t>(samples * resamples));
    // The share of 2^32 below the draw; off from uniform by at most samples / 2^32.
    for (std::uint16_t& index : drawn_)
      index = static_cast<std::uint16_t>(
          static_cast<std::uint64_t>(random()) * static_cast<std::uint64_t>(samples) >> 32);
  }

  Index samples() const { return samples_; }

  // The interval of the mean of the values, [samples]. Throws std::invalid_argument for another
  // number of them.
  Interval of_mean(std::span<const double> values) const {
    require_equal("the number of values", std::ssize(values), "the samples", samples_);
    std::vector<double> means(static_cast<std::size_t>(resamples_));
    const std::uint16_t* index = drawn_.data();
    for (double& m : means) {
      double sum = 0.0;
      for (Index i = 0; i < samples_; ++i) sum += values[*index++];
      m = sum / static_cast<double>(samples_);
    }
    std::sort(means.begin(), means.end());
    return {quantile_of_sorted(means, 0.025), quantile_of_sorted(means, 0.975)};
  }

  // The interval of the mean of a[i] - b[i], [samples].
  Interval of_difference(std::span<const double> a, std::span<const double> b) const {
    require_equal("a's values", std::ssize(a), "b's", std::ssize(b));
    std::vector<double> differences(a.size());
    std::transform(a.begin(), a.end(), b.begin(), differences.begin(), std::minus<>());
    return of_mean(differences);
  }

 private:
  Index samples_, resamples_;
  std::vector<std::uint16_t> drawn_;  // [resamples, samples]
};

}  // namespace quoka_examples
