#include "decoder/model/config.hpp"

#include "decoder/file/gguf.hpp"

#include "support/require.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <variant>
#include <vector>

namespace quoka_decoder {
namespace {

struct Architecture {
  const char* name;
  RopePairing pairing;
  Index no_rope_step;
};
constexpr std::array architectures{
    Architecture{"llama", RopePairing::adjacent, 0},
    Architecture{"qwen2", RopePairing::halves, 0},
    Architecture{"qwen3", RopePairing::halves, 0},
    Architecture{"smollm3", RopePairing::adjacent, 4},
};

const Architecture& architecture_named(const GgufFile& file, const std::string& name) {
  std::string known;
  for (const Architecture& a : architectures) {
    if (a.name == name) return a;
    known += known.empty() ? a.name : std::string(", ") + a.name;
  }
  throw std::runtime_error(file.name() + ": its architecture is \"" + name +
                           "\"; this program knows " + known);
}

// Every key of an architecture is in one of the three lists below, without its prefix, or refused. Those
// that llama.cpp reads are in its src/llama-arch.cpp.

// What read_config() reads.
constexpr std::array<std::string_view, 17> computed_keys{"block_count",
                                                         "embedding_length",
                                                         "feed_forward_length",
                                                         "context_length",
                                                         "attention.head_count",
                                                         "attention.head_count_kv",
                                                         "attention.key_length",
                                                         "attention.value_length",
                                                         "attention.layer_norm_rms_epsilon",
                                                         "rope.dimension_count",
                                                         "rope.freq_base",
                                                         "rope.scale_linear",
                                                         "rope.scaling.type",
                                                         "rope.scaling.factor",
                                                         "rope.scaling.attn_factor",
                                                         "rope.scaling.original_context_length",
                                                         "no_rope_layer_interval"};

// What changes no logit: a count that the tensors' shapes repeat, how an embedding of a text is
// made, whether the stretched context was trained.
constexpr std::array<std::string_view, 3> silent_keys{"vocab_size", "pooling_type",
                                                      "rope.scaling.finetuned"};

// Parts that this program has not, and the values by which a file says that the model is without.
struct Absent {
  std::string_view key;
  const char* what;
  std::vector<std::variant<Index, float, bool, std::string>> without;
};
const std::vector<Absent>& absent_parts() {
  static const std::vector<Absent> parts{
      {"attention.sliding_window", "sliding windows", {Index{0}}},
      {"attention.causal", "attention to later tokens", {true}},
      {"attention.scale", "scale of logits but 1 / sqrt(head_dim)", {0.0f}},
      {"attention.clamp_kqv", "clamped queries, keys and values", {0.0f}},
      {"attention.max_alibi_bias", "ALiBi", {0.0f}},
      {"attn_logit_softcapping", "soft-cap of attention's logits", {0.0f}},
      {"final_logit_softcapping", "soft-cap of the logits", {0.0f}},
      {"logit_scale", "scale of the logits", {0.0f, 1.0f}},
      {"embedding_scale", "scale of the embedding", {0.0f, 1.0f}},
      {"residual_scale", "scale of a layer's output", {0.0f, 1.0f}},
      {"use_parallel_residual", "parallel residuals", {false}},
      {"hidden_activation", "activation but SiLU", {std::string("silu")}},
      {"expert_count", "mixtures of experts", {Index{0}}},
      {"expert_used_count", "mixtures of experts", {Index{0}}},
      {"nextn_predict_layers", "layers that predict further tokens", {Index{0}}},
      {"rope.scaling.alpha", "RoPE scaling by alpha", {0.0f}},
      {"rope.scaling.yarn_ext_factor", "YaRN but the published", {1.0f}},
      {"rope.scaling.yarn_attn_factor", "YaRN but the published", {1.0f}},
      {"rope.scaling.yarn_beta_fast", "YaRN but the published", {32.0f}},
      {"rope.scaling.yarn_beta_slow", "YaRN but the published", {1.0f}},
      {"rope.scaling.yarn_log_multiplier", "YaRN but the published", {0.0f}},
      {"tensor_data_layout",
       "other order of the tensors' rows",
       {std::string("reference"), std::string("Meta AI original pth")}},
  };
  return parts;
}

// Throws where the file's value is none of `part.without`.
void require_absent(const GgufFile& file, const std::string& key, const Absent& part) {
  std::ostringstream found;
  const bool without = std::visit(
      [&](const auto& first) {
        using T = std::decay_t<decltype(first)>;
        const T value = file.get<T>(key);
        if constexpr (std::same_as<T, std::string>) {
          found << '"' << value << '"';
        } else {
          found << std::boolalpha << value;
        }
        return std::ranges::any_of(part.without,
                                   [&](const auto& x) { return std::get<T>(x) == value; });
      },
      part.without.front());
  if (!without)
    throw std::runtime_error(file.name() + ": " + key + " is " + found.str() +
                             "; this program has no " + part.what);
}

void require_known_keys(const GgufFile& file, const std::string& prefix) {
  for (const std::string& key : file.keys()) {
    if (key.starts_with("xielu.") || key.starts_with("adapter."))
      throw std::runtime_error(file.name() + ": " + key +
                               " belongs to no model that this program knows");
    if (!key.starts_with(prefix)) continue;
    const std::string_view name = std::string_view(key).substr(prefix.size());
    if (std::ranges::count(computed_keys, name) + std::ranges::count(silent_keys, name) > 0)
      continue;
    const auto part = std::ranges::find(absent_parts(), name, &Absent::key);
    if (part == absent_parts().end())
      throw std::runtime_error(file.name() + ": this program does not know " + key +
                               ", which may change what is computed");
    require_absent(file, key, *part);
  }
}

// Keys that say what kind of a file this is.
void require_whole_model(const GgufFile& file) {
  if (const auto parts = file.get_or<Index>("split.count", 1); parts > 1)
    throw std::runtime_error(file.name() + ": part " +
                             std::to_string(file.get_or<Index>("split.no", 0) + 1) + " of " +
                             std::to_string(parts) +
                             " of a split file; this program reads whole ones: join them first "
                             "(llama.cpp: llama-gguf-split --merge)");
  if (const auto type = file.get_or<std::string>("general.type", "model"); type != "model")
    throw std::runtime_error(file.name() + ": general.type is \"" + type + "\", not \"model\"");
  if (const auto version = file.get_or<Index>("general.quantization_version", 2); version != 2)
    throw std::runtime_error(file.name() + ": general.quantization_version is " +
                             std::to_string(version) + "; blocks of version 2 are read");
}

// The file's factor; 1 where it has none.
float rope_factor(const GgufFile& file, const std::string& prefix) {
  const std::string key = prefix + "rope.scaling.factor";
  const auto factor = file.get_or<float>(file.has(key) ? key : prefix + "rope.scale_linear", 0.0f);
  return factor == 0.0f ? 1.0f : factor;
}

RopeConfig read_rope(const GgufFile& file, const std::string& prefix, const ModelConfig& config) {
  RopeConfig rope;
  rope.dim = file.get_or<Index>(prefix + "rope.dimension_count", config.head_dim);
  rope.base = file.get_or<float>(prefix + "rope.freq_base", 10000.0f);
  rope.magnitude = file.get_or<float>(prefix + "rope.scaling.attn_factor", 1.0f);
  const auto scaling = file.get_or<std::string>(prefix + "rope.scaling.type", "linear");
  const float factor = rope_factor(file, prefix);
  if (scaling == "linear") {
    if (factor != 1.0f) rope.scaling = RopeScaling::linear;
  } else if (scaling == "yarn") {
    rope.scaling = RopeScaling::yarn;
    rope.trained_context =
        file.get_or<Index>(prefix + "rope.scaling.original_context_length", config.context);
  } else if (scaling != "none") {
    throw std::runtime_error(file.name() + ": its RoPE scaling is \"" + scaling +
                             "\"; this program knows none, linear and yarn");
  }
  if (rope.scaling != RopeScaling::none) rope.factor = factor;
  return rope;
}

}  // namespace

void check_config(const ModelConfig& c) {
  using namespace quoka_examples;
  require_at_least("the number of layers", c.layers, 1);
  require_at_least("d_model", c.d_model, 1);
  require_at_least("kv_heads", c.kv_heads, 1);
  require_multiple("q_heads", c.q_heads, "kv_heads", c.kv_heads);
  require_at_least("head_dim", c.head_dim, 1);
  require_at_least("v_dim", c.v_dim, 1);
  require_at_least("ffn_dim", c.ffn_dim, 1);
  require_at_least("the vocabulary's size", c.vocabulary, 1);
  require_at_least("RoPE's dim", c.rope.dim, 2);
  require_at_least("head_dim (RoPE turns that many channels)", c.head_dim, c.rope.dim);
  if (c.rope.dim % 2 != 0)
    throw std::invalid_argument("RoPE's dim is " + std::to_string(c.rope.dim) + ", not even");
  for (const auto& [what, value] : {std::pair{"RoPE's base", c.rope.base},
                                    {"RoPE's factor", c.rope.factor},
                                    {"RoPE's attn_factor", c.rope.magnitude}})
    if (!(value > 0.0f && std::isfinite(value)))
      throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) +
                                  ", but must be above 0 and finite");
  if (!(c.norm_epsilon >= 0.0f && std::isfinite(c.norm_epsilon)))
    throw std::invalid_argument("the norm's epsilon is " + std::to_string(c.norm_epsilon));
}

