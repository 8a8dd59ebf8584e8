// Reads a layer policy (support/layer_policy.hpp).
#pragma once

#include "support/budget_text.hpp"
#include "support/json_text.hpp"
#include "support/layer_policy.hpp"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace quoka_examples {

// Throws std::invalid_argument: `what` is x, but must be `wanted`.
[[noreturn]] inline void refuse_json(const std::string& what, const nlohmann::json& x,
                                     const std::string& wanted) {
  throw std::invalid_argument(what + " is " + x.dump() + ", but must be " + wanted);
}

// Throws std::invalid_argument for anything but a whole number in [least, most].
inline Index whole_from(const std::string& what, const nlohmann::json& x, Index least, Index most) {
  if (!x.is_number_integer() || x.get<Index>() < least || x.get<Index>() > most)
    refuse_json(what, x,
                "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  return x.get<Index>();
}

// The members of a JSON object, taken one by one. Each throws std::invalid_argument, which names the member, for
// what is not understood.
class Members {
 public:
  explicit Members(nlohmann::json all) : all_(std::move(all)) {}
  nlohmann::json take(const char* key, const nlohmann::json& otherwise) {
    const nlohmann::json x = all_.value(key, otherwise);
    all_.erase(key);
    return x;
  }
  Index whole(const char* key, Index least, Index most, Index otherwise) {
    return whole_from(key, take(key, otherwise), least, most);
  }
  bool flag(const char* key, bool otherwise) {
    const nlohmann::json x = take(key, otherwise);
    if (x != true && x != false && x != 1 && x != 0) refuse_json(key, x, "0 or 1");
    return x == true || x == 1;
  }
  // One of these names.
  template <class Names>
  std::string one_of(const char* key, const Names& names, const std::string& otherwise) {
    const nlohmann::json x = take(key, otherwise);
    std::string all;
    for (const char* const name : names) {
      if (x == name) return name;
      all += (all.empty() ? "" : " or ") + std::string(name);
    }
    if (x != otherwise) refuse_json(key, x, all);
    return otherwise;
  }
  const nlohmann::json& rest() const { return all_; }

 private:
  nlohmann::json all_;
};

// A count, or a share with a point: budget_text.hpp. Throws std::invalid_argument for anything else, 0, 1 and true
// among it.
inline quoka::Budget budget_from(const std::string& what, const nlohmann::json& x) {
  std::optional<quoka::Budget> budget;
  if (x.is_number_unsigned() && x.get<std::uint64_t>() > std::uint64_t{most_keys})
    budget.reset();
  else if (x.is_number_integer())
    budget = count_budget(x.get<Index>());
  else if (x.is_number_float())
    budget = share_budget(x.get<double>());
  if (!budget) refuse_json(what, x, budget_rules());
  return *budget;
}

// Throws std::invalid_argument, which names the member, for what is not understood.
inline LayerPolicy parse_policy(const nlohmann::json& json) {
  constexpr Index most_layers = 10'000, most_channels = 1 << 20;
  if (!json.is_object()) throw std::invalid_argument("the policy is no JSON object");
  LayerPolicy policy;
  for (const auto& [key, x] : json.items()) {
    if (key == "budget") {
      policy.budget = budget_from(key, x);
    } else if (key == "dense_layers" && x.is_array()) {
      for (const auto& layer : x)
        policy.dense.insert(whole_from("a dense layer", layer, 0, most_layers));
    } else if (key == "dense_layers") {
      for (Index layer = whole_from(key, x, 0, most_layers); layer-- > 0;)
        policy.dense.insert(layer);
    } else if (key == "layer_budgets" && x.is_object()) {
      for (const auto& [layer, budget] : x.items()) {
        auto number = nlohmann::json::parse(layer, nullptr, false);
        if (number.is_discarded()) number = layer;
        policy.budgets.insert_or_assign(whole_from("a layer with a budget", number, 0, most_layers),
                                        budget_from("the budget of layer " + layer, budget));
      }
    } else if (key == "model" && x.is_object()) {
      for (const auto& [part, size] : x.items()) {
        Index* const to = part == "q_heads"    ? &policy.q_heads
                          : part == "kv_heads" ? &policy.kv_heads
                          : part == "head_dim" ? &policy.head_dim
                                               : nullptr;
        if (to == nullptr) refuse_json("a member of model", part, "q_heads, kv_heads or head_dim");
        *to = whole_from(part, size, 0, most_channels);
      }
    } else if (key != "mode") {  // the selector is the caller's
      refuse_json("the member " + key, x, "one of those that are documented");
    }
  }
  return policy;
}

inline LayerPolicy read_policy(const std::string& path) try {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument("cannot be read");
  return parse_policy(parse_json_object("it", {std::istreambuf_iterator<char>(file), {}}));
} catch (const std::invalid_argument& e) {
  throw std::invalid_argument(path + ": " + e.what());
}

}  // namespace quoka_examples
