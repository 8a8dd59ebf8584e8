// A tiny model of random weights for every architecture that llama.cpp makes of key-values alone,
// without a file. They have no vocabulary: tokens are numbers below architecture_vocabulary.
//
// llama.cpp ignores keys that an architecture does not ask for, so nearly all of them get the same;
// what differs says so. Names, meanings and limits of keys: llama.cpp, src/llama-arch.cpp and
// src/models; sizes are ours.
#pragma once

#include "llama_session.hpp"

#include <ggml-cpp.h>
#include <gguf.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace quoka_ggml {

inline constexpr int architecture_vocabulary = 128;

// Key-values of one model; set() takes the name without the architecture's prefix.
class ModelKeys {
 public:
  explicit ModelKeys(std::string architecture)
      : architecture_(std::move(architecture)), keys_(gguf_init_empty()) {
    gguf_set_val_str(keys_.get(), "general.architecture", architecture_.c_str());
    gguf_set_val_str(keys_.get(), "tokenizer.ggml.model", "no_vocab");
  }
  const std::string& architecture() const { return architecture_; }
  void set(const char* name, int value) {
    gguf_set_val_u32(keys_.get(), key(name).c_str(), static_cast<std::uint32_t>(value));
  }
  void set(const char* name, bool value) {
    gguf_set_val_bool(keys_.get(), key(name).c_str(), value);
  }
  void set(const char* name, float value) {
    gguf_set_val_f32(keys_.get(), key(name).c_str(), value);
  }
  void set(const char* name, const std::vector<std::uint32_t>& values) {
    gguf_set_arr_data(keys_.get(), key(name).c_str(), GGUF_TYPE_UINT32, values.data(),
                      values.size());
  }
  void set(const char* name, const std::vector<std::uint64_t>& values) {
    gguf_set_arr_data(keys_.get(), key(name).c_str(), GGUF_TYPE_UINT64, values.data(),
                      values.size());
  }
  void set(const char* name, const std::vector<float>& values) {
    gguf_set_arr_data(keys_.get(), key(name).c_str(), GGUF_TYPE_FLOAT32, values.data(),
                      values.size());
  }
  // A tensor of 32-bit floats; llama.cpp sets its shape.
  void name_tensor(const std::string& name) {
    ggml_tensor t{};
    t.type = GGML_TYPE_F32;
    std::fill_n(t.ne, GGML_MAX_DIMS, 1), std::fill_n(t.nb, GGML_MAX_DIMS, sizeof(float));
    ggml_set_name(&t, name.c_str());
    gguf_add_tensor(keys_.get(), &t);
  }
  gguf_context* get() const { return keys_.get(); }

 private:
  std::string key(const char* name) const { return architecture_ + '.' + name; }

  std::string architecture_;
  gguf_context_ptr keys_;
};

// Those of llama.cpp v0.5.0 (src/llama-arch.cpp) that have logits. Left out are embedding models
// (bert and its kin, eurobert, gemma-embedding, llama-embed), drafts of another model
// (gemma4-assistant, eagle3, dflash) and audio (wavtokenizer-dec, pockettts). So are t5, whose
// attention has a bias by position and is not flash attention, and rwkv, which has no attention.
// llama.cpp makes no model of gptj, chameleon, plm and graniteswitch from such keys.
inline constexpr std::string_view architecture_names[] = {
    "llama",          "llama4",       "deci",          "falcon",
    "grok",           "gpt2",         "gptneox",       "mpt",
    "baichuan",       "starcoder",    "refact",        "bloom",
    "stablelm",       "qwen",         "qwen2",         "qwen2moe",
    "qwen2vl",        "qwen3",        "qwen3moe",      "qwen3next",
    "qwen3vl",        "qwen3vlmoe",   "qwen35",        "qwen35moe",
    "qwen4exp",       "phi2",         "phi3",          "phimoe",
    "plamo",          "plamo2",       "plamo3",        "codeshell",
    "orion",          "internlm2",    "minicpm",       "minicpm3",
    "gemma",          "gemma2",       "gemma3",        "gemma3n",
    "gemma4",         "starcoder2",   "mamba",         "mamba2",
    "maple",          "jamba",        "falcon-h1",     "xverse",
    "command-r",      "cohere2",      "cohere2moe",    "dbrx",
    "olmo",           "olmo2",        "olmoe",         "muse-glimmer",
    "openelm",        "arctic",       "deepseek",      "deepseek2",
    "deepseek2-ocr",  "deepseek32",   "deepseek4",     "chatglm",
    "glm4",           "glm4moe",      "glm-dsa",       "bitnet",
    "jais",           "jais2",        "nemotron",      "nemotron_h",
    "nemotron_h_moe", "exaone",       "exaone4",       "exaone-moe",
    "granite",        "granitemoe",   "granitehybrid", "granite_swa",
    "bailingmoe",     "bailingmoe2",  "bailingmoe3",   "dots1",
    "dots3note",      "arcee",        "afmoe",         "laguna",
    "ernie4_5",       "ernie4_5-moe", "hunyuan-moe",   "hunyuan-dense",
    "hunyuan_vl",     "hy_v3",        "hy_v4",         "smollm3",
    "gpt-oss",        "lfm2",         "lfm2moe",       "dream",
    "smallthinker",   "llada",        "llada-moe",     "seed_oss",
    "grovemoe",       "apertus",      "minimax-01",    "hrm_text",
    "minimax-m2",     "minimax-m3",   "cogvlm",        "rnd1",
    "pangu-embedded", "mistral3",     "mistral4",      "paddleocr",
    "mimo2",          "step35",       "spark2_5",      "maincoder",
    "kimi-linear",    "kimi-k3",      "talkie",        "mellum",
    "nanbeige",       "qwen3tts"};

