// attention() of any case that the attention suite can draw (support/attention_case.hpp): the
// oracle's numbers within the arithmetic's bound, and the same bits in any order of tasks.
#pragma once

#include "fuzz/bytes.hpp"
#include "support/attention_case.hpp"

namespace quoka_fuzz {

inline void fuzz_attention(Input input) {
  using namespace quoka_test;
  Random random(input);
  const AttentionCase c(random);
  const Output<float> output = c.attend();
  if (const auto close = c.is_as_oracle(output); !close)
    broken(c.describe() + ": " + close.message());
  ShuffledExecutor shuffled(random.bits(), static_cast<int>(1 + random.below(8)));
  quoka::AttentionWorkspace workspace;
  const Output<float> other = c.attend(shuffled, workspace);
  if (!same_bits(other.out, output.out) || !same_bits(other.lse, output.lse))
    broken(c.describe() + ": other bits in another order");
}

}  // namespace quoka_fuzz
