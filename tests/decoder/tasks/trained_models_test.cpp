// The small trained models: do they compute here what PyTorch computed, and do selections still
// find what they found?
#include "decoder/tasks/ask.hpp"

#include "decoder/file/gguf.hpp"

#include <nlohmann/json.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace quoka_decoder {
namespace {

namespace fs = std::filesystem;

// ---- quality ------------------------------------------------------------------------------------

struct Quality {
  const char* model;
  Task task;
  const char* method;
  double measured;  // exact match, in per cent
};

// A selection must find what it found, but for four samples: what another instruction set or the
// order of sums changes is one or two. The figures are those that this prints (g++ 12, AVX-512):
//
//   decoder ruler -m MODEL.gguf --lengths 512 --samples 40 --budgets 0.125 --selectors METHODS
constexpr Index length = 512, samples = 40, budget = length / 8;
constexpr double margin = 10.0;
constexpr Quality qualities[] = {
    {"needles", Task::single, "dense", 100.0},
    {"needles", Task::haystack, "dense", 100.0},
    {"needles", Task::multi_value, "dense", 97.5},
    {"needles", Task::multi_query, "dense", 100.0},
    {"needles", Task::vt, "dense", 97.5},
    {"needles", Task::multi_query, "oracle", 100.0},
    {"needles", Task::vt, "oracle", 97.5},
    {"needles", Task::single, "quoka", 95.0},
    {"needles", Task::haystack, "quoka", 70.0},
    {"needles", Task::multi_key, "quoka.balanced", 100.0},
    {"needles", Task::haystack, "quoka.balanced", 100.0},
    {"needles", Task::multi_value, "quoka.balanced", 97.5},
    {"needles", Task::multi_query, "quoka.balanced", 100.0},
    {"needles", Task::vt, "quoka.balanced", 97.5},
    {"needles", Task::vt, "sample_attention", 72.5},
    {"words", Task::cwe, "dense", 100.0},
    {"words", Task::cwe, "quoka.balanced", 87.5},
    {"needles", Task::vt, "quoka.recommended", 97.5},
    {"words", Task::cwe, "quoka.recommended", 87.5},
};

std::string path_of(const std::string& name) { return QUOKA_DECODER_TRAINED "/" + name; }

Model load(const std::string& name) {
  return load_model(std::make_shared<const GgufFile>(path_of(name + ".gguf")));
}

class SelectionFinds : public testing::TestWithParam<Quality> {};
INSTANTIATE_TEST_SUITE_P(TrainedModels, SelectionFinds, testing::ValuesIn(qualities),
                         [](const auto& test) {
                           std::string name = test.param.model;
                           name += '_' + name_of(test.param.task) + '_' + test.param.method;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST_P(SelectionFinds, WhatItFound) {
  const Quality& expected = GetParam();
  const Model model = load(expected.model);
  SessionOptions options;
  options.method = expected.method;
  options.selector.budget = quoka::Budget::keys(budget);
  quoka::ThreadPool threads(2);
  const auto asked = ask(model, options, {expected.task, length, 0, samples, 1}, threads);
  const auto exact = std::ranges::count_if(asked, &TaskScore::exact, &Asked::score);
  const double percent = 100.0 * static_cast<double>(exact) / static_cast<double>(samples);
  EXPECT_GE(percent, expected.measured - margin);
}

// ---- goldens ------------------------------------------------------------------------------------

// Logits are of size 16 and rounded to 1e-4 in the goldens; the largest difference was 1.3e-4.
constexpr double tolerance = 2e-4;

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(QUOKA_DECODER_TRAINED)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".golden.json")) names.push_back(name.substr(0, name.find('.')));
  }
  std::ranges::sort(names);
  return names;
}

class Goldens : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(TrainedModels, Goldens, testing::ValuesIn(golden_names()),
                         [](const auto& test) { return test.param; });

TEST(TrainedModels, AllHaveGoldens) {
  const auto names = golden_names();
  EXPECT_FALSE(names.empty());
  for (const auto& entry : fs::directory_iterator(QUOKA_DECODER_TRAINED))
    if (entry.path().extension() == ".gguf") {
      EXPECT_TRUE(std::ranges::count(names, entry.path().stem().string()) == 1) << entry.path();
    }
}

TEST_P(Goldens, AreTheLogitsHere) {
  const Model model = load(GetParam());
  const Index vocabulary = model.config.vocabulary;
  const auto goldens = nlohmann::json::parse(std::ifstream(path_of(GetParam() + ".golden.json")));
  ASSERT_FALSE(goldens.empty());
  quoka::ThreadPool threads(1);
  for (const auto& golden : goldens) {
    const TaskSample sample{golden.at("tokens"), golden.at("positions"), golden.at("answers")};
    const auto best = golden.at("best").get<std::vector<std::vector<Token>>>();
    const auto best_logits = golden.at("best_logits").get<std::vector<std::vector<double>>>();
    const SessionOptions options;
    Session session(model, options, threads);
    const Vector logits = answer_logits(session, sample, options.chunk);
    ASSERT_EQ(best.size(), sample.positions.size());
    for (std::size_t a = 0; a < best.size(); ++a) {
      SCOPED_TRACE(golden.at("task").get<std::string>() + ", " +
                   std::to_string(sample.tokens.size()) + " tokens, answer " + std::to_string(a));
      const float* row = logits.data() + static_cast<Index>(a) * vocabulary;
      for (std::size_t i = 0; i < best[a].size(); ++i)
        EXPECT_NEAR(row[best[a][i]], best_logits[a][i], tolerance) << "token " << best[a][i];
      // The same best tokens: no other one is larger, but by what the tolerance allows.
      for (Token t = 0; t < vocabulary; ++t) {
        if (std::ranges::count(best[a], t) > 0) continue;
        EXPECT_LT(row[t], best_logits[a].back() + tolerance) << "token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace quoka_decoder