namespace of_architectures {

template <class... Names>
bool any_of(std::string_view name, Names... names) {
  return ((name == names) || ...);
}

inline ModelKeys keys(const std::string& name) {
  ModelKeys m(name);
  const bool latent = any_of(name, "deepseek2", "deepseek32", "glm-dsa", "dots3note", "kimi-linear",
                             "bailingmoe3", "kimi-k3", "mistral4", "hy_v4");
  const bool nemotron = any_of(name, "nemotron_h", "nemotron_h_moe");
  const int layers = name == "gemma3n"                    ? 24  // 20 have keys of their own
                     : any_of(name, "gemma4", "hrm_text") ? 8
                     : nemotron                           ? 6
                                                          : 4;
  const auto by_layer = [&](auto value) {
    std::vector<std::uint32_t> all;
    for (int i = 0; i < layers; ++i) all.push_back(static_cast<std::uint32_t>(value(i)));
    return all;
  };
  const int heads = 4, dim = name == "deepseek4" ? 64 : 32, width = heads * dim, ff = 128;
  const int kv_heads = name == "deepseek4" || latent                                 ? 1
                       : any_of(name, "olmoe", "deepseek2-ocr", "dots1", "minicpm3") ? heads
                                                                                     : 2;

  m.set("vocab_size", name == "qwen3tts" ? 3072 : architecture_vocabulary);
  m.set("context_length", 4096), m.set("block_count", layers);
  m.set("embedding_length", width), m.set("features_length", width);
  m.set("feed_forward_length", ff), m.set("leading_dense_block_count", 1);
  m.set("use_parallel_residual", false);
  m.set("logit_scale", 1.0f), m.set("residual_scale", 1.0f);

  // Attention.
  m.set("attention.head_count", heads), m.set("attention.head_count_kv", kv_heads);
  m.set("attention.key_length", dim), m.set("attention.value_length", dim);
  m.set("rope.dimension_count", dim);
  m.set("rope.dimension_sections", std::vector<std::uint32_t>(4, 4));
  m.set("attention.layer_norm_epsilon", 1e-5f), m.set("attention.layer_norm_rms_epsilon", 1e-5f);
  m.set("attention.group_norm_epsilon", 1e-5f), m.set("attention.group_norm_groups", 8);
  m.set("attention.clamp_kqv", 1.0f), m.set("attention.max_alibi_bias", 8.0f);
  m.set("attention.relative_buckets_count", 8);
  m.set("attention.q_lora_rank", 64), m.set("attention.kv_lora_rank", 64);
  if (latent) {
    // A key of 64 latent channels and 32 turned ones; of it, each head makes a key of 64 and a
    // value of 32.
    m.set("attention.key_length", 96), m.set("attention.value_length", 64);
    m.set("attention.key_length_mla", 64), m.set("attention.value_length_mla", 32);
  }
  if (name == "minicpm3") m.set("attention.key_length", 64);

  // Windows, of 64.
  if (name != "lfm2") m.set("attention.sliding_window", 64);
  if (name == "gemma4")
    m.set("attention.sliding_window_pattern", by_layer([](int i) { return i % 2 == 0; }));
  else if (any_of(name, "cohere2moe", "mimo2", "step35", "spark2_5", "muse-glimmer", "granite_swa",
                  "dots3note", "maple"))
    m.set("attention.sliding_window_pattern", by_layer([](int i) { return i % 2; }));
  else
    m.set("attention.sliding_window_pattern", 2);
  m.set("rope.freq_base_swa", 10000.0f);
  m.set("attention.key_length_swa", latent ? 96 : dim);
  m.set("attention.value_length_swa", latent ? 64 : dim);
  m.set("attention.key_length_mla_swa", 64), m.set("attention.value_length_mla_swa", 32);
  m.set("attention.kv_lora_rank_swa", 64);
  if (name == "gemma4")
    m.set("attention.shared_kv_layers", 4), m.set("embedding_length_per_layer_input", 32);

  // Experts, where there are any.
  m.set("expert_feed_forward_length", ff), m.set("expert_shared_feed_forward_length", ff);
  m.set("expert_latent_length", ff), m.set("interleave_moe_layer_step", 2);
  m.set("expert_count", 2), m.set("expert_used_count", 2), m.set("expert_shared_count", 1);
  m.set("expert_gating_func", name == "deepseek4" ? 4 : 2);  // the only one that it has
  m.set("expert_group_scale", 1.0f), m.set("experts_per_group", 1);
  m.set("expert_weights_scale", 1.0f), m.set("expert_weights_norm", true);

  // Layers without attention: every other one, from the first on.
  m.set("full_attention_interval", 2);
  m.set("ssm.conv_kernel", 4), m.set("ssm.state_size", 32), m.set("ssm.time_step_rank", heads);
  m.set("ssm.inner_size", any_of(name, "mamba", "jamba", "granitehybrid") ? 2 * width : heads * 32);
  m.set("ssm.group_count", name == "plamo2" ? 0 : 2);
  m.set("kda.head_dim", 32), m.set("kda.gate_lower_bound", -5.0f);
  m.set("wkv.head_size", dim), m.set("shortconv.l_cache", 3);
  if (nemotron || any_of(name, "plamo2", "jamba", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear",
                         "bailingmoe3", "kimi-k3"))
    m.set("attention.head_count_kv", by_layer([&](int i) {
            return i % 2 == 0 || (nemotron && i == layers - 1) ? 0 : kv_heads;
          }));
  if (nemotron)  // its last layer has experts or a feed-forward net alone
    m.set("feed_forward_length", by_layer([&](int i) { return i == layers - 1 ? ff : 0; }));

  // Keys that the model chooses.
  m.set("attention.indexer.head_count", name == "minimax-m3" ? kv_heads : 4);
  m.set("attention.indexer.key_length", 64), m.set("attention.indexer.top_k", 64);
  m.set("attention.indexer.block_size", 4), m.set("attention.indexer.local_blocks", 1);
  if (any_of(name, "dots3note", "hy_v4"))  // odd layers share what the even ones chose
    m.set("attention.indexer.types", by_layer([](int i) { return i % 2 == 0; }));
  m.set("hyper_connection.count", 4), m.set("hyper_connection.epsilon", 1e-6f);
  m.set("hyper_connection.magnitude", 2.0f), m.set("hyper_connection.sinkhorn_iterations", 2);
  m.set("hyper_connection.low_rank", 8), m.set("hash_layer_count", 0);
  if (name == "deepseek4") {
    m.set("attention.output_group_count", 4), m.set("attention.output_lora_rank", 32);
    m.set("attention.compress_ratios", std::vector<std::uint32_t>{0, 0, 4, 128});
    m.set("attention.compress_rope_freq_base", 160000.0f);
    m.set("attention.indexer.head_count", 64), m.set("attention.indexer.key_length", 128);
    m.set("attention.indexer.top_k", 8);
  }
  if (name == "qwen4exp") {
    constexpr int grams = 3, per_gram = 2, tables = (grams - 1) * per_gram;
    std::vector<std::uint64_t> offsets;
    for (int i = 0; i < tables; ++i)
      offsets.push_back(static_cast<std::uint64_t>(i * architecture_vocabulary));
    m.set("attention.compress_ratios", by_layer([](int) { return 4; }));
    m.set("ple.layers", std::vector<std::uint32_t>{0}), m.set("ple.ngram_size", grams);
    m.set("ple.heads_per_ngram", per_gram), m.set("ple.conv_kernel", 4);
    m.set("ple.eos_token_id", 0), m.set("embedding_length_per_layer_input", width / tables);
    m.set("ple.layer_multipliers", std::vector<std::uint64_t>{1, 3, 5});
    m.set("ple.head_offsets", offsets);
    m.set("ple.head_vocab_sizes", std::vector<std::uint64_t>(tables, architecture_vocabulary));
  }

  // Single architectures.
  if (name == "bailingmoe3")
    m.set("swiglu_clamp_exp", std::vector<float>(4, 4.0f)),
        m.set("swiglu_clamp_shexp", std::vector<float>(4, 5.0f));
  else
    m.set("swiglu_clamp_exp", 10.0f);
  m.set("hrm.layers_per_stack", 1), m.set("hrm.h_cycles", 2), m.set("hrm.l_cycles", 3);
  m.set("attn_res.block_size", 12);
  m.set("activation.situ_beta", 4.0f), m.set("activation.situ_linear_beta", 25.0f);
  for (const char* const key : {"xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"})
    gguf_set_val_f32(m.get(), key, 1.0f);

  // Tensors that llama.cpp takes for absent unless they are named, and does not do without.
  const auto named = [&](std::initializer_list<const char*> tensors, auto in_layer) {
    for (int i = 0; i < layers; ++i)
      for (const char* const tensor : tensors)
        if (in_layer(i)) m.name_tensor("blk." + std::to_string(i) + '.' + tensor);
  };
  const auto all = [](int) { return true; };
  if (name == "phi3") named({"attn_q.weight", "attn_k.weight", "attn_v.weight"}, all);
  if (any_of(name, "qwen3next", "qwen35", "qwen35moe", "qwen4exp"))
    named({"attn_qkv.weight", "attn_gate.weight"}, [](int i) { return i % 2 == 0; });
  if (any_of(name, "falcon-h1", "granitehybrid") || nemotron)
    named({"ssm_conv1d.bias", "ssm_norm.weight"},
          [&](int i) { return name == "falcon-h1" || i % 2 == 0; });
  if (any_of(name, "glm-dsa", "deepseek32"))
    named({"indexer.k_norm.weight", "indexer.k_norm.bias", "indexer.proj.weight",
           "indexer.attn_k.weight", "indexer.attn_q_b.weight"},
          all);
  return m;
}

}  // namespace of_architectures

