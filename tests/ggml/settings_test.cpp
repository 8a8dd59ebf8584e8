// Settings of the backend: variables, a file, parameters, and refusals in one line.

#include "ggml/settings.hpp"
#include "ggml/settings_text.hpp"

#include <quoka/runtime/isa.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>

#include <unistd.h>

namespace {

using namespace quoka_ggml;

using Variables = std::map<std::string, std::string>;

// Read with these variables, and none after it.
class Parsed {
 public:
  explicit Parsed(const Variables& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    settings = read_settings(problem);
    for (const auto& one : variables) unsetenv(one.first.c_str());
  }
  Settings settings;
  std::string problem;
};

// A file of this text, which is removed when the program ends.
std::string written(const std::string& text) {
  struct Folder {
    const std::filesystem::path path = std::filesystem::path(::testing::TempDir()) /
                                       ("quoka_settings_" + std::to_string(::getpid()));
    Folder() { std::filesystem::create_directory(path); }
    ~Folder() { std::filesystem::remove_all(path); }
  };
  static const Folder folder;
  static int count = 0;
  const auto path = folder.path / (std::to_string(++count) + ".json");
  std::ofstream(path) << text;
  return path.string();
}

TEST(GgmlSettings, AreExactUnlessToldOtherwise) {
  const Parsed parsed({});
  EXPECT_EQ(parsed.problem, "");
  EXPECT_EQ(parsed.settings.mode, "exact");
  EXPECT_EQ(parsed.settings.first_dense, 1);
  EXPECT_TRUE(parsed.settings.policy.dense.empty());
  EXPECT_FALSE(parsed.settings.policy.budget.has_value());
  EXPECT_NE(parsed.settings.summary().find("exact attention"), std::string::npos);
}

TEST(GgmlSettings, Variables) {
  const Parsed parsed({{"QUOKA_MODE", "recommended"},
                       {"QUOKA_BUDGET", "0.25"},
                       {"QUOKA_DENSE_LAYERS", "[2, 5]"},
                       {"QUOKA_CHUNK", "64"},
                       {"QUOKA_QUERIES", "192"},
                       {"QUOKA_DECODE", "1"},
                       {"QUOKA_MIN_PAST", "4096"},
                       {"QUOKA_MIN_QUERIES", "7"},
                       {"QUOKA_THREADS", "3"},
                       {"QUOKA_ARITHMETIC", "bf16"},
                       {"QUOKA_SKETCH", "0"},
                       {"QUOKA_STATS", "true"},
                       {"QUOKA_QUIET", "1"},
                       {"QUOKA_ISA", quoka::isa_levels().front()}});
  EXPECT_EQ(parsed.problem, "");
  const Settings& s = parsed.settings;
  EXPECT_EQ(s.mode, "recommended");
  const auto mass = [](const Settings& of) {
    return std::get<quoka::MassOptions>(of.selection(0));
  };
  EXPECT_EQ(mass(s).budget.count(800), 200);
  EXPECT_EQ(mass(s).queries, 192);
  const Parsed of_preset({{"QUOKA_MODE", "recommended"}, {"QUOKA_QUIET", "1"}});
  EXPECT_EQ(mass(of_preset.settings).queries, quoka::MassOptions::recommended().queries);
  EXPECT_EQ(of_preset.settings.summary().find("budget"), std::string::npos);
  EXPECT_EQ(s.policy.dense, (std::set<Index>{2, 5}));
  EXPECT_EQ(s.first_dense, 0);
  EXPECT_EQ(s.chunk, 64);
  EXPECT_EQ(s.min_past, 4096);
  EXPECT_EQ(s.min_queries, 7);
  EXPECT_EQ(s.threads, 3);
  EXPECT_EQ(s.arithmetic, quoka::Arithmetic::bf16);
  EXPECT_TRUE(s.decode && s.stats && s.quiet && !s.sketch);
  EXPECT_EQ(s.isa, quoka::isa_levels().front());
  EXPECT_NE(s.summary().find("recommended"), std::string::npos);
  EXPECT_NE(s.summary().find("0.25"), std::string::npos);
}

// Without a budget a preset is what the library calls by its name. With a layer's own it is that layer's alone.
TEST(GgmlSettings, APresetWithoutABudgetIsTheLibrarys) {
  for (const char* const mode : {"recommended", "balanced"}) {
    const Parsed parsed(Variables{{"QUOKA_MODE", mode},
                                  {"QUOKA_CONFIG", written(R"({"layer_budgets": {"2": 64}})")}});
    EXPECT_EQ(parsed.problem, "");
    const auto of = std::get<quoka::MassOptions>(parsed.settings.selection(1)),
               preset = std::get<quoka::MassOptions>(quoka::selection_preset(mode));
    EXPECT_EQ(of.threshold, preset.threshold);
    EXPECT_EQ(of.least, preset.least);
    EXPECT_EQ(of.budget.count(9000), 9000);
    const auto own = std::get<quoka::MassOptions>(parsed.settings.selection(2));
    EXPECT_EQ(own.threshold, 0.0f);
    EXPECT_EQ(own.budget.count(9000), 64);
  }
  const Parsed paper(Variables{{"QUOKA_MODE", "paper"}});
  EXPECT_EQ(budget_of(paper.settings.selection(1)).count(9000), 1024);
  EXPECT_NE(paper.settings.summary().find("1024"), std::string::npos);
}

// As `evaluate --calibrate` writes it.
TEST(GgmlSettings, APolicyFileThatVariablesOverrule) {
  const std::string path = written(R"({"budget": 0.125, "dense_layers": [0, 3],
      "layer_budgets": {"2": 0.5, "7": 2048}, "mode": "recommended",
      "model": {"head_dim": 64, "kv_heads": 4, "q_heads": 32}})");
  const Parsed parsed({{"QUOKA_CONFIG", path}, {"QUOKA_BUDGET", "512"}});
  EXPECT_EQ(parsed.problem, "");
  const Settings& s = parsed.settings;
  EXPECT_EQ(s.mode, "recommended");
  EXPECT_EQ(budget_of(s.selection(1)).count(9000), 512);
  EXPECT_EQ(budget_of(s.selection(2)).count(9000), 4500);
  EXPECT_EQ(budget_of(s.selection(7)).count(9000), 2048);
  EXPECT_EQ(s.policy.kv_heads, 4);
  // A backend's own parameters win.
  const Settings more = with_parameters(s, R"({"mode": "paper", "dense_layers": 1})");
  EXPECT_EQ(more.mode, "paper");
  EXPECT_EQ(more.first_dense, 1);
  EXPECT_TRUE(more.policy.dense.empty());
  EXPECT_EQ(budget_of(more.selection(7)).count(9000), 2048);
  EXPECT_EQ(with_parameters(s, nullptr).in_full, s.in_full);
}

