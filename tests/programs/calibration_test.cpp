// examples/support/calibration.hpp: a layer's error at each budget, against that of `evaluate`, and the
// policy that follows; policy_layers.hpp: layers that follow it.

#include "support/accuracy.hpp"
#include "support/calibrate_capture.hpp"
#include "support/fixtures.hpp"

#include <fmt/format.h>

#include <sstream>

namespace {

using namespace quoka_test;
using nlohmann::json;
using quoka_examples::Calibration;
using quoka_examples::DenseReference;
using quoka_examples::LayerCapture;
using quoka_examples::LayerPolicy;
using quoka_examples::MethodOptions;

constexpr Index q_heads = 4, kv_heads = 2, dim = 12, v_dim = 8, len = 107, chunk = 20;
constexpr float scale = 0.4f;  // not 1 / sqrt(dim)

// Layers 3, 5 and 11. The more their values have in common, the less a selection costs, relatively.
std::vector<LayerCapture> random_layers(Random& random) {
  std::vector<LayerCapture> layers;
  for (const auto& [name, in_common] :
       {std::pair{"layer3", 20.0f}, std::pair{"5", 1.0f}, std::pair{"layers.11.attention", 0.0f}}) {
    layers.push_back({name, random.tensor<float>(1, q_heads, len, dim),
                      random.tensor<float>(1, kv_heads, len, dim),
                      random.tensor<float>(1, kv_heads, len, v_dim)});
    auto& v = layers.back().v;
    for (Index i = 0; i < v.size(); ++i) v.data()[i] += in_common;
  }
  return layers;
}

// What accuracy_test.cpp compares with its definition: of a layer, over the chunks with a past.
double output_error(const LayerCapture& layer, Index budget) {
  quoka::ThreadPool threads(1);
  const std::vector<LayerCapture> one{layer};
  DenseReference reference(one, chunk, {.scale = scale}, threads);
  const quoka_examples::AccuracyRules with_a_past{.past_per_budget = 0.01};
  return quoka_examples::AccuracyRun("first_recent", {.budget = Budget::keys(budget)}, reference,
                                     with_a_past, threads)
      .run()[0]
      .result()
      .output_error;
}
// One KV head and its queries.
LayerCapture kv_head_of(const LayerCapture& layer, Index head) {
  const auto part = [&](const Tensor4<float>& x, Index heads) {
    const std::array<Index, 4> begin{0, head * heads, 0, 0},
        size{1, heads, x.dimension(2), x.dimension(3)};
    return Tensor4<float>(x.slice(begin, size));
  };
  return {layer.name, part(layer.q, q_heads / kv_heads), part(layer.k, 1), part(layer.v, 1)};
}

Calibration calibrated(const std::vector<LayerCapture>& layers, const std::vector<json>& ladder,
                       const std::string& selector = "first_recent") {
  quoka::ThreadPool threads(2);
  const DenseReference reference(layers, chunk, {.scale = scale}, threads);
  return quoka_examples::calibrate_capture(reference, selector, {}, ladder, threads);
}

TEST(Calibration, ErrorsAreThoseOfTheOutputs) {
  Random random(941);
  const auto layers = random_layers(random);
  const std::vector<json> ladder{16, 30};
  const Calibration calibration = calibrated(layers, ladder);
  ASSERT_EQ(calibration.rungs(), 2);
  for (Index rung = 0; rung < 2; ++rung)
    for (Index layer = 0; layer < 3; ++layer) {
      const LayerCapture& of = layers[uz(layer)];
      const auto budget = ladder[uz(rung)].get<Index>();
      double worst = 0.0;
      for (Index head = 0; head < kv_heads; ++head) {
        const double error = output_error(kv_head_of(of, head), budget);
        EXPECT_NEAR(calibration.error(rung, layer, head), error, 1e-5);
        worst = std::max(worst, error);
      }
      EXPECT_NEAR(calibration.error(rung, layer), output_error(of, budget), 1e-5);
      EXPECT_NEAR(calibration.worst_kv_head(rung, layer), worst, 1e-5);
    }
}

TEST(Calibration, ALayerTakesTheFirstBudgetWithinTheTolerance) {
  Random random(942);
  const Calibration calibration = calibrated(random_layers(random), {16, 30, 60});
  for (Index layer = 0; layer < 3; ++layer) {
    for (Index rung = 0; rung < 3; ++rung) {
      const double error = calibration.error(rung, layer);
      if (rung > 0) {
        ASSERT_LT(error, calibration.error(rung - 1, layer));
      }
      EXPECT_EQ(calibration.choose(error * (1.0 + 1e-9))[uz(layer)], rung);
      EXPECT_EQ(calibration.choose(error * (1.0 - 1e-9))[uz(layer)], rung + 1);
    }
    EXPECT_EQ(calibration.choose(0.0)[uz(layer)], 3);  // dense
  }
}

TEST(Calibration, ItsPolicyIsReadBackAsItWasChosen) {
  Random random(943);
  const Calibration calibration = calibrated(random_layers(random), {0.1, 0.5});
  // Layer 3 takes the first budget, layer 5 just the second, and layer 11 none.
  const double tolerance = calibration.error(1, 1);
  ASSERT_LT(calibration.error(0, 0), tolerance);
  ASSERT_GT(calibration.error(0, 1), tolerance);
  ASSERT_GT(calibration.error(1, 2), tolerance);
  const json written = calibration.policy(tolerance);
  EXPECT_EQ(written["mode"], "first_recent");
  const LayerPolicy policy = quoka_examples::parse_policy(written);
  ASSERT_TRUE(policy.budget.has_value());
  EXPECT_EQ(policy.budget->count(1000), 100);
  EXPECT_EQ(policy.dense, std::set<Index>{11});
  ASSERT_EQ(policy.budgets.size(), 1u);
  EXPECT_EQ(policy.budgets.at(5).count(1000), 500);
  EXPECT_NO_THROW(policy.check_shape(q_heads, kv_heads, dim));
  EXPECT_THROW(policy.check_shape(q_heads, kv_heads, v_dim), std::invalid_argument);
  EXPECT_EQ(calibration.results().size(), 6u);
  EXPECT_EQ(calibration.results()[3]["layer"], 5);
  EXPECT_EQ(calibration.results()[3]["kv_head_error"][1], calibration.error(1, 1, 1));
}

TEST(Calibration, OfAPresetSaysItsMode) {
  Random random(944);
  const auto layers = random_layers(random);
  EXPECT_EQ(calibrated(layers, {16}, "quoka.recommended").policy(1.0)["mode"], "recommended");
  EXPECT_EQ(calibrated(layers, {16}, "quoka").policy(1.0)["mode"], "paper");
  EXPECT_EQ(calibrated(layers, {16}, "quoka.kernel3").policy(1.0)["mode"], "quoka.kernel3");
}

TEST(Calibration, PrintsARowPerLayerWithWhatThePolicySays) {
  Random random(945);
  const Calibration calibration = calibrated(random_layers(random), {16, 30});
  std::ostringstream out;
  calibration.print(out, calibration.error(1, 1));
  EXPECT_NE(out.str().find("error at 30  worst KV head  policy"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find(fmt::format("{:.4f}", calibration.worst_kv_head(0, 2)) + "  dense"),
            std::string::npos)
      << out.str();
}

TEST(Calibration, LaddersAreDoubledOrGiven) {
  using quoka_examples::doubled_ladder, quoka_examples::given_ladder;
  EXPECT_EQ(doubled_ladder("128", 3), (std::vector<json>{128, 256, 512}));
  EXPECT_EQ(doubled_ladder("0.25", 3), (std::vector<json>{0.25, 0.5}));
  EXPECT_EQ(given_ladder({"16", "30"}), (std::vector<json>{16, 30}));
  EXPECT_TRUE(given_ladder({"0.5"})[0].is_number_float());
  expect_refused([&] { (void)doubled_ladder("1.0", 2); }, {"1.0", "selects nothing"});
  expect_refused([&] { (void)doubled_ladder("mass:0.9", 2); }, {"mass:0.9"});
  expect_refused([&] { (void)given_ladder({}); }, {"needs a budget"});
  expect_refused([&] { (void)given_ladder({"30", "16"}); }, {"not ascending", 30, 16});
  expect_refused([&] { (void)given_ladder({"16", "16"}); }, {"not ascending"});
  expect_refused([&] { (void)given_ladder({"16", "0.5"}); }, {"mixes", 16, "0.5"});
  expect_refused([&] { (void)given_ladder({"relative:0.1"}); }, {"relative:0.1"});
  expect_refused([&] { (void)given_ladder({"many"}); }, {"many"});
  expect_refused([&] { (void)given_ladder({"1.5"}); }, {"1.5"});
}

TEST(Calibration, RefusesWhatItCannotMeasure) {
  Random random(946);
  auto layers = random_layers(random);
  expect_refused([&] { (void)calibrated(layers, {16}, "tidal_decode"); },
                 {"tidal_decode", "shares a choice"});
  expect_refused([&] { (void)calibrated(layers, {16, 100}); }, {100, "longest past"});
  EXPECT_NO_THROW((void)calibrated(layers, {99}));
  layers[1].name = "unnamed";
  expect_refused([&] { (void)calibrated(layers, {16}); }, {"unnamed", "layer11"});
  layers[1].name = "layer03";
  expect_refused([&] { (void)calibrated(layers, {16}); }, {"layer3", "layer03", "both"});
  layers[1].name = "layer5";
  layers[1].v = random.tensor<float>(1, kv_heads, len, dim);
  expect_refused([&] { (void)calibrated(layers, {16}); }, {"layer5", "layer3", "shapes"});
  quoka::ThreadPool threads(1);
  layers.pop_back(), layers.pop_back();
  const DenseReference one_chunk(layers, len, {}, threads);
  expect_refused(
      [&] {
        (void)quoka_examples::calibrate_capture(one_chunk, "first_recent", {}, {16}, threads);
      },
      {len, "one chunk"});
}

TEST(LayerNumbers, AreThoseInTheNames) {
  using quoka_examples::layer_number;
  EXPECT_EQ(layer_number("layer11"), 11);
  EXPECT_EQ(layer_number("7"), 7);
  EXPECT_EQ(layer_number("layers.0.attention"), 0);
  for (const char* name : {"", "unnamed", "layer", "layer1.head2", "layer12345678901234567890"})
    expect_refused([&] { (void)layer_number(name); }, {name});
}

// ---- layers that follow a policy ----------------------------------------------------------------

LayerPolicy policy_of(std::set<Index> dense, std::map<Index, quoka::Budget> budgets) {
  LayerPolicy policy;
  policy.dense = std::move(dense), policy.budgets = std::move(budgets);
  return policy;
}

// Keys that each layer keeps of a past of 80 by a budget of 10.
std::vector<Index> kept(const std::string& method, const LayerPolicy& policy) {
  Random random(947);
  quoka::ThreadPool threads(1);
  const auto captures = random_layers(random);
  const auto layers = quoka_examples::make_policy_layers(
      method, quoka_examples::shape_of(captures[0]), {.budget = Budget::keys(10)}, policy,
      {3, 5, 11}, {.scale = scale});
  std::vector<Index> counts;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const quoka::TensorView<const float> q = captures[i].q, k = captures[i].k, v = captures[i].v;
    layers[i]->append(q.slice(0, 80), k.slice(0, 80), v.slice(0, 80), threads);
    const Selection& keep = layers[i]->select(q.slice(80, 20), threads, k.slice(80, 20));
    counts.push_back(keep.sum_of_counts() / keep.heads());
  }
  return counts;
}

TEST(PolicyLayers, HaveTheirOwnBudgetsByTheirNumbers) {
  using Counts = std::vector<Index>;
  EXPECT_EQ(kept("quoka", {}), (Counts{10, 10, 10}));
  EXPECT_EQ(kept("quoka", policy_of({3, 7}, {{5, Budget::keys(21)}, {0, Budget::keys(33)}})),
            (Counts{80, 21, 10}));
  EXPECT_EQ(kept("quoka.recommended", policy_of({}, {{11, Budget::share(0.5)}})),
            (Counts{10, 10, 40}));
  LayerPolicy with_budget = policy_of({}, {});
  with_budget.budget = Budget::keys(50);  // the caller's
  EXPECT_EQ(kept("quoka", with_budget), (Counts{10, 10, 10}));
  EXPECT_EQ(kept("tidal_decode", policy_of({3}, {})).front(), 80);
}

TEST(PolicyLayers, AreRefusedForAnotherShapeAndWhereLayersShareAChoice) {
  LayerPolicy policy;
  policy.kv_heads = 3;
  expect_refused([&] { kept("quoka", policy); }, {3, kv_heads, "KV heads"});
  expect_refused(
      [&] {
        kept("tidal_decode", policy_of({}, {{5, Budget::keys(20)}}));
      },
      {"tidal_decode", "shares a choice", 1});
}

TEST(Accuracy, FollowsAPolicyByTheNumbersInTheNames) {
  Random random(948);
  quoka::ThreadPool threads(1);
  const auto layers = random_layers(random);
  DenseReference reference(layers, chunk, {.scale = scale}, threads);
  const auto sums = [&](Index budget, std::optional<LayerPolicy> policy) {
    return quoka_examples::AccuracyRun("quoka", {.budget = Budget::keys(budget)}, reference,
                                       {.past_per_budget = 0.0, .policy = std::move(policy)},
                                       threads)
        .run();
  };
  const auto by_policy = sums(9, policy_of({3}, {{11, Budget::keys(30)}})), plain = sums(9, {});
  EXPECT_EQ(by_policy[0].result().output_error, 0.0);
  EXPECT_EQ(by_policy[0].result().kv_pairs, 1.0);
  EXPECT_EQ(by_policy[1].result().output_error, plain[1].result().output_error);
  EXPECT_EQ(by_policy[2].result().output_error, sums(30, {})[2].result().output_error);
  EXPECT_NE(by_policy[2].result().output_error, plain[2].result().output_error);
}

}  // namespace
