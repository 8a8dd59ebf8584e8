// attention() of any case that the attention suite can draw (support/attention_case.hpp): the
// oracle's numbers within the arithmetic's bound, the same bits in any order of tasks; and shapes
// that do not fit are refused before anything is written.
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

  AttentionOptions wrong = c.options();
  const std::vector<float> sinks(static_cast<std::size_t>(c.shape().q_heads + 1));
  switch (random.below(3)) {
    case 0:
      wrong.sliding_window = -1;
      break;
    case 1:
      wrong.sinks = sinks;
      break;
    default:
      wrong.softcap = -1.0f;
  }
  Output<float> untouched = c.unwritten_output();
  try {
    quoka::attention(c.q(), c.past(), c.chunk(), {untouched.out, untouched.lse}, wrong);
    broken("what does not fit was taken");
  } catch (const std::invalid_argument&) {
    if (!same_bits(untouched.out, c.unwritten_output().out)) broken("a refused call wrote");
  }
}

}  // namespace quoka_fuzz
