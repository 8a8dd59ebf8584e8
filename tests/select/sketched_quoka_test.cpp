// QuokaOptions::sketch in the softmax domain: what selections by 8-bit codes lose of the mass that float's hold,
// on a real model's keys; and when codes are used.

#include <quoka/select/quoka.hpp>
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

// A State that was told of the keys, and so has codes, beside one that was not: by cosines the same keys, by softmax
// other ones of nearly equal mass.
TEST(SketchedQuoka, AStateExchangesKeysOfNearlyEqualMassAlone) {
  Random random(724);
  Index exchanged = 0, chosen = 0;
  for (const Index q_len : {1, 5, 37, 128})
    for (const Index kv_len : {200, 401, 1003}) {
      const auto q = random.tensor<float>(1, 4, q_len, 64),
                 k = random.tensor<float>(1, 2, kv_len, 64);
      const SelectorInput input{q, k, LogitOptions{}};
      const auto chosen_by = [&](const QuokaOptions& options, bool told) {
        const QuokaSelector selector(options);
        QuokaSelector::State state;
        Selection keep;
        if (told) selector.appended(input, state, SerialExecutor{});
        selector.select(input, state, keep, SerialExecutor{});
        return keep;
      };
      QuokaOptions paper = QuokaOptions::paper(Budget::keys(kv_len / 5));
      paper.sketch = Sketch::on;
      EXPECT_EQ(chosen_by(paper, true), chosen_by(paper, false));
      const QuokaOptions in_float = softmax(Sketch::off, kv_len / 5);
      EXPECT_EQ(chosen_by(in_float, true), chosen_by(in_float, false));

      const QuokaOptions mass = softmax(Sketch::on, kv_len / 5);
      const Selection with = chosen_by(mass, true), without = chosen_by(mass, false);
      EXPECT_EQ(without, chosen_by(in_float, true));
      const QuokaScorer scorer(in_float);
      QuokaScorer::State state;
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
