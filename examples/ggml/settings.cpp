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
// Of these no backend has its own: which instructions run, which operations are taken, and what is said is one thing for
// the whole program.
constexpr const char* of_the_program[] = {"isa", "min_queries", "stats", "quiet"};
// Settings of earlier versions, and what to take in their place.
const std::vector<std::pair<std::string, std::string>> removed{
    {"rest", "a larger budget or more queries lose less"},
    {"always", "recommended and balanced attend to all keys where that takes less; paper selects"}};
// What this project's tests and test scripts are told by: not settings, and no typos.
const std::vector<std::string> of_tests{"QUOKA_TINYLLAMA",  "QUOKA_SMOLLM2",
                                        "QUOKA_SOAK_STEPS", "QUOKA_SERVER_MINUTES",
                                        "QUOKA_MUTANT",     "QUOKA_MUTANT_TRACE"};

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
[[noreturn]] void refuse_name(const std::string& kind, const std::string& name,
                              const std::vector<std::string>& known) {
  for (const auto& [old, instead] : removed)
    if (name == old || name == variable_of(old))
      throw std::invalid_argument(name + " was removed from this backend: " + instead);
  const auto nearest = std::min_element(
      known.begin(), known.end(),
      [&](const auto& a, const auto& b) { return distance(name, a) < distance(name, b); });
  throw std::invalid_argument(name + " is no " + kind + " of this backend, " + *nearest + " is");
}

// Throws std::invalid_argument for a variable that looks like one of ours and is none.
void check_variables() {
  std::vector<std::string> known{"QUOKA_CONFIG"};
  for (const std::string& key : variables) known.push_back(variable_of(key));
  for (char** at = environ; at != nullptr && *at != nullptr; ++at) {
    const std::string one = *at, name = one.substr(0, one.find('='));
    if (name.starts_with("QUOKA_") && std::find(known.begin(), known.end(), name) == known.end() &&
        std::find(of_tests.begin(), of_tests.end(), name) == of_tests.end())
      refuse_name("variable", name, known);
  }
}
void check_members(const json& all) {
  std::vector<std::string> known = variables;
  known.insert(known.end(), {"layer_budgets", "model"});
  for (const auto& [key, x] : all.items())
    if (std::find(known.begin(), known.end(), key) == known.end())
      refuse_name("setting", key, known);
}

// A path has a slash in it or ends in .json: what else someone wrote is no name of a file.
bool is_path(const std::string& text) {
  return text.find('/') != text.npos || text.ends_with(".json");
}

Settings parse(json all) {
  check_members(all);
  // Of a preset's own budget the file and what is told say the number.
  const bool of_share = all.value("mode", json()) == "recommended";
  all.emplace("budget", of_share ? json(0.25) : json(1024)), all.emplace("dense_layers", 1);
  Settings s;
  s.told = all.dump();
  quoka_examples::Members members(std::move(all));
  s.mode = members.one_of("mode", modes, s.mode);
  s.chunk = members.whole("chunk", 1, 1 << 20, s.chunk);
  s.queries = members.whole("queries", 0, 1 << 20, s.queries);
  s.decode = members.flag("decode", s.decode);
  s.min_past = members.whole("min_past", 0, quoka_examples::most_keys, s.min_past);
  s.min_queries = members.whole("min_queries", 0, 1 << 20, s.min_queries);
  s.threads = static_cast<int>(members.whole("threads", 0, 1024, s.threads));
  s.arithmetic = arithmetic_named(members.one_of("arithmetic", arithmetic_names(), "automatic"));
  s.sketch = members.flag("sketch", s.sketch);
  s.quiet = members.flag("quiet", s.quiet);
  s.isa = members.one_of("isa", quoka::isa_levels(), s.isa);
  const json stats = members.take("stats", false);
  if (stats.is_string() && is_path(stats.get<std::string>()))
    s.stats_file = stats.get<std::string>();
  else if (stats != true && stats != 1 && stats != false && stats != 0)
    quoka_examples::refuse_json("stats", stats, "0, 1, or a file's path with a / or .json in it");
  s.stats = stats == true || stats == 1;
  json dense = members.take("dense_layers", 0), policy = members.rest();
  if (dense.is_array())
    policy["dense_layers"] = std::move(dense);
  else
    s.first_dense = quoka_examples::whole_from("dense_layers", dense, 0, 10'000);
  s.policy = quoka_examples::parse_policy(policy);
  if (s.mode == "exact") return s;
  (void)quoka::AnySelector(s.selection(-1));  // refuses now what the method refuses
  for (const auto& [layer, budget] : s.policy.budgets)
    (void)quoka::AnySelector(s.selection(static_cast<int>(layer)));
  return s;
}

}  // namespace

Settings read_settings(std::string& problem) try {
  check_variables();
  json all = json::object();
  if (const char* const path = std::getenv("QUOKA_CONFIG")) {
    std::ifstream file(path);
    if (!file) throw std::invalid_argument(std::string("QUOKA_CONFIG: cannot read ") + path);
    all = quoka_examples::parse_json_object(path, {std::istreambuf_iterator<char>(file), {}});
  }
  for (const std::string& key : variables) {
    const char* const text = std::getenv(variable_of(key).c_str());
    if (text == nullptr) continue;
    all[key] = value_of(text);
  }
  return parse(all);
} catch (const std::exception& e) {
  problem = e.what();
  return {};
}

Settings with_parameters(const Settings& settings, const char* text) {
  if (text == nullptr || *text == 0) return settings;
  json all = json::parse(settings.told);
  const json own = quoka_examples::parse_json_object("parameters", text);
  for (const char* const key : of_the_program)
    if (own.contains(key))
      quoka_examples::refuse_json(key, own[key], variable_of(key) + "'s, for the whole program");
  all.update(own);
  return parse(all);
}

std::string Settings::no_faster() const {
  const Arithmetic used = quoka::arithmetic_used(arithmetic);
  if (arithmetic == Arithmetic::automatic || used == arithmetic) return "";
  return "in " + name_of(used) + ": " + name_of(arithmetic) + " is no faster here";
}

std::string Settings::summary() const {
  const std::string instead = no_faster();
  const std::string in = !instead.empty()                      ? ", " + instead
                         : arithmetic == Arithmetic::automatic ? ""
                                                               : ", in " + name_of(arithmetic);
  return std::string("version ") + QUOKA_VERSION_STRING + " (" + quoka::isa() +
         "): " + (mode == "exact" ? "exact attention" : "selects keys by " + told) + in;
}

}  // namespace quoka_ggml
