// The small trained models: do they compute here what PyTorch computed, and do selections still
// find what they found before?
#include "support/ask_model.hpp"
#include "support/attention_fixtures.hpp"
#include "support/gguf_writer.hpp"

#include <nlohmann/json.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace quoka_examples {
namespace {

namespace fs = std::filesystem;

// ---- quality ------------------------------------------------------------------------------------

struct Quality {
  const char* model;
  Task task;
  const char* method;
  double measured;  // exact match, in per cent
};

// A selection must find what it found before, except in four samples: another instruction set or order of sums changes
// one or two. The figures are those that this prints (g++ 12, AVX-512):
//
//   build/bench/accuracy -m MODEL.gguf --lengths 512 --samples 40 --budgets 0.125 --selectors METHODS
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

std::string path_of(const std::string& name) { return QUOKA_EXAMPLES_DATA "/trained/" + name; }

SmallModel load(const std::string& name) { return SmallModel(GgufFile(path_of(name + ".gguf"))); }

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
  const SmallModel model = load(expected.model);
  quoka::ThreadPool threads(2);
  const auto asked = ask(model, expected.method, {.budget = quoka::Budget::keys(budget)},
                         {expected.task, length, 0, samples, 1}, threads);
  const auto exact = std::ranges::count_if(asked, &TaskScore::exact, &Asked::score);
  const double percent = 100.0 * static_cast<double>(exact) / static_cast<double>(samples);
  EXPECT_GE(percent, expected.measured - margin);
}

// ---- goldens ------------------------------------------------------------------------------------

// Logits are of size 16 and rounded to 1e-4 in the goldens; the largest difference was 1.3e-4.
// Where AMX's tiles split floats into parts of bfloat16, errors are ten times as large.
const double tolerance = quoka_test::automatic_splits_floats() ? 2e-3 : 2e-4;

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(QUOKA_EXAMPLES_DATA "/trained")) {
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
  for (const auto& entry : fs::directory_iterator(QUOKA_EXAMPLES_DATA "/trained"))
    if (entry.path().extension() == ".gguf") {
      EXPECT_TRUE(std::ranges::count(names, entry.path().stem().string()) == 1) << entry.path();
    }
}

TEST_P(Goldens, AreTheLogitsHere) {
  const SmallModel model = load(GetParam());
  const Index vocabulary = model.vocabulary;
  const auto goldens = nlohmann::json::parse(std::ifstream(path_of(GetParam() + ".golden.json")));
  ASSERT_FALSE(goldens.empty());
  for (const auto& golden : goldens) {
    const TaskSample sample{golden.at("tokens"), golden.at("positions"), golden.at("answers")};
    const auto best = golden.at("best").get<std::vector<std::vector<Token>>>();
    const auto best_logits = golden.at("best_logits").get<std::vector<std::vector<double>>>();
    SmallSession session(model, "dense", {});
    const SmallModel::Rows logits = session.answers(sample, 128);
    ASSERT_EQ(best.size(), sample.positions.size());
    for (std::size_t a = 0; a < best.size(); ++a) {
      SCOPED_TRACE(golden.at("task").get<std::string>() + ", " +
                   std::to_string(sample.tokens.size()) + " tokens, answer " + std::to_string(a));
      const float* row = logits.data() + static_cast<Index>(a) * vocabulary;
      for (std::size_t i = 0; i < best[a].size(); ++i)
        EXPECT_NEAR(row[best[a][i]], best_logits[a][i], tolerance) << "token " << best[a][i];
      // The same best tokens: no other one is larger by more than the tolerance.
      for (Token t = 0; t < vocabulary; ++t) {
        if (std::ranges::count(best[a], t) > 0) continue;
        EXPECT_LT(row[t], best_logits[a].back() + tolerance) << "token " << t;
      }
    }
  }
}

// ---- refused files ----------------------------------------------------------------

// A model of one layer and 16 channels; what a test changes before it is written.
struct Tiny {
  std::string architecture = "smollm3";
  Index q_rows = 32, layers = 1, kv_heads = 1;
  std::string further = "";  // one tensor more
  TensorType type = TensorType::f32;

  std::string refusal() const {
    const std::vector<std::byte> bytes = written();
    try {
      const SmallModel model(GgufFile(bytes, "FILE"));
      return "";
    } catch (const std::runtime_error& error) {
      return error.what();
    }
  }

