// kernels/bfloat16_panels.hpp over every unit that this machine compiles: the ISA's own, and their
// emulations in plain C++, which run everywhere. Against the oracle, to the bound that
// bfloat16_error() states for all inputs.

#include <quoka/attention/attention_impl.hpp>
#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/matrix/emulated_tiles.hpp>
#include <quoka/matrix/pair_unit.hpp>
#include <quoka/matrix/square_unit.hpp>
#include <quoka/matrix/tile_unit.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

using namespace quoka_test;
using quoka::detail::PanelArithmetic;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;

using Emulated = detail::TileUnit<simd::EmulatedTiles>;
using PlainPairs = detail::PairUnit<simd::PlainBfloat16Sums>;

// One arithmetic under test.
struct Panels {
  std::string name;
  const PanelArithmetic& panels;
  int products;
};

template <class Unit>
void add_unit(std::vector<Panels>& all, const std::string& name) {
  all.push_back({name + ", 1 product", detail::bfloat16_panels<Unit, 1>(), 1});
  all.push_back({name + ", 2 products", detail::bfloat16_panels<Unit, 2>(), 2});
  all.push_back({name + ", 3 products", detail::bfloat16_panels<Unit, 3>(), 3});
}

template <bool tiles = simd::has_tiles, bool pairs = simd::has_bfloat16_sums,
          bool squares = simd::has_bfloat16_squares>
std::vector<Panels> every_unit() {
  std::vector<Panels> all;
  add_unit<Emulated>(all, "emulated tiles");
  add_unit<PlainPairs>(all, "plain pairs");
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
void for_each_unit(F&& f) {
  for (const Panels& unit : every_unit()) {
    SCOPED_TRACE(unit.name);
    f(unit);
  }
}

template <class T>
Output<T> attend_by(const Panels& unit, const Inputs<T>& in, const AttentionOptions& options = {},
                    const Selection* keep = nullptr, ExecutorRef executor = SerialExecutor{}) {
  Output<T> output = unwritten<T>(in.q, std::max(in.past_v.dimension(3), in.v.dimension(3)));
  quoka::Past past(in.past_k, in.past_v);
  past.keep = keep;
  quoka::AttentionWorkspace workspace;
  workspace.parts().begin(1);
  workspace.parts().calls.push_back(
      detail::checked_call(in.q, past, {in.k, in.v}, {output.out, output.lse}, options));
  workspace.parts().run(unit.panels, executor);
  return output;
}

// ---- the bound ----------------------------------------------------------------------------------

// The largest sum over channels of |q| |k| scale, of any query and key of one head.
template <class T>
double largest_products(const Inputs<T>& in, const AttentionOptions& options) {
  const Index dim = in.q.dimension(3), group = in.q.dimension(1) / in.past_k.dimension(1);
  const double scale = std::abs(options.scale ? static_cast<double>(*options.scale)
                                              : 1.0 / std::sqrt(static_cast<double>(dim)));
  double most = 0.0;
  for (Index b = 0; b < in.q.dimension(0); ++b)
    for (Index head = 0; head < in.q.dimension(1); ++head)
      for (Index i = 0; i < in.q.dimension(2); ++i)
        for (const Tensor4<T>* k : {&in.past_k, &in.k})
          for (Index t = 0; t < k->dimension(2); ++t) {
            double sum = 0.0;
            for (Index c = 0; c < dim; ++c)
              sum += std::abs(static_cast<double>(static_cast<float>(in.q(b, head, i, c))) *
                              static_cast<double>(static_cast<float>((*k)(b, head / group, t, c))));
            most = std::max(most, sum * scale);
          }
  return most;
}

template <class T>
void expect_within_bound(const Panels& unit, const Output<T>& output,
                         const oracle::AttentionResult& expected, const Inputs<T>& in,
                         const AttentionOptions& options = {}) {
  const quoka::Bfloat16Error error =
      quoka::bfloat16_error(unit.products, std::is_same_v<T, Eigen::bfloat16>);
  const double value = std::max(largest(in.past_v), largest(in.v));
  // Float's own part: of sums over the channels, and of the softmax.
  const double logit = (error.logit + 0x1p-23 * std::sqrt(in.q.dimension(3)) + 0x1p-22) *
                           largest_products(in, options) +
                       1e-6;
  const double bound = (std::expm1(2 * logit) + error.value + 4e-6) * value;
  EXPECT_TRUE(elements_close(output.out, expected.out, bound));
  EXPECT_TRUE(lse_close(output.lse, expected.lse, logit + error.value + 1e-6));
}

template <class T>
void expect_as_bound(const Panels& unit, const Inputs<T>& in, const AttentionOptions& options = {},
                     const Selection* keep = nullptr) {
  expect_within_bound(unit, attend_by(unit, in, options, keep), oracle_attend(in, options, keep),
                      in, options);
}

TEST(Bfloat16Attention, EveryHeadDim) {
  for_each_storage([]<class T>() {
    Random random(10);
    for (const Index dim : {1, 3, 17, 40, 64, 80, 100, 128}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim));
      const auto in = random_inputs<T>(
          random, {.q_heads = 3, .head_dim = dim, .v_dim = dim, .q_len = 37, .kv_len = 127});
      for_each_unit([&](const Panels& unit) { expect_as_bound(unit, in); });
    }
  });
}

}  // namespace
