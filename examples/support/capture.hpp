// Captured layers: the queries, keys and values that a real model's attention received, after RoPE,
// as the tensors NAME.q, NAME.k and NAME.v of one safetensors file. examples/data/README.md says
// how to make such a file.
#pragma once

#include <quoka/core/view.hpp>

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/safetensors.hpp"

namespace quoka_examples {

struct LayerCapture {
  std::string name;  // "layer11"
  Tensor<float> q;   // [batch, q_heads, len, head_dim]
  Tensor<float> k;   // [batch, kv_heads, len, head_dim]
  Tensor<float> v;   // [batch, kv_heads, len, v_dim]; v_dim is head_dim in most models
  // [batch, q_heads, len] the one key that a query is after, -1: none; empty where nobody knows.
  quoka::Tensor<quoka::Position, 3> targets = {};
};

// Every NAME for which there is a NAME.q, NAME.k or NAME.v; shorter names first, then in
// alphabetical order, which puts layer2 before layer11.
inline std::vector<std::string> layer_names(const SafetensorsFile& file) {
  std::set<std::string> found;
  for (const std::string& name : file.names()) {
    if (name.size() > 2 && (name.ends_with(".q") || name.ends_with(".k") || name.ends_with(".v"))) {
      found.insert(name.substr(0, name.size() - 2));
    }
  }
  std::vector<std::string> names(found.begin(), found.end());
  std::stable_sort(names.begin(), names.end(),
                   [](const std::string& a, const std::string& b) { return a.size() < b.size(); });
  return names;
}

// One layer, as float. Throws std::runtime_error naming the file, the layer and both numbers if a
// tensor is missing or empty, or if the three do not fit together.
inline LayerCapture load_layer(const SafetensorsFile& file, const std::string& name) {
  LayerCapture layer{name,
                     file.read_float(name + ".q"),
                     file.read_float(name + ".k"),
                     file.read_float(name + ".v"),
                     {}};
  const auto require = [&](bool fits, const char* what, Index left, Index right) {
    if (!fits) {
      throw std::runtime_error(file.path() + ": " + name + ": " + what + ": " +
                               std::to_string(left) + " and " + std::to_string(right));
    }
  };
  const auto same = [&](const char* what, Index left, Index right) {
    require(left == right, what, left, right);
  };
  const Tensor<float>& q = layer.q;
  const Tensor<float>& k = layer.k;
  const Tensor<float>& v = layer.v;
  for (const Tensor<float>* tensor : {&q, &k, &v}) {
    require(tensor->size() > 0, "a tensor is empty: its heads and len are", tensor->dimension(1),
            tensor->dimension(2));
  }
  same("q and k differ in batch", q.dimension(0), k.dimension(0));
  same("k and v differ in batch", k.dimension(0), v.dimension(0));
  require(q.dimension(1) % k.dimension(1) == 0, "q_heads is not a multiple of kv_heads",
          q.dimension(1), k.dimension(1));
  same("k and v differ in kv_heads", k.dimension(1), v.dimension(1));
  same("q and k differ in len", q.dimension(2), k.dimension(2));
  same("k and v differ in len", k.dimension(2), v.dimension(2));
  same("q and k differ in head_dim", q.dimension(3), k.dimension(3));
  return layer;
}

// All layers, in the order of layer_names. Throws as load_layer does, and if there is no layer.
inline std::vector<LayerCapture> load_layers(const SafetensorsFile& file) {
  std::vector<LayerCapture> layers;
  for (const std::string& name : layer_names(file)) layers.push_back(load_layer(file, name));
  if (layers.empty())
    throw std::runtime_error(file.path() + ": no tensors named NAME.q, NAME.k and NAME.v");
  return layers;
}

// The metadata's "softmax_scale", or nothing if the file has none: 1/sqrt(head_dim) is then usual.
// Throws std::runtime_error if it is there but not a positive finite number.
inline std::optional<float> softmax_scale(const SafetensorsFile& file) {
  const auto found = file.metadata().find("softmax_scale");
  if (found == file.metadata().end()) return std::nullopt;
  const nlohmann::json number =
      nlohmann::json::parse(found->second, nullptr, false);  // reads "." in every locale
  const double scale = number.is_number() ? number.get<double>() : 0.0;
  if (!(scale >= double{std::numeric_limits<float>::min()} &&
        scale <= double{std::numeric_limits<float>::max()})) {
    throw std::runtime_error(file.path() + ": metadata softmax_scale is '" +
                             found->second.substr(0, 60) + "', not a positive finite number");
  }
  return static_cast<float>(scale);
}

}  // namespace quoka_examples
