// The sizes and choices that make one decoder-only transformer out of many, read from the metadata
// of a GGUF file. The keys are those llama.cpp's converter writes: "<architecture>.block_count".
//
//   architecture  models                RoPE pairs channels  besides
//   llama         Llama 2, 3, TinyLlama i and i + 1          rope_freqs.weight (Llama 3.1)
//   qwen2         Qwen2, Qwen2.5        i and i + dim / 2    biases on q, k and v
//   qwen3         Qwen3                 i and i + dim / 2    RMS norm of each query and key head
//   smollm3       SmolLM3               i and i + 1          every fourth layer without RoPE
//
// Biases, head norms, frequency factors and tied embeddings are taken where the file has them.
// Beyond llama.cpp: "<architecture>.no_rope_layer_interval" n, where layers n - 1, 2n - 1, ... have
// no RoPE; 4 for smollm3, none for the others.
//
// A key "<architecture>.*" is computed with, or known to change no logit, or refused by name: config.cpp
// has the lists. A key of a part that this program has not (a soft-cap, experts) may say that the model
// is without it.
#pragma once

#include <quoka/base/index.hpp>

#include <string>

namespace quoka_decoder {

using quoka::Index;

class GgufFile;

enum class RopePairing { adjacent, halves };
enum class RopeScaling { none, linear, yarn };

// Rotary position embedding; `scaling` stretches a trained context to `factor` times its length. As in
// llama.cpp a factor without a type is linear, 0 is none, and rope.scale_linear is the factor where
// rope.scaling.factor is not there.
struct RopeConfig {
  Index dim = 0;  // channels that turn, the first of each head
  float base = 10000.0f;
  RopePairing pairing = RopePairing::adjacent;
  RopeScaling scaling = RopeScaling::none;
  float factor = 1.0f;
  float magnitude = 1.0f;     // cosine and sine are multiplied with it: rope.scaling.attn_factor
  Index trained_context = 0;  // of yarn: the context before it was stretched
};

struct ModelConfig {
  std::string architecture;
  Index layers = 0;
  Index d_model = 0;
  Index q_heads = 0;
  Index kv_heads = 0;
  Index head_dim = 0;  // of queries and keys
  Index v_dim = 0;     // of values
  Index ffn_dim = 0;
  Index vocabulary = 0;
  Index context = 0;  // tokens the model was trained on
  float norm_epsilon = 1e-5f;
  RopeConfig rope;
  Index no_rope_step = 0;  // n: layers n - 1, 2n - 1, ... have no RoPE; 0: all have it

  bool has_rope(Index layer) const { return no_rope_step == 0 || (layer + 1) % no_rope_step != 0; }
};

// Throws std::runtime_error for a part of a split file, an architecture, a RoPE scaling or a key that is
// not among those above, naming it, and for sizes that do not fit together.
ModelConfig read_config(const GgufFile& file);

// Throws std::invalid_argument, with both numbers, for sizes that do not fit together.
void check_config(const ModelConfig& config);

}  // namespace quoka_decoder
