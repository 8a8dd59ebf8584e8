// The loss of each layer and KV head by selection, at several budgets, and the layer policy that
// follows.
//
//   error = |out_selected - out_dense| / |out_dense|      over the chunks that have a past
//
// of a layer's outputs before its output product, all heads together, and of the query heads of
// each KV head. All budgets see the queries, keys and values of dense attention: an error is a
// layer's own, and does not contain what earlier layers would have added. The policy gives each
// layer the first budget of the ladder whose error is at most the tolerance, and all keys where
// none is.
#pragma once

#include "support/methods.hpp"

#include <nlohmann/json.hpp>

#include <iosfwd>
#include <string>
#include <vector>

namespace quoka_examples {

// A budget of a ladder is a count of keys or a fraction of the past, a JSON number as in a policy.

// first, 2 first, 4 first, ...: `rungs` of them, of fractions those below 1. Throws
// std::invalid_argument for a text that is not a budget, and for a fraction of 1.
std::vector<nlohmann::json> doubled_ladder(const std::string& first, int rungs);
// The budgets as given. Throws std::invalid_argument for none, for counts mixed with
// fractions, and for an order that is not ascending.
std::vector<nlohmann::json> given_ladder(const std::vector<std::string>& budgets);

// Measures layers chunk by chunk. Memory: a cache of keys and values per layer and budget.
class Calibration {
 public:
  using View = AnyLayer::View;

  // Layers of one shape, `numbers` as the policy is to call them; the budget of `options` is
  // ignored. Throws std::invalid_argument for a method that shares a choice between layers, and as
  // make_layers does.
  Calibration(std::string selector, const quoka::LayerShape& shape, const MethodOptions& options,
              const std::vector<nlohmann::json>& ladder, std::vector<Index> numbers,
              const quoka::AttentionOptions& attention = {});

  // The next chunk of layer numbers[layer], and its dense output.
  void add(Index layer, View q, View k, View v, View dense_out, quoka::ThreadPool& threads);

  Index rungs() const { return std::ssize(ladder_); }
  const nlohmann::json& budget(Index rung) const { return at(rung).budget; }
  double error(Index rung, Index layer) const;
  double error(Index rung, Index layer, Index kv_head) const;
  double worst_kv_head(Index rung, Index layer) const;

  // The rung that each layer takes; rungs(): all keys.
  std::vector<Index> choose(double tolerance) const;
  // As support/layer_policy.hpp describes it. Layers that are not listed get the ladder's first
  // budget.
  nlohmann::json policy(double tolerance) const;
  // A record per layer and budget: layer, budget, error, kv_head_error.
  nlohmann::json results() const;
  // A row per layer: its error at each budget, the worst KV head's at the first, and what the
  // policy says.
  void print(std::ostream& out, double tolerance) const;

 private:
  struct Rung {
    nlohmann::json budget;
    LayerStack layers;
    std::vector<std::vector<double>> difference, size;  // sums of squares [layer][KV head]
  };

  const Rung& at(Index rung) const { return ladder_[static_cast<std::size_t>(rung)]; }

  std::string selector_;
  quoka::LayerShape shape_;
  std::vector<Index> numbers_;
  std::vector<Rung> ladder_;
};

// Writes the file, and says on `out` what is in it.
void write_policy(const std::string& path, const nlohmann::json& policy, std::ostream& out);

}  // namespace quoka_examples
