#include "settings.hpp"

#include "settings_text.hpp"

#include "support/layer_policy_file.hpp"

#include <quoka/base/version.hpp>
#include <quoka/runtime/isa.hpp>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace quoka_ggml {
namespace {

using nlohmann::json;

constexpr const char* modes[] = {"exact", "paper", "balanced", "recommended"};
// Members of the file that are variables, too: QUOKA_ before the capitals.
const std::vector<std::string> variables{
    "mode",    "budget", "dense_layers", "chunk", "decode", "min_past",   "min_queries",
    "threads", "sketch", "stats",        "quiet", "isa",    "arithmetic", "queries"};
// Settings of the whole program, which no backend has for itself: instructions, operations that are taken, and
// messages.
constexpr const char* of_the_program[] = {"isa", "min_queries", "stats", "quiet"};
// Members of the file alone.
const std::vector<std::string> of_the_file{"layer_budgets", "model"};
// Those that say how keys are selected.
const std::vector<std::string> of_selection{"budget", "dense_layers", "layer_budgets", "chunk",
                                            "decode", "min_past",     "queries",       "sketch"};
// Variables that this project's tests and test scripts read, beside those of is_of_tests().
const std::vector<std::string> of_tests{
    "QUOKA_SMOLLM2",      "QUOKA_SOAK_STEPS", "QUOKA_SERVER_MINUTES", "QUOKA_MUTANT",
    "QUOKA_MUTANT_TRACE", "QUOKA_TIMES",      "QUOKA_REPLACED"};

// Letters to insert, leave out, replace, or swap with their neighbour.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i)
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min(
          {d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}
bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}
[[noreturn]] void refuse_name(const std::string& kind, const std::string& name,
                              const std::vector<std::string>& known) {
  for (const std::string& key : of_the_file)
    if (name == variable_of(key))
      throw std::invalid_argument(name + " is not a variable of this backend: " + key +
                                  " is a key of the file that QUOKA_CONFIG names");
  for (const std::string& key : variables)
    if (name == variable_of(key))  // written into the file
      throw std::invalid_argument(name + " is not a " + kind + " of this backend, " + key + " is");
  const auto nearest = std::min_element(
      known.begin(), known.end(),
      [&](const auto& a, const auto& b) { return distance(name, a) < distance(name, b); });
  throw std::invalid_argument(name + " is not a " + kind + " of this backend, " + *nearest + " is");
}

// The value of a variable; null where it is not set, or empty.
const char* value_of_variable(const std::string& name) {
  const char* const text = std::getenv(name.c_str());
  return text == nullptr || *text == 0 ? nullptr : text;
}
// Neither a setting nor a typo: QUOKA_TEST_SLOW, QUOKA_ATTENTION_SEED, QUOKA_ATTENTION_CASES.
bool is_of_tests(const std::string& name) {
  return name.starts_with("QUOKA_TEST_") || name.ends_with("_SEED") || name.ends_with("_CASES") ||
         contains(of_tests, name);
}
// JSON has no other text.
bool is_utf8(const json& value) try {
  (void)value.dump();
  return true;
} catch (const json::type_error&) {
  return false;
}
// Refuses variables that look like a setting and are not one.
void check_variables(quoka_examples::Refusals& refused) {
  std::vector<std::string> known{"QUOKA_CONFIG"};
  for (const std::string& key : variables) known.push_back(variable_of(key));
  for (char** at = environ; at != nullptr && *at != nullptr; ++at) {
    const std::string one = *at, name = one.substr(0, one.find('='));
    if (name.starts_with("QUOKA_") && value_of_variable(name) != nullptr &&
        !contains(known, name) && !is_of_tests(name))
      refused.in([&] { refuse_name("variable", name, known); });
  }
}
// Refuses such members of an object, and leaves them out of it.
void check_members(json& all, quoka_examples::Refusals& refused) {
  std::vector<std::string> known = variables;
  known.insert(known.end(), of_the_file.begin(), of_the_file.end());
  std::vector<std::string> unknown;
  for (const auto& one : all.items())
    if (!contains(known, one.key())) unknown.push_back(one.key());
  for (const std::string& key : unknown) {
    refused.in([&] { refuse_name("setting", key, known); });
    all.erase(key);
  }
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}
// Settings of selection that were written where no mode selects keys.
std::vector<std::string> notes_on(const json& written, const json& all) {
  if (all.contains("mode")) return {};
  std::vector<std::string> idle;
  for (const std::string& key : of_selection)
    if (written.contains(key)) idle.push_back(key);
  if (idle.empty()) return {};
  return {joined(idle) + (idle.size() > 1 ? " have" : " has") +
          " no effect: no mode is set, and attention is exact; mode recommended, balanced or paper "
          "selects keys"};
}

// A path has a slash in it or ends in .json; any other text is not the name of a file.
bool is_path(const std::string& text) {
  return text.find('/') != text.npos || text.ends_with(".json");
}

void read_stats(const json& stats, Settings& s) {
  if (stats.is_string() && is_path(stats.get<std::string>()))
    s.stats_file = stats.get<std::string>();
  else if (stats != true && stats != 1 && stats != false && stats != 0)
    quoka_examples::refuse_json("stats", stats, "0, 1, or a file's path with a / or .json in it");
  s.stats = stats == true || stats == 1;
}

// Throws std::invalid_argument with all that is wrong.
Settings parse(json all) {
  quoka_examples::Refusals refused;
  check_members(all, refused);
  Settings s;
  s.written = all.dump();
  // recommended and balanced have a threshold in place of a budget.
  if (all.value("mode", json()) == "paper") all.emplace("budget", 1024);
  all.emplace("dense_layers", 1);
  s.in_full = all.dump();
  quoka_examples::Members members(std::move(all));
  const auto whole = [&](const char* key, Index least, Index most, auto& to) {
    refused.in([&] {
      to = static_cast<std::remove_reference_t<decltype(to)>>(members.whole(key, least, most, to));
    });
  };
  const auto flag = [&](const char* key, bool& to) {
    refused.in([&] { to = members.flag(key, to); });
  };
  const auto one_of = [&](const char* key, const auto& names, std::string& to) {
    refused.in([&] { to = members.one_of(key, names, to); });
  };
  one_of("mode", modes, s.mode), one_of("isa", quoka::isa_levels(), s.isa);
  std::string arithmetic = "automatic";
  one_of("arithmetic", arithmetic_names(), arithmetic);
  s.arithmetic = arithmetic_named(arithmetic);
  whole("chunk", 1, 1 << 20, s.chunk), whole("queries", 0, 1 << 20, s.queries);
  whole("min_past", 0, quoka_examples::most_keys, s.min_past);
  whole("min_queries", 0, 1 << 20, s.min_queries), whole("threads", 0, 1024, s.threads);
  flag("decode", s.decode), flag("sketch", s.sketch), flag("quiet", s.quiet);
  const json stats = members.take("stats", false);
  refused.in([&] { read_stats(stats, s); });
  json dense = members.take("dense_layers", 0), policy = members.rest();
  if (quoka_examples::is_whole(dense, 0, quoka_examples::most_layers))
    s.first_dense = dense.get<Index>();
  else
    policy["dense_layers"] = std::move(dense);
  refused.in([&] { s.policy = quoka_examples::parse_policy(policy); });
  refused.throw_if_any();
  if (s.mode == "exact") return s;
  (void)quoka::AnySelector(s.selection(-1));  // refuses now what the method refuses
  for (const auto& [layer, budget] : s.policy.budgets)
    (void)quoka::AnySelector(s.selection(static_cast<int>(layer)));
  return s;
}

}  // namespace

