// Settings of the backend: variables, a file, parameters, and refusals in one line.

#include "ggml/said.hpp"
#include "ggml/settings.hpp"
#include "ggml/settings_text.hpp"

#include <quoka/runtime/isa.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>

namespace {

using namespace quoka_ggml;

using Variables = std::map<std::string, std::string>;

// "MODE=paper BUDGET=64": these variables, QUOKA_ before each.
Variables named(const std::string& words) {
  Variables all;
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    const std::size_t at = word.find('=');
    all["QUOKA_" + word.substr(0, at)] = word.substr(at + 1);
  }
  return all;
}

// Read with these variables, and none after it.
class Parsed {
 public:
  explicit Parsed(const Variables& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    settings = read_settings(problem);
    for (const auto& one : variables) unsetenv(one.first.c_str());
  }
  explicit Parsed(const std::string& words) : Parsed(named(words)) {}

  // Refused in one line that says this, and exact.
  void expect_refused(const std::string& says) const {
    EXPECT_NE(problem.find(says), std::string::npos) << says << ": " << problem;
    EXPECT_FALSE(problem.empty()) << says;
    EXPECT_EQ(problem.find('\n'), std::string::npos);
    EXPECT_EQ(settings.mode, "exact");
  }

  Settings settings;
  std::string problem;
};

Index keys(const Settings& s, int layer, Index past = 9000) {
  return budget_of(s.selection(layer)).count(past);
}
quoka::MassOptions mass(const Settings& s, int layer = 1) {
  return std::get<quoka::MassOptions>(s.selection(layer));
}

// A file of this text, which is removed when the program ends; or the variable that names it.
std::string written(const std::string& text) {
  static const quoka_test::Folder folder;
  static int count = 0;
  return folder.written(std::to_string(++count) + ".json", text);
}
std::string config(const std::string& text) { return "CONFIG=" + written(text); }

TEST(GgmlSettings, AreExactUnlessToldOtherwise) {
  const Parsed parsed("");
  EXPECT_EQ(parsed.problem, "");
  EXPECT_EQ(parsed.settings.mode, "exact");
  EXPECT_EQ(parsed.settings.first_dense, 1);
  EXPECT_TRUE(parsed.settings.policy.dense.empty());
  EXPECT_FALSE(parsed.settings.policy.budget.has_value());
  EXPECT_NE(parsed.settings.summary().find("exact attention"), std::string::npos);
}

TEST(GgmlSettings, EveryVariable) {
  const std::string isa = quoka::isa_levels().front();
  const Parsed parsed(
      "MODE=recommended BUDGET=0.25 DENSE_LAYERS=[2,5] CHUNK=64 QUERIES=192 DECODE=1 MIN_PAST=4096 "
      "MIN_QUERIES=7 THREADS=3 ARITHMETIC=bf16 SKETCH=0 STATS=true QUIET=1 ISA=" +
      isa);
  EXPECT_EQ(parsed.problem, "");
  const Settings& s = parsed.settings;
  EXPECT_EQ(s.mode, "recommended");
  EXPECT_EQ(keys(s, 0, 800), 200);
  EXPECT_EQ(mass(s).queries, 192);
  EXPECT_EQ(s.policy.dense, (std::set<Index>{2, 5}));
  EXPECT_EQ(s.first_dense, 0);
  EXPECT_EQ(s.chunk, 64);
  EXPECT_EQ(s.min_past, 4096);
  EXPECT_EQ(s.min_queries, 7);
  EXPECT_EQ(s.threads, 3);
  EXPECT_EQ(s.arithmetic, quoka::Arithmetic::bf16);
  EXPECT_TRUE(s.decode && s.stats && s.quiet && !s.sketch);
  EXPECT_EQ(s.isa, isa);
  EXPECT_NE(s.summary().find("recommended"), std::string::npos);
  EXPECT_NE(s.summary().find("0.25"), std::string::npos);
}