TEST(GgmlSettings, StatsAreASwitchOrAPath) {
  for (const char* const path : {"/tmp/a file.json", "here.json", "./1", "folder/yes"}) {
    const Parsed parsed(Variables{{"QUOKA_STATS", path}});
    EXPECT_EQ(parsed.problem, "");
    EXPECT_EQ(parsed.settings.stats_file, path);
    EXPECT_FALSE(parsed.settings.stats);
  }
  for (const char* const on : {"1", "true"})
    EXPECT_TRUE(Parsed(Variables{{"QUOKA_STATS", on}}).settings.stats) << on;
  for (const char* const off : {"0", "false"}) {
    const Parsed parsed(Variables{{"QUOKA_STATS", off}});
    EXPECT_EQ(parsed.problem, "") << off;
    EXPECT_FALSE(parsed.settings.stats) << off;
  }
  for (const char* const neither : {"yes", "on", "2", "1,", "\"\"", "[1]", "stats"}) {
    const Parsed parsed(Variables{{"QUOKA_STATS", neither}});
    EXPECT_NE(parsed.problem.find("0, 1, or a file's path"), std::string::npos) << neither;
    EXPECT_EQ(parsed.settings.stats_file, "") << neither;
  }
}

// A variable with a typo is not a variable: silence would leave its user in exact mode.
TEST(GgmlSettings, UnknownVariablesAreNamedWithTheNearest) {
  const std::pair<const char*, const char*> cases[] = {{"QUOKA_MOED", "QUOKA_MODE"},
                                                       {"QUOKA_BUGDET", "QUOKA_BUDGET"},
                                                       {"QUOKA_DENSE_LAYER", "QUOKA_DENSE_LAYERS"},
                                                       {"QUOKA_MINPAST", "QUOKA_MIN_PAST"},
                                                       {"QUOKA_ARITMETIC", "QUOKA_ARITHMETIC"},
                                                       {"QUOKA_CONFG", "QUOKA_CONFIG"},
                                                       {"QUOKA_STAT", "QUOKA_STATS"},
                                                       {"QUOKA_mode", "QUOKA_MODE"}};
  for (const auto& [name, nearest] : cases) {
    const Parsed parsed(Variables{{name, "paper"}, {"QUOKA_MODE", "recommended"}});
    EXPECT_NE(parsed.problem.find(std::string(name) + " is not a variable"), std::string::npos)
        << parsed.problem;
    EXPECT_NE(parsed.problem.find(std::string(nearest) + " is"), std::string::npos)
        << parsed.problem;
    EXPECT_EQ(parsed.settings.mode, "exact") << name;
  }
  EXPECT_EQ(
      Parsed(Variables{{"QUOKA_TINYLLAMA", "x"}, {"QUOKAS", "x"}, {"MY_QUOKA_MODE", "x"}}).problem,
      "")
      << "not ours";
  const Parsed member(Variables{{"QUOKA_CONFIG", written(R"({"min_pasts": 3})")}});
  EXPECT_NE(member.problem.find("min_pasts is not a setting of this backend, min_past is"),
            std::string::npos)
      << member.problem;
}

