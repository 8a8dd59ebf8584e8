#include "kernels/every_arithmetic.hpp"

#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/kernels/bfloat16_units.hpp>
#include <quoka/kernels/float_panels.hpp>
#include <quoka/kernels/int8_panels.hpp>

#include "support/emulated_tiles.hpp"

#include <stdexcept>

namespace quoka_test {

namespace simd = quoka::simd;
using quoka::Arithmetic;

namespace {

template <class Unit>
void add_unit(std::vector<Panels>& all, const std::string& name) {
  all.push_back(
      {name + ", 1 product", quoka::detail::bfloat16_panels<Unit, 1>(), Arithmetic::bf16});
  all.push_back(
      {name + ", 2 products", quoka::detail::bfloat16_panels<Unit, 2>(), Arithmetic::automatic, 2});
  all.push_back(
      {name + ", 3 products", quoka::detail::bfloat16_panels<Unit, 3>(), Arithmetic::automatic, 3});
}

// A template: what an ISA lacks is not compiled.
template <bool tiles = simd::has_tiles, bool pairs = simd::has_bfloat16_sums,
          bool squares = simd::has_bfloat16_squares>
std::vector<Panels> of_this_machine() {
  std::vector<Panels> all{
      {"float", quoka::detail::float_panels(), Arithmetic::float_},
      {"quads", quoka::detail::int8_panels<simd::QuadSums>(), Arithmetic::int8},
      {"plain quads", quoka::detail::int8_panels<simd::PlainQuadSums>(), Arithmetic::int8}};
  add_unit<quoka::detail::TileUnit<simd::EmulatedTiles>>(all, "emulated tiles");
  add_unit<quoka::detail::PairUnit<simd::PlainBfloat16Sums>>(all, "plain pairs");
  if constexpr (tiles) {
    EXPECT_TRUE(simd::tiles_allowed()) << "compiled for tiles, and the system refuses them";
    add_unit<quoka::detail::TileUnit<simd::Tiles>>(all, "tiles");
  }
  if constexpr (pairs) add_unit<quoka::detail::PairUnit<simd::DotBfloat16Sums>>(all, "pairs");
  if constexpr (squares)
    add_unit<quoka::detail::SquareUnit<simd::Bfloat16Square, simd::Bfloat16Eight>>(all, "squares");
  return all;
}

}  // namespace

const std::vector<Panels>& every_arithmetic() {
  static const std::vector<Panels> all = of_this_machine();
  return all;
}

const quoka::detail::PanelArithmetic& panels_named(const std::string& name) {
  for (const Panels& one : every_arithmetic())
    if (one.name == name) return one.panels;
  throw std::logic_error("no arithmetic is called " + name);
}

void attend_by(const quoka::detail::PanelArithmetic& panels, const Rows& q, const quoka::Past& past,
               const quoka::Chunk& chunk, const quoka::AttentionOutput& output,
               const AttentionOptions& options, ExecutorRef executor) {
  quoka::AttentionWorkspace workspace;
  quoka::detail::AttentionCall call =
      quoka::detail::checked_call({q, past, chunk, output}, options);
  quoka::detail::prepare_call(options.arithmetic, call);
  call.arithmetic = &panels;
  quoka::detail::run_calls({&call, 1}, workspace.state(), executor);
}

}  // namespace quoka_test