ModelConfig read_config(const GgufFile& file) {
  require_whole_model(file);
  ModelConfig config;
  config.architecture = file.get<std::string>("general.architecture");
  const Architecture& architecture = architecture_named(file, config.architecture);
  const std::string prefix = config.architecture + '.';

  require_known_keys(file, prefix);
  config.layers = file.get<Index>(prefix + "block_count");
  config.d_model = file.get<Index>(prefix + "embedding_length");
  config.q_heads = file.get<Index>(prefix + "attention.head_count");
  config.kv_heads = file.get_or<Index>(prefix + "attention.head_count_kv", config.q_heads);
  if (config.q_heads < 1)
    throw std::runtime_error(file.name() + ": " + prefix + "attention.head_count is " +
                             std::to_string(config.q_heads));
  config.head_dim =
      file.get_or<Index>(prefix + "attention.key_length", config.d_model / config.q_heads);
  config.v_dim = file.get_or<Index>(prefix + "attention.value_length", config.head_dim);
  config.ffn_dim = file.get<Index>(prefix + "feed_forward_length");
  config.context = file.get<Index>(prefix + "context_length");
  config.norm_epsilon = file.get<float>(prefix + "attention.layer_norm_rms_epsilon");
  config.vocabulary = file.tensor("token_embd.weight").rows();
  config.rope = read_rope(file, prefix, config);
  config.rope.pairing = architecture.pairing;
  config.no_rope_step =
      file.get_or<Index>(prefix + "no_rope_layer_interval", architecture.no_rope_step);
  try {
    check_config(config);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(file.name() + ": " + error.what());
  }
  return config;
}

}  // namespace quoka_decoder
