#include "decoder/model/session.hpp"

#include "support/policy_layers.hpp"
#include "support/require.hpp"

#include <quoka/views/tensor.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace quoka_decoder {
namespace {

using Array = Eigen::Map<Eigen::ArrayXf>;
using ConstArray = Eigen::Map<const Eigen::ArrayXf>;

// out = weight * x / rms(x), [size].
void rms_norm(const float* x, const Vector& weight, float epsilon, float* out) {
  const auto size = static_cast<Index>(weight.size());
  const ConstArray in(x, size);
  const float scale = 1.0f / std::sqrt(in.square().mean() + epsilon);
  Array(out, size) = in * scale * ConstArray(weight.data(), size);
}

// x [heads, size of weight], in place; nothing where the weight is empty.
void norm_heads(float* x, Index heads, const Vector& weight, float epsilon) {
  if (weight.empty()) return;
  for (Index head = 0; head < heads; ++head, x += weight.size()) rms_norm(x, weight, epsilon, x);
}

void add_bias(float* x, const Vector& bias) {
  if (bias.empty()) return;
  const auto size = static_cast<Index>(bias.size());
  Array(x, size) += ConstArray(bias.data(), size);
}

// One sequence's activations [tokens, heads * dim] as [1, heads, tokens, dim].
template <class T>
quoka::TensorView<T> by_head(T* data, Index heads, Index tokens, Index dim) {
  return {data, {1, heads, tokens, dim}, {tokens * heads * dim, dim, heads * dim, 1}};
}

quoka_examples::LayerStack attention_layers(const ModelConfig& c, const SessionOptions& options) {
  quoka_examples::require_at_least("dense_layers", options.dense_layers, 0);
  const quoka::LayerShape shape{
      .q_heads = c.q_heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim, .v_dim = c.v_dim};
  options.policy.check(c.q_heads, c.kv_heads, c.head_dim, c.layers);
  quoka_examples::LayerPolicy policy = options.policy;
  auto selector = options.selector;
  if (policy.budget) selector.budget = *policy.budget;
  std::vector<Index> numbers;
  for (Index layer = 0; layer < c.layers; ++layer) {
    numbers.push_back(layer);
    if (layer < options.dense_layers) policy.dense.insert(layer);
  }
  return quoka_examples::make_policy_layers(options.method, shape, selector, policy, numbers);
}

}  // namespace

Session::Session(const Model& model, const SessionOptions& options, quoka::ThreadPool& threads)
    : model_(model),
      threads_(threads),
      chunk_(options.chunk),
      batch_(options.batch),
      layers_(attention_layers(model.config, options)),
      rope_(model.config.rope, model.rope_factors),
      product_(threads),
      hidden_(static_cast<std::size_t>(model.config.layers * model.config.d_model)) {
  quoka_examples::require_at_least("chunk", chunk_, 1);
  quoka_examples::require_at_least("batch", batch_, 1);
  // A batch is whole chunks; one, where a layer reuses what another chose for this very chunk.
  batch_ = quoka_examples::shares_layers(options.method) ? chunk_ : quoka::round_up(batch_, chunk_);
}

void Session::run(std::span<const Token> tokens, const std::function<void(Index)>& progress) {
  run_batches(tokens, Until::logits, progress);
}

void Session::fill(std::span<const Token> tokens) { run_batches(tokens, Until::keys, {}); }

void Session::run_batches(std::span<const Token> tokens, Until until,
                          const std::function<void(Index)>& progress) {
  quoka_examples::require_at_least("the number of tokens", std::ssize(tokens), 1);
  for (const Token token : tokens)
    if (token < 0 || token >= model_.config.vocabulary)
      throw std::invalid_argument("token " + std::to_string(token) +
                                  " is not in the vocabulary of " +
                                  std::to_string(model_.config.vocabulary));
  const Index before = len();
  try {
    for (Index begin = 0; begin < std::ssize(tokens); begin += batch_) {
      const Index count = std::min(batch_, std::ssize(tokens) - begin);
      run_batch(tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)),
                until);
      if (progress) progress(begin + count);
    }
  } catch (...) {
    truncate(before);
    throw;
  }
}

void Session::run_batch(std::span<const Token> tokens, Until until) {
  const ModelConfig& c = model_.config;
  batch_tokens_ = std::ssize(tokens);
  const auto room = [&](Vector& rows, Index size) {
    rows.resize(static_cast<std::size_t>(batch_tokens_ * size));
  };
  room(x_, c.d_model), room(h_, c.d_model);
  room(q_, c.q_heads * c.head_dim), room(k_, c.kv_heads * c.head_dim);
  room(v_, c.kv_heads * c.v_dim), room(attended_, c.q_heads * c.v_dim);
  room(gate_, c.ffn_dim), room(up_, c.ffn_dim);

  rope_.set_positions(len(), batch_tokens_);
  each_token(batch_tokens_, [&](Index t) {
    model_.embedding.read_row(tokens[static_cast<std::size_t>(t)], x_.data() + t * c.d_model);
  });
  for (Index layer = 0; layer < c.layers; ++layer) {
    run_layer(layer, batch_tokens_, layer + 1 < c.layers ? Until::logits : until);
    std::copy_n(x_.end() - c.d_model, c.d_model, hidden_.begin() + layer * c.d_model);
  }
  if (until == Until::keys) batch_tokens_ = 0;
}

