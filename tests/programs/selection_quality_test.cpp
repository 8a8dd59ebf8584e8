// Does a change make selections worse? On the committed capture (one layer of TinyLlama-1.1B
// IQ2_XXS, a group of 8), each figure stays where it was measured. Bands are half a point of mass
// wide each way and 3 % of the error: near ties between scores, which another instruction set may
// decide otherwise, move them by less than a tenth of that.

#include "support/accuracy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using namespace quoka_examples;

struct Expected {
  const char* method;
  Index budget;
  double mass_kept, worst_percent_mass, output_error;
};

// g++ 12, AVX-512; chunk 128, pasts longer than two budgets.
constexpr Expected measured[] = {
    {"quoka", 128, 0.7401, 0.0453, 0.4954},
    {"quoka", 256, 0.7986, 0.0815, 0.3814},
    {"quoka", 512, 0.8622, 0.1838, 0.2545},
    {"quoka.per_head", 256, 0.7454, 0.0832, 0.4203},
    {"quoka.kernel7", 256, 0.7750, 0.0635, 0.4265},
    {"sample_attention", 256, 0.8350, 0.1631, 0.2999},
    {"oracle", 256, 0.8441, 0.2206, 0.2597},
};

class SelectionQuality : public ::testing::TestWithParam<Expected> {
 protected:
  static void SetUpTestSuite() {
    const SafetensorsFile file(QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors");
    layers = new std::vector<LayerCapture>(load_layers(file));
    quoka::AttentionOptions attention;
    attention.scale = softmax_scale(file);
    threads = new quoka::ThreadPool(2);
    reference = new DenseReference(*layers, 128, attention, *threads);
  }
  static void TearDownTestSuite() {
    delete reference;
    delete threads;
    delete layers;
  }
  static inline std::vector<LayerCapture>* layers = nullptr;
  static inline quoka::ThreadPool* threads = nullptr;
  static inline DenseReference* reference = nullptr;
};

TEST_P(SelectionQuality, IsWhatItWas) {
  const Expected& expected = GetParam();
  const MethodOptions options{.budget = quoka::Budget::keys(expected.budget)};
  const AccuracyRules rules{.overlap = false};
  const Accuracy got =
      overall(AccuracyRun(expected.method, options, *reference, rules, *threads).run());
  EXPECT_NEAR(got.mass_kept, expected.mass_kept, 0.005);
  EXPECT_NEAR(got.worst_percent_mass, expected.worst_percent_mass, 0.01);
  EXPECT_NEAR(got.output_error, expected.output_error, 0.03 * expected.output_error);
}

INSTANTIATE_TEST_SUITE_P(OfMethods, SelectionQuality, ::testing::ValuesIn(measured),
                         [](const auto& test) {
                           std::string name = test.param.method;
                           name.append(1, '_').append(std::to_string(test.param.budget));
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

}  // namespace
