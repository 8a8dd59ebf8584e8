// Reads a layer policy (support/layer_policy.hpp).
#pragma once

#include "support/budget_text.hpp"
#include "support/json_text.hpp"
#include "support/layer_policy.hpp"
#include "support/refusals.hpp"

#include <cstdint>
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

inline bool is_whole(const nlohmann::json& x, Index least, Index most) {
  return x.is_number_integer() && x.get<Index>() >= least && x.get<Index>() <= most;
}
// Throws std::invalid_argument for anything but a whole number in [least, most].
inline Index whole_from(const std::string& what, const nlohmann::json& x, Index least, Index most) {
  if (!is_whole(x, least, most))
    refuse_json(what, x,
                "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  return x.get<Index>();
}

// The members of a JSON object, taken one by one. Each throws std::invalid_argument, which names
// the member, for what is not understood.
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

// A count, or a share with a point: budget_text.hpp. Throws std::invalid_argument for anything
// else, 0, 1 and true among it.
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

inline constexpr Index most_layers = 10'000;

inline std::set<Index> dense_layers_from(const nlohmann::json& x) {
  std::set<Index> dense;
  if (x.is_array()) {
    for (const auto& layer : x) dense.insert(whole_from("a dense layer", layer, 0, most_layers));
    return dense;
  }
  if (!is_whole(x, 0, most_layers))
    refuse_json("dense_layers", x,
                "a whole number from 0 to " + std::to_string(most_layers) +
                    ", or a list of layers in brackets such as [0,5]");
  for (Index layer = x.get<Index>(); layer-- > 0;) dense.insert(layer);
  return dense;
}
// One layer's, as a member of layer_budgets.
inline std::pair<Index, quoka::Budget> layer_budget_from(const std::string& layer,
                                                         const nlohmann::json& budget) {
  auto number = nlohmann::json::parse(layer, nullptr, false);
  if (number.is_discarded()) number = layer;
  return {whole_from("a layer with a budget", number, 0, most_layers),
          budget_from("the budget of layer " + layer, budget)};
}

// Throws std::invalid_argument, which names each member that is not understood.
inline LayerPolicy parse_policy(const nlohmann::json& json) {
  constexpr Index most_channels = 1 << 20;
  if (!json.is_object()) throw std::invalid_argument("the policy is not a JSON object");
  LayerPolicy policy;
  const std::pair<const char*, Index*> sizes[] = {
      {"q_heads", &policy.q_heads}, {"kv_heads", &policy.kv_heads}, {"head_dim", &policy.head_dim}};
  const auto read_size = [&](const std::string& part, const nlohmann::json& size) {
    for (const auto& [name, to] : sizes)
      if (part == name) return void(*to = whole_from(part, size, 0, most_channels));
    refuse_json("a member of model", part, "q_heads, kv_heads or head_dim");
  };
  const auto object_of = [](const std::string& key, const nlohmann::json& x,
                            const char* wanted) -> const nlohmann::json& {
    if (!x.is_object()) refuse_json(key, x, wanted);
    return x;
  };
  Refusals refused;
  for (const auto& item : json.items())
    refused.in([&, key = item.key(), &x = item.value()] {
      if (key == "budget") {
        policy.budget = budget_from(key, x);
      } else if (key == "dense_layers") {
        policy.dense = dense_layers_from(x);
      } else if (key == "layer_budgets") {
        for (const auto& one :
             object_of(key, x, "an object such as {\"7\": 2048, \"8\": 0.5}").items())
          refused.in([&] {
            const auto [layer, budget] = layer_budget_from(one.key(), one.value());
            policy.budgets.insert_or_assign(layer, budget);
          });
      } else if (key == "model") {
        for (const auto& one :
             object_of(key, x, "an object of q_heads, kv_heads and head_dim").items())
          refused.in([&] { read_size(one.key(), one.value()); });
      } else if (key != "mode") {  // the selector is the caller's
        refuse_json("the member " + key, x, "one of those that are documented");
      }
    });
  refused.throw_if_any();
  return policy;
}

inline LayerPolicy read_policy(const std::string& path) {
  const nlohmann::json all = read_json_object(path);
  try {
    return parse_policy(all);
  } catch (const std::invalid_argument& e) {
    throw std::invalid_argument(path + ": " + e.what());
  }
}

}  // namespace quoka_examples
