// What selection by codes is called with, from the rows of a tensor: for tests that look inside.
#pragma once

#include <quoka/select/sketch/sketched_call.hpp>

#include "support/fixtures.hpp"

namespace quoka_test {

// cache: of which the keys lie anywhere; null: `own` is a sketch of these. One call.
struct SketchedCallOf {
  quoka::detail::SketchedKeys keys;
  quoka::detail::SketchedCall call;

  SketchedCallOf(const Rows& k, const quoka::KeySketch& own, const quoka::KeySketch* cache,
                 const Tensor4<float>& q_bar, Aggregation over,
                 ExecutorRef executor = SerialExecutor{})
      : keys(k, own, cache),
        call{keys, q_bar.data(), q_bar.dimension(2), over, k.len(), executor} {}
  SketchedCallOf(const SketchedCallOf&) = delete;
  SketchedCallOf& operator=(const SketchedCallOf&) = delete;
};

}  // namespace quoka_test
