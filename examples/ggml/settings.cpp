#include "settings.hpp"

#include "support/layer_policy_file.hpp"

#include <quoka/base/version.hpp>
#include <quoka/runtime/isa.hpp>

#include <cctype>
#include <cstdlib>

namespace quoka_ggml {
namespace {

using nlohmann::json;

constexpr const char* modes[] = {"exact", "quoka", "recommended", "robust"};

Settings parse(json all) {
  all.emplace("budget", 1024), all.emplace("dense_layers", 1);
  Settings s;
  s.told = all.dump();
  quoka_examples::Members members(std::move(all));
  s.mode = members.one_of("mode", modes, s.mode);
  s.chunk = members.whole("chunk", 1, 1 << 20, s.chunk);
  s.decode = members.flag("decode", s.decode);
  s.min_past = members.whole("min_past", 0, quoka_examples::most_keys, s.min_past);
  s.min_queries = members.whole("min_queries", 0, 1 << 20, s.min_queries);
  s.threads = static_cast<int>(members.whole("threads", 0, 1024, s.threads));
  s.sketch = members.flag("sketch", s.sketch);
  s.quiet = members.flag("quiet", s.quiet);
  s.isa = members.one_of("isa", quoka::isa_levels(), s.isa);
  const json stats = members.take("stats", false);
  if (stats.is_string()) s.stats_file = stats.get<std::string>();
  s.stats = stats == true || stats == 1;
  if (!s.stats && s.stats_file.empty() && stats != false && stats != 0)
    quoka_examples::refuse_json("stats", stats, "0, 1 or a file's path");
  s.policy = quoka_examples::parse_policy(members.rest());
  if (s.mode == "exact") return s;
  (void)quoka::QuokaSelector(s.selection(-1));  // refuses now what the method refuses
  for (const auto& [layer, budget] : s.policy.budgets)
    (void)quoka::QuokaSelector(s.selection(static_cast<int>(layer)));
  return s;
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
    const char* const text = std::getenv(name.c_str());
    if (text == nullptr) continue;
    all[key] = json::parse(text, nullptr, false);
    if (all[key].is_discarded()) all[key] = text;  // no JSON: the text itself
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

std::string Settings::summary() const {
  return std::string("version ") + QUOKA_VERSION_STRING + " (" + quoka::isa() +
         "): " + (mode == "exact" ? "exact attention" : "selects keys by " + told);
}

}  // namespace quoka_ggml
