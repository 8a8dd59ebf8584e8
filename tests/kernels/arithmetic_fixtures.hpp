// What the tests of one arithmetic's kernels share: a call in that arithmetic, wherever its own
// instructions are, and random masks.
#pragma once

#include <quoka/attention/attention_impl.hpp>

#include "support/attention_fixtures.hpp"

namespace quoka_test {

template <class T>
Output<T> attend_with(const quoka::detail::PanelArithmetic& panels, const Inputs<T>& in,
                      const AttentionOptions& options = {}, const Selection* keep = nullptr,
                      ExecutorRef executor = SerialExecutor{}) {
  Output<T> output = unwritten<T>(in.q, std::max(in.past_v.dimension(3), in.v.dimension(3)));
  quoka::Past past(in.past_k, in.past_v);
  past.keep = keep;
  quoka::AttentionWorkspace workspace;
  quoka::detail::attend_by(
      panels,
      quoka::detail::checked_call(in.q, past, {in.k, in.v}, {output.out, output.lse}, options),
      executor, workspace);
  return output;
}

// Biases, and -infinity in some places: the mask, and the oracle's.
struct RandomMask {
  RandomMask(Random& random, Index q_len, Index keys) : added(1, 1, q_len, keys) {
    for (Index i = 0; i < added.size(); ++i) {
      const Index kind = random.below(8);
      added.data()[i] = kind < 3   ? -infinity
                        : kind < 5 ? static_cast<float>(random.normal())
                                   : 0.0f;
    }
  }
  oracle::AttentionOptions with(AttentionOptions& options) const {
    oracle::AttentionOptions exact = to_oracle(options);
    exact.mask = [this](Index, Index, Index i, Index key) {
      return static_cast<double>(added(0, 0, i, key));
    };
    options.mask = added;
    return exact;
  }
  Tensor4<float> added;
};

}  // namespace quoka_test
