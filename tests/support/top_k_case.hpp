// A call of top_k() drawn at random: any k, kernel size and forced keys; scores of all kinds, by whole rows and by
// ranges, in any rounding mode. Fuzzers draw the same.
#pragma once

#include <quoka/select/stages.hpp>

#include "support/fixtures.hpp"
#include "support/rounding_modes.hpp"

namespace quoka_test {

struct TopKCase {
  Tensor3<float> scores{2, 3, 0};
  Index k = 0;
  quoka::TopKOptions options;
  RoundingMode mode = rounding_modes[0];

  explicit TopKCase(Random& random) {
    const Index kind = random.below(8), length = random.below(50);
    const bool is_long = length == 49 || (kind == 6 && length % 4 == 0);
    const Index len = 1 + random.below(is_long ? 9000 : length % 3 == 0 ? 12 : 501);
    mode = random.one_of(rounding_modes);
    scores = random.scores(2, 3, len);
    for (Index i = 0; i < scores.size() && kind > 0; ++i) {
      const std::uint64_t bits = random.bits();
      float& score = scores.data()[i];
      score = kind == 1   ? odd(bits)
              : kind == 2 ? std::bit_cast<float>(static_cast<std::uint32_t>(bits))  // any
              : kind == 3 ? static_cast<float>(bits % 7) - 1.0f                     // many ties
              : kind == 4 ? 1.0f + 0x1p-23f * static_cast<float>(bits % 300)        // of one bucket
              : kind == 5 ? -7.0f
              // A sample of every 8th score guesses the threshold: of the best alone.
              : kind == 6 ? score + (i % len % 8 == 0 ? 100.0f : 0.0f)
                          : score * (bits % 3 == 0 ? 1e-37f : 1e-41f);  // near zero
    }
    const auto some = [&](Index most) { return random.seldom(4) ? random.below(most) : Index{0}; };
    k = random.below(3) > 0 ? random.below(len + 2)
                            : random.below(4) + len - std::min<Index>(len, 3);
    if (random.seldom(2)) options.kernel_size = 1 + some(20) + some(3 * len);
    options.keep_first = some(9) + some(len), options.keep_last = some(9) + some(len);
  }
  std::string describe() const {
    return "kv_len " + std::to_string(scores.dimension(2)) + ", k " + std::to_string(k) +
           ", kernel_size " + std::to_string(options.kernel_size) + ", keep_first " +
           std::to_string(options.keep_first) + ", keep_last " + std::to_string(options.keep_last) +
           ", " + mode.name;
  }
  // Every position is the oracle's, which gets the very same scores; denormals that are taken for zeros tie with them.
  // Any executor chooses the same keys, and scores are left alone.
  ::testing::AssertionResult is_as_oracle(ExecutorRef pool) const {
    const Tensor3<float> before = scores;
    const Selection keep = in(mode, [&] { return quoka::top_k(scores, k, options); });
    Tensor3<float> seen = scores;
    for (Index i = 0; i < seen.size() && mode.no_denormals; ++i)
      if (std::abs(seen.data()[i]) < std::numeric_limits<float>::min()) seen.data()[i] = 0.0f;
    const oracle::Scores widened = oracle::window_max(to_oracle_scores(seen), options.kernel_size);
    if (to_positions(keep) != oracle::top_k(widened, k, options.keep_first, options.keep_last))
      return ::testing::AssertionFailure() << describe() << ": not the oracle's keys";
    if (quoka::top_k(scores, k, options, pool) != quoka::top_k(scores, k, options))
      return ::testing::AssertionFailure() << describe() << ": other keys by several workers";
    return same_bits(scores, before);
  }

 private:
  // Few values, both zeros, NaN, infinities, denormals, the ends of the range.
  static float odd(std::uint64_t bits) {
    using Limits = std::numeric_limits<float>;
    constexpr float all[] = {0.0f,         0.5f,          1.0f,          infinity,
                             not_a_number, Limits::max(), Limits::min(), Limits::denorm_min()};
    const float x = all[bits / 2 % std::size(all)];
    return bits % 2 == 0 ? x : -x;
  }
};

}  // namespace quoka_test
