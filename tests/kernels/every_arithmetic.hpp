// Every arithmetic of panels that this machine compiles, the ISA's own units and those in plain C++, which run
// everywhere, and attention() by one of them. every_arithmetic.cpp compiles their kernels, once for all tests.
//
//   for_each_arithmetic([&](const Panels& by) { attend_by(by.panels, in); });
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace quoka_test {

// One of them, whose error it has, and how many products of bfloat16 it takes.
struct Panels {
  std::string name;
  const quoka::detail::PanelArithmetic& panels;
  quoka::Arithmetic arithmetic;
  int products = 1;
};

const std::vector<Panels>& every_arithmetic();
// "float", "quads", "plain quads", "emulated tiles, 1 product", "plain pairs, 3 products". Throws where there is none.
const quoka::detail::PanelArithmetic& panels_named(const std::string& name);

template <class F>
void for_each_arithmetic(F&& f) {
  for (const Panels& by : every_arithmetic()) {
    SCOPED_TRACE(by.name);
    f(by);
  }
}

// attention() by these, whichever it would take.
void attend_by(const quoka::detail::PanelArithmetic& panels, const Rows& q, const quoka::Past& past,
               const quoka::Chunk& chunk, const quoka::AttentionOutput& output,
               const AttentionOptions& options, ExecutorRef executor = SerialExecutor{});
template <class T>
Output<T> attend_by(const quoka::detail::PanelArithmetic& panels, const Inputs<T>& in,
                    const AttentionOptions& options = {}, const Selection* keep = nullptr,
                    ExecutorRef executor = SerialExecutor{}) {
  Output<T> output = unwritten<T>(in.q, std::max(in.past_v.dimension(3), in.v.dimension(3)));
  quoka::Past past(in.past_k, in.past_v);
  past.selection = keep;
  const quoka::Chunk chunk = in.k.size() > 0 ? quoka::Chunk{in.k, in.v} : quoka::Chunk{};
  attend_by(panels, in.q, past, chunk, {output.out, output.lse}, options, executor);
  return output;
}

}  // namespace quoka_test
