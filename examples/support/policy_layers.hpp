// The layers of one sequence by a layer policy (support/layer_policy.hpp).
#pragma once

#include "support/layer_policy.hpp"
#include "support/methods.hpp"

#include <string>
#include <vector>

namespace quoka_examples {

// Throws std::invalid_argument for a method that shares a choice between layers, where the policy
// has budgets of single layers.
void require_fits(const std::string& method, const LayerPolicy& policy);

// A layer for each of `numbers`, the layers' numbers in the policy, in the order of the model. It
// is dense, or has a budget of its own, or that of `options`. The policy's own `budget` is the
// caller's. A method that shares a choice between layers shares it among those that are not dense.
// Throws std::invalid_argument as require_fits and make_layers do, and for a policy of another
// shape.
LayerStack make_policy_layers(const std::string& method, const quoka::LayerShape& shape,
                              const MethodOptions& options, const LayerPolicy& policy,
                              const std::vector<Index>& numbers,
                              const quoka::AttentionOptions& attention = {});

}  // namespace quoka_examples
