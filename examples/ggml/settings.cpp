#include "settings.hpp"

#include <quoka/runtime/isa.hpp>
#include <quoka/version.hpp>

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace quoka_ggml {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& name, const std::string& value,
                         const std::string& wanted) {
  throw std::invalid_argument(name + " is " + value + ", but must be " + wanted);
}

Index whole(const std::string& name, const json& x, Index least, Index most) {
  if (!x.is_number_integer() || x.get<Index>() < least || x.get<Index>() > most)
    refuse(name, x.dump(),
           "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  return x.get<Index>();
}

quoka::Budget budget_from(const std::string& name, const json& x) {
  if (x.is_number_integer()) return whole(name, x, 0, 1 << 30);
  if (!x.is_number() || !(x.get<double>() > 0 && x.get<double>() <= 1))
    refuse(name, x.dump(), "a count of keys, or a fraction in (0, 1]");
  return x.get<double>();
}

Mode mode_from(const std::string& name, const json& x) {
  if (x == "exact") return Mode::exact;
  if (x == "quoka") return Mode::quoka;
  if (x == "robust") return Mode::robust;
  refuse(name, x.dump(), "exact, quoka or robust");
}

// A number: that many of the first layers. A list: these layers.
std::set<int> layers_from(const std::string& name, const json& x) {
  std::set<int> layers;
  if (x.is_array())
    for (const json& layer : x) layers.insert(static_cast<int>(whole(name, layer, 0, 9999)));
  else
    for (Index layer = whole(name, x, 0, 9999); layer-- > 0;)
      layers.insert(static_cast<int>(layer));
  return layers;
}

bool flag(const std::string& name, const json& x) {
  return x.is_boolean() ? x.get<bool>() : whole(name, x, 0, 1) == 1;
}

void read_model(const std::string& name, const json& x, Settings& to) {
  for (const auto& [key, value] : x.items()) {
    Index* const field = key == "q_heads"    ? &to.model_q_heads
                         : key == "kv_heads" ? &to.model_kv_heads
                         : key == "head_dim" ? &to.model_head_dim
                                             : nullptr;
    if (field == nullptr) refuse("a key of " + name, key, "q_heads, kv_heads or head_dim");
    *field = whole(name + "." + key, value, 1, 1 << 20);
  }
}

void set(const std::string& key, const std::string& name, const json& x, Settings& to) {
  if (key == "mode")
    to.mode = mode_from(name, x);
  else if (key == "budget")
    to.budget = budget_from(name, x);
  else if (key == "chunk")
    to.chunk = whole(name, x, 1, 1 << 20);
  else if (key == "dense_layers")
    to.dense = layers_from(name, x);
  else if (key == "decode")
    to.decode = flag(name, x);
  else if (key == "min_queries")
    to.min_queries = whole(name, x, 1, 1 << 20);
  else if (key == "threads")
    to.threads = static_cast<int>(whole(name, x, 1, 1024));
  else if (key == "stats")
    to.stats = flag(name, x);
  else if (key == "model" && x.is_object())
    read_model(name, x, to);
  else if (key == "layer_budgets" && x.is_object())
    for (const auto& [layer, budget] : x.items())
      to.layer_budgets.insert_or_assign(
          static_cast<int>(
              whole("a layer of " + name, json::parse(layer, nullptr, false), 0, 9999)),
          budget_from(name + "." + layer, budget));
  else
    throw std::invalid_argument(name + " is no setting");
}

void read_object(const std::string& source, const json& all, Settings& to) {
  if (!all.is_object()) throw std::invalid_argument(source + " is no JSON object");
  for (const auto& [key, value] : all.items()) set(key, source + ": " + key, value, to);
}

void read_file(const char* path, Settings& to) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(std::string("QUOKA_CONFIG: cannot read ") + path);
  read_object(path, json::parse(file, nullptr, false), to);
}

}  // namespace

Settings read_settings(std::string& problem) {
  Settings settings;
  try {
    if (const char* const path = std::getenv("QUOKA_CONFIG")) read_file(path, settings);
    for (const char* const key :
         {"mode", "budget", "chunk", "dense_layers", "decode", "min_queries", "threads", "stats"}) {
      std::string name = "QUOKA_";
      for (const char* c = key; *c != 0; ++c)
        name += *c == '_' ? '_' : static_cast<char>(*c - 'a' + 'A');
      const char* const text = std::getenv(name.c_str());
      if (text == nullptr) continue;
      json value = json::parse(text, nullptr, false);
      set(key, name, value.is_discarded() ? json(text) : value, settings);
    }
  } catch (const std::exception& e) {
    problem = e.what();
    settings = Settings();
  }
  return settings;
}

Settings with_parameters(Settings settings, const char* text) {
  if (text != nullptr && *text != 0)
    read_object("parameters", json::parse(text, nullptr, false), settings);
  return settings;
}

std::string Settings::summary() const {
  std::ostringstream line;
  line << "version " << QUOKA_VERSION_MAJOR << '.' << QUOKA_VERSION_MINOR << '.'
       << QUOKA_VERSION_PATCH << " (" << quoka::isa() << "): ";
  if (mode == Mode::exact) {
    line << "exact attention";
  } else {
    line << (mode == Mode::quoka ? "QuoKA" : "QuoKA, robust preset") << ", budget ";
    const Index keys = budget.keys(1 << 30);  // of a past beyond all counts: fractions stay large
    if (keys < 1 << 20)
      line << keys;
    else
      line << 100.0 * static_cast<double>(keys) / (1 << 30) << " %";
    line << ", dense layers";
    for (const int layer : dense) line << ' ' << layer;
    line << (dense.empty() ? " none" : "") << (decode ? ", decode steps too" : "");
  }
  return line.str();
}

}  // namespace quoka_ggml