TEST(GgmlSettings, KeysOfTheFileAreNoVariables) {
  for (const std::string key : {"layer_budgets", "model"}) {
    const std::string name = variable_of(key);
    EXPECT_EQ(Parsed(Variables{{name, "{}"}}).problem,
              name + " is not a variable of this backend: " + key +
                  " is a key of the file that QUOKA_CONFIG names");
  }
  EXPECT_EQ(Parsed(Variables{{"QUOKA_CONFIG", written(R"({"QUOKA_BUDGET": 64})")}}).problem,
            "QUOKA_BUDGET is not a setting of this backend, budget is");
}

TEST(GgmlSettings, AnEmptyVariableIsNotSet) {
  Variables all{{"QUOKA_CONFIG", ""}, {"QUOKA_MOED", ""}};
  for (const char* const key :
       {"mode", "budget", "dense_layers", "chunk", "decode", "min_past", "min_queries", "threads",
        "sketch", "stats", "quiet", "isa", "arithmetic", "queries"})
    all.emplace(variable_of(key), "");
  const Parsed parsed(all);
  EXPECT_EQ(parsed.problem, "");
  EXPECT_EQ(parsed.settings.in_full, Parsed({}).settings.in_full);
  EXPECT_TRUE(parsed.settings.notes.empty());
}

