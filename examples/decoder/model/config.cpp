#include "decoder/model/config.hpp"

#include "decoder/file/gguf.hpp"

#include "support/require.hpp"

#include <array>
#include <stdexcept>

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

RopeConfig read_rope(const GgufFile& file, const std::string& prefix, const ModelConfig& config) {
  RopeConfig rope;
  rope.dim = file.get_or<Index>(prefix + "rope.dimension_count", config.head_dim);
  rope.base = file.get_or<float>(prefix + "rope.freq_base", 10000.0f);
  const auto scaling = file.get_or<std::string>(prefix + "rope.scaling.type", "none");
  const auto factor = file.get_or<float>(prefix + "rope.scaling.factor", 1.0f);
  if (scaling == "linear") {
    rope.scaling = RopeScaling::linear;
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
  if (!(c.rope.base > 0.0f && c.rope.factor > 0.0f))
    throw std::invalid_argument("RoPE's base " + std::to_string(c.rope.base) + " and factor " +
                                std::to_string(c.rope.factor) + " must be above 0");
  if (!(c.norm_epsilon >= 0.0f))
    throw std::invalid_argument("the norm's epsilon is " + std::to_string(c.norm_epsilon));
}

ModelConfig read_config(const GgufFile& file) {
  ModelConfig config;
  config.architecture = file.get<std::string>("general.architecture");
  const Architecture& architecture = architecture_named(file, config.architecture);
  const std::string prefix = config.architecture + '.';

  if (const auto experts = file.get_or<Index>(prefix + "expert_count", 0); experts > 0)
    throw std::runtime_error(file.name() + ": a mixture of " + std::to_string(experts) +
                             " experts; this program knows dense models");
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