// Without a budget a preset is what the library calls by its name: the paper's keeps 1,024 keys, others keep what their
// threshold keeps, up to all. With a layer's own budget it is that layer's alone.
TEST(GgmlSettings, APresetIsTheLibrarys) {
  for (const std::string mode : {"recommended", "balanced"}) {
    const Parsed parsed("MODE=" + mode + " " + config(R"({"layer_budgets": {"2": 64}})"));
    EXPECT_EQ(parsed.problem, "");
    const auto of = mass(parsed.settings), own = mass(parsed.settings, 2),
               preset = std::get<quoka::MassOptions>(quoka::selection_preset(mode));
    EXPECT_EQ(of.threshold, preset.threshold);
    EXPECT_EQ(of.least, preset.least);
    EXPECT_EQ(of.queries, preset.queries);
    EXPECT_EQ(of.budget.count(9000), 9000);
    EXPECT_EQ(own.threshold, 0.0f);
    EXPECT_EQ(own.budget.count(9000), 64);
    EXPECT_EQ(Parsed("QUIET=1 MODE=" + mode).settings.summary().find("budget"), std::string::npos);
  }
  const Settings paper = Parsed("MODE=paper").settings;
  EXPECT_TRUE(std::holds_alternative<quoka::QuokaOptions>(paper.selection(1)));
  EXPECT_EQ(keys(paper, 1), 1024);
  EXPECT_NE(paper.summary().find("1024"), std::string::npos);
  // A backend's other mode does not take over the budget of the program's mode.
  EXPECT_EQ(keys(with_parameters(paper, R"({"mode": "recommended"})"), 0), 9000);
}

// As `evaluate --calibrate` writes it.
TEST(GgmlSettings, APolicyFileThatVariablesOverrule) {
  const Parsed parsed("BUDGET=512 " + config(R"({"budget": 0.125, "dense_layers": [0, 3],
      "layer_budgets": {"2": 0.5, "7": 2048}, "mode": "recommended",
      "model": {"head_dim": 64, "kv_heads": 4, "q_heads": 32}})"));
  EXPECT_EQ(parsed.problem, "");
  const Settings& s = parsed.settings;
  EXPECT_EQ(s.mode, "recommended");
  EXPECT_EQ(keys(s, 1), 512);
  EXPECT_EQ(keys(s, 2), 4500);
  EXPECT_EQ(keys(s, 7), 2048);
  EXPECT_EQ(s.policy.kv_heads, 4);
  // A backend's own parameters win.
  const Settings more = with_parameters(s, R"({"mode": "paper", "dense_layers": 2})");
  EXPECT_EQ(more.mode, "paper");
  EXPECT_EQ(more.first_dense, 2);
  EXPECT_TRUE(more.policy.dense.empty());
  EXPECT_EQ(keys(more, 7), 2048);
  EXPECT_EQ(with_parameters(s, nullptr).in_full, s.in_full);
}

TEST(GgmlSettings, StatsAreASwitchOrAPath) {
  const auto stats = [](const char* value) { return Parsed(Variables{{"QUOKA_STATS", value}}); };
  for (const char* const path : {"/tmp/a file.json", "here.json", "./1", "folder/yes"}) {
    const Parsed parsed = stats(path);
    EXPECT_EQ(parsed.problem, "");
    EXPECT_EQ(parsed.settings.stats_file, path);
    EXPECT_FALSE(parsed.settings.stats);
  }
  for (const auto& [value, on] :
       {std::pair{"1", true}, {"true", true}, {"0", false}, {"false", false}}) {
    EXPECT_EQ(stats(value).problem, "") << value;
    EXPECT_EQ(stats(value).settings.stats, on) << value;
  }
  for (const char* const neither : {"yes", "on", "2", "1,", "\"\"", "[1]", "stats"}) {
    stats(neither).expect_refused("0, 1, or a file's path");
    EXPECT_EQ(stats(neither).settings.stats_file, "") << neither;
  }
}

TEST(GgmlSettings, AVariableThatIsEmptyOrNotOursIsNotSet) {
  Variables all{{"QUOKA_CONFIG", ""},     {"QUOKA_MOED", ""},       {"QUOKA_SMOLLM2", "x"},
                {"QUOKA_TEST_SLOW", "x"}, {"QUOKA_NODE_SEED", "x"}, {"QUOKA_ATTENTION_CASES", "x"},
                {"QUOKAS", "x"},          {"MY_QUOKA_MODE", "x"}};
  for (const char* const key :
       {"mode", "budget", "dense_layers", "chunk", "decode", "min_past", "min_queries", "threads",
        "sketch", "stats", "quiet", "isa", "arithmetic", "queries"})
    all.emplace(variable_of(key), "");
  const Parsed parsed(all);
  EXPECT_EQ(parsed.problem, "");
  EXPECT_EQ(parsed.settings.in_full, Parsed("").settings.in_full);
  EXPECT_TRUE(parsed.settings.notes.empty());
}

