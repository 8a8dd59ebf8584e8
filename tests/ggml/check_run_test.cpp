// The program `check` from its command line to its files, on a tiny random model that reads bytes.

#include "ggml/node.hpp"
#include "ggml/said.hpp"
#include "ggml/tiny_llama.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <numeric>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

using nlohmann::json;
using namespace quoka_ggml;
using quoka_test::Folder, quoka_test::text_of, quoka_test::TinyLlama;

// A program that is run in a folder of its own.
class Command : public ::testing::Test {
 protected:
  // The exit status; what it printed is in said_.
  int run_here(const std::string& command) {
    const int status =
        std::system(("cd " + folder_.string() + " && " + command + " > said 2>&1").c_str());
    said_ = text_of(folder_ / "said");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  bool says(const std::string& what) const { return said_.find(what) != said_.npos; }
  void write(const std::string& name, const std::string& text) const {
    of_test_.written(name, text);
  }

  const Folder of_test_;
  const std::filesystem::path folder_ = of_test_.path();
  std::string said_;
};

class CheckProgram : public Command {
 protected:
  CheckProgram() {
    TinyLlama(true).write((folder_ / "tiny.gguf").string());
    std::ofstream text(folder_ / "text");
    for (int i = 0; i < 300; ++i)
      text << "A line of a text, one of three hundred, and its end " << i * i << ".\n";
  }

