// Every arithmetic of panels that this machine compiles, the ISA's own units and those in plain
// C++, which run everywhere, and attention() by one of them. Compiles their kernels: one test
// includes it.
//
//   for_each_arithmetic([&](const Panels& by) { attend_by(by.panels, in); });
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/kernels/arithmetics.hpp>
#include <quoka/kernels/int8_panels.hpp>

#include "support/attention_fixtures.hpp"
#include "support/emulated_tiles.hpp"
#include "support/plain_sums.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
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

template <class Unit>
void add_unit(std::vector<Panels>& all, const std::string& name) {
  using quoka::Arithmetic;
  all.push_back(
      {name + ", 1 product", quoka::detail::bfloat16_panels<Unit, 1>(), Arithmetic::bf16});
  all.push_back(
      {name + ", 2 products", quoka::detail::bfloat16_panels<Unit, 2>(), Arithmetic::automatic, 2});
  all.push_back(
      {name + ", 3 products", quoka::detail::bfloat16_panels<Unit, 3>(), Arithmetic::automatic, 3});
}

// A template: what an ISA lacks is not compiled.
template <bool tiles = quoka::simd::has_tiles, bool pairs = quoka::simd::has_bfloat16_sums,
          bool squares = quoka::simd::has_bfloat16_squares>
std::vector<Panels> arithmetics_of_this_machine() {
  namespace simd = quoka::simd;
  namespace detail = quoka::detail;
  using quoka::Arithmetic;
  std::vector<Panels> all{
      {"float", detail::float_panels(), Arithmetic::float_},
      {"plain quads", detail::int8_panels<simd::PlainQuadSums>(), Arithmetic::int8},
      {"quads", detail::int8_panels<simd::OwnQuadSums>(), Arithmetic::int8}};
  add_unit<detail::TileUnit<simd::EmulatedTiles>>(all, "emulated tiles");
  add_unit<detail::PairUnit<simd::PlainBfloat16Sums>>(all, "plain pairs");
  if constexpr (tiles) {
    EXPECT_TRUE(simd::tiles_allowed()) << "compiled for tiles, and the system refuses them";
    add_unit<detail::TileUnit<simd::Tiles>>(all, "tiles");
  }
  if constexpr (pairs) add_unit<detail::PairUnit<simd::DotBfloat16Sums>>(all, "pairs");
  if constexpr (squares)
    add_unit<detail::SquareUnit<simd::Bfloat16Square, simd::Bfloat16Eight>>(all, "squares");
  return all;
}

inline const std::vector<Panels>& every_arithmetic() {
  static const std::vector<Panels> all = arithmetics_of_this_machine();
  return all;
}
// "float", "quads", "plain quads", "emulated tiles, 1 product", "plain pairs, 3 products". Throws
// where there is none.
inline const quoka::detail::PanelArithmetic& panels_named(const std::string& name) {
  for (const Panels& one : every_arithmetic())
    if (one.name == name) return one.panels;
  throw std::logic_error("no arithmetic is called " + name);
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
  quoka::detail::AttentionCall call =
      quoka::detail::checked_call({q, past, chunk, output}, options);
  quoka::detail::prepare_call(options.arithmetic, call);
  call.arithmetic = &panels;
  quoka::detail::run_calls({&call, 1}, workspace.state(), executor);
}
template <class T>
Output<T> attend_by(const quoka::detail::PanelArithmetic& panels, const Inputs<T>& in,
                    const AttentionOptions& options = {}, ExecutorRef executor = SerialExecutor{}) {
  Output<T> output = unwritten<T>(in.q, std::max(in.past_v.dimension(3), in.v.dimension(3)));
  const quoka::Chunk chunk = in.k.size() > 0 ? quoka::Chunk{in.k, in.v} : quoka::Chunk{};
  attend_by(panels, in.q, {in.past_k, in.past_v}, chunk, {output.out, output.lse}, options,
            executor);
  return output;
}

}  // namespace quoka_test
