// Models of random weights that llama.cpp makes of key-values alone, without a file: hybrids, and what chooses keys
// by itself. They have no vocabulary: tokens are numbers below 128.
#pragma once

#include "ggml/llama_session.hpp"

#include <ggml-cpp.h>
#include <gguf.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace quoka_test {

class UserModel {
 public:
  // Of four layers: convolution, attention, convolution, attention.
  static llama_model_ptr lfm2() {
    UserModel m("lfm2", 128, 128);
    m.set("attention.head_count", 4);
    m.set("attention.head_count_kv", std::vector<std::uint32_t>{0, 2, 0, 2});
    m.set("attention.key_length", 32), m.set("attention.value_length", 32);
    m.set("rope.dimension_count", 32), m.set("shortconv.l_cache", 3);
    return m.made(40);
  }
  // Of four layers: two with a window of 32; keys compressed by 4, of which some are chosen; keys compressed by 128.
  static llama_model_ptr deepseek4() {
    UserModel m("deepseek4", 256, 128);
    m.set("attention.head_count", 4), m.set("attention.head_count_kv", 1);
    m.set("attention.key_length", 64), m.set("attention.value_length", 64);
    m.set("rope.dimension_count", 32), m.set("attention.q_lora_rank", 64);
    m.set("attention.sliding_window", 32);
    m.set("attention.indexer.head_count", 64), m.set("attention.indexer.key_length", 128);
    m.set("attention.indexer.top_k", 8);
    m.set("attention.output_group_count", 4), m.set("attention.output_lora_rank", 32);
    m.set("attention.compress_ratios", std::vector<std::uint32_t>{0, 0, 4, 128});
    m.set("attention.compress_rope_freq_base", 160000.0f);
    m.set("hyper_connection.count", 4), m.set("hyper_connection.sinkhorn_iterations", 2);
    m.set("hyper_connection.epsilon", 1e-6f), m.set("hash_layer_count", 0);
    m.set("swiglu_clamp_exp", 10.0f), m.set("expert_weights_scale", 1.0f);
    gguf_set_val_bool(m.keys_.get(), "deepseek4.expert_weights_norm", true);
    m.set("expert_feed_forward_length", 128), m.set("expert_count", 2);
    m.set("expert_used_count", 2), m.set("expert_shared_count", 1);
    m.set("expert_gating_func", 4);  // the only one that it has
    return m.made(116);
  }

 private:
  UserModel(std::string architecture, std::uint32_t width, std::uint32_t feed_forward)
      : architecture_(std::move(architecture)), keys_(gguf_init_empty()) {
    gguf_set_val_str(keys_.get(), "general.architecture", architecture_.c_str());
    gguf_set_val_str(keys_.get(), "tokenizer.ggml.model", "no_vocab");
    set("vocab_size", 128), set("context_length", 4096), set("block_count", 4);
    set("embedding_length", width), set("feed_forward_length", feed_forward);
    set("attention.layer_norm_rms_epsilon", 1e-5f);
  }
  std::string key(const std::string& name) const { return architecture_ + '.' + name; }
  void set(const std::string& name, int value) {
    gguf_set_val_u32(keys_.get(), key(name).c_str(), static_cast<std::uint32_t>(value));
  }
  void set(const std::string& name, std::uint32_t value) {
    gguf_set_val_u32(keys_.get(), key(name).c_str(), value);
  }
  void set(const std::string& name, float value) {
    gguf_set_val_f32(keys_.get(), key(name).c_str(), value);
  }
  void set(const std::string& name, const std::vector<std::uint32_t>& values) {
    gguf_set_arr_data(keys_.get(), key(name).c_str(), GGUF_TYPE_UINT32, values.data(),
                      values.size());
  }
  // tensors: how many a model has. llama.cpp compares their number with that of the key-values' own, and takes their
  // types from there; names that it does not ask for are of no consequence.
  llama_model_ptr made(int tensors) {
    for (int i = 0; i < tensors; ++i) {
      ggml_tensor unnamed{};
      unnamed.type = GGML_TYPE_F32;
      std::fill_n(unnamed.ne, GGML_MAX_DIMS, 1), std::fill_n(unnamed.nb, GGML_MAX_DIMS, 4);
      ggml_format_name(&unnamed, "of_no_name.%d", i);
      gguf_add_tensor(keys_.get(), &unnamed);
    }
    quoka_ggml::load_cpu();
    llama_log_set(quoka_ggml::only_errors, nullptr);
    const auto fill = [](ggml_tensor* t, void*) {
      std::mt19937 random(static_cast<unsigned>(std::hash<std::string>()(t->name)));
      std::normal_distribution<float> normal(0.0f, 0.1f);
      std::vector<float> x(static_cast<std::size_t>(ggml_nelements(t)));
      for (float& one : x) one = normal(random);
      std::vector<std::byte> stored(ggml_nbytes(t));
      ggml_quantize_chunk(t->type, x.data(), stored.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
      ggml_backend_tensor_set(t, stored.data(), 0, stored.size());
    };
    llama_model_ptr model(
        llama_model_init_from_user(keys_.get(), fill, nullptr, llama_model_default_params()));
    if (!model) throw std::runtime_error("llama.cpp makes no " + architecture_);
    return model;
  }

  std::string architecture_;
  gguf_context_ptr keys_;
};

}  // namespace quoka_test
