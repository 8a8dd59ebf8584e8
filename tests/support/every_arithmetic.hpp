// For tests that look inside: every arithmetic of panels that this machine compiles, the ISA's own units and those in
// plain C++, which run everywhere, and attention() by one of them.
//
//   for_each_arithmetic([&](const Panels& by) { attend_by(by.panels, in); });
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/kernels/bfloat16_units.hpp>
#include <quoka/kernels/float_panels.hpp>
#include <quoka/kernels/int8_panels.hpp>

#include "support/attention_fixtures.hpp"
#include "support/emulated_tiles.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace quoka_test {

using EmulatedUnit = quoka::detail::TileUnit<quoka::simd::EmulatedTiles>;
using PlainPairUnit = quoka::detail::PairUnit<quoka::simd::PlainBfloat16Sums>;

// One of them, whose error it has, and how many products of bfloat16 it takes.
struct Panels {
  std::string name;
  const quoka::detail::PanelArithmetic& panels;
  quoka::Arithmetic arithmetic;
  int products = 1;
};

template <class Unit>
void add_unit(std::vector<Panels>& all, const std::string& name) {
  using quoka::Arithmetic;
  namespace detail = quoka::detail;
  all.push_back({name + ", 1 product", detail::bfloat16_panels<Unit, 1>(), Arithmetic::bfloat16});
  all.push_back(
      {name + ", 2 products", detail::bfloat16_panels<Unit, 2>(), Arithmetic::automatic, 2});
  all.push_back(
      {name + ", 3 products", detail::bfloat16_panels<Unit, 3>(), Arithmetic::automatic, 3});
}

// A template: what an ISA lacks is not compiled.
template <bool tiles = quoka::simd::has_tiles, bool pairs = quoka::simd::has_bfloat16_sums,
          bool squares = quoka::simd::has_bfloat16_squares>
std::vector<Panels> every_arithmetic() {
  namespace detail = quoka::detail;
  namespace simd = quoka::simd;
  using quoka::Arithmetic;
  std::vector<Panels> all{
      {"float", detail::float_panels(), Arithmetic::fp32},
      {"quads", detail::int8_panels<simd::QuadSums>(), Arithmetic::int8},
      {"plain quads", detail::int8_panels<simd::PlainQuadSums>(), Arithmetic::int8}};
  add_unit<EmulatedUnit>(all, "emulated tiles");
  add_unit<PlainPairUnit>(all, "plain pairs");
  if constexpr (tiles) {
    EXPECT_TRUE(simd::tiles_allowed()) << "compiled for tiles, and the system refuses them";
    add_unit<detail::TileUnit<simd::Tiles>>(all, "tiles");
  }
  if constexpr (pairs) add_unit<detail::PairUnit<simd::DotBfloat16Sums>>(all, "pairs");
  if constexpr (squares)
    add_unit<detail::SquareUnit<simd::Bfloat16Square, simd::Bfloat16Eight>>(all, "squares");
  return all;
}

template <class F>
void for_each_arithmetic(F&& f) {
  for (const Panels& by : every_arithmetic()) {
    SCOPED_TRACE(by.name);
    f(by);
  }
}

// attention() by these, whichever it would take.
inline void attend_by(const quoka::detail::PanelArithmetic& panels, const Rows& q,
                      const quoka::Past& past, const quoka::Chunk& chunk,
                      const quoka::AttentionOutput& output, const AttentionOptions& options,
                      ExecutorRef executor = SerialExecutor{}) {
  quoka::AttentionWorkspace workspace;
  quoka::AttentionWorkspace::State& state = workspace.state();
  quoka::detail::AttentionCall& call =
      state.begin_one(quoka::detail::checked_call(q, past, chunk, output, options));
  quoka::detail::prepare(call, options.arithmetic);
  call.arithmetic = &panels;
  state.run(executor);
}
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
