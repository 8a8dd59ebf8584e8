// One sequence on a model: runs tokens through the layers and keeps the cache.
//
//   x  = embedding[token]
//   each layer:  h = norm(x);  q, k, v = h Wq, h Wk, h Wv (+ bias, head norms), RoPE on q and k
//                x += attention(q, k, v) Wo         quoka::ChunkedPrefill, chunk by chunk
//                h = norm(x);  x += (silu(h Wgate) * h Wup) Wdown
//   logits = norm(x) Wout
//
// norm is RMSNorm (Zhang & Sennrich 2019), the feed-forward SwiGLU (Shazeer 2020). Tokens go
// through the products in batches, several chunks at once, so that the weights are made float less
// often; what a chunk attends to does not depend on the batch. Activations and cache are float.
#pragma once

#include "decoder/model/model.hpp"
#include "decoder/model/rope.hpp"

#include "support/layer_policy.hpp"
#include "support/methods.hpp"

#include <functional>
#include <span>
#include <string>
#include <vector>

namespace quoka_decoder {

using Token = std::int32_t;

struct SessionOptions {
  std::string method = "dense";            // a selector's name: support/methods.hpp
  // Its budget and its other options. With its `ranks` every layer's keys are spread over these: each rank
  // runs the same tokens through the same model, and keeps a part of the cache.
  quoka_examples::MethodOptions selector;
  Index chunk = 128;                       // tokens that select together
  Index batch = 512;                       // tokens that go through a product together
  Index dense_layers = 0;                  // the first layers attend to everything
  quoka_examples::LayerPolicy policy;      // layers by number: more dense ones, and their budgets
};

class Session {
 public:
  // The model and the threads must outlive the session. Throws std::invalid_argument for a chunk or
  // batch below 1, for selector options that the model's shape does not allow, for a policy of another
  // model, and for budgets of single layers where layers share a choice.
  Session(const Model& model, const SessionOptions& options, quoka::ThreadPool& threads);

  // Runs these tokens after those that are there already. progress(done) hears how many of them are
  // done after every batch. Throws std::invalid_argument, before anything is run, for no token and
  // for one outside of the vocabulary. After any other throw the session is as it was.
  void run(std::span<const Token> tokens, const std::function<void(Index)>& progress = {});

  // As run(), of tokens that are to be attended to and nothing else: the last layer stops at their
  // keys and values. In a model of two layers that is half of the work. Neither logits nor the last
  // layer's state follow; what later tokens see is the same. Throws as run().
  void fill(std::span<const Token> tokens);

  // What follows the last `count` tokens of the last batch: [count, vocabulary]. Throws
  // std::invalid_argument if that batch had fewer, or was filled.
  Vector logits(Index count = 1);

  // The last token's state after a layer, [d_model]; of the last layer only where it was run.
  std::span<const float> hidden(Index layer) const;

  // Hears of every chunk that a layer attends with: its queries, keys, values and outputs,
  // [1, heads, tokens, dim], before the layer's output product.
  using View = quoka_examples::AnyLayer::View;
  std::function<void(Index layer, View q, View k, View v, View out)> watch;

  // Back to the first `len` tokens.
  void truncate(Index len);
  void reserve(Index len);
  Index len() const { return layers_.front()->kv_len(); }
  const Model& model() const { return model_; }
  quoka_examples::AnyLayer& layer(Index layer) { return *layers_[static_cast<std::size_t>(layer)]; }

 private:
  enum class Until { logits, keys };  // where the last layer stops

  void run_batches(std::span<const Token> tokens, Until until,
                   const std::function<void(Index)>& progress);
  void run_batch(std::span<const Token> tokens, Until until);
  void run_layer(Index layer, Index tokens, Until until);
  void queries_keys_values(Index layer, Index tokens);
  void attend(Index layer, Index tokens, Until until);
  void norm(const Vector& weight, Index tokens);
  template <class F>
  void each_token(Index tokens, F&& f);

  const Model& model_;
  quoka::ThreadPool& threads_;
  Index chunk_, batch_;
  quoka_examples::LayerStack layers_;
  RopeTable rope_;
  MatrixProduct product_;
  Index batch_tokens_ = 0;       // of the last batch
  Vector x_, h_;                 // [tokens, d_model] the states, and their norm
  Vector q_, k_, v_, attended_;  // [tokens, heads * head_dim]
  Vector gate_, up_;             // [tokens, ffn_dim]
  Vector hidden_;                // [layers, d_model] of the last token
};

}  // namespace quoka_decoder
