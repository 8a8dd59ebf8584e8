#include "settings.hpp"

#include "support/layer_policy_file.hpp"

#include <quoka/runtime/isa.hpp>
#include <quoka/base/version.hpp>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <stdexcept>

namespace quoka_ggml {
namespace {

using nlohmann::json;

// One of the ISA levels that this library was built for and this machine runs.
std::string level(const json& x) {
  std::string all;
  for (const char* const name : quoka::isa_levels()) {
    if (x == name) return name;
    all += std::string(all.empty() ? "" : " or ") + name;
  }
  if (x != "") quoka_examples::refuse_json("isa", x, all);
  return "";
}

Settings parse(json all) {
  all.emplace("budget", 1024), all.emplace("dense_layers", 1);
  Settings s;
  s.told = all.dump();
  const auto take = [&](const char* key, const json& otherwise) {
    const json x = all.value(key, otherwise);
    all.erase(key);
    return x;
  };
  const auto whole = [&](const char* key, Index least, Index most, Index otherwise) {
    return quoka_examples::whole_from(key, take(key, otherwise), least, most);
  };
  const auto flag = [&](const char* key, bool otherwise) {
    const json x = take(key, otherwise);
    if (x != true && x != false && x != 1 && x != 0) quoka_examples::refuse_json(key, x, "0 or 1");
    return x == true || x == 1;
  };
  const json mode = take("mode", "exact");
  if (mode == "quoka")
    s.mode = Mode::quoka;
  else if (mode == "recommended")
    s.mode = Mode::recommended;
  else if (mode == "robust")
    s.mode = Mode::robust;
  else if (mode != "exact")
    quoka_examples::refuse_json("mode", mode, "exact, quoka, recommended or robust");
  s.chunk = whole("chunk", 1, 1 << 20, s.chunk);
  s.decode = flag("decode", false);
  s.min_past = whole("min_past", 0, quoka_examples::most_keys, 0);
  s.min_queries = whole("min_queries", 0, 1 << 20, 0);
  s.threads = static_cast<int>(whole("threads", 0, 1024, 0));
  s.sketch = flag("sketch", true);
  if (const json stats = all.value("stats", json(false)); stats.is_string()) {
    s.stats_file = stats.get<std::string>();
    if (s.stats_file.empty()) quoka_examples::refuse_json("stats", stats, "0, 1 or a file's path");
    all.erase("stats");
  } else {
    s.stats = flag("stats", false);
  }
  s.quiet = flag("quiet", false);
  s.isa = level(take("isa", ""));
  s.policy = quoka_examples::parse_policy(all);
  if (s.mode == Mode::exact) return s;
  (void)quoka::QuokaSelector(s.selection(1, -1));  // refuses now what the method refuses
  for (const auto& [layer, budget] : s.policy.budgets)
    (void)quoka::QuokaSelector(s.selection(1, static_cast<int>(layer)));
  return s;
}

// JSON, or else the text itself.
json value_of(const char* text) {
  const json value = json::parse(text, nullptr, false);
  return value.is_discarded() ? json(text) : value;
}

json object(const std::string& source, const json& x) {
  if (!x.is_object()) throw std::invalid_argument(source + " is no JSON object");
  return x;
}

}  // namespace

Settings read_settings(std::string& problem) try {
  json all = json::object();
  if (const char* const path = std::getenv("QUOKA_CONFIG")) {
    std::ifstream file(path);
    if (!file) throw std::invalid_argument(std::string("QUOKA_CONFIG: cannot read ") + path);
    all = object(path, json::parse(file, nullptr, false));
  }
  for (const std::string key : {"mode", "budget", "chunk", "dense_layers", "decode", "min_past",
                                "min_queries", "threads", "sketch", "stats", "quiet", "isa"}) {
    std::string name = "QUOKA_" + key;
    for (char& c : name) c = static_cast<char>(std::toupper(c));
    if (const char* const text = std::getenv(name.c_str())) all[key] = value_of(text);
  }
  return parse(all);
} catch (const std::exception& e) {
  problem = e.what();
  return {};
}

Settings with_parameters(const Settings& settings, const char* text) {
  if (text == nullptr || *text == 0) return settings;
  json all = json::parse(settings.told);
  const json own = object("parameters", json::parse(text, nullptr, false));
  if (own.contains("isa"))
    quoka_examples::refuse_json("isa", own["isa"], "QUOKA_ISA's, for the whole program");
  all.update(own);
  return parse(all);
}

quoka::QuokaOptions Settings::selection(Index group, int layer) const {
  const auto own = policy.budgets.find(layer);
  const quoka::Budget budget = own != policy.budgets.end() ? own->second : policy.budget.value();
  if (mode == Mode::recommended) return quoka::QuokaOptions::recommended(group, budget);
  return mode == Mode::robust ? quoka::QuokaOptions::robust(group, budget)
                              : quoka::QuokaOptions::paper(budget);
}

std::string Settings::summary() const {
  const std::string version = std::to_string(QUOKA_VERSION_MAJOR) + '.' +
                              std::to_string(QUOKA_VERSION_MINOR) + '.' +
                              std::to_string(QUOKA_VERSION_PATCH);
  return "version " + version + " (" + quoka::isa() +
         "): " + (mode == Mode::exact ? "exact attention" : "selects keys by " + told);
}

}  // namespace quoka_ggml