// Makes the model of these keys. llama.cpp compares the number of tensors that it makes with the
// number in the file, which has none: a first call gives the right number. Throws
// std::runtime_error, with llama.cpp's message, if it makes no model.
inline llama_model_ptr model_of(ModelKeys keys) {
  load_cpu();
  // Norms near 1; what a state decays by is negative; the rest spreads by a tenth.
  const auto fill = [](ggml_tensor* t, void*) {
    const std::string_view of = t->name;
    const bool norm = of.find("norm") != of.npos && of.ends_with("weight");
    const bool decay = of.find("ssm_a") != of.npos;
    std::mt19937 random(static_cast<unsigned>(std::hash<std::string_view>()(of)));
    std::normal_distribution<float> normal(norm ? 1.0f : 0.0f, 0.1f);
    std::vector<float> x(static_cast<std::size_t>(ggml_nelements(t)));
    for (float& one : x) one = normal(random), one = decay ? -std::abs(one) : one;
    std::vector<std::byte> stored(ggml_nbytes(t));
    ggml_quantize_chunk(t->type, x.data(), stored.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
    ggml_backend_tensor_set(t, stored.data(), 0, stored.size());
  };
  std::string errors;
  llama_log_set(
      [](ggml_log_level level, const char* text, void* to) {
        if (level == GGML_LOG_LEVEL_ERROR) *static_cast<std::string*>(to) += text;
      },
      &errors);
  const auto make = [&] {
    return llama_model_ptr(
        llama_model_init_from_user(keys.get(), fill, nullptr, llama_model_default_params()));
  };
  llama_model_ptr model = make();
  int expected = 0, got = 0;
  const std::size_t at = errors.find("expected ");
  if (!model && at != errors.npos &&
      std::sscanf(errors.c_str() + at, "expected %d, got %d", &expected, &got) == 2) {
    for (int i = expected; i < got; ++i) keys.name_tensor("of_no_name." + std::to_string(i));
    errors.clear();
    model = make();
  }
  llama_log_set(only_errors, nullptr);
  if (!model) throw std::runtime_error("llama.cpp makes no " + keys.architecture() + ": " + errors);
  return model;
}
inline llama_model_ptr random_architecture(const std::string& name) {
  return model_of(of_architectures::keys(name));
}

}  // namespace quoka_ggml
