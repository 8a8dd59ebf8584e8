// Tiny random models that llama.cpp runs, of architectures with windows, sinks and experts. They
// have no vocabulary: tokens are numbers; or one whose tokens are a text's bytes.
#pragma once

#include "support/gguf_writer.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
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

// A model's parts besides Llama's layers.
struct Face {
  bool qkv_biases = false, post_norms = false, ffn_norm = true, experts = false;
  bool tied = false;     // the embedding is the output's matrix, too
  bool latent = false;   // one KV head of latent and turned channels (MLA), values its first ones
  bool windows = false;  // of 64, in every other layer
  bool sinks = false, biases = false, softcaps = false, rope_factors = false;
};
// One for each kind of attention; what other architectures select, `architectures` tests.
inline constexpr std::pair<const char*, Face> faces[] = {
    {"llama", {.rope_factors = true}},  // Llama 3's
    {"deepseek2", {.latent = true}},
    {"gemma2", {.post_norms = true, .tied = true, .windows = true, .softcaps = true}},
    {"gpt-oss",
     {.qkv_biases = true,
      .post_norms = true,
      .ffn_norm = false,
      .experts = true,
      .windows = true,
      .sinks = true,
      .biases = true}}};

// One of `faces`.
class TinyLlama {
 public:
  explicit TinyLlama(std::string architecture, bool reads_bytes = false)
      : arch_(std::move(architecture)) {
    const Index vocabulary = reads_bytes ? 3 + 256 : tiny_vocabulary;
    const Face face = std::find_if(std::begin(faces), std::end(faces), [&](const auto& one) {
                        return arch_ == one.first;
                      })->second;
    file_.add("general.architecture", arch_);
    file_.add("general.file_type", std::uint32_t{0});
    number("block_count", layers), number("context_length", 4096);
    number("embedding_length", width);
    number("feed_forward_length", ffn), number("attention.head_count", heads);
    number("attention.head_count_kv", face.latent ? 1 : kv_heads);
    number("attention.key_length", face.latent ? dim + turned : dim);
    number("attention.value_length", dim), number("vocab_size", vocabulary);
    number("rope.dimension_count", face.latent ? turned : dim);
    if (face.latent) {
      number("attention.key_length_mla", dim), number("attention.value_length_mla", dim);
      number("attention.q_lora_rank", q_rank), number("attention.kv_lora_rank", dim);
      number("leading_dense_block_count", layers), number("expert_shared_count", 1);
      file_.add(arch_ + ".expert_weights_scale", 1.0f);
    }
    file_.add(arch_ + ".attention.layer_norm_rms_epsilon", 1e-5f);
    file_.add(arch_ + ".rope.freq_base", 10000.0f);
    if (face.windows) number("attention.sliding_window", 64);
    if (face.softcaps) {
      file_.add(arch_ + ".attn_logit_softcapping", 5.0f);
      file_.add(arch_ + ".final_logit_softcapping", 30.0f);
    }
    if (face.rope_factors) add("rope_freqs.weight", {dim / 2}, 4, 3);
    if (face.experts || face.latent)
      number("expert_count", experts), number("expert_used_count", 2),
          number("expert_feed_forward_length", ffn);
    if (reads_bytes)
      add_bytes();
    else
      file_.add("tokenizer.ggml.model", std::string("no_vocab"));

    matrix("token_embd.weight", {width, vocabulary}, 1.0);
    vector("output_norm.weight", width);
    if (!face.tied) matrix("output.weight", {width, vocabulary}, 4 / std::sqrt(width));
    for (Index layer = 0; layer < layers; ++layer) {
      const std::string of = "blk." + std::to_string(layer) + ".";
      vector(of + "attn_norm.weight", width);
      const auto attention = [&](const std::string& part, Index rows) {
        matrix(of + "attn_" + part + ".weight", {width, rows}, 3 / std::sqrt(width));
        if (face.qkv_biases) bias(of + "attn_" + part + ".bias", {rows});
      };
      if (face.latent)
        add_latent(of);
      else
        attention("q", heads * dim), attention("k", kv_heads * dim), attention("v", kv_heads * dim);
      matrix(of + "attn_output.weight", {heads * dim, width}, 2 / std::sqrt(heads * dim));
      if (face.biases) bias(of + "attn_output.bias", {width});
      if (face.sinks) bias(of + "attn_sinks.weight", {heads});
      if (face.post_norms) vector(of + "post_attention_norm.weight", width);
      if (face.ffn_norm) vector(of + "ffn_norm.weight", width);
      if (face.post_norms && face.ffn_norm) vector(of + "post_ffw_norm.weight", width);
      const std::string kind = face.experts ? "_exps" : "";
      const auto feed_forward = [&](const std::string& part, Index in, Index out) {
        std::vector<Index> shape{in, out};
        if (face.experts) shape.push_back(experts);
        matrix(of + "ffn_" + part + kind + ".weight", shape, 2 / std::sqrt(in));
        if (face.biases) bias(of + "ffn_" + part + kind + ".bias", {out, experts});
      };
      feed_forward("gate", width, ffn), feed_forward("up", width, ffn);
      feed_forward("down", ffn, width);
      if (face.experts) matrix(of + "ffn_gate_inp.weight", {width, experts}, 2 / std::sqrt(width));
      if (face.experts && face.biases) bias(of + "ffn_gate_inp.bias", {experts});
    }
  }
  void write(const std::string& path) const { file_.write(path); }

 private:
  static constexpr Index layers = 4, width = 64, heads = 8, kv_heads = 2, dim = 32, ffn = 96,
                         experts = 4;
  // MLA: channels of latent queries, and of those with RoPE.
  static constexpr Index q_rank = 48, turned = 16;

  // MLA's matrices: heads are expanded from latent channels, `dim` of them for keys and values.
  void add_latent(const std::string& of) {
    matrix(of + "attn_q_a.weight", {width, q_rank}, 2 / std::sqrt(width));
    vector(of + "attn_q_a_norm.weight", q_rank);
    matrix(of + "attn_q_b.weight", {q_rank, heads * dim}, 3 / std::sqrt(q_rank));
    matrix(of + "attn_kv_a_mqa.weight", {width, dim + turned}, 3 / std::sqrt(width));
    vector(of + "attn_kv_a_norm.weight", dim);
    matrix(of + "attn_k_b.weight", {dim - turned, dim, heads}, 1 / std::sqrt(dim));
    matrix(of + "attn_v_b.weight", {dim, dim, heads}, 1 / std::sqrt(dim));
  }
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
    file_.add(arch_ + "." + key, static_cast<std::uint32_t>(value));
  }
  void add(const std::string& name, const std::vector<Index>& shape, double offset, double scale) {
    Index count = 1;
    for (const Index extent : shape) count *= extent;
    file_.add_tensor(name, shape, tiny::values(arch_ + "/" + name, count, offset, scale));
  }
  void matrix(const std::string& name, const std::vector<Index>& shape, double scale) {
    add(name, shape, 0, scale);
  }
  void vector(const std::string& name, Index length) { add(name, {length}, 1, 0.125); }
  void bias(const std::string& name, const std::vector<Index>& shape) { add(name, shape, 0, 0.5); }

  std::string arch_;
  GgufWriter file_;
};

}  // namespace quoka_test