// Silence would leave its user in exact mode with a budget.
TEST(GgmlSettings, WhatSelectsNothingWithoutAModeIsNoted) {
  const auto noted = [](const Settings& s, const char* note) {
    EXPECT_EQ(s.notes.size(), *note == '\0' ? 0u : 1u);
    EXPECT_TRUE(*note == '\0' || s.notes[0].starts_with(note)) << s.notes[0];
  };
  const Parsed parsed("BUDGET=512 DECODE=1 THREADS=2");
  EXPECT_EQ(parsed.problem, "");
  noted(parsed.settings, "budget, decode have no effect: no mode is set");
  noted(Parsed(config(R"({"layer_budgets": {"3": 64}})")).settings, "layer_budgets has no effect");
  for (const char* const fine : {"BUDGET=512 MODE=exact", "BUDGET=512 MODE=paper", "THREADS=2"})
    noted(Parsed(fine).settings, "");
  // A backend's own parameters.
  noted(with_parameters({}, R"({"budget": 64, "chunk": 32})"), "budget, chunk have no effect");
  noted(with_parameters({}, R"({"budget": 64, "mode": "paper"})"), "");
  noted(with_parameters(parsed.settings, R"({"threads": 1})"), "");  // said before
}

TEST(GgmlSettings, SaysWhichCameFromTheFile) {
  const std::string path = written(R"({"mode": "paper", "budget": 256, "chunk": 64})");
  const Parsed both("BUDGET=512 MIN_PAST=9 CONFIG=" + path);
  EXPECT_TRUE(both.settings.summary().ends_with(
      "; from the environment: budget (in place of 256), min_past; from " + path + ": chunk, mode"))
      << both.settings.summary();
  EXPECT_EQ(Parsed("CONFIG=" + path).settings.sources, "");
  EXPECT_EQ(Parsed("BUDGET=512 MODE=paper").settings.sources, "");
}

TEST(GgmlSettings, NumbersMayBeginOrEndWithTheirPoint) {
  for (const auto& [text, count] :
       {std::pair{".25", 200}, {"0.25", 200}, {"0.250", 200}, {"1.", 800}, {"1.0", 800}}) {
    const Parsed parsed(std::string("MODE=paper BUDGET=") + text);
    EXPECT_EQ(parsed.problem, "") << text;
    EXPECT_EQ(keys(parsed.settings, 0, 800), count) << text;
  }
}

TEST(GgmlSettings, Arithmetics) {
  const auto of = [](const std::string& name) { return Parsed("ARITHMETIC=" + name).settings; };
  EXPECT_EQ(Parsed("").settings.arithmetic, quoka::Arithmetic::automatic);
  const bool has_bf16 =
      quoka::arithmetic_used(quoka::Arithmetic::bf16) != quoka::Arithmetic::float_;
  const std::string no_faster = has_bf16 ? "" : "in float: bf16 is no faster here";
  const std::tuple<const char*, quoka::Arithmetic, std::string> cases[] = {
      {"automatic", quoka::Arithmetic::automatic, "exact attention"},
      {"float", quoka::Arithmetic::float_, "exact attention, in float"},
      {"bf16", quoka::Arithmetic::bf16, has_bf16 ? ", in bf16" : ", " + no_faster}};
  for (const auto& [name, arithmetic, ends] : cases) {
    EXPECT_EQ(of(name).arithmetic, arithmetic);
    EXPECT_TRUE(of(name).summary().ends_with(ends)) << of(name).summary();
    EXPECT_EQ(of(name).no_faster(), arithmetic == quoka::Arithmetic::bf16 ? no_faster : "");
  }
  EXPECT_EQ(of("int8").arithmetic, quoka::Arithmetic::int8);
}

