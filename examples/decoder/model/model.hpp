// The weights of a decoder-only transformer (Llama, Qwen, SmolLM): immutable, shared by every
// sequence that runs on them, in the form their file stores them in.
//
// Tensor names are GGUF's: token_embd, blk.<n>.{attn_norm, attn_q, attn_k, attn_v, attn_output,
// attn_q_norm, attn_k_norm, ffn_norm, ffn_gate, ffn_up, ffn_down}, output_norm, output,
// rope_freqs. A tensor of another name is refused: a model that needs it would run and be wrong.
#pragma once

#include "decoder/model/config.hpp"
#include "decoder/model/matrix.hpp"

#include <memory>
#include <string>
#include <vector>

namespace quoka_decoder {

struct LayerWeights {
  Vector attention_norm;          // [d_model]
  Matrix q, k, v;                 // [heads * head_dim, d_model]
  Vector q_bias, k_bias, v_bias;  // [heads * head_dim], or empty
  Vector q_norm, k_norm;          // [head_dim], or empty
  Matrix attention_out;           // [d_model, q_heads * v_dim]
  Vector ffn_norm;                // [d_model]
  Matrix gate, up;                // [ffn_dim, d_model]
  Matrix down;                    // [d_model, ffn_dim]
};

struct Model {
  ModelConfig config;
  Matrix embedding;  // [vocabulary, d_model]
  std::vector<LayerWeights> layers;
  Vector output_norm;   // [d_model]
  Matrix output;        // [vocabulary, d_model]; the embedding where the two are tied
  Vector rope_factors;  // [rope.dim / 2], or empty
  std::shared_ptr<const void> storage;  // what the matrices view

  Index bytes() const;  // of all matrices, tied ones once
};

// Throws std::runtime_error as read_config, and naming the tensor for one that is missing, has
// another shape than the metadata says, or is not known here.
Model load_model(std::shared_ptr<const GgufFile> file);

// A model of this shape with normally distributed weights of variance 1 / columns, the same in each
// run: what it computes is noise, how long it takes is real. `type` is f32, f16 or q8_0.
Model random_model(const ModelConfig& config, TensorType type);

}  // namespace quoka_decoder