TEST(GgmlSettings, AllThatIsWrongIsNamedAtOnce) {
  const Parsed parsed(
      {{"QUOKA_MODE", "fast"},
       {"QUOKA_BUDGET", "1.5"},
       {"QUOKA_CHUNK", "0"},
       {"QUOKA_ARITHMETIC", "fp8"},
       {"QUOKA_MOED", "paper"},
       {"QUOKA_STATS", "yes"},
       {"QUOKA_CONFIG", written(R"({"bugdet": 3, "model": {"heads": 3, "q_heads": -1},
                                             "layer_budgets": {"x": 64, "3": 0}})")}});
  for (const char* const named :
       {"mode is \"fast\"", "budget is 1.5", "chunk is 0", "arithmetic is \"fp8\"",
        "QUOKA_MOED is not a variable", "stats is \"yes\"", "bugdet is not a setting", "\"heads\"",
        "q_heads is -1", "\"x\"", "the budget of layer 3 is 0"})
    EXPECT_NE(parsed.problem.find(named), std::string::npos) << named << ": " << parsed.problem;
  EXPECT_EQ(parsed.problem.find('\n'), std::string::npos);
  EXPECT_EQ(parsed.settings.mode, "exact");
}

// Silence would leave its user in exact mode with a budget.
TEST(GgmlSettings, WhatSelectsNothingWithoutAModeIsNoted) {
  const Parsed parsed({{"QUOKA_BUDGET", "512"}, {"QUOKA_DECODE", "1"}, {"QUOKA_THREADS", "2"}});
  EXPECT_EQ(parsed.problem, "");
  ASSERT_EQ(parsed.settings.notes.size(), 1u);
  EXPECT_TRUE(parsed.settings.notes[0].starts_with("budget, decode have no effect: no mode is set"))
      << parsed.settings.notes[0];
  const Parsed of_file(Variables{{"QUOKA_CONFIG", written(R"({"layer_budgets": {"3": 64}})")}});
  ASSERT_EQ(of_file.settings.notes.size(), 1u);
  EXPECT_TRUE(of_file.settings.notes[0].starts_with("layer_budgets has no effect"));
  for (const char* const mode : {"exact", "paper"})  // a mode that is set is meant
    EXPECT_TRUE(Parsed({{"QUOKA_BUDGET", "512"}, {"QUOKA_MODE", mode}}).settings.notes.empty());
  EXPECT_TRUE(Parsed(Variables{{"QUOKA_THREADS", "2"}}).settings.notes.empty());
  // A backend's own parameters.
  EXPECT_EQ(with_parameters({}, R"({"budget": 64, "chunk": 32})").notes.size(), 1u);
  EXPECT_TRUE(with_parameters({}, R"({"budget": 64, "mode": "paper"})").notes.empty());
  EXPECT_TRUE(with_parameters(parsed.settings, R"({"threads": 1})").notes.empty()) << "said before";
}

TEST(GgmlSettings, SaysWhichCameFromTheFile) {
  const std::string path = written(R"({"mode": "paper", "budget": 256, "chunk": 64})");
  const Parsed both({{"QUOKA_CONFIG", path}, {"QUOKA_BUDGET", "512"}, {"QUOKA_MIN_PAST", "9"}});
  EXPECT_TRUE(both.settings.summary().ends_with(
      "; from the environment: budget (in place of 256), min_past; from " + path + ": chunk, mode"))
      << both.settings.summary();
  EXPECT_EQ(Parsed(Variables{{"QUOKA_CONFIG", path}}).settings.sources, "");
  EXPECT_EQ(Parsed({{"QUOKA_BUDGET", "512"}, {"QUOKA_MODE", "paper"}}).settings.sources, "");
}

// The program's mode has a budget of its own, which a backend's other mode does not take over.
TEST(GgmlSettings, AParametersModeHasItsOwnBudget) {
  const Parsed parsed(Variables{{"QUOKA_MODE", "paper"}});
  EXPECT_EQ(budget_of(parsed.settings.selection(0)).count(9000), 1024);
  const Settings own = with_parameters(parsed.settings, R"({"mode": "recommended"})");
  EXPECT_EQ(budget_of(own.selection(0)).count(9000), 9000);  // a threshold without a cap
}

TEST(GgmlSettings, NumbersMayBeginOrEndWithTheirPoint) {
  for (const auto& [text, count] :
       {std::pair{".25", 200}, {"0.25", 200}, {"0.250", 200}, {"1.", 800}, {"1.0", 800}}) {
    const Parsed parsed({{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", text}});
    EXPECT_EQ(parsed.problem, "") << text;
    EXPECT_EQ(budget_of(parsed.settings.selection(0)).count(800), count) << text;
  }
}

// Every variable, with numbers that do not end where they should, of the wrong kind, and at their borders.
TEST(GgmlSettings, RemovedSettingsSayWhatToTake) {
  const Parsed parsed(std::map<std::string, std::string>{{"QUOKA_REST", "1"}});
  EXPECT_NE(parsed.problem.find("QUOKA_REST was removed"), std::string::npos) << parsed.problem;
  EXPECT_NE(parsed.problem.find("a larger budget or more queries"), std::string::npos);
  EXPECT_THROW(quoka_ggml::with_parameters({}, R"({"rest": true})"), std::invalid_argument);
  EXPECT_THROW(quoka_ggml::with_parameters({}, R"({"always": true})"), std::invalid_argument);
}

TEST(GgmlSettings, ValuesAreReadToTheirEnd) {
  const std::vector<std::string> garbage{"1,",
                                         "1024 keys",
                                         "0x10",
                                         "1e",
                                         "[1",
                                         "[1],",
                                         "{}",
                                         "null",
                                         "1;",
                                         "--1",
                                         "99999999999999999999",
                                         "nan",
                                         "1.2.3"};
  for (const char* const name :
       {"QUOKA_MODE", "QUOKA_BUDGET", "QUOKA_DENSE_LAYERS", "QUOKA_CHUNK", "QUOKA_DECODE",
        "QUOKA_MIN_PAST", "QUOKA_MIN_QUERIES", "QUOKA_THREADS", "QUOKA_SKETCH", "QUOKA_QUIET",
        "QUOKA_ISA", "QUOKA_ARITHMETIC", "QUOKA_CONFIG"})
    for (const std::string& value : garbage) {
      const Parsed parsed(Variables{{name, value}});
      EXPECT_NE(parsed.problem, "") << name << "=" << value;
      EXPECT_EQ(parsed.settings.mode, "exact");
    }
}

TEST(GgmlSettings, Arithmetics) {
  const auto named = [](const char* name) { return Parsed(Variables{{"QUOKA_ARITHMETIC", name}}); };
  EXPECT_EQ(Parsed({}).settings.arithmetic, quoka::Arithmetic::automatic);
  EXPECT_EQ(named("automatic").settings.arithmetic, quoka::Arithmetic::automatic);
  EXPECT_EQ(named("float").settings.arithmetic, quoka::Arithmetic::float_);
  EXPECT_EQ(named("bf16").settings.arithmetic, quoka::Arithmetic::bf16);
  EXPECT_EQ(named("int8").settings.arithmetic, quoka::Arithmetic::int8);
  for (const char* const none : {"int9", "BF16", "bfloat16", "16"})
    EXPECT_NE(named(none).problem.find("but must be automatic or float or bf16 or int8"),
              std::string::npos)
        << named(none).problem;
  EXPECT_TRUE(named("float").settings.summary().ends_with("exact attention, in float"));
  EXPECT_TRUE(named("automatic").settings.summary().ends_with("exact attention"));
  const bool has_bf16 =
      quoka::arithmetic_used(quoka::Arithmetic::bf16) != quoka::Arithmetic::float_;
  EXPECT_TRUE(named("bf16").settings.summary().ends_with(
      has_bf16 ? ", in bf16" : ", in float: bf16 is no faster here"));
  EXPECT_EQ(named("bf16").settings.no_faster(), has_bf16 ? "" : "in float: bf16 is no faster here");
  for (const char* const always : {"float", "automatic"})
    EXPECT_EQ(named(always).settings.no_faster(), "");
}

TEST(GgmlSettings, ModesHaveCommasBetweenThemAndListsWithin) {
  using Modes = std::vector<std::string>;
  EXPECT_EQ(modes_of("paper,recommended"), (Modes{"paper", "recommended"}));
  EXPECT_EQ(modes_of("recommended:dense_layers=[0,7]:queries=256,exact"),
            (Modes{"recommended:dense_layers=[0,7]:queries=256", "exact"}));
  EXPECT_EQ(modes_of("exact"), Modes{"exact"});
  EXPECT_EQ(settings_of_mode("recommended:dense_layers=[0,7]")["dense_layers"],
            (nlohmann::json{0, 7}));
}

TEST(GgmlSettings, ModesOfPrograms) {
  EXPECT_EQ(settings_of_mode("exact"), (nlohmann::json{{"mode", "exact"}}));
  EXPECT_EQ(settings_of_mode("exact:arithmetic=bf16:threads=2"),
            (nlohmann::json{{"mode", "exact"}, {"arithmetic", "bf16"}, {"threads", 2}}));
  for (const char* const wrong : {"exact:", "exact:2", "exact:threads=2:", "exact::threads=2"})
    EXPECT_THROW((void)settings_of_mode(wrong), std::invalid_argument) << wrong;
}

// Without a budget the paper's keeps 1,024 keys; the others keep what their threshold keeps, up to all.
TEST(GgmlSettings, EveryPreset) {
  const std::pair<std::string, Index> budgets[] = {
      {"paper", 1024}, {"balanced", 9000}, {"recommended", 9000}};
  for (const auto& [mode, budget] : budgets) {
    const std::map<std::string, std::string> variables{{"QUOKA_MODE", mode}};
    const Parsed parsed(variables);
    EXPECT_EQ(parsed.problem, "");
    const quoka::SelectionOptions got = parsed.settings.selection(1),
                                  wanted = quoka::selection_preset(mode);
    ASSERT_EQ(got.index(), wanted.index());
    EXPECT_EQ(budget_of(got).count(9000), budget);
    if (mode != "paper") {
      EXPECT_EQ(std::get<quoka::MassOptions>(got).queries,
                std::get<quoka::MassOptions>(wanted).queries);
    }
  }
}

TEST(GgmlSettings, WhatIsNotUnderstoodIsNamedAndAttentionStaysExact) {
  const std::pair<std::map<std::string, std::string>, const char*> cases[] = {
      {{{"QUOKA_MODE", "fast"}}, "mode is \"fast\""},
      {{{"QUOKA_MODE", "quoka"}}, "exact or paper or balanced or recommended"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "-3"}}, "budget is -3"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "1.5"}}, "budget is 1.5"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "0"}}, "budget is 0, but must be a count"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "1"}}, "budget is 1, but must be a count"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "true"}}, "budget is true"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "1024,"}}, "budget is \"1024,\""},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_DENSE_LAYERS", "[0,5,]"}}, "dense_layers is \"[0,5,]\""},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_DENSE_LAYERS", "0,5"}},
       "dense_layers is \"0,5\", but must be a whole number from 0 to 10000, or a list of layers "
       "in "
       "brackets such as [0,5]"},
      {{{"QUOKA_CONFIG", ::testing::TempDir()}}, "is a folder, but must be a file"},
      {{{"QUOKA_CONFIG", written(R"({"layer_budgets": [1, 2]})")}},
       "layer_budgets is [1,2], but must be an object such as {\"7\": 2048, \"8\": 0.5}"},
      {{{"QUOKA_CONFIG", written(R"({"model": 3})")}}, "model is 3, but must be an object"},
      {{{"QUOKA_CONFIG", written(R"({"mode": "paper",})")}}, "cannot be read from byte"},
      {{{"QUOKA_CONFIG", written(R"({"mode": "paper"} x)")}}, "cannot be read from byte"},
      {{{"QUOKA_CONFIG", written(R"({"mode": "paper", "budget": 9, "mode": "exact"})")}},
       "\"mode\" occurs twice"},
      {{{"QUOKA_CONFIG", written(R"({"model": {"q_heads": 1, "q_heads": 2}})")}},
       "\"q_heads\" occurs twice"},
      {{{"QUOKA_CONFIG", written(R"({"mode": 3})")}}, "mode is 3"},
      {{{"QUOKA_CONFIG", written(R"({"layer_budgets": {"3": 0}})")}}, "layer 3 is 0"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "mass:0.9"}},
       "budget is \"mass:0.9\", but must be a count of keys"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_DENSE_LAYERS", "99999999999"}}, "dense_layers"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_CHUNK", "0"}}, "chunk is 0"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_QUERIES", "-1"}}, "queries is -1"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_THREADS", "-1"}}, "threads is -1"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_DECODE", "2"}}, "decode is 2"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_CONFIG", "/nowhere"}}, "cannot read /nowhere"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_CONFIG", written("[1]")}}, "is not a JSON object"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_CONFIG", written("{\"bugdet\": 3}")}}, "bugdet"},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_ISA", "x87"}}, "isa is \"x87\""},
      {{{"QUOKA_MODE", "paper"}, {"QUOKA_ARITHMETIC", "fp8"}}, "arithmetic is \"fp8\""},
      {{{"QUOKA_CONFIG", written(R"({"mode": "paper", "layer_budgets": {"3": "mass:0.5"}})")}},
       "(budgets by scores, mass: and relative:, were removed)"},
      {{{"QUOKA_CONFIG", written(R"({"mode": "paper", "layer_budgets": {"x": 3}})")}}, "\"x\""},
      {{{"QUOKA_CONFIG", written(R"({"mode": "paper", "model": {"heads": 3}})")}}, "\"heads\""},
  };
  for (const auto& [variables, named] : cases) {
    const Parsed parsed(variables);
    EXPECT_NE(parsed.problem.find(named), std::string::npos) << named << ": " << parsed.problem;
    EXPECT_EQ(parsed.settings.mode, "exact");
    EXPECT_EQ(parsed.problem.find('\n'), std::string::npos);
  }
}