Settings read_settings(std::string& problem) try {
  quoka_examples::Refusals refused;
  check_variables(refused);
  const char* const path = value_of_variable("QUOKA_CONFIG");
  json file = json::object();
  if (path != nullptr)
    refused.in([&] {
      try {
        file = quoka_examples::read_json_object(path);
      } catch (const std::invalid_argument& e) {
        throw std::invalid_argument(std::string("QUOKA_CONFIG: ") + e.what());
      }
    });
  json all = file;
  std::vector<std::string> of_file, of_variables;
  for (const std::string& key : variables)
    if (const char* const text = value_of_variable(variable_of(key))) {
      const json value = value_of(text);
      if (!is_utf8(value)) {
        refused.in([&] { throw std::invalid_argument(variable_of(key) + " is not UTF-8"); });
        continue;
      }
      all[key] = value;
      of_variables.push_back(key +
                             (file.contains(key) ? " (in place of " + file[key].dump() + ")" : ""));
      file.erase(key);
    }
  for (const auto& one : file.items()) of_file.push_back(one.key());
  Settings s;
  refused.in([&] { s = parse(all); });
  refused.throw_if_any();
  s.notes = notes_on(all, all);
  if (path != nullptr && !of_variables.empty())
    s.sources = "from the environment: " + joined(of_variables) + "; from " + path + ": " +
                (of_file.empty() ? "nothing" : joined(of_file));
  return s;
} catch (const std::exception& e) {
  problem = e.what();
  return {};
}

Settings with_parameters(const Settings& settings, const char* text) {
  if (text == nullptr || *text == 0) return settings;
  json all = json::parse(settings.written);
  const json own = quoka_examples::parse_json_object("parameters", text);
  quoka_examples::Refusals refused;
  for (const char* const key : of_the_program)
    if (own.contains(key))
      refused.in([&] {
        quoka_examples::refuse_json(key, own[key], variable_of(key) + "'s, for the whole program");
      });
  refused.throw_if_any();
  all.update(own);
  Settings s = parse(all);
  s.notes = notes_on(own, all);
  return s;
}

std::string Settings::no_faster() const {
  const Arithmetic used = quoka::arithmetic_used(arithmetic);
  if (arithmetic == Arithmetic::automatic || used == arithmetic) return "";
  return "in " + name_of(used) + ": " + name_of(arithmetic) + " is no faster here";
}

std::string Settings::dense_layers() const { return json::parse(in_full)["dense_layers"].dump(); }

std::string Settings::summary() const {
  const std::string instead = no_faster();
  const std::string in = !instead.empty()                      ? ", " + instead
                         : arithmetic == Arithmetic::automatic ? ""
                                                               : ", in " + name_of(arithmetic);
  return std::string("version ") + QUOKA_VERSION_STRING + " (" + quoka::isa() +
         "): " + (mode == "exact" ? "exact attention" : "selects keys by " + in_full) + in +
         (sources.empty() ? "" : "; " + sources);
}

}  // namespace quoka_ggml