  // All contenders read side by side, however much memory is free, unless the arguments say how many do.
  int run(const std::string& arguments, const std::string& model = "tiny.gguf") {
    const bool grouped = arguments.find("--together") != arguments.npos;
    return run_as_is(arguments + (grouped ? "" : " --together 99"), model);
  }
  int run_as_is(const std::string& arguments, const std::string& model = "tiny.gguf") {
    return run_here(QUOKA_CHECK " " + model + " text --threads 1 --out out " + arguments);
  }
  json result() const { return json::parse(text_of(folder_ / "out/check.json")); }
  json settings() const { return json::parse(text_of(folder_ / "out/settings.json")); }
  // The files of a run with this report that was stopped before these steps and its advice.
  void stop_before(json report, const std::vector<const char*>& steps) const {
    for (const char* const step : steps) report["steps"].erase(step);
    report.erase("advice");
    write("out/check.json", report.dump());
  }
};

const std::string small = "--ubatch 512 --samples 40 --arithmetics float ",
                  sizes = small + "--lengths 600,1400 --budgets 64 --questions 2 ",
                  all_is_allowed =
                      "--max-perplexity 1e9 --max-kl 1e9 --max-needles 101 --min-gain 1e-9 ",
                  anything_goes = sizes + all_is_allowed;

TEST_F(CheckProgram, WritesWhatItRecommendsVerifiesItAndGoesOnWhereItStopped) {
  ASSERT_EQ(run(anything_goes + "--modes paper,recommended"), 0) << said_;
  const json whole = result(), &measured = whole["steps"]["measure"], &advice = whole["advice"];
  EXPECT_EQ(whole["asked"]["model"]["kv_heads"], 2);
  EXPECT_EQ(whole["asked"]["model"]["head_dim"], 32);
  ASSERT_EQ(measured["by_length"].size(), 4u * 2);
  for (const json& x : measured["by_length"]) {
    EXPECT_GT(x["seconds"], 0.0);
    const bool dense = x["name"] == "llama.cpp" || x["name"] == "exact";
    if (dense) {
      EXPECT_LT(x["kl"], 1e-3) << x;
    } else if (x["length"] == 1400) {
      EXPECT_GT(x["kl"], 1e-3) << "64 of 1,400 keys must be felt: " << x;
    }
  }
  EXPECT_EQ(measured["needles"].size(), 4u * (2 + 2)) << measured["needles"];
  ASSERT_EQ(whole["steps"]["layers"]["layers"].size(), 4u);
  for (const json& layer : whole["steps"]["layers"]["layers"]) EXPECT_GT(layer["kl"], 0.0) << layer;

  EXPECT_EQ(advice["use"], "selection");
  EXPECT_TRUE(advice["kept"]);
  EXPECT_EQ(whole["steps"]["verify"]["by_length"].size(), 3u * 2);
  EXPECT_EQ(settings(), advice["settings"]);
  EXPECT_EQ(settings()["budget"], 64);
  EXPECT_EQ(settings()["model"]["q_heads"], 8);
  EXPECT_TRUE(says("On the other half of the text")) << said_;
  EXPECT_TRUE(says("check: that took ")) << said_;
  EXPECT_TRUE(says("Use it by QUOKA_CONFIG=" + (folder_ / "out/settings.json").string())) << said_;
  const std::size_t report = said_.find(" settings read 1400 tokens"),
                    began = said_.find("measure");
  EXPECT_LT(report, began) << "how long it takes is said before it starts: " << said_;
  EXPECT_NE(said_.find("minutes with 1 threads", report) & said_.find(" s with 1 threads", report),
            std::string::npos)
      << said_;

  stop_before(whole, {"layers", "verify"});
  ASSERT_EQ(run(anything_goes + "--modes paper,recommended"), 0) << said_;
  EXPECT_TRUE(says("goes on where it stopped")) << said_;
  const json again = result();
  EXPECT_EQ(again["steps"]["measure"], measured) << "not measured again";
  EXPECT_TRUE(again["steps"].contains("verify") && again["steps"].contains("layers"));

  // Other settings; and contenders that do not fit side by side.
  ASSERT_EQ(run(anything_goes + "--modes paper,recommended --cache q8_0 --together 3"), 0) << said_;
  EXPECT_TRUE(says("starting over")) << said_;
  const json grouped = result();
  EXPECT_EQ(grouped["asked"]["cache"], "q8_0");
  EXPECT_EQ(grouped["steps"]["measure 1"]["longest"].size(), 3u);
  ASSERT_EQ(grouped["steps"]["measure 2"]["longest"].size(), 3u);
  EXPECT_EQ(grouped["steps"]["measure 2"]["longest"][0]["name"], "llama.cpp");
  EXPECT_EQ(grouped["steps"]["measure 2"]["longest"][1]["name"], "exact") << "gains are over it";
  EXPECT_EQ(grouped["steps"]["measure 2"]["longest"][2]["name"], "recommended 64");
  EXPECT_FALSE(grouped["steps"].contains("measure"));
  EXPECT_EQ(grouped["advice"]["use"], "selection");
  ASSERT_EQ(run_as_is(anything_goes + "--modes paper,recommended --cache q8_0"), 0) << said_;
  EXPECT_EQ(result()["steps"], grouped["steps"]) << "goes on in the groups that it began with";
}

// Without --together half of the memory decides.
TEST_F(CheckProgram, ReadsSideBySideWhatFits) {
  const std::string flags =
      "--lengths 600 --budgets 64 --ubatch 512 --samples 16 --questions 0 --arithmetics float "
      "--modes paper,recommended --measure-only";
  ASSERT_EQ(run_as_is(flags), 0) << said_;
  const json report = result();
  const Index together = report["together"];
  EXPECT_GE(together, 3);
  EXPECT_EQ(report["steps"].size(), together >= 4 ? 1u : 2u);
}

// The yardsticks for a difference: llama.cpp beside itself, and each sample's divergence.
TEST_F(CheckProgram, MeasuresExactModeAloneAndOwnRounding) {
  ASSERT_EQ(run(small + "--lengths 600 --questions 1 --modes exact --rounding"), 0) << said_;
  const json report = result();
  EXPECT_EQ(report["asked"]["tried"], json({"llama.cpp", "exact"}));
  EXPECT_FALSE(report["steps"].contains("layers")) << "nothing selects";
  EXPECT_NE(report["advice"]["use"], "selection");
  const auto own = [&](const std::string& step, const std::string& name) {
    const json& one = report["steps"][step];
    const std::vector<double> samples = one["kl_of_samples"][name];
    EXPECT_EQ(samples.size(), one["samples"]);
    const double mean =
        std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
    EXPECT_EQ(one["longest"][1]["name"], name);
    EXPECT_DOUBLE_EQ(one["longest"][1]["kl"], mean);
    return mean;
  };
  const double rounding = own("rounding", "llama.cpp without flash attention");
  EXPECT_GT(rounding, 0.0);
  EXPECT_LT(rounding, 1e-3);
  EXPECT_LT(own("measure", "exact"), 1e-3);
}

// A preset's own rule, budgets as shares, settings of one mode, other facts; and no advice.
TEST_F(CheckProgram, OnlyMeasures) {
  const std::string flags = small +
                            "--lengths 600,1200 --budgets own,0.125,0.5 --questions 3 "
                            "--modes recommended,recommended:chunk=32 --measure-only ";
  ASSERT_EQ(run(flags + "--seed 7"), 0) << said_;
  const json report = result(), &measured = report["steps"]["measure"];
  EXPECT_EQ(
      report["asked"]["tried"],
      json({"llama.cpp", "exact", "recommended", "recommended 0.125", "recommended 0.5",
            "recommended:chunk=32", "recommended:chunk=32 0.125", "recommended:chunk=32 0.5"}));
  EXPECT_EQ(report["steps"].size(), 1u);
  EXPECT_FALSE(report.contains("advice"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out/settings.json"));
  const auto kl = [&](std::size_t i) { return measured["longest"][i]["kl"].get<double>(); };
  EXPECT_LT(kl(4), kl(3)) << "half of the keys lose less than an eighth";
  EXPECT_LT(kl(2), kl(4)) << "a short past loses nothing without a budget";
  EXPECT_NE(kl(6), kl(3)) << "chunks of 32 choose otherwise";
  const std::vector<Index> at = measured["sampled_at"];
  EXPECT_EQ(at.size(), 40u);
  EXPECT_TRUE(std::is_sorted(at.begin(), at.end()) && at.front() >= 31 && at.back() < 1199);
  // A sample's loss is that of the perplexity: of those beyond 600 tokens.
  double change = 0, count = 0;
  for (std::size_t i = 0; i < at.size(); ++i)
    if (at[i] >= 600)
      change += measured["loss_of_samples"]["recommended 0.125"][i].get<double>() -
                measured["loss_of_samples"]["llama.cpp"][i].get<double>(),
          ++count;
  EXPECT_NEAR(measured["longest"][3]["perplexity"][0], 100 * std::expm1(change / count), 1e-6);
  ASSERT_EQ(run(flags + "--seed 8"), 0) << said_;
  EXPECT_TRUE(says("starting over")) << said_;
  EXPECT_NE(result()["steps"]["measure"]["kl_of_samples"], measured["kl_of_samples"]);
  for (const char* const wrong : {"--budgets 1", "--budgets 1.5", "--modes dense"}) {
    EXPECT_NE(run(sizes + wrong), 0) << wrong;
    EXPECT_TRUE(says("a budget is own, or a count") || says("a mode is exact")) << said_;
  }
  ASSERT_EQ(run(small + "--lengths 600 --questions 0 --modes exact --measure-only"), 0) << said_;
  EXPECT_EQ(result()["asked"]["facts"], 0);
  EXPECT_TRUE(result()["steps"]["measure"]["needles"].empty());
}

// Every mode in every arithmetic, side by side; what is chosen is written with its own.
TEST_F(CheckProgram, ComparesArithmetics) {
  ASSERT_EQ(run("--lengths 600 --budgets 64 --ubatch 512 --samples 40 --questions 1 --modes "
                "recommended --arithmetics float,bf16,automatic " +
                all_is_allowed),
            0)
      << said_;
  const json report = result();
  const bool has_bf16 = quoka::arithmetic_used(quoka::Arithmetic::bf16) == quoka::Arithmetic::bf16;
  const std::string automatic = name_of(arithmetic_used(quoka::Arithmetic::automatic, GGML_TYPE_F16,
                                                        GGML_TYPE_F16, 512, 1));  // may be a third
  json names{"llama.cpp"};
  for (const std::string mode : {"exact", "recommended 64"}) {
    if (!has_bf16) names.push_back(mode);
    if (has_bf16) names.push_back(mode + " float"), names.push_back(mode + " bf16");
    if (automatic != "float" && automatic != "bf16") names.push_back(mode + " " + automatic);
  }
  EXPECT_EQ(report["asked"]["tried"], names);
  EXPECT_EQ(report["advice"]["use"], "selection") << "all is allowed";
  const std::string name = report["advice"]["contender"];  // or it with layers left dense
  EXPECT_TRUE(std::any_of(names.begin() + 2, names.end(), [&](const json& one) {
    return name.starts_with(one.get<std::string>());
  })) << name;
  const auto names_it = [&](const std::string& arithmetic) {
    return (name + ",").find(" " + arithmetic + ",") != name.npos;
  };
  const std::string expected = names_it("bf16")                              ? "bf16"
                               : names_it(automatic) && automatic != "float" ? "automatic"
                                                                             : "float";
  EXPECT_EQ(settings().value("arithmetic", "automatic"), expected);
  EXPECT_EQ(settings()["mode"], name.starts_with("exact") ? "exact" : "recommended");
  EXPECT_NE(run("--lengths 600 --arithmetics int9"), 0);
  EXPECT_TRUE(says("automatic,float,bf16")) << said_;
}

TEST_F(CheckProgram, LeavesHurtLayersDenseAndGivesUp) {
  const std::string nothing_goes = sizes + "--modes paper --max-kl -1 --min-gain ";
  ASSERT_EQ(run(nothing_goes + "1e-9"), 0) << said_;
  const json report = result();
  EXPECT_EQ(report["advice"]["use"], "exact");
  ASSERT_TRUE(report["steps"].contains("refine"));
  EXPECT_NE(report["steps"]["refine"]["longest"][2]["name"].get<std::string>().find(", dense 0"),
            std::string::npos);
  EXPECT_EQ(settings()["mode"], "exact");
  // `balanced` becomes `recommended` then.
  ASSERT_EQ(
      run(small +
          "--lengths 600 --budgets 64 --questions 1 --modes balanced --max-kl -1 --min-gain 1e-9"),
      0)
      << said_;
  const json refined = result()["steps"]["refine"];
  EXPECT_TRUE(refined["longest"][2]["name"].get<std::string>().ends_with(", as recommended"));
  EXPECT_EQ(refined["settings"]["mode"], "recommended");
  ASSERT_EQ(run(nothing_goes + "1e9"), 0) << said_;
  EXPECT_EQ(result()["advice"]["use"], "nothing");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out/settings.json"))
      << "settings that are not recommended are not left";
  EXPECT_TRUE(says("do not use it here")) << said_;
  EXPECT_TRUE(says("No settings were written")) << said_;
  EXPECT_FALSE(says("settings.json")) << "none that is not there is named: " << said_;
  EXPECT_FALSE(result()["advice"].contains("settings"));
}

// Settings that fail on another text are refined before they are given up. The passes that promise too much are written
// here.
TEST_F(CheckProgram, RefinesWhatDoesNotKeepItsPromise) {
  const std::string flags = small +
                            "--lengths 1200 --budgets 64 --questions 1 --modes paper --max-kl 1e-5 "
                            "--max-perplexity 1e9 --max-needles 101 --min-gain 1e-9";
  ASSERT_EQ(run(flags), 0) << said_;
  json report = result();
  ASSERT_TRUE(report["steps"].contains("refine")) << "too much is lost: " << said_;
  EXPECT_NE(report["advice"]["use"], "selection");
  for (const char* const step : {"measure", "refine"})
    for (json& outcome : report["steps"][step]["longest"]) outcome["kl"] = 0;
  for (json& layer : report["steps"]["layers"]["layers"]) layer["kl"] = 1e-9;
  stop_before(report, {"verify"});
  ASSERT_EQ(run(flags), 0) << said_;
  report = result();
  ASSERT_TRUE(report["steps"].contains("verify again")) << said_;
  EXPECT_EQ(report["steps"]["verify"]["longest"].back()["name"], "paper 64");
  EXPECT_TRUE(
      report["steps"]["verify again"]["longest"].back()["name"].get<std::string>().starts_with(
          "paper 64, dense "))
      << said_;
  EXPECT_EQ(report["advice"]["use"], "exact") << "nor does it keep that one";
  EXPECT_FALSE(report["advice"]["kept"]);

  // One layer that alone moves the logits by more than is allowed is enough, and is left dense.
  report["steps"]["layers"]["layers"][2]["kl"] = 0.49;
  stop_before(report, {"refine", "verify", "verify again"});
  ASSERT_EQ(run(flags), 0) << said_;
  EXPECT_EQ(result()["steps"]["refine"]["longest"].back()["name"], "paper 64, dense 0 2");
}

TEST_F(CheckProgram, NamesWhatItCannotDo) {
  EXPECT_EQ(run("--lengths 4090"), 1);
  EXPECT_TRUE(says("4090") && says("context of 4096")) << said_;
  EXPECT_TRUE(says("--lengths 4000 is the longest that works")) << said_;
  for (const char* const list :
       {"--lengths 1000,", "--lengths=,1000", "--budgets 64,,128", "--modes paper,"}) {
    EXPECT_NE(run(list), 0) << list;
    EXPECT_TRUE(says("is empty")) << said_;
  }
  EXPECT_NE(run("--lengths 1000,x"), 0) << said_;
  EXPECT_EQ(run("--lengths 100"), 1);
  EXPECT_TRUE(says("--lengths 100: at least 128")) << said_;
  std::filesystem::resize_file(folder_ / "text", 60);
  EXPECT_EQ(run(sizes), 1);
  EXPECT_TRUE(says("1400 are wanted")) << said_;
  TinyLlama().write((folder_ / "mute.gguf").string());
  EXPECT_EQ(run(sizes, "mute.gguf"), 1);
  EXPECT_TRUE(says("no vocabulary")) << said_;
  EXPECT_NE(run(sizes, "none.gguf"), 0);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out/check.json"));
}

// The script, with the programs that install and build replaced by ones that note that they were called; and a whole model.
class CheckScript : public Command {
 protected:
  CheckScript() {
    std::filesystem::create_directories(folder_ / "bin");
    for (const std::string name : {"cmake", "ninja", "npm", "apt-get", "sudo", "dpkg-query"}) {
      write("bin/" + name, "#!/bin/sh\ntouch " + (folder_ / "called").string() + "\nexit 1\n");
      std::filesystem::permissions(folder_ / "bin" / name, std::filesystem::perms::owner_all);
    }
    TinyLlama().write(model_);
  }

  int run(const std::string& arguments) {
    return run_here("PATH=" + (folder_ / "bin").string() + ":$PATH bash " QUOKA_CHECK_SCRIPT " " +
                    arguments);
  }
  // Ends with this status before anything is installed or built.
  void expect_at_once(const std::string& arguments, int status) {
    EXPECT_EQ(run(arguments), status) << arguments << ":\n" << said_;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "called") || says("Traceback")) << said_;
  }
  // The --options among its output.
  std::set<std::string> options() const {
    std::set<std::string> all;
    const std::regex option("(^|[ ,])(--[a-z-]+)");
    for (std::sregex_iterator at(said_.begin(), said_.end(), option), end; at != end; ++at)
      all.insert((*at)[2]);
    return all;
  }
  const std::string model_ = of_test_ / "whole.gguf";
};

TEST_F(CheckScript, ListsAndKnowsTheProgramsOptions) {
  ASSERT_EQ(run_here(QUOKA_CHECK " --help"), 0);
  const std::set<std::string> of_program = options();
  for (const char* const arguments : {"--help", "-h", "model.gguf --quick --help"}) {
    expect_at_once(arguments, 0);
    auto listed = options();
    for (const char* const own : {"--compare", "--estimate", "--budget"})
      EXPECT_EQ(listed.erase(own), 1u) << own;
    EXPECT_EQ(listed, of_program);
  }
  expect_at_once("", 2);
  EXPECT_TRUE(says("check.sh MODEL.gguf")) << said_;
  for (const std::string& option : of_program) {
    if (option == "--help") continue;
    expect_at_once(model_ + " --wrong " + option + "=?", 2);
    EXPECT_FALSE(says(option + " is not an option")) << said_;
  }
}

// All that is wrong is named at once, before anything is installed or built.
TEST_F(CheckScript, RefusesBeforeItInstallsOrBuilds) {
  const std::string model = model_, whole = text_of(model_);
  for (const std::size_t size : {10u, 40u, 300u, 1500u})
    write(std::to_string(size) + ".gguf", whole.substr(0, size));
  write("text.gguf", "GGU"), write("check.json", "{}");
  const struct {
    std::string arguments;
    int status;
    std::vector<const char*> named;
  } all[] = {
      {"--estimate " + model,
       0,
       {"4 layers, 4 of them see the whole text; 8 query heads, 2 KV heads of 32; context 4,096"}},
      {"--estimate", 1, {"--estimate wants"}},
      {"--estimate /nowhere.gguf", 1, {"cannot read /nowhere.gguf"}},
      {"--estimate text.gguf", 1, {"does not begin with GGUF"}},
      {"--estimate 10.gguf", 1, {"it ends, or is damaged"}},
      {"--estimate 40.gguf", 1, {"it ends, or is damaged"}},
      {"--estimate 300.gguf", 1, {"it ends, or is damaged"}},
      {"--estimate 1500.gguf", 1, {"it ends, or is damaged"}},
      {"--estimate " + model + " --budget 1",
       1,
       {"1 is not a budget: give a count of keys from 16"}},
      {"--compare", 1, {"--compare wants"}},
      {"--compare /nope", 1, {"there is no file /nope/check.json"}},
      {"--compare " + folder_.string(), 1, {"nothing that check.sh wrote"}},
      {"/nowhere/model.gguf", 2, {"there is no file /nowhere/model.gguf"}},
      {"--quick", 2, {"no MODEL.gguf"}},
      {model + " --budgets own,1.5 --threads 0 --lengths 512,0",
       2,
       {"--budgets is own,1.5, but must be own, counts of keys from 16 on",
        "--threads is 0, but must be a whole number above 0",
        "--lengths is 512,0, but must be numbers of tokens"}},
      {model + " --lenghts 512 --budgets 0.5,x --threads two --cache q4 --modes=fast "
               "--arithmetics float,fp8 nothing.txt --max-kl",
       2,
       {"--lenghts is not an option: --help lists them",
        "--budgets is 0.5,x, but must be own, counts of keys",
        "--threads is two, but must be a whole number above 0",
        "--cache is q4, but must be f16 or q8_0",
        "--modes is fast, but must be exact, paper, balanced or recommended",
        "--arithmetics is float,fp8, but must be automatic, float, bf16 or int8",
        "there is no file nothing.txt", "--max-kl is without a value, but must be a number"}},
  };
  for (const auto& [arguments, status, named] : all) {
    expect_at_once(arguments, status);
    for (const char* const one : named) EXPECT_TRUE(says(one)) << one << ":\n" << said_;
  }
  expect_at_once(model + " --budgets own,.125,1.0,16,1024 --seed 0 --lenghts 512", 2);
  EXPECT_FALSE(says("--budgets") || says("--seed")) << said_;
}

// Good ones go on to what builds, which is missing here.
TEST_F(CheckScript, TakesWhatItsHelpShows) {
  write("text", "A text.");
  EXPECT_NE(
      run(model_ +
          " text --quick --lengths 512,2048 --modes paper,recommended:chunk=256 --arithmetics "
          "automatic,bf16 --budgets 512,0.25,.5,1.0 --cache q8_0 --threads 4 --ubatch 256 --seed 1 "
          "--max-kl 1e-5 --min-gain=1.05 --max-perplexity -1 --out ."),
      0);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "called")) << said_;
  EXPECT_FALSE(says("check.sh: ")) << said_;
}

}  // namespace
