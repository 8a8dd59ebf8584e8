// top_k() of any call that its test can draw is the oracle's.
#pragma once

#include "fuzz/bytes.hpp"
#include "support/top_k_case.hpp"

namespace quoka_fuzz {

inline void fuzz_top_k(Input input) {
  quoka_test::Random random(input);
  static quoka::ThreadPool threads(3);
  const auto same = quoka_test::TopKCase(random).is_as_oracle(threads);
  if (!same) broken(same.message());
}

}  // namespace quoka_fuzz