TEST(GgmlSettings, BadParametersThrow) {
  for (const char* const text :
       {R"({"mode": "fast"})", "[1]", "{", R"({"threads": 2000})", R"({"isa": "sse2"})",
        R"({"moed": "paper"})", R"({"mode": "paper", "mode": "paper"})"})
    EXPECT_THROW((void)with_parameters({}, text), std::invalid_argument) << text;
}

// They would change nothing: one backend has none of its own. Those of the program stay what they are.
TEST(GgmlSettings, SettingsOfTheWholeProgramAreNoParameters) {
  const Parsed parsed({{"QUOKA_MIN_QUERIES", "7"}, {"QUOKA_STATS", "1"}, {"QUOKA_QUIET", "1"}});
  for (const auto& [parameter, named] :
       {std::pair{R"({"isa": "x86-64-v3"})", "isa is \"x86-64-v3\", but must be QUOKA_ISA's"},
        {R"({"min_queries": 7})", "min_queries is 7, but must be QUOKA_MIN_QUERIES's"},
        {R"({"stats": true})", "stats is true, but must be QUOKA_STATS's"},
        {R"({"quiet": 0})", "quiet is 0, but must be QUOKA_QUIET's"}})
    try {
      (void)with_parameters(parsed.settings, parameter);
      ADD_FAILURE() << parameter;
    } catch (const std::invalid_argument& e) {
      EXPECT_EQ(std::string(e.what()).find(named), 0u) << e.what();
    }
  const Settings of_backend = with_parameters(parsed.settings, R"({"mode": "paper"})");
  EXPECT_EQ(of_backend.min_queries, 7);
  EXPECT_TRUE(of_backend.stats && of_backend.quiet);
}

}  // namespace
