// Models of random weights in the shapes of real ones, for times alone: Llama's architecture, Q8_0,
// and fewer layers than the real one has, since all of a model's layers take the same time.
#pragma once

#include "support/gguf_writer.hpp"

#include <Eigen/Core>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace quoka_ggml {

using quoka_examples::Index;

struct ModelShape {
  const char* name;
  Index layers, width, ffn, heads, kv_heads, head_dim;
};
// Sources: config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0, Qwen/Qwen2.5-1.5B,
// meta-llama/Llama-3.1-8B.
inline constexpr ModelShape model_shapes[] = {{"tinyllama", 22, 2048, 5632, 32, 4, 64},
                                              {"qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128},
                                              {"llama-3.1-8b", 32, 4096, 14336, 32, 8, 128}};

// 1,024 tokens without texts: next to no time goes into logits. Throws std::runtime_error where the
// file cannot be written.
inline void write_random_model(const ModelShape& s, Index layers, const std::string& path) {
  constexpr Index vocabulary = 1024;
  quoka_examples::GgufWriter file;
  const auto number = [&](const char* key, Index value) {
    file.add(std::string("llama.") + key, static_cast<std::uint32_t>(value));
  };
  file.add("general.architecture", std::string("llama"));
  number("block_count", layers), number("context_length", 131072);
  number("embedding_length", s.width), number("feed_forward_length", s.ffn);
  number("attention.head_count", s.heads), number("attention.head_count_kv", s.kv_heads);
  number("attention.key_length", s.head_dim), number("attention.value_length", s.head_dim);
  number("vocab_size", vocabulary), number("rope.dimension_count", s.head_dim);
  file.add("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  file.add("llama.rope.freq_base", 500000.0f);
  file.add("tokenizer.ggml.model", std::string("no_vocab"));

  std::mt19937_64 random(1);
  // Codes of all values; their scale makes the weights' variance 1 / in.
  const auto matrix = [&](const std::string& name, Index in, Index out) {
    const auto scale = static_cast<Eigen::half>(1 / (74 * std::sqrt(static_cast<float>(in))));
    std::vector<std::byte> blocks(static_cast<std::size_t>(in * out / 32 * 34));
    for (std::size_t block = 0; block < blocks.size(); block += 34) {
      std::memcpy(&blocks[block], &scale, 2);
      for (std::size_t i = 2; i < 34; i += 8) {
        const std::uint64_t codes = random();
        std::memcpy(&blocks[block + i], &codes, 8);
      }
    }
    file.add_tensor(name, {in, out}, quoka_examples::TensorType::q8_0, blocks);
  };
  const auto ones = [&](const std::string& name) {
    file.add_tensor(name, {s.width}, std::vector<float>(static_cast<std::size_t>(s.width), 1.0f));
  };
  matrix("token_embd.weight", s.width, vocabulary);
  matrix("output.weight", s.width, vocabulary);
  ones("output_norm.weight");
  for (Index layer = 0; layer < layers; ++layer) {
    const std::string of = "blk." + std::to_string(layer) + '.';
    ones(of + "attn_norm.weight"), ones(of + "ffn_norm.weight");
    matrix(of + "attn_q.weight", s.width, s.heads * s.head_dim);
    matrix(of + "attn_k.weight", s.width, s.kv_heads * s.head_dim);
    matrix(of + "attn_v.weight", s.width, s.kv_heads * s.head_dim);
    matrix(of + "attn_output.weight", s.heads * s.head_dim, s.width);
    matrix(of + "ffn_gate.weight", s.width, s.ffn);
    matrix(of + "ffn_up.weight", s.width, s.ffn);
    matrix(of + "ffn_down.weight", s.ffn, s.width);
  }
  file.write(path);
}

}  // namespace quoka_ggml