TEST(GgmlSettings, ModesOfPrograms) {
  using Modes = std::vector<std::string>;
  EXPECT_EQ(modes_of("paper,recommended"), (Modes{"paper", "recommended"}));
  EXPECT_EQ(modes_of("recommended:dense_layers=[0,7]:queries=256,exact"),
            (Modes{"recommended:dense_layers=[0,7]:queries=256", "exact"}));
  EXPECT_EQ(modes_of("exact"), Modes{"exact"});
  EXPECT_EQ(settings_of_mode("recommended:dense_layers=[0,7]")["dense_layers"],
            (nlohmann::json{0, 7}));
  EXPECT_EQ(settings_of_mode("exact"), (nlohmann::json{{"mode", "exact"}}));
  EXPECT_EQ(settings_of_mode("exact:arithmetic=bf16:threads=2"),
            (nlohmann::json{{"mode", "exact"}, {"arithmetic", "bf16"}, {"threads", 2}}));
  for (const char* const wrong : {"exact:", "exact:2", "exact:threads=2:", "exact::threads=2"})
    EXPECT_THROW((void)settings_of_mode(wrong), std::invalid_argument) << wrong;
}

// ---- refusals -----------------------------------------------------------------------------------------------------------

TEST(GgmlSettings, WhatIsNotUnderstoodIsNamedAndAttentionStaysExact) {
  const std::pair<std::string, const char*> cases[] = {
      {"MODE=fast", "mode is \"fast\""},
      {"MODE=quoka", "exact or paper or balanced or recommended"},
      {"MODE=paper BUDGET=-3", "budget is -3"},
      {"MODE=paper BUDGET=1024,", "budget is \"1024,\""},
      {"MODE=paper DENSE_LAYERS=[0,5,]", "dense_layers is \"[0,5,]\""},
      {"MODE=paper DENSE_LAYERS=99999999999", "dense_layers"},
      {"MODE=paper CHUNK=0", "chunk is 0"},
      {"MODE=paper QUERIES=-1", "queries is -1"},
      {"MODE=paper THREADS=-1", "threads is -1"},
      {"MODE=paper DECODE=2", "decode is 2"},
      {"MODE=paper ISA=x87", "isa is \"x87\""},
      {"MODE=paper ARITHMETIC=fp8", "arithmetic is \"fp8\""},
      {"ARITHMETIC=int9", "but must be automatic or float or bf16 or int8"},
      {"ARITHMETIC=BF16", "but must be automatic or float or bf16 or int8"},
      {"ARITHMETIC=bfloat16", "but must be automatic or float or bf16 or int8"},
      {"ARITHMETIC=16", "but must be automatic or float or bf16 or int8"},
      {"MODE=paper CONFIG=/nowhere", "cannot read /nowhere"},
      {"CONFIG=" + ::testing::TempDir(), "is a folder, but must be a file"},
      // A variable with a typo is not a variable: silence would leave its user in exact mode.
      {"MODE=paper MOED=paper", "QUOKA_MOED is not a variable of this backend, QUOKA_MODE is"},
      {"MODE=paper BUGDET=64", "QUOKA_BUGDET is not a variable of this backend, QUOKA_BUDGET is"},
      {"DENSE_LAYER=1",
       "QUOKA_DENSE_LAYER is not a variable of this backend, QUOKA_DENSE_LAYERS is"},
      {"MINPAST=1", "QUOKA_MINPAST is not a variable of this backend, QUOKA_MIN_PAST is"},
      {"ARITMETIC=int8", "QUOKA_ARITMETIC is not a variable of this backend, QUOKA_ARITHMETIC is"},
      {"CONFG=x", "QUOKA_CONFG is not a variable of this backend, QUOKA_CONFIG is"},
      {"STAT=1", "QUOKA_STAT is not a variable of this backend, QUOKA_STATS is"},
      {"mode=paper", "QUOKA_mode is not a variable of this backend, QUOKA_MODE is"},
      {"LAYER_BUDGETS={}",
       "QUOKA_LAYER_BUDGETS is not a variable of this backend: layer_budgets is a key of the file "
       "that "
       "QUOKA_CONFIG names"},
      {"MODEL={}",
       "QUOKA_MODEL is not a variable of this backend: model is a key of the file that "
       "QUOKA_CONFIG "
       "names"},
      // In the file. Wrong budgets, layers and models: layer_policy_test.cpp.
      {config(R"({"min_pasts": 3})"), "min_pasts is not a setting of this backend, min_past is"},
      {config(R"({"QUOKA_BUDGET": 64})"),
       "QUOKA_BUDGET is not a setting of this backend, budget is"},
      {config("{\"bugdet\": 3}"), "bugdet"},
      {config("[1]"), "is not a JSON object"},
      {config(R"({"mode": "paper",})"), "cannot be read from byte"},
      {config(R"({"mode": "paper"} x)"), "cannot be read from byte"},
      {config(R"({"mode": "paper", "budget": 9, "mode": "exact"})"), "\"mode\" occurs twice"},
      {config(R"({"mode": 3})"), "mode is 3"},
      {config(R"({"model": {"q_heads": 1, "q_heads": 2}})"), "\"q_heads\" occurs twice"},
  };
  for (const auto& [words, says] : cases) Parsed(words).expect_refused(says);
}

