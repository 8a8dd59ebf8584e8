// From the logits of the next token to a token: the most probable one, or a draw.
//
//   p_i = softmax(logit_i / temperature), cut to the top_k most probable tokens and then to the
//   fewest of those whose probabilities reach top_p (nucleus sampling, Holtzman et al. 2020)
//
// A seed gives the same draws on every run.
#pragma once

#include "support/require.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_decoder {

// The position of the largest logit, the first of equal ones. Throws std::invalid_argument for no
// logits, and where they hold a NaN.
inline std::int32_t most_probable(std::span<const float> logits) {
  if (logits.empty()) throw std::invalid_argument("no logits to choose from");
  for (std::size_t i = 0; i < logits.size(); ++i)
    if (std::isnan(logits[i]))
      throw std::invalid_argument("logit " + std::to_string(i) + " is not a number");
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Natural logarithms of the probabilities, [vocabulary].
inline std::vector<double> log_probabilities(std::span<const float> logits) {
  const double largest = logits[static_cast<std::size_t>(most_probable(logits))];
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  const double log_sum = largest + std::log(sum);
  std::vector<double> result;
  for (const float logit : logits) result.push_back(static_cast<double>(logit) - log_sum);
  return result;
}

struct SamplingOptions {
  double temperature = 0.0;  // 0: always the most probable token
  quoka::Index top_k = 40;   // 0: all
  double top_p = 0.95;
  std::uint64_t seed = 1;
};

class Sampler {
 public:
  // Throws std::invalid_argument for options out of their range.
  explicit Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) {
    if (!(options.temperature >= 0.0))
      quoka_examples::fail_range("temperature", options.temperature, "[0, inf)");
    if (!(options.top_p > 0.0 && options.top_p <= 1.0))
      quoka_examples::fail_range("top_p", options.top_p, "(0, 1]");
    quoka_examples::require_at_least("top_k", options.top_k, 0);
  }

  std::int32_t operator()(std::span<const float> logits) {
    const std::int32_t best = most_probable(logits);
    if (options_.temperature == 0.0) return best;

    std::vector<std::int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const auto logit = [&](std::int32_t token) { return logits[static_cast<std::size_t>(token)]; };
    const std::size_t kept = options_.top_k == 0
                                 ? order.size()
                                 : std::min(order.size(), static_cast<std::size_t>(options_.top_k));
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
                      });
    std::vector<double> weights;
    double sum = 0.0;
    for (std::size_t i = 0; i < kept; ++i) {
      const double below = static_cast<double>(logit(order[i])) - static_cast<double>(logit(best));
      sum += weights.emplace_back(std::exp(below / options_.temperature));
    }
    std::size_t nucleus = 0;
    for (double reached = 0.0; nucleus < kept && reached < options_.top_p * sum;)
      reached += weights[nucleus++];
    weights.resize(std::max<std::size_t>(nucleus, 1));
    return order[std::discrete_distribution<std::size_t>(weights.begin(), weights.end())(random_)];
  }

 private:
  SamplingOptions options_;
  std::mt19937_64 random_;
};

}  // namespace quoka_decoder
