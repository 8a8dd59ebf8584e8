// The small trained models of data/trained: a decoder-only transformer on token ids, driven by a
// GGUF file. It has no tokenizer and samples nothing; attention is the caller's, so that any
// selector runs in it.
//
//   x  = embedding[token]
//   each layer:  h = norm(x);  q, k, v = h Wq, h Wk, h Wv (+ norms of each head), RoPE on q and k
//                x += attention(q, k, v) Wo
//                h = norm(x);  x += (silu(h Wgate) * h Wup) Wdown
//   logits = norm(x) embedding^T, or norm(x) output^T where the file has that matrix
//
// norm is RMSNorm (Zhang & Sennrich 2019), the feed-forward SwiGLU (Shazeer 2020). RoPE turns
// channels 2 i and 2 i + 1 (SmolLM3's architecture); each `no_rope_layer_interval`-th layer is
// without RoPE. Weights are F32 or F16 in the file, float here. Cost: one product a matrix and
// call, on one thread.
#pragma once

#include "support/gguf_file.hpp"
#include "support/require.hpp"

#include <quoka/rows/tensor.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_examples {

using Token = std::int32_t;

class SmallModel {
 public:
  using Rows = GgufFile::RowMajor;  // [tokens, width]
  using View = quoka::TensorView<const float>;
  using OutView = quoka::TensorView<float>;

  // Throws std::runtime_error for another architecture than smollm3, for a key of it or a tensor
  // that is missing or unsupported, and for sizes that do not fit together.
  explicit SmallModel(const GgufFile& file) {
    if (const std::string of = file.text("general.architecture"); of != "smollm3")
      throw std::runtime_error(file.name() + ": its architecture is \"" + of + "\", not smollm3");
    const auto size = [&](const char* key, Index least = 1) {
      const Index x = file.integer(std::string("smollm3.") + key);
      if (x < least)
        throw std::runtime_error(file.name() + ": " + key + " is " + std::to_string(x) +
                                 ", but must be at least " + std::to_string(least));
      return x;
    };
    const Index layers = size("block_count");
    d_model = size("embedding_length"), ffn_ = size("feed_forward_length");
    q_heads = size("attention.head_count"), kv_heads = size("attention.head_count_kv");
    head_dim = size("attention.key_length"), vocabulary = size("vocab_size");
    no_rope_step_ = size("no_rope_layer_interval", 0);
    if (q_heads % kv_heads != 0 || head_dim % 2 != 0 ||
        size("attention.value_length") != head_dim || size("rope.dimension_count") != head_dim)
      throw std::runtime_error(file.name() + ": " + std::to_string(q_heads) + " query heads for " +
                               std::to_string(kv_heads) + " KV heads of " +
                               std::to_string(head_dim) + " channels do not fit together");
    epsilon_ = static_cast<float>(file.number("smollm3.attention.layer_norm_rms_epsilon"));
    rope_base_ = file.number("smollm3.rope.freq_base");
    if (!(epsilon_ >= 0 && epsilon_ < 1) || !(rope_base_ > 0 && std::isfinite(rope_base_)))
      throw std::runtime_error(file.name() + ": the norm's epsilon is " + std::to_string(epsilon_) +
                               ", RoPE's base " + std::to_string(rope_base_));

    std::set<std::string> known;
    const auto matrix = [&](const std::string& name, Index rows, Index columns) {
      known.insert(name + ".weight");
      return file.matrix(name + ".weight", rows, columns);
    };
    embedding_ = matrix("token_embd", vocabulary, d_model);
    if (file.tensors().contains("output.weight")) output_ = matrix("output", vocabulary, d_model);
    output_norm_ = matrix("output_norm", 1, d_model);
    if (layers > std::ssize(file.tensors()))  // before anything is made for them
      throw std::runtime_error(file.name() + ": " + std::to_string(layers) + " layers, but " +
                               std::to_string(file.tensors().size()) + " tensors");
    for (Index i = 0; i < layers; ++i) {
      const std::string of = "blk." + std::to_string(i) + '.';
      Layer& l = layers_.emplace_back();
      l.attention_norm = matrix(of + "attn_norm", 1, d_model);
      l.q = matrix(of + "attn_q", q_heads * head_dim, d_model);
      l.k = matrix(of + "attn_k", kv_heads * head_dim, d_model);
      l.v = matrix(of + "attn_v", kv_heads * head_dim, d_model);
      if (file.tensors().contains(of + "attn_q_norm.weight")) {
        l.q_norm = matrix(of + "attn_q_norm", 1, head_dim);
        l.k_norm = matrix(of + "attn_k_norm", 1, head_dim);
      }
      l.out = matrix(of + "attn_output", d_model, q_heads * head_dim);
      l.ffn_norm = matrix(of + "ffn_norm", 1, d_model);
      l.gate = matrix(of + "ffn_gate", ffn_, d_model);
      l.up = matrix(of + "ffn_up", ffn_, d_model);
      l.down = matrix(of + "ffn_down", d_model, ffn_);
    }
    for (const auto& [name, tensor] : file.tensors())
      if (!known.contains(name))
        throw std::runtime_error(file.name() + ": tensor " + name + " is not known here");
  }

