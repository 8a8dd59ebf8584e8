#include "decoder/model/rope.hpp"

#include "support/require.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace quoka_decoder {
namespace {

// The pair that turns `turns` times within `context` tokens, as a real number.
double pair_of_turns(double turns, const RopeConfig& config) {
  const double context = static_cast<double>(config.trained_context);
  return static_cast<double>(config.dim) * std::log(context / (turns * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(static_cast<double>(config.base)));
}

}  // namespace

RopeFrequencies rope_frequencies(const RopeConfig& config, std::span<const float> factors) {
  const Index pairs = config.dim / 2;
  if (!factors.empty())
    quoka_examples::require_equal("the number of RoPE factors", std::ssize(factors), "RoPE's pairs",
                                  pairs);
  const double stretch = config.scaling == RopeScaling::none ? 1.0 : config.factor;
  double first = 0.0, last = 0.0;  // YaRN's ramp
  RopeFrequencies result;
  result.magnitude = config.magnitude;
  if (config.scaling == RopeScaling::yarn) {
    quoka_examples::require_at_least("YaRN's trained context", config.trained_context, 1);
    first = std::max(0.0, std::floor(pair_of_turns(32.0, config)));
    last = std::min(static_cast<double>(config.dim - 1), std::ceil(pair_of_turns(1.0, config)));
    if (stretch > 1.0) result.magnitude *= 1.0 + 0.1 * std::log(stretch);
  }
  for (Index i = 0; i < pairs; ++i) {
    const double pair = static_cast<double>(i);
    double f =
        std::pow(static_cast<double>(config.base), -2.0 * pair / static_cast<double>(config.dim));
    if (!factors.empty()) f /= factors[static_cast<std::size_t>(i)];
    double kept = 0.0;  // share of the frequency that is not stretched
    if (config.scaling == RopeScaling::yarn)
      kept = 1.0 - std::clamp((pair - first) / std::max(0.001, last - first), 0.0, 1.0);
    result.radians_per_token.push_back(f * kept + f / stretch * (1.0 - kept));
  }
  return result;
}

RopeTable::RopeTable(const RopeConfig& config, std::span<const float> factors)
    : pairing_(config.pairing),
      pairs_(config.dim / 2),
      frequencies_(rope_frequencies(config, factors)) {}

void RopeTable::set_positions(Index first, Index count) {
  cos_.resize(static_cast<std::size_t>(count * pairs_));
  sin_.resize(cos_.size());
  std::size_t at = 0;
  for (Index token = 0; token < count; ++token) {
    for (const double radians : frequencies_.radians_per_token) {
      // In double: at position 100,000 a float angle is off by 4e-3.
      const double angle = static_cast<double>(first + token) * radians;
      cos_[at] = static_cast<float>(std::cos(angle) * frequencies_.magnitude);
      sin_[at++] = static_cast<float>(std::sin(angle) * frequencies_.magnitude);
    }
  }
}

void RopeTable::rotate(float* x, Index heads, Index head_dim, Index token) const {
  const float* cos = cos_.data() + token * pairs_;
  const float* sin = sin_.data() + token * pairs_;
  const Index step = pairing_ == RopePairing::adjacent ? 2 : 1;
  const Index partner = pairing_ == RopePairing::adjacent ? 1 : pairs_;
  for (Index head = 0; head < heads; ++head, x += head_dim) {
    for (Index i = 0; i < pairs_; ++i) {
      float& a = x[i * step];
      float& b = x[i * step + partner];
      const float turned = a * cos[i] - b * sin[i];
      b = a * sin[i] + b * cos[i];
      a = turned;
    }
  }
}

}  // namespace quoka_decoder
