// The backend's lines on what it did not do: attention that never came, settings of layers that do not exist.

#include "ggml/said.hpp"
#include "ggml/tiny_llama.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace {

using namespace quoka_ggml;
using namespace quoka_test;

using Variables = std::map<std::string, std::string>;

struct How {
  llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  bool on_device = false;  // as `-dev QuoKA`
};

// What the backend says while a model of four layers, loaded with these variables, reads two tokens, as a server does to
// warm up, then a prompt and three tokens.
std::string said_by(const How& how, const Variables& variables) {
  llama_log_set(only_errors, nullptr);
  load_cpu();
  return said_while([&] {
    restart_with(variables);
    const Folder folder;
    TinyLlama().write(folder / "tiny.gguf");
    llama_model_params of_model = llama_model_default_params();
    ggml_backend_dev_t devices[] = {ggml_backend_dev_by_name("QuoKA"), nullptr};
    if (how.on_device) of_model.devices = devices;
    const llama_model_ptr model(
        llama_model_load_from_file((folder / "tiny.gguf").c_str(), of_model));
    llama_context_params parameters = context_params(1024, 512, 1);
    parameters.flash_attn_type = how.flash;
    Session session(model.get(), parameters);
    session.decode({{{5, 0}, {6, 1, 0, true}}});
    session.cut(0);
    std::vector<TokenAt> prompt;
    for (int i = 0; i < 512; ++i)
      prompt.push_back({static_cast<llama_token>(i % tiny_vocabulary), i});
    session.decode(prompt);
    for (int i = 512; i < 515; ++i) session.decode({{{5, i, 0, true}}});
  });
}
std::size_t count(const std::string& said, const std::string& part) {
  std::size_t times = 0;
  for (std::size_t at = said.find(part); at != said.npos; at = said.find(part, at + 1)) ++times;
  return times;
}
const Variables selecting{{"QUOKA_MODE", "recommended"}, {"QUOKA_BUDGET", "64"}};

TEST(BackendSays, ThatNoAttentionCameAndHowToChangeIt) {
  for (const How& how : {How{.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED},
                         How{.flash = LLAMA_FLASH_ATTN_TYPE_AUTO, .on_device = true}})
    for (const Variables& variables : {selecting, Variables{{"QUOKA_QUIET", "1"}}}) {
      SCOPED_TRACE(how.on_device);
      const std::string said = said_by(how, variables);
      EXPECT_EQ(count(said, "no attention comes here"), 1u) << said;
      EXPECT_EQ(count(said, "-fa on"), 1u) << said;
    }
  for (const auto flash : {LLAMA_FLASH_ATTN_TYPE_ENABLED, LLAMA_FLASH_ATTN_TYPE_AUTO}) {
    const std::string said = said_by({.flash = flash}, selecting);
    EXPECT_EQ(count(said, "no attention"), 0u) << said;
    EXPECT_GE(count(said, "; selected ("), 1u)
        << said;  // layers that differ have lines of their own
  }
  restart_quoka();
}

TEST(BackendSays, ThatNoAttentionCameInItsStatistics) {
  const Folder folder;
  const std::string file = folder / "stats.json";
  const auto none_came = [&] {
    return nlohmann::json::parse(text_of(file))["none_came"].get<std::string>();
  };
  said_by({.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}, {{"QUOKA_STATS", file}});
  EXPECT_NE(none_came().find("-fa on"), std::string::npos);
  said_by({}, {{"QUOKA_STATS", file}});
  restart_quoka();
  EXPECT_EQ(none_came(), "");
}

TEST(BackendSays, WhichLayersOfTheSettingsAreNotThere) {
  Variables settings = selecting;
  settings["QUOKA_DENSE_LAYERS"] = "[3,77,78]";
  EXPECT_EQ(count(said_by({}, settings),
                  "dense_layers names layer 77, 78, and no attention of it comes here: the first "
                  "that comes is of layer 0, the last of layer 3\n"),
            1u);
  settings["QUOKA_DENSE_LAYERS"] = "[3]";
  EXPECT_EQ(count(said_by({}, settings), "names layer"), 0u);
  const Folder folder;
  settings["QUOKA_CONFIG"] =
      folder.written("told.json", R"({"layer_budgets": {"2": 64, "4": 64}})");
  EXPECT_EQ(count(said_by({}, settings), "layer_budgets names layer 4, and"), 1u);
  restart_quoka();
}

TEST(BackendSays, ThatNoLayerSelects) {
  Variables settings = selecting;
  for (const auto& [dense, shown, none] : {std::tuple{"99", "99", true},
                                           {"4", "4", true},
                                           {"[0,1,2,3]", "[0,1,2,3]", true},
                                           {"3", "", false},
                                           {"[0,1,2]", "", false}}) {
    settings["QUOKA_DENSE_LAYERS"] = dense;
    const std::string said = said_by({}, settings);
    EXPECT_EQ(count(said, "no layer selects keys: dense_layers is " + std::string(shown) +
                              ", and 4 of the model's layers could select\n"),
              none ? 1u : 0u)
        << said;
    EXPECT_EQ(count(said, "; selected ("), none ? 0u : 1u) << said;
  }
  settings["QUOKA_MODE"] = "exact";
  settings["QUOKA_DENSE_LAYERS"] = "99";
  EXPECT_EQ(count(said_by({}, settings), "no layer selects"), 0u) << "exact was asked for";
  restart_quoka();
}

TEST(BackendSays, WhatHasNoEffectWithoutAMode) {
  const std::string said = said_by({}, {{"QUOKA_BUDGET", "64"}, {"QUOKA_DECODE", "1"}});
  EXPECT_EQ(count(said, "quoka: budget, decode have no effect: no mode is set"), 1u) << said;
  restart_quoka();
}

}  // namespace
