// Random draws that are the same with every standard library: the engine's numbers are fixed by the
// C++ standard, those of its distributions are not.
//
//   below(n)   the smallest 64-bit draw that is not in the incomplete last n of 2^64, mod n
//   unit()     the upper 53 bits of a draw, over 2^53: [0, 1)
#pragma once

#include "support/require.hpp"

#include <quoka/base/index.hpp>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace quoka_examples {

using quoka::Index;

class Draws {
 public:
  // Each list of numbers has draws of its own; of a number 32 bits count.
  explicit Draws(std::initializer_list<Index> seeds) {
    std::seed_seq sequence(seeds.begin(), seeds.end());
    engine_.seed(sequence);
  }

  // Uniform in [0, n). Throws std::invalid_argument for n < 1.
  Index below(Index n) {
    quoka_examples::require_at_least("the number of equally likely draws", n, 1);
    const auto count = static_cast<std::uint64_t>(n);
    const std::uint64_t incomplete =
        (std::numeric_limits<std::uint64_t>::max() % count + 1) % count;
    std::uint64_t draw = engine_();
    while (draw < incomplete) draw = engine_();
    return static_cast<Index>(draw % count);
  }

  double unit() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }

  // `count` different ones of 0 .. n - 1; every order of every choice is equally likely. Throws
  // std::invalid_argument for more than n.
  std::vector<Index> distinct(Index n, Index count) {
    quoka_examples::require_at_most("different draws", count, "the numbers there are", n);
    std::vector<Index> all(static_cast<std::size_t>(n));
    std::iota(all.begin(), all.end(), Index{0});
    for (Index i = 0; i < count; ++i)
      std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(i + below(n - i))]);
    all.resize(static_cast<std::size_t>(count));
    return all;
  }

  template <class T>
  void shuffle(std::vector<T>& values) {
    for (Index i = std::ssize(values); i > 1; --i)
      std::swap(values[static_cast<std::size_t>(i - 1)],
                values[static_cast<std::size_t>(below(i))]);
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace quoka_examples
