// MassOptions::sketch: the mass that selections by 8-bit codes lose against float's, on a real
// model's keys; and when codes are used.

#include <quoka/select/mass_selector.hpp>

#include "support/capture.hpp"
#include "support/mass_oracle.hpp"
#include "support/real_layers.hpp"
#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::MassSelector;
using quoka::SelectorInput;
using quoka::Sketch;
namespace detail = quoka::detail;

MassOptions softmax(Sketch sketch, Index budget) {
  MassOptions options = balanced_without_neighbours(Budget::keys(budget));
  options.sketch = sketch;
  return options;
}

// The share of attention that a Selection's voters keep, on average over its heads: by a State with the keys' codes,
// and in float.
struct Kept {
  double by_sketch, in_float;
};
Kept kept_of(const Rows& q, const Rows& k, MassOptions options, float scale) {
  const SelectorInput input{
      .q = q, .k = k, .logits = LogitOptions{.scale = scale}, .capacity = k.len()};
  const auto expected =
      oracle::mass_shares(to_oracle(q), to_oracle(k), oracle::Tensor(1, k.heads(), 0, k.dim()),
                          {.queries = options.queries,
                           .kernel_size = options.kernel_size,
                           .scale = static_cast<double>(scale)});
  const auto kept = [&](Sketch sketch) {
    options.sketch = sketch;
    const MassSelector selector(options);
    MassSelector::State state;
    Selection keep;
    selector.appended(input, state, SerialExecutor{});
    selector.select(input, state, keep, SerialExecutor{});
    EXPECT_EQ(std::isfinite(state.scorer.logit_error(0)), sketch == Sketch::on);
    double sum = 0.0;
    for (Index list = 0; list < keep.heads(); ++list)
      for (const Position t : keep.positions(0, list)) sum += expected.shares[0][uz(list)][uz(t)];
    return sum / static_cast<double>(keep.heads());
  };
  return {kept(Sketch::on), kept(Sketch::off)};
}

TEST(SketchedMassSelector, LosesLittleOfTheMassOfRealLayers) {
  double most = 0.0;
  for_each_real_layer([&](const quoka_examples::LayerCapture& layer) {
    const TensorView<const float> q = layer.q, k = layer.k;
    for (const Index begin : {Index{512}, Index{1280}, q.len() - 128})
      for (const Index budget : {begin / 32, begin / 8}) {
        const MassOptions options = softmax(Sketch::on, budget);
        const float scale = 1.0f / std::sqrt(static_cast<float>(q.dim()));
        const Kept kept = kept_of(q.slice(begin, 128), k.slice(0, begin), options, scale);
        const double lost = kept.in_float - kept.by_sketch;
        EXPECT_LE(lost, 0.002) << layer.name << ", " << budget << " of " << begin;
        most = std::max(most, lost);
      }
  });
  RecordProperty("most_mass_lost", std::to_string(most));
}

TEST(SketchedMassSelector, SoftmaxUsesItWhereItIsFast) {
  Random random(723);
  const auto q = random.tensor<float>(1, 4, 37, 24), k = random.tensor<float>(1, 2, 401, 24);
  const SelectorInput input{q, k, LogitOptions{}};
  for (const Sketch sketch : {Sketch::automatic, Sketch::on, Sketch::off}) {
    const MassSelector selector(softmax(sketch, 40));
    MassSelector::State state;
    Selection keep;
    selector.appended(input, state, SerialExecutor{});
    selector.select(input, state, keep, SerialExecutor{});
    const bool used = quoka::by_codes(sketch);
    EXPECT_EQ(state.scorer.sketch.len(), used ? 401 : 0);
    EXPECT_EQ(std::isfinite(state.scorer.logit_error(0)), used);
  }
}

// Nobody could read their codes (StateSketch::most_dim).
TEST(SketchedMassSelector, KeysOfMoreThan1024ChannelsAreNotSketched) {
  Random random(724);
  for (const Index dim : {1024, 1025}) {
    const auto q = random.tensor<float>(1, 4, 3, dim), k = random.tensor<float>(1, 2, 40, dim);
    MassSelector::State state;
    MassSelector(softmax(Sketch::on, 10)).appended({q, k, LogitOptions{}}, state, SerialExecutor{});
    EXPECT_EQ(state.kept_len(), dim == 1024 ? 40 : 0);
    EXPECT_EQ(state.kept_bytes() > 0, dim == 1024);
  }
}

}  // namespace
