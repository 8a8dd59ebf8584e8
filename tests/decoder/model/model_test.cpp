// What a model's file must hold, and what is refused.
#include "decoder/file/gguf_writer.hpp"

#include "decoder/file/gguf.hpp"
#include "decoder/model/model.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>

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
  writer.add(prefix + "attention.layer_norm_rms_epsilon", 1e-5f);
  for (const auto& [key, value] : parts.keys) writer.add(prefix + key, value);
  for (const auto& [key, value] : parts.texts) writer.add(prefix + key, value);
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
            "tiny.gguf: a mixture of 8 experts; this program knows dense models");
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
