#include "support/policy_layers.hpp"

#include <stdexcept>
#include <utility>

namespace quoka_examples {

void require_fits(const std::string& method, const LayerPolicy& policy) {
  if (!policy.budgets.empty() && shares_layers(method))
    throw std::invalid_argument(method + " shares a choice between layers: a policy with " +
                                std::to_string(policy.budgets.size()) +
                                " budgets of single layers is not for it");
}

LayerStack make_policy_layers(const std::string& method, const quoka::LayerShape& shape,
                              const MethodOptions& options, const LayerPolicy& policy,
                              const std::vector<Index>& numbers,
                              const quoka::AttentionOptions& attention) {
  policy.check_shape(shape.q_heads, shape.kv_heads, shape.head_dim);
  require_fits(method, policy);
  const auto make = [&](const std::string& of, const std::vector<Index>& which,
                        const MethodOptions& o) {
    return make_layers(of, shape, o, attention, which, std::ssize(numbers), which.front());
  };
  std::vector<Index> selecting;
  for (Index i = 0; i < std::ssize(numbers); ++i)
    if (!policy.dense.contains(numbers[static_cast<std::size_t>(i)])) selecting.push_back(i);
  const bool shared = shares_layers(method);
  LayerStack sharing, layers;
  if (shared && !selecting.empty()) sharing = make(method, selecting, options);
  for (Index i = 0, next = 0; i < std::ssize(numbers); ++i) {
    const Index number = numbers[static_cast<std::size_t>(i)];
    MethodOptions of_layer = options;
    if (const auto own = policy.budgets.find(number); own != policy.budgets.end())
      of_layer.budget = own->second;
    if (policy.dense.contains(number))
      layers.push_back(std::move(make("dense", {i}, of_layer).front()));
    else if (shared)
      layers.push_back(std::move(sharing[static_cast<std::size_t>(next++)]));
    else
      layers.push_back(std::move(make(method, {i}, of_layer).front()));
  }
  return layers;
}

}  // namespace quoka_examples