void Session::run_layer(Index layer, Index tokens, Until until) {
  const ModelConfig& c = model_.config;
  const LayerWeights& w = model_.layers[static_cast<std::size_t>(layer)];
  const auto rows = [&](Vector& data) {
    return Rows<float>(data.data(), tokens, std::ssize(data) / tokens);
  };

  queries_keys_values(layer, tokens);
  attend(layer, tokens, until);
  if (until == Until::keys) return;
  product_(w.attention_out, rows(attended_), rows(x_), Write::add);

  norm(w.ffn_norm, tokens);
  product_(w.gate, rows(h_), rows(gate_));
  product_(w.up, rows(h_), rows(up_));
  each_token(tokens, [&](Index t) {
    Array gate(rows(gate_)[t], c.ffn_dim);
    gate *= ConstArray(rows(up_)[t], c.ffn_dim) / (1.0f + (-gate).exp());  // silu(gate) * up
  });
  product_(w.down, rows(gate_), rows(x_), Write::add);
}

void Session::queries_keys_values(Index layer, Index tokens) {
  const ModelConfig& c = model_.config;
  const LayerWeights& w = model_.layers[static_cast<std::size_t>(layer)];
  const auto rows = [&](Vector& data) {
    return Rows<float>(data.data(), tokens, std::ssize(data) / tokens);
  };

  norm(w.attention_norm, tokens);
  product_(w.q, rows(h_), rows(q_));
  product_(w.k, rows(h_), rows(k_));
  product_(w.v, rows(h_), rows(v_));
  each_token(tokens, [&](Index t) {
    float* q = rows(q_)[t];
    float* k = rows(k_)[t];
    add_bias(q, w.q_bias), add_bias(k, w.k_bias), add_bias(rows(v_)[t], w.v_bias);
    norm_heads(q, c.q_heads, w.q_norm, c.norm_epsilon);
    norm_heads(k, c.kv_heads, w.k_norm, c.norm_epsilon);
    if (!c.has_rope(layer)) return;
    rope_.rotate(q, c.q_heads, c.head_dim, t);
    rope_.rotate(k, c.kv_heads, c.head_dim, t);
  });
}

void Session::attend(Index layer, Index tokens, Until until) {
  const ModelConfig& c = model_.config;
  const auto q = by_head<const float>(q_.data(), c.q_heads, tokens, c.head_dim);
  const auto k = by_head<const float>(k_.data(), c.kv_heads, tokens, c.head_dim);
  const auto v = by_head<const float>(v_.data(), c.kv_heads, tokens, c.v_dim);
  const auto out = by_head<float>(attended_.data(), c.q_heads, tokens, c.v_dim);
  auto& attention = *layers_[static_cast<std::size_t>(layer)];
  for (Index begin = 0; begin < tokens; begin += chunk_) {
    const Index n = std::min(chunk_, tokens - begin);
    const auto q_chunk = q.slice(begin, n), k_chunk = k.slice(begin, n),
               v_chunk = v.slice(begin, n);
    if (until == Until::keys)  // the queries for those that keep keys by them
      attention.append(q_chunk, k_chunk, v_chunk, threads_);
    else
      attention.forward(q_chunk, k_chunk, v_chunk, out.slice(begin, n), threads_);
    if (watch && until == Until::logits)
      watch(layer, q_chunk, k_chunk, v_chunk, out.slice(begin, n));
  }
}

void Session::norm(const Vector& weight, Index tokens) {
  each_token(tokens, [&](Index t) {
    const Index at = t * model_.config.d_model;
    rms_norm(x_.data() + at, weight, model_.config.norm_epsilon, h_.data() + at);
  });
}

template <class F>
void Session::each_token(Index tokens, F&& f) {
  constexpr Index together = 16;
  threads_.run(quoka::ceil_div(tokens, together), [&](Index task, int) {
    for (Index t = task * together; t < std::min(tokens, (task + 1) * together); ++t) f(t);
  });
}

Vector Session::logits(Index count) {
  quoka_examples::require_at_least("the number of tokens", count, 1);
  quoka_examples::require_at_least("the last batch's tokens", batch_tokens_, count);
  const ModelConfig& c = model_.config;
  const Index first = batch_tokens_ - count;
  Vector logits(static_cast<std::size_t>(count * c.vocabulary));
  for (Index t = 0; t < count; ++t)
    rms_norm(x_.data() + (first + t) * c.d_model, model_.output_norm, c.norm_epsilon,
             h_.data() + t * c.d_model);
  product_(model_.output, Rows<const float>(h_.data(), count, c.d_model),
           Rows<float>(logits.data(), count, c.vocabulary));
  return logits;
}

std::span<const float> Session::hidden(Index layer) const {
  const Index d = model_.config.d_model;
  return {hidden_.data() + layer * d, static_cast<std::size_t>(d)};
}

void Session::truncate(Index len) {
  for (const auto& layer : layers_)
    if (layer->kv_len() > len) layer->truncate(len);
}

void Session::reserve(Index len) {
  for (const auto& layer : layers_) layer->reserve(len);
}

}  // namespace quoka_decoder
