// Selection under threads: the same Selection by any executor and number of threads.

#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/quoka.hpp>

#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

namespace {

using namespace quoka_test;
using quoka::MassSelector;

// A head whose keys are too long for codes has its mass in float, after that of the others.
TEST(SelectThreads, AHeadThatCodesCannotStandForIsThatOfFloat) {
  Random random(505);
  const Index len = 9000, dim = 32;
  auto k = random.tensor<float>(1, 2, len, dim);
  const auto q = random.tensor<float>(1, 8, 130, dim);
  for (Index t = 0; t < len; ++t)
    for (Index c = 0; c < dim; ++c) k(0, 1, t, c) *= 1e13f;
  quoka::ThreadPool pool(16);
  for (MassOptions options :
       {MassOptions::balanced(Budget::keys(100)), balanced_without_neighbours(Budget::keys(100))}) {
    options.sketch = quoka::Sketch::on;
    const MassSelector selector(options);
    const quoka::SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}, .capacity = len};
    Selection serial;
    for (const bool by_pool : {false, true}) {
      MassSelector::State state;
      Selection keep;
      selector.appended(input, state, SerialExecutor{});
      selector.select(input, state, keep, by_pool ? ExecutorRef(pool) : SerialExecutor{});
      EXPECT_EQ(keep.sum_of_counts(), 100 * keep.heads());
      EXPECT_EQ(state.scorer.logit_error(1), std::numeric_limits<float>::infinity());
      EXPECT_LT(state.scorer.logit_error(0), 4.0f);
      if (!by_pool) serial = keep;
      EXPECT_EQ(keep, serial);
    }
  }
}

}  // namespace