// Every variable, with numbers that do not end where they should, of the wrong kind, and at their borders.
TEST(GgmlSettings, ValuesAreReadToTheirEnd) {
  for (const char* const name :
       {"MODE", "BUDGET", "DENSE_LAYERS", "CHUNK", "DECODE", "MIN_PAST", "MIN_QUERIES", "THREADS",
        "SKETCH", "QUIET", "ISA", "ARITHMETIC", "CONFIG"})
    for (const char* const value : {"1,", "1024 keys", "0x10", "1e", "[1", "[1],", "{}", "null",
                                    "1;", "--1", "99999999999999999999", "nan", "1.2.3"})
      Parsed(Variables{{std::string("QUOKA_") + name, value}}).expect_refused("");
}

TEST(GgmlSettings, AllThatIsWrongIsNamedAtOnce) {
  const Parsed parsed(
      "MODE=fast BUDGET=1.5 CHUNK=0 ARITHMETIC=fp8 MOED=paper STATS=yes ISA=v\xff " +
      config(R"({"bugdet": 3, "model": {"heads": 3, "q_heads": -1},
                                 "layer_budgets": {"x": 64, "3": 0}})"));
  for (const char* const says :
       {"mode is \"fast\"", "budget is 1.5", "chunk is 0", "arithmetic is \"fp8\"",
        "QUOKA_MOED is not a variable", "QUOKA_ISA is not UTF-8", "stats is \"yes\"",
        "bugdet is not a setting", "\"heads\"", "q_heads is -1", "\"x\"",
        "the budget of layer 3 is 0"})
    parsed.expect_refused(says);
}

// Parameters that are wrong; and settings of the whole program, which one backend has none of its own of. Those of the
// program stay what they are.
TEST(GgmlSettings, BadParametersThrow) {
  const Settings program = Parsed("MIN_QUERIES=7 STATS=1 QUIET=1").settings;
  for (const auto& [text, says] :
       {std::pair{R"({"mode": "fast"})", "mode is \"fast\""},
        {"[1]", ""},
        {"{", ""},
        {R"({"threads": 2000})", "threads is 2000"},
        {R"({"moed": "paper"})", "moed"},
        {R"({"mode": "paper", "mode": "paper"})", "\"mode\" occurs twice"},
        {R"({"rest": true})", "rest"},
        {R"({"always": true})", "always"},
        {R"({"isa": "x86-64-v3"})", "isa is \"x86-64-v3\", but must be QUOKA_ISA's"},
        {R"({"min_queries": 7})", "min_queries is 7, but must be QUOKA_MIN_QUERIES's"},
        {R"({"stats": true})", "stats is true, but must be QUOKA_STATS's"},
        {R"({"quiet": 0})", "quiet is 0, but must be QUOKA_QUIET's"}})
    try {
      (void)with_parameters(program, text);
      ADD_FAILURE() << text;
    } catch (const std::invalid_argument& e) {
      EXPECT_NE(std::string(e.what()).find(says), std::string::npos) << e.what();
    }
  const Settings of_backend = with_parameters(program, R"({"mode": "paper"})");
  EXPECT_EQ(of_backend.min_queries, 7);
  EXPECT_TRUE(of_backend.stats && of_backend.quiet);
}

// The file that the page shows as an example.
TEST(GgmlSettings, TheExamplesFileSelects) {
  const Parsed example("CONFIG=" QUOKA_GGML_FOLDER "/quoka.example.json");
  EXPECT_EQ(example.problem, "");
  EXPECT_EQ(example.settings.mode, "recommended");
  EXPECT_EQ(keys(example.settings, 1), 2250);
}

}  // namespace
