// Captured layers: the queries, keys and values that a real model's attention received, after RoPE.
// They are the tensors NAME.q, NAME.k and NAME.v of a safetensors file, or q, k and v if the layer
// has no name. Other tensors are skipped. examples/data/README.md says how to make such a file.
#pragma once

#include <quoka/rows/tensor.hpp>

#include <optional>
#include <string>
#include <vector>

#include "support/safetensors.hpp"

namespace quoka_examples {

struct LayerCapture {
  std::string name;  // "layer11"; "unnamed" for the layer of q, k and v
  Tensor<float> q;   // [batch, q_heads, len, head_dim]
  Tensor<float> k;   // [batch, kv_heads, len, head_dim]
  Tensor<float> v;   // [batch, kv_heads, len, v_dim]; v_dim is head_dim in most models
  // [batch, q_heads, len] the one key that a query is after, -1: none; empty if unknown.
  quoka::Tensor<quoka::Position, 3> targets = {};
};

// Every NAME with a NAME.q, NAME.k or NAME.v, and "" for q, k and v. Shorter names come first, then
// in alphabetical order, which puts layer2 before layer11. Throws std::runtime_error, with what the
// file has, if there is no layer.
std::vector<std::string> layer_names(const SafetensorsFile& file);

// Throws std::runtime_error that begins with `who` and says where the first number is that is not
// finite.
void require_finite(const std::string& who, const Tensor<float>& x);

// One layer, as float; "" is that of q, k and v. Throws std::runtime_error, with the file, the
// layer and both numbers, if a tensor is missing or empty, if the three do not fit together, or if
// a number is not finite.
LayerCapture load_layer(const SafetensorsFile& file, const std::string& name);

// 11 of "layer11", "11" and "layers.11.attention". Throws std::invalid_argument for a name without
// a number, with several, and with one that no model has.
Index layer_number(const std::string& name);

// The numbers of all layers. Throws std::invalid_argument as layer_number does, and for a number
// that two layers have.
std::vector<Index> layer_numbers(const std::vector<LayerCapture>& layers);

// All layers, in the order of layer_names. Throws as both do.
std::vector<LayerCapture> load_layers(const SafetensorsFile& file);

// The metadata's "softmax_scale", or nothing if the file has none: 1/sqrt(head_dim) is then usual.
// Throws std::runtime_error if it is there but not a positive finite number.
std::optional<float> softmax_scale(const SafetensorsFile& file);

}  // namespace quoka_examples
