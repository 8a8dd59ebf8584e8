// methods/softmax_sketch.hpp: SampleAttention, SparQ and Loki by 8-bit logits score nearly as in float,
// and in float where their State was not told of all keys.

#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/methods/loki.hpp>
#include <quoka/methods/sample_attention.hpp>
#include <quoka/methods/sparq.hpp>

#include "support/baseline_fixtures.hpp"

#include <cmath>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
using quoka::SelectorInput;
using quoka::Sketch;

constexpr Index kv_heads = 2, q_heads = 6, dim = 40;

template <class S>
typename S::Options options_of(Sketch sketch) {
  typename S::Options options{};
  options.budget = Budget::keys(31), options.sketch = sketch;
  if constexpr (requires { options.rank; }) options.rank = 21;
  if constexpr (requires { options.n_queries; }) options.n_queries = 7;
  if constexpr (requires { options.calibration; }) {
    static const auto fitted = [] {
      Random random(830);
      const auto keys = random.tensor<float>(1, kv_heads, 300, dim);
      quoka::LokiFit fit(kv_heads, dim);
      fit.add(quoka::view_of(keys));
      return std::make_shared<const quoka::LokiCalibration>(fit.finish());
    }();
    options.calibration = fitted;
  }
  return options;
}

template <class S>
class SoftmaxSketch : public ::testing::Test {};
using Methods =
    ::testing::Types<quoka::SampleAttentionScorer, quoka::SparqScorer, quoka::LokiScorer>;
TYPED_TEST_SUITE(SoftmaxSketch, Methods);

// Scores by a State that was told of all keys.
template <class S>
Tensor3<float> told(const typename S::Options& options, const SelectorInput& input) {
  typename S::State state;
  S(options).appended(input, state, SerialExecutor{});
  return scores_by<S>(options, input, state);
}

// The largest |ln(x / y)|; not finite in one, not in the other.
double farthest(const Tensor3<float>& x, const Tensor3<float>& y) {
  double most = 0.0;
  for (Index i = 0; i < x.size(); ++i) {
    if (std::isfinite(x.data()[i]) != std::isfinite(y.data()[i])) return 1e30;
    if (!std::isfinite(x.data()[i])) continue;
    if (x.data()[i] == 0.0f && y.data()[i] == 0.0f) continue;
    most = std::max(most, std::abs(std::log(static_cast<double>(x.data()[i]) /
                                            static_cast<double>(y.data()[i]))));
  }
  return most;
}

TYPED_TEST(SoftmaxSketch, ScoresNearlyAsInFloat) {
  Random random(831);
  const auto on = options_of<TypeParam>(Sketch::on), off = options_of<TypeParam>(Sketch::off);
  for (const Index q_len : {1, 5, 37})
    for (const Index kv_len : {40, 333}) {
      const auto q = random.tensor<float>(2, q_heads, q_len, dim);
      const auto k = random.tensor<float>(2, kv_heads, kv_len, dim);
      const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}};
      const auto by_codes = told<TypeParam>(on, input), in_float = told<TypeParam>(off, input);
      EXPECT_LT(farthest(by_codes, in_float), 0.06) << q_len << " queries, " << kv_len << " keys";
      EXPECT_FALSE(same_bits(by_codes, in_float));
    }
}

TYPED_TEST(SoftmaxSketch, IsNotThereInTheLogitDomain) {
  Random random(832);
  const auto q = random.tensor<float>(1, q_heads, 17, dim);
  const auto k = random.tensor<float>(1, kv_heads, 200, dim);
  auto on = options_of<TypeParam>(Sketch::on), off = options_of<TypeParam>(Sketch::off);
  on.domain = off.domain = Domain::logit;
  const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}};
  EXPECT_TRUE(same_bits(told<TypeParam>(on, input), told<TypeParam>(off, input)));
  typename TypeParam::State state;
  TypeParam(on).appended(input, state, SerialExecutor{});
  EXPECT_EQ(state.sketch.kept_bytes(), 0);
}

TYPED_TEST(SoftmaxSketch, AStateThatWasNotToldOfAllKeysScoresInFloat) {
  if constexpr (!std::is_same_v<TypeParam, quoka::LokiScorer>) {  // that catches up by itself
    Random random(833);
    const auto q = random.tensor<float>(1, q_heads, 17, dim);
    const auto k = random.tensor<float>(1, kv_heads, 200, dim);
    const auto on = options_of<TypeParam>(Sketch::on), off = options_of<TypeParam>(Sketch::off);
    const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}};
    const auto in_float = scores_by<TypeParam>(off, input);
    EXPECT_TRUE(same_bits(scores_by<TypeParam>(on, input), in_float));
    typename TypeParam::State state;
    TypeParam(on).appended({.q = q, .k = Rows(k).slice(0, 199)}, state, SerialExecutor{});
    EXPECT_TRUE(same_bits(scores_by<TypeParam>(on, input, state), in_float));
  }
}

TYPED_TEST(SoftmaxSketch, BudgetsByScoresAreInFloat) {
  Random random(834);
  const auto q = random.tensor<float>(1, q_heads, 17, dim);
  const auto k = random.tensor<float>(1, kv_heads, 200, dim);
  auto on = options_of<TypeParam>(Sketch::on), off = options_of<TypeParam>(Sketch::off);
  on.budget = off.budget = Budget::mass(0.7);
  const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}};
  EXPECT_TRUE(same_bits(told<TypeParam>(on, input), told<TypeParam>(off, input)));
}