  Index layers() const { return std::ssize(layers_); }

  // The states after the last layer, [tokens, d_model], of tokens that follow `position` others.
  // attend(layer, q, k, v, out): views [1, heads, tokens, head_dim]; it keeps k and v, and writes
  // what the queries attend to. keys_only: what these tokens say themselves is not asked. The last
  // layer stops at their keys and values, where `out` has no data, and no states follow. Throws
  // std::invalid_argument for no token and for one outside of the vocabulary.
  template <class Attend>
  Rows run(std::span<const Token> tokens, Index position, Attend&& attend,
           bool keys_only = false) const {
    const Index n = std::ssize(tokens);
    require_at_least("the number of tokens", n, 1);
    Rows x(n, d_model);
    for (Index t = 0; t < n; ++t) {
      const Token token = tokens[static_cast<std::size_t>(t)];
      require_at_least("a token", token, 0);
      require_at_most("a token", token, "the last one", vocabulary - 1);
      x.row(t) = embedding_.row(token);
    }
    Rows attended(n, q_heads * head_dim);
    for (Index i = 0; i < layers(); ++i) {
      const Layer& l = layers_[static_cast<std::size_t>(i)];
      Rows h = norm(x, l.attention_norm);
      Rows q = h * l.q.transpose(), k = h * l.k.transpose(), v = h * l.v.transpose();
      norm_heads(q, l.q_norm), norm_heads(k, l.k_norm);
      if (no_rope_step_ == 0 || (i + 1) % no_rope_step_ != 0)
        rotate(q, position), rotate(k, position);
      const bool stops = keys_only && i + 1 == layers();
      attend(i, View(by_head(q.data(), q_heads, n)), View(by_head(k.data(), kv_heads, n)),
             View(by_head(v.data(), kv_heads, n)),
             stops ? OutView() : by_head(attended.data(), q_heads, n));
      if (stops) return {};
      x += attended * l.out.transpose();
      h = norm(x, l.ffn_norm);
      const Rows gate = h * l.gate.transpose(), up = h * l.up.transpose();
      x += (gate.array() / (1.0f + (-gate.array()).exp()) * up.array()).matrix() *
           l.down.transpose();
    }
    return x;
  }

  // The logits of the next token after each of these states, [tokens, vocabulary].
  Rows logits(const Rows& states) const {
    const Rows& output = output_.size() > 0 ? output_ : embedding_;
    return norm(states, output_norm_) * output.transpose();
  }

  Index d_model = 0, q_heads = 0, kv_heads = 0, head_dim = 0, vocabulary = 0;

 private:
  struct Layer {
    Rows attention_norm, q, k, v, q_norm, k_norm, out, ffn_norm, gate, up, down;
  };

  // A sequence's rows [tokens, heads * head_dim] as [1, heads, tokens, head_dim].
  OutView by_head(float* data, Index heads, Index tokens) const {
    return {data,
            {1, heads, tokens, head_dim},
            {tokens * heads * head_dim, head_dim, heads * head_dim, 1}};
  }

  // weight * x / rms(x), row by row.
  Rows norm(const Rows& x, const Rows& weight) const {
    Rows result(x.rows(), x.cols());
    for (Index t = 0; t < x.rows(); ++t)
      result.row(t) =
          (x.row(t).array() /
           std::sqrt(x.row(t).squaredNorm() / static_cast<float>(x.cols()) + epsilon_)) *
          weight.array();
    return result;
  }
  // Each head by itself; nothing without a weight.
  void norm_heads(Rows& x, const Rows& weight) const {
    if (weight.size() == 0) return;
    Eigen::Map<Rows> heads(x.data(), x.size() / head_dim, head_dim);
    heads = norm(heads, weight);
  }

  void rotate(Rows& x, Index position) const {
    for (Index t = 0; t < x.rows(); ++t)
      for (Index pair = 0; pair < head_dim / 2; ++pair) {
        // In double: at position 100,000 a float angle is off by 4e-3.
        const double angle =
            static_cast<double>(position + t) *
            std::pow(rope_base_, -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim));
        const auto cos = static_cast<float>(std::cos(angle));
        const auto sin = static_cast<float>(std::sin(angle));
        for (Index c = 2 * pair; c < x.cols(); c += head_dim) {
          const float a = x(t, c), b = x(t, c + 1);
          x(t, c) = a * cos - b * sin;
          x(t, c + 1) = a * sin + b * cos;
        }
      }
  }

  Index ffn_ = 0, no_rope_step_ = 0;
  float epsilon_ = 0;
  double rope_base_ = 0;
  Rows embedding_, output_, output_norm_;
  std::vector<Layer> layers_;
};

}  // namespace quoka_examples
