// Which layers of a model select, and how many keys: what `evaluate --calibrate` writes, and what
// `evaluate` and the ggml backend (QUOKA_CONFIG) read.
//
//   {
//    "budget": 0.125,                          of layers that are not listed
//    "dense_layers": [0],                      these attend to everything
//    "layer_budgets": {"5": 0.25, "7": 2048},  of single layers: a fraction of the past, or a count
//    "mode": "recommended",                    the selector: exact, paper, balanced, recommended
//    "model": {"head_dim": 64, "kv_heads": 4, "q_heads": 32}   that it was measured on
//   }
//
// Every member may be left out. support/layer_policy_file.hpp reads it.
#pragma once

#include <quoka/select/options.hpp>

#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

namespace quoka_examples {

using quoka::Index;

struct LayerPolicy {
  std::optional<quoka::Budget> budget;
  std::set<Index> dense;
  std::map<Index, quoka::Budget> budgets;
  Index q_heads = 0, kv_heads = 0, head_dim = 0;  // 0: any

  // Throws std::invalid_argument for a model of another shape.
  void check_shape(Index model_q_heads, Index model_kv_heads, Index model_head_dim) const {
    const auto same = [](const char* what, Index wanted, Index got) {
      if (wanted != 0 && wanted != got)
        throw std::invalid_argument(std::string("the policy is for ") + std::to_string(wanted) +
                                    " " + what + ", the model has " + std::to_string(got));
    };
    same("query heads", q_heads, model_q_heads);
    same("KV heads", kv_heads, model_kv_heads);
    same("channels of a head", head_dim, model_head_dim);
  }
  // The same, and for a layer that it has not.
  void check(Index model_q_heads, Index model_kv_heads, Index model_head_dim,
             Index model_layers) const {
    check_shape(model_q_heads, model_kv_heads, model_head_dim);
    const auto has = [&](Index layer) {
      if (layer >= model_layers)
        throw std::invalid_argument("the policy names layer " + std::to_string(layer) +
                                    ", the model has " + std::to_string(model_layers) + " layers");
    };
    for (const Index layer : dense) has(layer);
    for (const auto& own : budgets) has(own.first);
  }
};

}  // namespace quoka_examples