TYPED_TEST(SoftmaxSketch, LeavesOutQueriesThatAreNotFinite) {
  Random random(835);
  auto q = random.tensor<float>(1, q_heads, 14, dim);
  const auto k = random.tensor<float>(1, kv_heads, 200, dim);
  for (const float odd : {not_a_number, infinity})
    for (const Index i : {1, 6, 13}) q(0, 3, i, 7) = odd;
  const auto on = options_of<TypeParam>(Sketch::on), off = options_of<TypeParam>(Sketch::off);
  const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}};
  const auto by_codes = told<TypeParam>(on, input);
  EXPECT_LT(farthest(by_codes, told<TypeParam>(off, input)), 0.06);
  q.setConstant(not_a_number);
  const auto none = told<TypeParam>(on, {.q = q, .k = k, .logits = LogitOptions{}});
  for (Index i = 0; i < none.size(); ++i) EXPECT_EQ(none.data()[i], 0.0f);
}

// The same bits however the keys came, were taken back and came again, and by any number of threads.
TYPED_TEST(SoftmaxSketch, FollowsTheCache) {
  Random random(836);
  const auto q = random.tensor<float>(2, q_heads, 17, dim);
  const auto k = random.tensor<float>(2, kv_heads, 300, dim),
             other = random.tensor<float>(2, kv_heads, 300, dim);
  const auto on = options_of<TypeParam>(Sketch::on);
  const TypeParam scorer(on);
  const auto expected = told<TypeParam>(on, {.q = q, .k = k, .logits = LogitOptions{}});
  const auto then = joined(k, 150, other);
  quoka::ThreadPool threads(3);
  typename TypeParam::State state;
  for (Index len : {20, 21, 170, 300})
    scorer.appended({.q = q, .k = Rows(then).slice(0, len)}, state, threads);
  state.truncate(150);
  for (Index len : {160, 300})
    scorer.appended({.q = q, .k = Rows(k).slice(0, len), .capacity = 1000}, state, threads);
  Tensor3<float> scores(2, kv_heads, 300);
  scorer.score({.q = q, .k = k, .logits = LogitOptions{}}, state, scores, threads);
  EXPECT_TRUE(same_bits(scores, expected));
  state.truncate(0);
  scorer.appended({.q = q, .k = other}, state, threads);
  scorer.score({.q = q, .k = other, .logits = LogitOptions{}}, state, scores, threads);
  EXPECT_TRUE(
      same_bits(scores, told<TypeParam>(on, {.q = q, .k = other, .logits = LogitOptions{}})));
}

// By the sketch of the cache that keys lie in, here from position 60 on: that of a State, to the bit.
TYPED_TEST(SoftmaxSketch, TakesTheSketchOfTheCache) {
  if constexpr (!std::is_same_v<TypeParam, quoka::LokiScorer>) {  // which has directions of its own
    Random random(838);
    const auto q = random.tensor<float>(1, q_heads, 17, dim);
    const auto cache = random.tensor<float>(1, kv_heads, 400, dim);
    KeySketch sketch;
    sketch.update(Rows(cache), 0, 400, SerialExecutor{});
    const Rows k = Rows(cache).slice(64, 300);
    const auto on = options_of<TypeParam>(Sketch::on);
    typename TypeParam::State state;
    const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}, .sketch = &sketch};
    TypeParam(on).appended(input, state, SerialExecutor{});
    EXPECT_EQ(state.kept_bytes(), 0);
    EXPECT_TRUE(same_bits(scores_by<TypeParam>(on, input, state),
                          told<TypeParam>(on, {.q = q, .k = k, .logits = LogitOptions{}})));
  }
}

// Through a layer: what is selected holds the mass that float's best keys hold.
TYPED_TEST(SoftmaxSketch, ALayerKeepsTheMassOfFloat) {
  Random random(839);
  using Layer = quoka::ChunkedPrefill<quoka::ScoredSelector<TypeParam>>;
  const quoka::LayerShape shape{.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim};
  Layer on(shape, options_of<TypeParam>(Sketch::on)),
      off(shape, options_of<TypeParam>(Sketch::off));
  const auto q = random.tensor<float>(1, q_heads, 640, dim);
  const auto k = random.tensor<float>(1, kv_heads, 640, dim);
  Tensor4<float> out(1, q_heads, 128, dim);
  for (Index begin = 0; begin < 640; begin += 128)
    for (Layer* layer : {&on, &off}) {
      const auto at = quoka::view_of(k).slice(begin, 128);
      layer->forward(quoka::view_of(q).slice(begin, 128), at, at, out);
    }
  EXPECT_GT(on.kept_bytes(), 0);
  const auto scores = scores_by<TypeParam>(options_of<TypeParam>(Sketch::off),
                                           SelectorInput{.q = quoka::view_of(q).slice(512, 128),
                                                         .k = Rows(k).slice(0, 512),
                                                         .logits = LogitOptions{}});
  Index shared = 0;
  for (Index head = 0; head < kv_heads; ++head) {
    double by_codes = 0.0, in_float = 0.0;
    for (const Position t : on.selection().row(0, head))
      by_codes += static_cast<double>(scores(0, head, t));
    for (const Position t : off.selection().row(0, head)) {
      in_float += static_cast<double>(scores(0, head, t));
      const auto kept = on.selection().row(0, head);
      shared += std::find(kept.begin(), kept.end(), t) != kept.end() ? 1 : 0;
    }
    EXPECT_GT(by_codes, 0.998 * in_float);
    EXPECT_LE(by_codes, in_float * (1 + 1e-6));
  }
  EXPECT_GT(shared, 50) << "of " << 2 * 31;
}

}  // namespace
