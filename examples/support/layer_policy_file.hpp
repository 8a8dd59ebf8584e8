// Reads a layer policy (support/layer_policy.hpp).
#pragma once

#include "support/json_file.hpp"
#include "support/layer_policy.hpp"

#include <fstream>
#include <stdexcept>
#include <string>

namespace quoka_examples {

namespace detail {

[[noreturn]] inline void refuse_policy(const std::string& what, const nlohmann::json& x,
                                       const std::string& wanted) {
  throw std::invalid_argument("policy: " + what + " is " + x.dump() + ", but must be " + wanted);
}

inline Index policy_number(const std::string& what, const nlohmann::json& x, Index least) {
  if (!x.is_number_integer() || x.get<Index>() < least)
    refuse_policy(what, x, "a whole number from " + std::to_string(least));
  return x.get<Index>();
}

inline quoka::Budget policy_budget(const std::string& what, const nlohmann::json& x) {
  if (x.is_number_integer()) return policy_number(what, x, 0);
  if (!x.is_number() || !(x.get<double>() > 0.0 && x.get<double>() <= 1.0))
    refuse_policy(what, x, "a count of keys, or a fraction of the past in (0, 1]");
  return x.get<double>();
}

}  // namespace detail

// Throws std::invalid_argument, which names the member, for what is not understood.
inline LayerPolicy parse_policy(const nlohmann::json& json) {
  using namespace detail;
  if (!json.is_object()) throw std::invalid_argument("policy: no JSON object");
  LayerPolicy policy;
  for (const auto& [key, x] : json.items()) {
    if (key == "budget") {
      policy.budget = policy_budget(key, x);
    } else if (key == "dense_layers" && x.is_array()) {
      for (const auto& layer : x) policy.dense.insert(policy_number("a dense layer", layer, 0));
    } else if (key == "dense_layers") {
      for (Index layer = policy_number(key, x, 0); layer-- > 0;) policy.dense.insert(layer);
    } else if (key == "layer_budgets" && x.is_object()) {
      for (const auto& [layer, budget] : x.items()) {
        const auto number = nlohmann::json::parse(layer, nullptr, false);
        policy.budgets.insert_or_assign(policy_number("a layer with a budget", number, 0),
                                        policy_budget("the budget of layer " + layer, budget));
      }
    } else if (key == "model" && x.is_object()) {
      policy.q_heads = policy_number("q_heads", x.value("q_heads", nlohmann::json(0)), 0);
      policy.kv_heads = policy_number("kv_heads", x.value("kv_heads", nlohmann::json(0)), 0);
      policy.head_dim = policy_number("head_dim", x.value("head_dim", nlohmann::json(0)), 0);
    } else if (key != "mode") {  // the selector is the command line's
      refuse_policy("the member " + key, x, "one of those that are documented");
    }
  }
  return policy;
}

inline LayerPolicy read_policy(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument("policy: cannot read " + path);
  return parse_policy(nlohmann::json::parse(file, nullptr, false));
}

}  // namespace quoka_examples
