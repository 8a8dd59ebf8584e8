// Files of tiny random models that llama.cpp runs, as a Llama 3. They have no vocabulary: tokens are
// numbers; or one whose tokens are a text's bytes. Models of all architectures, without files:
// examples/bindings/ggml/architectures.hpp.
#pragma once

#include "support/gguf_writer.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace quoka_test {

using quoka_examples::GgufWriter;
using quoka_examples::Index;

// Weights that follow from their tensor's name and their place alone.
namespace tiny {

constexpr std::uint64_t fnv1a64_start = 0xCBF29CE484222325;

inline std::uint64_t fnv1a64(std::span<const std::byte> data, std::uint64_t value = fnv1a64_start) {
  for (const std::byte byte : data) value = (value ^ std::uint64_t(byte)) * 0x100000001B3;
  return value;
}

// The output of the generator splitmix64 in this state.
constexpr std::uint64_t splitmix64(std::uint64_t state) {
  std::uint64_t z = state + 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// [count] `offset` + `scale` * u, u in [-1, 1) of 24 bits. With an offset other than 0 the scale is
// a power of two, so that the sum is exact in double and a fused multiply-add changes nothing.
inline std::vector<float> values(const std::string& key, Index count, double offset, double scale) {
  const std::uint64_t start = fnv1a64(std::as_bytes(std::span(key)));
  std::vector<float> result(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double u = std::ldexp(static_cast<double>(splitmix64(start + i) >> 40), -23) - 1;
    result[i] = static_cast<float>(offset + scale * u);
  }
  return result;
}

}  // namespace tiny

inline constexpr Index tiny_vocabulary = 128;

class TinyLlama {
 public:
  explicit TinyLlama(bool reads_bytes = false) {
    const Index vocabulary = reads_bytes ? 3 + 256 : tiny_vocabulary;
    file_.add("general.architecture", std::string("llama"));
    file_.add("general.file_type", std::uint32_t{0});
    number("block_count", layers), number("context_length", 4096);
    number("embedding_length", width), number("feed_forward_length", ffn);
    number("attention.head_count", heads), number("attention.head_count_kv", kv_heads);
    number("attention.key_length", dim), number("attention.value_length", dim);
    number("vocab_size", vocabulary), number("rope.dimension_count", dim);
    file_.add("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    file_.add("llama.rope.freq_base", 10000.0f);
    add("rope_freqs.weight", {dim / 2}, 4, 3);
    if (reads_bytes)
      add_bytes();
    else
      file_.add("tokenizer.ggml.model", std::string("no_vocab"));

    matrix("token_embd.weight", width, vocabulary, 1.0), vector("output_norm.weight");
    matrix("output.weight", width, vocabulary, 4 / std::sqrt(width));
    for (Index layer = 0; layer < layers; ++layer) {
      const std::string of = "blk." + std::to_string(layer) + ".";
      vector(of + "attn_norm.weight"), vector(of + "ffn_norm.weight");
      for (const auto& [part, rows] :
           {std::pair{"q", heads * dim}, {"k", kv_heads * dim}, {"v", kv_heads * dim}})
        matrix(of + "attn_" + part + ".weight", width, rows, 3 / std::sqrt(width));
      matrix(of + "attn_output.weight", heads * dim, width, 2 / std::sqrt(heads * dim));
      for (const char* const part : {"gate", "up"})
        matrix(of + "ffn_" + part + ".weight", width, ffn, 2 / std::sqrt(width));
      matrix(of + "ffn_down.weight", ffn, width, 2 / std::sqrt(ffn));
    }
  }
  void write(const std::string& path) const { file_.write(path); }

 private:
  static constexpr Index layers = 4, width = 64, heads = 8, kv_heads = 2, dim = 32, ffn = 96;

  // A SentencePiece vocabulary of single bytes.
  void add_bytes() {
    std::vector<std::string> tokens{"<unk>", "<s>", "</s>"};
    std::vector<std::int32_t> types{2, 3, 3};
    for (int byte = 0; byte < 256; ++byte) {
      char text[8];
      std::snprintf(text, sizeof text, "<0x%02X>", byte);
      tokens.emplace_back(text), types.push_back(6);
    }
    file_.add("tokenizer.ggml.model", std::string("llama"));
    file_.add("tokenizer.ggml.tokens", tokens);
    file_.add("tokenizer.ggml.scores", std::vector<float>(tokens.size(), 0.0f));
    file_.add("tokenizer.ggml.token_type", types);
  }
  void number(const char* key, Index value) {
    file_.add(std::string("llama.") + key, static_cast<std::uint32_t>(value));
  }
  void add(const std::string& name, const std::vector<Index>& shape, double offset, double scale) {
    const Index count = shape.front() * (shape.size() > 1 ? shape[1] : 1);
    file_.add_tensor(name, shape, tiny::values("llama/" + name, count, offset, scale));
  }
  void matrix(const std::string& name, Index in, Index out, double scale) {
    add(name, {in, out}, 0, scale);
  }
  void vector(const std::string& name) { add(name, {width}, 1, 0.125); }

  GgufWriter file_;
};

}  // namespace quoka_test
