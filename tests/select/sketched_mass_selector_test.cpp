// MassOptions::sketch: what selections by 8-bit codes lose of the mass that float's hold,
// on a real model's keys; and when codes are used.

#include <quoka/select/mass_selector.hpp>
#include <quoka/select/sketch/sketched_call.hpp>

#include "support/capture.hpp"
#include "support/real_layers.hpp"
#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::MassScorer;
using quoka::MassSelector;
using quoka::SelectorInput;
using quoka::Sketch;
namespace detail = quoka::detail;

MassOptions softmax(Sketch sketch, Index budget) {
  MassOptions options = softmax_options(Budget::keys(budget));
  options.sketch = sketch;
  return options;
}

// Mass of the selection by the sketch, less that in float, by float's own scores; the largest loss of a
// head.
double mass_lost(const Rows& q, const Rows& k, MassOptions options, float scale) {
  const SelectorInput input{
      .q = q, .k = k, .logits = LogitOptions{.scale = scale}, .capacity = k.len()};
  options.sketch = Sketch::off;
  const MassScorer scorer(options);
  MassScorer::State state;
  Tensor3<float> scores(k.batch(), k.heads(), k.len());
  scorer.score(input, state, scores, SerialExecutor{});
  Selection in_float, by_sketch;
  MassSelector::State a, b;
  MassSelector(options).select(input, a, in_float, SerialExecutor{});
  options.sketch = Sketch::on;
  const MassSelector sketched(options);
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

TEST(SketchedMassSelector, LosesLittleOfTheMassOfRealLayers) {
  double most = 0.0;
  for_each_real_layer([&](const quoka_examples::LayerCapture& layer) {
    const TensorView<const float> q = layer.q, k = layer.k;
    for (const Index begin : {Index{512}, Index{1280}, q.len() - 128})
      for (const Index budget : {begin / 32, begin / 8}) {
        const MassOptions options = softmax(Sketch::on, budget);
        const float scale = 1.0f / std::sqrt(static_cast<float>(q.dim()));
        const double lost = mass_lost(q.slice(begin, 128), k.slice(0, begin), options, scale);
        EXPECT_LE(lost, 0.002) << layer.name << ", " << budget << " of " << begin;
        most = std::max(most, lost);
      }
  });
  RecordProperty("most_mass_lost", std::to_string(most));
}

// A State that was told of the keys, and so has codes, beside one that was not: other
// keys of nearly equal mass.
TEST(SketchedMassSelector, AStateExchangesKeysOfNearlyEqualMassAlone) {
  Random random(724);
  Index exchanged = 0, chosen = 0;
  for (const Index q_len : {1, 5, 37, 128})
    for (const Index kv_len : {200, 401, 1003}) {
      const auto q = random.tensor<float>(1, 4, q_len, 64),
                 k = random.tensor<float>(1, 2, kv_len, 64);
      const SelectorInput input{q, k, LogitOptions{}};
      const auto chosen_by = [&](const MassOptions& options, bool told) {
        const MassSelector selector(options);
        MassSelector::State state;
        Selection keep;
        if (told) selector.appended(input, state, SerialExecutor{});
        selector.select(input, state, keep, SerialExecutor{});
        return keep;
      };
      const MassOptions in_float = softmax(Sketch::off, kv_len / 5);
      EXPECT_EQ(chosen_by(in_float, true), chosen_by(in_float, false));

      const MassOptions mass = softmax(Sketch::on, kv_len / 5);
      const Selection with = chosen_by(mass, true), without = chosen_by(mass, false);
      EXPECT_EQ(without, chosen_by(in_float, true));
      const MassScorer scorer(in_float);
      MassScorer::State state;
      Tensor3<float> scores(1, 2, kv_len);
      scorer.score(input, state, scores, SerialExecutor{});
      for (Index head = 0; head < 2; ++head) {
        const auto a = with.positions(0, head), b = without.positions(0, head);
        std::vector<Position> gained, lost;
        std::ranges::set_difference(a, b, std::back_inserter(gained));
        std::ranges::set_difference(b, a, std::back_inserter(lost));
        exchanged += std::ssize(gained), chosen += std::ssize(b);
        for (const Position in : gained)
          for (const Position out : lost)
            EXPECT_LT(scores(0, head, out), 1.06f * scores(0, head, in));
      }
    }
  EXPECT_GT(exchanged, 0) << "of " << chosen;
  EXPECT_LT(50 * exchanged, chosen) << exchanged << " of " << chosen;
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
    const bool used =
        sketch == Sketch::on || (sketch == Sketch::automatic && detail::sketched_mass_is_fast());
    EXPECT_EQ(state.scorer.sketch.len(), used ? 401 : 0);
    EXPECT_EQ(state.scorer.sketched != nullptr, used);
    EXPECT_EQ(state.scorer.in_float.bytes() > 0, !used);
  }
}

}  // namespace
