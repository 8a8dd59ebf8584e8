// QuokaOptions::sketch in the softmax domain: what selections by 8-bit codes lose of the mass that float's hold,
// on a real model's keys; and when codes are used.

#include <quoka/select/quoka.hpp>
#include <quoka/select/sketch/sketched_call.hpp>

#include "support/capture.hpp"
#include "support/real_layers.hpp"
#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <cmath>

namespace {

using namespace quoka_test;
using quoka::QuokaScorer;
using quoka::QuokaSelector;
using quoka::SelectorInput;
using quoka::Sketch;
namespace detail = quoka::detail;

QuokaOptions softmax(Sketch sketch, Index budget) {
  QuokaOptions options = softmax_options(Budget::keys(budget));
  options.sketch = sketch;
  return options;
}

// Mass of the selection by the sketch, less that in float, by float's own scores; the largest loss of a
// head.
double mass_lost(const Rows& q, const Rows& k, QuokaOptions options, float scale) {
  const SelectorInput input{
      .q = q, .k = k, .logits = LogitOptions{.scale = scale}, .capacity = k.len()};
  options.sketch = Sketch::off;
  const QuokaScorer scorer(options);
  QuokaScorer::State state;
  Tensor3<float> scores(k.batch(), k.heads(), k.len());
  scorer.score(input, state, scores, SerialExecutor{});
  Selection in_float, by_sketch;
  QuokaSelector::State a, b;
  QuokaSelector(options).select(input, a, in_float, SerialExecutor{});
  options.sketch = Sketch::on;
  const QuokaSelector sketched(options);
  sketched.appended(input, b, SerialExecutor{});
  sketched.select(input, b, by_sketch, SerialExecutor{});
  EXPECT_TRUE(std::isfinite(b.scorer.logit_error(0))) << "no codes were used";
  double most = 0.0;
  for (Index head = 0; head < k.heads(); ++head) {
    double lost = 0.0;
    for (const Position t : in_float.positions(0, head))
      lost += static_cast<double>(scores(0, head, t));
    for (const Position t : by_sketch.positions(0, head))
      lost -= static_cast<double>(scores(0, head, t));
    most = std::max(most, lost);
  }
  return most;
}

TEST(SketchedQuoka, LosesLittleOfTheMassOfRealLayers) {
  double most = 0.0;
  for_each_real_layer([&](const quoka_examples::LayerCapture& layer) {
    const TensorView<const float> q = layer.q, k = layer.k;
    for (const Index begin : {Index{512}, Index{1280}, q.len() - 128})
      for (const Index budget : {begin / 32, begin / 8}) {
        const QuokaOptions options = softmax(Sketch::on, budget);
        const float scale = 1.0f / std::sqrt(static_cast<float>(q.dim()));
        const double lost = mass_lost(q.slice(begin, 128), k.slice(0, begin), options, scale);
        EXPECT_LE(lost, 0.002) << layer.name << ", " << budget << " of " << begin;
        most = std::max(most, lost);
      }
  });
  RecordProperty("most_mass_lost", std::to_string(most));
}

TEST(SketchedQuoka, SoftmaxUsesItWhereItIsFast) {
  Random random(723);
  const auto q = random.tensor<float>(1, 4, 37, 24), k = random.tensor<float>(1, 2, 401, 24);
  const SelectorInput input{q, k, LogitOptions{}};
  for (const Sketch sketch : {Sketch::automatic, Sketch::on, Sketch::off}) {
    const QuokaSelector selector(softmax(sketch, 40));
    QuokaSelector::State state;
    Selection keep;
    selector.appended(input, state, SerialExecutor{});
    selector.select(input, state, keep, SerialExecutor{});
    const bool used =
        sketch == Sketch::on || (sketch == Sketch::automatic && detail::sketched_mass_is_fast());
    EXPECT_EQ(state.scorer.sketch.len(), used ? 401 : 0);
    EXPECT_EQ(state.scorer.sketched_mass != nullptr, used);
    EXPECT_EQ(state.scorer.softmax.bytes() > 0, !used);
  }
}

}  // namespace
