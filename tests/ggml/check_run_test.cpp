// The program `check` from its command line to its files, on a tiny random model that reads bytes.

#include "ggml/tiny_llama.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <unistd.h>

namespace {

using nlohmann::json;
using quoka_test::TinyLlama;

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class CheckProgram : public ::testing::Test {
 protected:
  CheckProgram()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                ("quoka_check_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
    TinyLlama("llama", true).write((folder_ / "tiny.gguf").string());
    std::ofstream text(folder_ / "text");
    for (int i = 0; i < 300; ++i)
      text << "A line of a text, one of three hundred, and its end " << i * i << ".\n";
  }
  ~CheckProgram() override { std::filesystem::remove_all(folder_); }

  // The exit status; what it printed is in said_.
  int run(const std::string& arguments, const std::string& model = "tiny.gguf") {
    const std::string command = "cd " + folder_.string() + " && " QUOKA_CHECK " " + model +
                                " text --threads 1 --out out " + arguments + " > said 2>&1";
    const int status = std::system(command.c_str());
    said_ = text_of(folder_ / "said");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  json result() const { return json::parse(text_of(folder_ / "out/check.json")); }
  bool says(const std::string& what) const { return said_.find(what) != said_.npos; }

  const std::filesystem::path folder_;
  std::string said_;
};

const std::string sizes =
    "--lengths 1000,2400 --budgets 64 --ubatch 512 --samples 40 --questions 2 ";
const std::string anything_goes =
    sizes + "--max-perplexity 1e9 --max-kl 1e9 --max-needles 101 --min-gain 1e-9 ";

TEST_F(CheckProgram, WritesWhatItRecommendsVerifiesItAndGoesOnWhereItStopped) {
  ASSERT_EQ(run(anything_goes + "--modes quoka,robust"), 0) << said_;
  const json whole = result(), &measured = whole["steps"]["measure"], &advice = whole["advice"];
  EXPECT_EQ(whole["asked"]["model"]["kv_heads"], 2);
  EXPECT_EQ(whole["asked"]["model"]["head_dim"], 32);
  ASSERT_EQ(measured["by_length"].size(), 4u * 2);
  for (const json& x : measured["by_length"]) {
    EXPECT_GT(x["seconds"], 0.0);
    const bool dense = x["name"] == "llama.cpp" || x["name"] == "exact";
    if (dense) {
      EXPECT_LT(x["kl"], 1e-3) << x;
    } else if (x["length"] == 2400) {
      EXPECT_GT(x["kl"], 1e-3) << "64 of 2,400 keys must be felt: " << x;
    }
  }
  EXPECT_EQ(measured["needles"].size(), 4u * (2 + 2)) << measured["needles"];
  ASSERT_EQ(whole["steps"]["layers"]["layers"].size(), 4u);
  for (const json& layer : whole["steps"]["layers"]["layers"]) EXPECT_GT(layer["kl"], 0.0) << layer;

  EXPECT_EQ(advice["use"], "selection");
  EXPECT_TRUE(advice["kept"]);
  EXPECT_EQ(whole["steps"]["verify"]["by_length"].size(), 3u * 2);
  const json settings = json::parse(text_of(folder_ / "out/settings.json"));
  EXPECT_EQ(settings, advice["settings"]);
  EXPECT_EQ(settings["budget"], 64);
  EXPECT_EQ(settings["model"]["q_heads"], 8);
  EXPECT_TRUE(says("On the other half of the text")) << said_;

  json stopped = whole;
  stopped["steps"].erase("verify"), stopped["steps"].erase("layers"), stopped.erase("advice");
  std::ofstream(folder_ / "out/check.json") << stopped;
  ASSERT_EQ(run(anything_goes + "--modes quoka,robust"), 0) << said_;
  EXPECT_TRUE(says("goes on where it stopped")) << said_;
  const json again = result();
  EXPECT_EQ(again["steps"]["measure"], measured) << "not measured again";
  EXPECT_TRUE(again["steps"].contains("verify") && again["steps"].contains("layers"));

  // Other settings; and contenders that do not fit side by side.
  ASSERT_EQ(run(anything_goes + "--modes quoka,robust --cache q8_0 --together 3"), 0) << said_;
  EXPECT_TRUE(says("begun anew")) << said_;
  const json grouped = result();
  EXPECT_EQ(grouped["asked"]["cache"], "q8_0");
  EXPECT_EQ(grouped["steps"]["measure 1"]["longest"].size(), 3u);
  ASSERT_EQ(grouped["steps"]["measure 3"]["longest"].size(), 2u);
  EXPECT_EQ(grouped["steps"]["measure 3"]["longest"][0]["name"], "llama.cpp");
  EXPECT_FALSE(grouped["steps"].contains("measure"));
  EXPECT_EQ(grouped["advice"]["use"], "selection");
}

TEST_F(CheckProgram, LeavesHurtLayersDenseAndGivesUp) {
  const std::string nothing_goes = sizes + "--modes quoka --max-perplexity -1e9 --min-gain ";
  ASSERT_EQ(run(nothing_goes + "1e-9"), 0) << said_;
  const json told = result();
  EXPECT_EQ(told["advice"]["use"], "exact");
  ASSERT_TRUE(told["steps"].contains("refine"));
  EXPECT_NE(told["steps"]["refine"]["longest"][2]["name"].get<std::string>().find(", dense 0"),
            std::string::npos);
  EXPECT_EQ(json::parse(text_of(folder_ / "out/settings.json"))["mode"], "exact");
  ASSERT_EQ(run(nothing_goes + "1e9"), 0) << said_;
  EXPECT_EQ(result()["advice"]["use"], "nothing");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out/settings.json"))
      << "settings that are not recommended are not left";
  EXPECT_TRUE(says("do not use it here")) << said_;
}

TEST_F(CheckProgram, NamesWhatItCannotDo) {
  EXPECT_EQ(run("--lengths 4090"), 1);
  EXPECT_TRUE(says("4090") && says("context of 4096")) << said_;
  EXPECT_EQ(run("--lengths 100"), 1);
  EXPECT_TRUE(says("--lengths 100: at least 128")) << said_;
  std::filesystem::resize_file(folder_ / "text", 60);
  EXPECT_EQ(run(sizes), 1);
  EXPECT_TRUE(says("2400 are wanted")) << said_;
  TinyLlama("llama").write((folder_ / "mute.gguf").string());
  EXPECT_EQ(run(sizes, "mute.gguf"), 1);
  EXPECT_TRUE(says("no vocabulary")) << said_;
  EXPECT_NE(run(sizes, "none.gguf"), 0);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out/check.json"));
}

}  // namespace
