// What a model's file must hold, and what is refused.
#include "decoder/file/gguf_writer.hpp"

#include "decoder/file/gguf.hpp"
#include "decoder/model/model.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <tuple>

namespace quoka_decoder {
namespace {

constexpr std::uint32_t d_model = 8, ffn = 12, vocabulary = 5;

// A llama of one layer, one head; each test changes one thing.
struct Parts {
  std::string architecture = "llama";
  std::map<std::string, std::uint32_t> keys{
      {"block_count", 1},           {"embedding_length", d_model}, {"context_length", 64},
      {"feed_forward_length", ffn}, {"attention.head_count", 2},   {"attention.head_count_kv", 1},
  };
  std::map<std::string, std::string> texts;
  std::map<std::string, float> numbers{{"attention.layer_norm_rms_epsilon", 1e-5f}};
  std::map<std::string, bool> flags;
  std::map<std::string, std::uint32_t> elsewhere;  // keys without the architecture before them
  std::string foreign_tensor;                      // its name; of a type that is not read
  std::map<std::string, std::vector<Index>> tensors{
      {"token_embd.weight", {d_model, vocabulary}},
      {"blk.0.attn_norm.weight", {d_model}},
      {"blk.0.attn_q.weight", {d_model, d_model}},
      {"blk.0.attn_k.weight", {d_model, d_model / 2}},
      {"blk.0.attn_v.weight", {d_model, d_model / 2}},
      {"blk.0.attn_output.weight", {d_model, d_model}},
      {"blk.0.ffn_norm.weight", {d_model}},
      {"blk.0.ffn_gate.weight", {d_model, ffn}},
      {"blk.0.ffn_up.weight", {d_model, ffn}},
      {"blk.0.ffn_down.weight", {ffn, d_model}},
      {"output_norm.weight", {d_model}},
  };
};

Model load(const Parts& parts) {
  GgufWriter writer;
  writer.add("general.architecture", parts.architecture);
  const std::string prefix = parts.architecture + '.';
  for (const auto& [key, value] : parts.keys) writer.add(prefix + key, value);
  for (const auto& [key, value] : parts.texts) writer.add(prefix + key, value);
  for (const auto& [key, value] : parts.numbers) writer.add(prefix + key, value);
  for (const auto& [key, value] : parts.flags) writer.add(prefix + key, value);
  for (const auto& [key, value] : parts.elsewhere) writer.add(key, value);
  if (!parts.foreign_tensor.empty())
    writer.add_tensor(parts.foreign_tensor, {4}, static_cast<TensorType>(26),  // ggml's I32
                      std::vector<std::byte>(16));
  for (const auto& [name, shape] : parts.tensors) {
    Index count = 1;
    for (const Index extent : shape) count *= extent;
    writer.add_tensor(name, shape, TensorType::f32,
                      std::vector<std::byte>(static_cast<std::size_t>(4 * count)));
  }
  const auto bytes = std::make_shared<const std::vector<std::byte>>(writer.bytes());
  Model model = load_model(std::make_shared<const GgufFile>(GgufFile::parse(*bytes, "tiny.gguf")));
  model.storage = bytes;
  return model;
}

// The message of the error that loading throws; empty if it throws none.
std::string refusal(const std::function<void(Parts&)>& change) {
  Parts parts;
  change(parts);
  try {
    load(parts);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(LoadModel, ReadsTheSizesFromTheMetadata) {
  const Model model = load({});
  const ModelConfig& c = model.config;
  EXPECT_EQ(c.layers, 1);
  EXPECT_EQ(c.q_heads, 2);
  EXPECT_EQ(c.kv_heads, 1);
  EXPECT_EQ(c.head_dim, 4);
  EXPECT_EQ(c.v_dim, 4);
  EXPECT_EQ(c.vocabulary, 5);
  EXPECT_EQ(c.rope.dim, 4);
  EXPECT_TRUE(c.has_rope(3));
  EXPECT_EQ(model.output.data, model.embedding.data);  // tied: there is no output.weight
}

TEST(LoadModel, LeavesRopeOutWhereTheArchitectureDoes) {
  Parts parts;
  parts.architecture = "smollm3";
  EXPECT_TRUE(load(parts).config.has_rope(2));
  EXPECT_FALSE(load(parts).config.has_rope(3));
  parts.keys["no_rope_layer_interval"] = 2;
  EXPECT_FALSE(load(parts).config.has_rope(1));
}

TEST(LoadModel, RefusesAnUnknownArchitectureByName) {
  EXPECT_EQ(
      refusal([](Parts& p) { p.architecture = "mamba"; }),
      "tiny.gguf: its architecture is \"mamba\"; this program knows llama, qwen2, qwen3, smollm3");
}

TEST(LoadModel, RefusesMixturesOfExperts) {
  EXPECT_EQ(refusal([](Parts& p) { p.keys["expert_count"] = 8; }),
            "tiny.gguf: llama.expert_count is 8; this program has no mixtures of experts");
}

TEST(LoadModel, RefusesAnUnknownRopeScalingByName) {
  EXPECT_EQ(
      refusal([](Parts& p) { p.texts["rope.scaling.type"] = "longrope"; }),
      "tiny.gguf: its RoPE scaling is \"longrope\"; this program knows none, linear and yarn");
}

TEST(LoadModel, RefusesATensorThatItWouldIgnore) {
  EXPECT_EQ(
      refusal([](Parts& p) { p.tensors["blk.0.attn_sinks.weight"] = {2}; }),
      "tiny.gguf: tensor blk.0.attn_sinks.weight is not one that this program knows how to use");
}

TEST(LoadModel, RefusesATensorOfAnotherTypeThatItWouldIgnore) {
  EXPECT_EQ(
      refusal([](Parts& p) { p.foreign_tensor = "blk.0.attn_rot_embd.weight"; }),
      "tiny.gguf: tensor blk.0.attn_rot_embd.weight is not one that this program knows how to use");
}

TEST(LoadModel, NamesASplitFileAsSuch) {
  EXPECT_EQ(
      refusal([](Parts& p) {
        p.architecture = "clip";  // said first: the first part alone need not have all keys
        p.elsewhere = {{"split.count", 3}, {"split.no", 1}};
      }),
      "tiny.gguf: part 2 of 3 of a split file; this program reads whole ones: join them first "
      "(llama.cpp: llama-gguf-split --merge)");
  EXPECT_EQ(refusal([](Parts& p) { p.elsewhere = {{"split.count", 1}, {"split.no", 0}}; }), "");
}

TEST(LoadModel, RefusesBlocksOfAnotherVersion) {
  EXPECT_EQ(refusal([](Parts& p) {
              p.elsewhere = {{"general.quantization_version", 1}};
            }),
            "tiny.gguf: general.quantization_version is 1; blocks of version 2 are read");
}

// The keys of an architecture that llama.cpp reads, without "<architecture>." before them: LLM_KV_NAMES in its
// src/llama-arch.cpp.
constexpr const char* keys_of_llama_cpp[] = {
    "vocab_size", "context_length", "embedding_length", "embedding_length_out",
    "embedding_length_per_layer_input", "features_length", "block_count",
    "leading_dense_block_count", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "expert_chunk_feed_forward_length", "swiglu_clamp_exp",
    "swiglu_clamp_shexp", "use_parallel_residual", "tensor_data_layout", "expert_count",
    "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
    "expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_scale",
    "experts_per_group", "moe_every_n_layers", "moe_latent_size", "nextn_predict_layers",
    "n_deepstack_layers", "deepstack_mapping", "hidden_activation", "pooling_type", "logit_scale",
    "decoder_start_token_id", "decoder_block_count", "attn_logit_softcapping",
    "router_logit_softcapping", "final_logit_softcapping", "swin_norm", "rescale_every_n_layers",
    "time_mix_extra_dim", "time_decay_extra_dim", "residual_scale", "embedding_scale",
    "token_shift_count", "interleave_moe_layer_step", "full_attention_interval",
    "attention.head_count", "attention.head_count_kv", "attention.max_alibi_bias",
    "attention.clamp_kqv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.causal",
    "attention.q_lora_rank", "attention.kv_lora_rank", "attention.decay_lora_rank",
    "attention.iclr_lora_rank", "attention.value_residual_mix_lora_rank",
    "attention.gate_lora_rank", "attention.relative_buckets_count", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.scale", "attention.output_scale",
    "attention.value_scale", "attention.temperature_length", "attention.temperature_scale",
    "attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa",
    "attention.value_length_swa", "attention.indexer.head_count", "attention.indexer.key_length",
    "attention.indexer.top_k", "attention.output_group_count", "attention.output_lora_rank",
    "attention.compress_rope_freq_base", "attention.compress_ratios", "attention.shared_kv_layers",
    "attention.recurrent_layers", "hyper_connection.count", "hyper_connection.sinkhorn_iterations",
    "hyper_connection.epsilon", "hash_layer_count", "rope.dimension_count",
    "rope.dimension_count_swa", "rope.dimension_sections", "rope.freq_base", "rope.freq_base_swa",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.alpha",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
    "ssm.dt_b_c_rms", "kda.head_dim", "wkv.head_size", "posnet.embedding_length",
    "posnet.block_count", "convnext.embedding_length", "convnext.block_count",
    "classifier.output_labels", "target_layers", "target_hidden_size", "norm_before_residual",
    "shortconv.l_cache", "dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in",
    "dense_3_feat_out",
    // and one that nobody reads
    "rope.twist"};

// What the model is made of, as far as a key may change it.
auto described(const Model& model) {
  const ModelConfig& c = model.config;
  return std::tuple(c.layers, c.d_model, c.q_heads, c.kv_heads, c.head_dim, c.v_dim, c.ffn_dim,
                    c.context, c.norm_epsilon, c.rope.dim, c.rope.base, c.rope.scaling,
                    c.rope.factor, c.rope.magnitude, c.rope.trained_context);
}

TEST(LoadModel, ComputesWithEachKeyOfLlamaCppsOrRefusesItByName) {
  // These change no logit.
  const std::set<std::string> silent{"vocab_size", "pooling_type", "rope.scaling.finetuned"};
  // These mean something beside another key only: of YaRN.
  const std::set<std::string> beside{"rope.scaling.type", "rope.scaling.original_context_length"};
  for (const char* architecture : {"llama", "qwen2", "qwen3", "smollm3"}) {
    for (const std::string key : keys_of_llama_cpp) {
      SCOPED_TRACE(std::string(architecture) + "." + key);
      Parts plain;
      plain.architecture = architecture;
      if (beside.contains(key)) {
        plain.texts["rope.scaling.type"] = "yarn";
        plain.numbers["rope.scaling.factor"] = 2.0f;
      }
      const auto before = described(load(plain));
      // A value that means something, in each type: one of them is the key's.
      std::vector<std::function<void(Parts&)>> values{
          [&](Parts& p) { p.keys[key] = 6; }, [&](Parts& p) { p.numbers[key] = 6.0f; },
          [&](Parts& p) { p.flags[key] = key != "attention.causal"; },
          [&](Parts& p) { p.texts[key] = "linear"; }};
      bool computed = false;
      for (const auto& set : values) {
        Parts parts = plain;
        parts.keys.erase(key), parts.texts.erase(key), parts.numbers.erase(key);
        set(parts);
        try {
          const bool changes = described(load(parts)) != before;
          EXPECT_TRUE(changes || silent.contains(key)) << "accepted, and nothing is changed by it";
          computed = true;
        } catch (const std::runtime_error& error) {
          const std::string what = error.what();
          // By its name; a size that does not fit the tensors by theirs.
          EXPECT_TRUE(what.find(key) != what.npos || what.find(" rows of ") != what.npos ||
                      what.find("there is no tensor") != what.npos ||
                      what.find("RoPE") != what.npos || what.find("q_heads") != what.npos ||
                      what.find("is not one that this program") != what.npos)
              << what;
        }
      }
      EXPECT_TRUE(computed || !silent.contains(key));
    }
  }
}

TEST(LoadModel, TakesKeysThatSayWhatAModelIsWithout) {
  Parts parts;
  parts.keys["attention.sliding_window"] = parts.keys["expert_count"] = 0;
  parts.numbers.insert(
      {{"attn_logit_softcapping", 0.0f}, {"logit_scale", 1.0f}, {"attention.scale", 0.0f}});
  parts.flags = {{"attention.causal", true}, {"use_parallel_residual", false}};
  parts.texts = {{"hidden_activation", "silu"}, {"tensor_data_layout", "Meta AI original pth"}};
  EXPECT_NO_THROW((void)load(parts));
}

TEST(LoadModel, SaysWhatItHasNot) {
  EXPECT_EQ(
      refusal([](Parts& p) { p.keys["attention.sliding_window"] = 4096; }),
      "tiny.gguf: llama.attention.sliding_window is 4096; this program has no sliding windows");
  EXPECT_EQ(
      refusal([](Parts& p) { p.flags["attention.causal"] = false; }),
      "tiny.gguf: llama.attention.causal is false; this program has no attention to later tokens");
  EXPECT_EQ(
      refusal([](Parts& p) { p.texts["hidden_activation"] = "gelu"; }),
      "tiny.gguf: llama.hidden_activation is \"gelu\"; this program has no activation but SiLU");
  EXPECT_EQ(
      refusal([](Parts& p) { p.keys["attention.window_of_mine"] = 1; }),
      "tiny.gguf: this program does not know llama.attention.window_of_mine, which may change what "
      "is computed");
  EXPECT_EQ(refusal([](Parts& p) { p.elsewhere["xielu.beta"] = 1; }),
            "tiny.gguf: xielu.beta belongs to no model that this program knows");
}

TEST(LoadModel, ReadsRopeScalingAsLlamaCppDoes) {
  const auto rope = [](std::map<std::string, float> numbers, const std::string& type = "") {
    Parts parts;
    for (const auto& [key, value] : numbers) parts.numbers["rope." + key] = value;
    if (!type.empty()) parts.texts["rope.scaling.type"] = type;
    return load(parts).config.rope;
  };
  const RopeConfig old = rope({{"scale_linear", 4.0f}});
  EXPECT_EQ(old.scaling, RopeScaling::linear);
  EXPECT_EQ(old.factor, 4.0f);
  const RopeConfig untyped = rope({{"scaling.factor", 3.0f}, {"scale_linear", 4.0f}});
  EXPECT_EQ(untyped.scaling, RopeScaling::linear);
  EXPECT_EQ(untyped.factor, 3.0f);
  EXPECT_EQ(rope({{"scale_linear", 4.0f}}, "yarn").factor, 4.0f);
  EXPECT_EQ(rope({{"scaling.factor", 4.0f}}, "none").scaling, RopeScaling::none);
  EXPECT_EQ(rope({{"scaling.factor", 0.0f}}).scaling, RopeScaling::none);
  EXPECT_EQ(rope({{"scaling.attn_factor", 1.5f}}).magnitude, 1.5f);
  const std::string negative = refusal([](Parts& p) { p.numbers["rope.scale_linear"] = -4.0f; });
  EXPECT_NE(negative.find("RoPE's factor is -4"), std::string::npos) << negative;
}

TEST(LoadModel, NamesATensorThatIsMissing) {
  const std::string what = refusal([](Parts& p) { p.tensors.erase("blk.0.ffn_up.weight"); });
  EXPECT_NE(what.find("blk.0.ffn_up.weight"), std::string::npos) << what;
}

TEST(LoadModel, RefusesAShapeThatTheMetadataDoesNotSay) {
  EXPECT_EQ(refusal([](Parts& p) {
              p.tensors["blk.0.ffn_up.weight"] = {d_model, 11};
            }),
            "tiny.gguf: tensor blk.0.ffn_up.weight has 11 rows of 8, not 12 of 8");
}

TEST(LoadModel, RefusesSizesThatDoNotFitTogether) {
  const std::string heads = refusal([](Parts& p) { p.keys["attention.head_count_kv"] = 3; });
  EXPECT_NE(heads.find("q_heads"), std::string::npos) << heads;
  const std::string none = refusal([](Parts& p) { p.keys["attention.head_count"] = 0; });
  EXPECT_NE(none.find("head_count"), std::string::npos) << none;
  const std::string rope = refusal([](Parts& p) { p.keys["rope.dimension_count"] = 6; });
  EXPECT_NE(rope.find('6'), std::string::npos) << rope;
}

TEST(RandomModel, IsTheSameInEachRunAndKeepsTheTypeAskedFor) {
  ModelConfig config = load({}).config;
  config.d_model = 32, config.head_dim = config.v_dim = 16, config.ffn_dim = 64;
  config.rope.dim = 16;
  for (const TensorType type : {TensorType::f32, TensorType::f16, TensorType::q8_0}) {
    const Model a = random_model(config, type), b = random_model(config, type);
    Vector row_a(32), row_b(32);
    a.layers[0].gate.read_row(63, row_a.data());
    b.layers[0].gate.read_row(63, row_b.data());
    EXPECT_EQ(row_a, row_b);
    EXPECT_EQ(a.layers[0].down.type, type);
    double square = 0.0;
    for (const float value : row_a) square += static_cast<double>(value) * value;
    EXPECT_GT(square, 0.3);  // 32 values of variance 1 / 32
    EXPECT_LT(square, 3.0);
  }
  EXPECT_THROW((void)random_model(config, TensorType::q4_k), std::invalid_argument);
}

}  // namespace
}  // namespace quoka_decoder