 private:
  std::vector<std::byte> written() const {
    GgufWriter file;
    file.add("general.architecture", architecture);
    const auto number = [&](const char* key, Index value) {
      file.add(std::string("smollm3.") + key, static_cast<std::uint32_t>(value));
    };
    number("block_count", layers), number("embedding_length", 16);
    number("feed_forward_length", 24), number("vocab_size", 10);
    number("attention.head_count", 4), number("attention.head_count_kv", kv_heads);
    number("attention.key_length", 8), number("attention.value_length", 8);
    number("rope.dimension_count", 8), number("no_rope_layer_interval", 2);
    file.add("smollm3.attention.layer_norm_rms_epsilon", 1e-5f);
    file.add("smollm3.rope.freq_base", 10000.0f);
    const auto tensor = [&](const std::string& name, Index rows, Index columns) {
      file.add_tensor(name + ".weight", {columns, rows}, type,
                      std::vector<std::byte>(static_cast<std::size_t>(rows * columns * 4)));
    };
    tensor("token_embd", 10, 16), tensor("output_norm", 1, 16);
    tensor("blk.0.attn_norm", 1, 16), tensor("blk.0.ffn_norm", 1, 16);
    tensor("blk.0.attn_q", q_rows, 16), tensor("blk.0.attn_k", 8, 16);
    tensor("blk.0.attn_v", 8, 16), tensor("blk.0.attn_output", 16, 32);
    tensor("blk.0.ffn_gate", 24, 16), tensor("blk.0.ffn_up", 24, 16);
    tensor("blk.0.ffn_down", 16, 24);
    if (!further.empty()) tensor(further, 1, 1);
    return file.bytes();
  }
};

TEST(SmallModelRefuses, WhatItWouldComputeWrongly) {
  EXPECT_EQ(Tiny{}.refusal(), "");
  EXPECT_EQ((Tiny{.architecture = "llama"}).refusal(),
            "FILE: its architecture is \"llama\", not smollm3");
  EXPECT_EQ((Tiny{.q_rows = 31}).refusal(),
            "FILE: tensor blk.0.attn_q.weight has 31 rows of 16, not 32 of 16");
  EXPECT_EQ((Tiny{.layers = 0}).refusal(), "FILE: block_count is 0, but must be at least 1");
  EXPECT_EQ((Tiny{.layers = 2}).refusal(), "FILE: there is no tensor blk.1.attn_norm.weight");
  EXPECT_EQ((Tiny{.layers = 2147483647}).refusal(), "FILE: 2147483647 layers, but 11 tensors");
  EXPECT_EQ((Tiny{.kv_heads = 3}).refusal(),
            "FILE: 4 query heads for 3 KV heads of 8 channels do not fit together");
  EXPECT_EQ((Tiny{.further = "extra"}).refusal(), "FILE: tensor extra.weight is not known here");
  EXPECT_EQ((Tiny{.further = "output"}).refusal(),
            "FILE: tensor output.weight has 1 rows of 1, not 10 of 16");
  EXPECT_EQ((Tiny{.type = TensorType::q8_0}).refusal(),
            "FILE: tensor token_embd.weight has type 8; 0 (F32) and 1 (F16) are read");
}

TEST(SmallModelRefuses, TokensOutsideOfItsVocabulary) {
  const SmallModel model = load("needles");
  SmallSession session(model, "dense", {});
  for (const Token token : {-1, 512}) {
    const std::vector<Token> tokens{1, token};
    EXPECT_THROW(session.run(tokens), std::invalid_argument) << token;
  }
  EXPECT_THROW(session.run(std::vector<Token>{}), std::invalid_argument);
  EXPECT_EQ(session.len(), 0);
}

// Whole chunks or not, a question within one chunk or across two: as if the whole prompt were run at once.
TEST(SmallSession, AnswersAreThoseOfTheWholePrompt) {
  const SmallModel model = load("needles");
  for (const Task task : {Task::single, Task::multi_query, Task::vt})
    for (const Index prompt : {128, 131, 133}) {
      const TaskSample sample = evaluation_sample(task, prompt, 5, 1);
      SmallSession by_chunks(model, "dense", {}), at_once(model, "dense", {});
      const auto logits = by_chunks.answers(sample, 32);
      const auto all = model.logits(at_once.run(sample.tokens));
      for (Index a = 0; a < logits.rows(); ++a)
        EXPECT_LT((logits.row(a) - all.row(sample.positions[static_cast<std::size_t>(a)]))
                      .cwiseAbs()
                      .maxCoeff(),
                  1e-4f)
            << name_of(task) << ' ' << prompt;
      EXPECT_EQ(by_chunks.len(), prompt);
    }
}

}  // namespace
}  // namespace quoka_examples
