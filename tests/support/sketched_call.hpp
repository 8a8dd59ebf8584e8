// What selection by codes is called with, from the rows of a tensor: for tests that look inside.
#pragma once

#include <quoka/select/sketch/sketched_call.hpp>

#include "support/fixtures.hpp"

namespace quoka_test {

// cache: of which the keys lie anywhere; null: `own` is a sketch of these. One call, whose chains it adds to.
struct SketchedCallOf {
  quoka::detail::SketchedKeys keys;
  mutable quoka::Chains chains;
  quoka::detail::SketchedCall call;

  SketchedCallOf(const Rows& k, const quoka::KeySketch& own, const quoka::KeySketch* cache,
                 const Tensor4<float>& q_bar, Aggregation over,
                 ExecutorRef executor = SerialExecutor{})
      : keys(k, own, cache),
        chains(k.batch() * k.heads(), quoka::detail::chains_at_once(executor.workers())),
        call{keys, q_bar.data(), q_bar.dimension(2), over, k.len(), executor, chains} {}
  SketchedCallOf(const SketchedCallOf&) = delete;
  SketchedCallOf& operator=(const SketchedCallOf&) = delete;
};

}  // namespace quoka_test
