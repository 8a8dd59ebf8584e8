// Tiny random models as GGUF files, and the logits they must give.
//
//   const std::vector<std::byte> file = write_tiny_model("qwen3");  // what GgufFile::parse reads
//   const Golden expected = golden("qwen3");
//
// goldens/transformer.py states the models, makes the goldens with PyTorch from the published
// definitions and says how a weight follows from its model, its tensor's name and its place; here
// the same weights are made again. The goldens hold a hash of the stored bytes, so a difference
// between the two is an error here and not a puzzle in a test of logits.
// Keys and tensors are those that llama.cpp's convert_hf_to_gguf.py writes.
//
// QUOKA_DECODER_GOLDENS must be defined as the path of tests/decoder/goldens.
#pragma once

#include <nlohmann/json.hpp>

#include <Eigen/Core>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "decoder/file/block_types.hpp"
#include "decoder/file/gguf_writer.hpp"

namespace quoka_decoder {

struct TinyModel {
  std::string name;
  std::string architecture;  // general.architecture
  Index layers, d_model, heads, kv_heads, head_dim, ffn, vocabulary, context;
  float rms_epsilon;
  float rope_base;
  float rope_linear_factor;         // positions are divided by it; 1: no scaling
  std::vector<float> rope_factors;  // [head_dim / 2] frequencies are divided by; empty: none
  bool tied;                        // no output.weight: the token embedding serves
  TensorType matrices;              // vectors are F32 always
  std::vector<int> tokens;          // [37] the prompt of the goldens
};

struct Golden {
  std::vector<int> tokens;                  // [positions]
  std::vector<int> top1;                    // [positions]; first by a margin of 0.02 at least
  std::vector<double> weighted_sums;        // [positions] see weighted_sum
  Index first_position;                     // of logits
  std::vector<std::vector<double>> logits;  // [positions - first_position][vocabulary]
};

// How a matrix is stored: as its model says, or the same rounded values as F32, for a program that
// would round what it multiplies them with to their type (llama.cpp does).
enum class StoreMatrices { as_stated, as_f32 };

// The mean over the vocabulary of (token + 1) * logit: one number that every logit moves.
template <class Real>
double weighted_sum(std::span<const Real> logits) {
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    sum += static_cast<double>(i + 1) * static_cast<double>(logits[i]);
  }
  return sum / static_cast<double>(logits.size());
}

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

template <class T>
std::vector<std::byte> bytes_of_values(const std::vector<T>& from) {
  const auto bytes = std::as_bytes(std::span(from));
  return {bytes.begin(), bytes.end()};
}

inline std::vector<std::byte> store(const std::vector<float>& from, TensorType type) {
  switch (type) {
    case TensorType::f32:
      return bytes_of_values(from);
    case TensorType::f16: {
      std::vector<std::uint16_t> to;
      for (const float value : from) to.push_back(std::bit_cast<std::uint16_t>(Eigen::half(value)));
      return bytes_of_values(to);
    }
    case TensorType::bf16: {
      std::vector<std::uint16_t> to;
      for (const float value : from) {
        to.push_back(std::bit_cast<std::uint16_t>(Eigen::bfloat16(value)));
      }
      return bytes_of_values(to);
    }
    case TensorType::q8_0: {
      const Index count = static_cast<Index>(from.size());
      std::vector<std::byte> to(static_cast<std::size_t>(bytes_of(type, count)));
      quantize_q8_0(from.data(), count, to.data());
      return to;
    }
    default:
      throw std::invalid_argument(std::string("tiny models do not store ") + name_of(type));
  }
}

struct Tensor {
  std::string name;
  std::vector<Index> shape;  // innermost first: [columns, rows] or [length]
};

// In the order of the file.
inline std::vector<Tensor> tensors_of(const TinyModel& model) {
  const Index d_model = model.d_model;
  const Index q_rows = model.heads * model.head_dim;
  const Index kv_rows = model.kv_heads * model.head_dim;
  std::vector<Tensor> result{{"token_embd.weight", {d_model, model.vocabulary}}};
  for (Index layer = 0; layer < model.layers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    const auto add = [&](const std::string& name, std::vector<Index> shape) {
      result.push_back({block + name, std::move(shape)});
    };
    add("attn_norm.weight", {d_model});
    for (const std::string part : {"q", "k", "v"}) {
      const Index rows = part == "q" ? q_rows : kv_rows;
      add("attn_" + part + ".weight", {d_model, rows});
      if (model.architecture == "qwen2") add("attn_" + part + ".bias", {rows});
      if (model.architecture == "qwen3" && part != "v") {
        add("attn_" + part + "_norm.weight", {model.head_dim});
      }
    }
    add("attn_output.weight", {q_rows, d_model});
    add("ffn_norm.weight", {d_model});
    add("ffn_gate.weight", {d_model, model.ffn});
    add("ffn_up.weight", {d_model, model.ffn});
    add("ffn_down.weight", {model.ffn, d_model});
  }
  if (!model.rope_factors.empty()) result.push_back({"rope_freqs.weight", {model.head_dim / 2}});
  result.push_back({"output_norm.weight", {d_model}});
  if (!model.tied) result.push_back({"output.weight", {d_model, model.vocabulary}});
  return result;
}

inline TensorType type_of(const TinyModel& model, const Tensor& tensor) {
  return tensor.shape.size() == 2 ? model.matrices : TensorType::f32;
}

inline std::vector<float> values_of(const TinyModel& model, const Tensor& tensor) {
  if (tensor.name == "rope_freqs.weight") return model.rope_factors;
  const std::string key = model.name + "/" + tensor.name;
  if (tensor.shape.size() == 2) {
    const Index columns = tensor.shape[0];
    return values(key, columns * tensor.shape[1], 0, 3 / std::sqrt(static_cast<double>(columns)));
  }
  if (tensor.name.ends_with(".bias")) return values(key, tensor.shape[0], 0, 0.5);
  return values(key, tensor.shape[0], 1, 0.125);
}

inline TensorType type_named(const std::string& name) {
  for (const auto type : {TensorType::f32, TensorType::f16, TensorType::bf16, TensorType::q8_0}) {
    if (name == name_of(type)) return type;
  }
  throw std::runtime_error("tiny models do not store " + name);
}

// llama.cpp's enum llama_ftype, for general.file_type.
inline std::uint32_t file_type(TensorType matrices) {
  switch (matrices) {
    case TensorType::f16:
      return 1;
    case TensorType::q8_0:
      return 7;
    case TensorType::bf16:
      return 32;
    default:
      return 0;
  }
}

inline void add_architecture(GgufWriter& to, const TinyModel& model) {
  const auto key = [&](const char* name) { return model.architecture + "." + name; };
  const auto add = [&](const char* name, Index value) {
    to.add(key(name), static_cast<std::uint32_t>(value));
  };
  add("block_count", model.layers);
  add("context_length", model.context);
  add("embedding_length", model.d_model);
  add("feed_forward_length", model.ffn);
  add("attention.head_count", model.heads);
  add("attention.head_count_kv", model.kv_heads);
  to.add(key("attention.layer_norm_rms_epsilon"), model.rms_epsilon);
  to.add(key("rope.freq_base"), model.rope_base);
  if (model.head_dim * model.heads != model.d_model) {
    add("attention.key_length", model.head_dim);
    add("attention.value_length", model.head_dim);
  }
  if (model.architecture == "llama" || model.architecture == "smollm3") {
    add("vocab_size", model.vocabulary);
    add("rope.dimension_count", model.head_dim);
  }
  if (model.rope_linear_factor != 1) {
    to.add(key("rope.scaling.type"), std::string("linear"));
    to.add(key("rope.scaling.factor"), model.rope_linear_factor);
  }
}

// A SentencePiece vocabulary: unknown, begin, end, the space, then ASCII's visible characters.
inline void add_tokenizer(GgufWriter& to, Index vocabulary) {
  enum : std::int32_t { normal = 1, unknown = 2, control = 3 };
  std::vector<std::string> tokens{"<unk>", "<s>", "</s>", "\u2581"};
  std::vector<std::int32_t> types{unknown, control, control, normal};
  for (char letter = '!'; std::ssize(tokens) < vocabulary; ++letter) {
    tokens.emplace_back(1, letter);
    types.push_back(normal);
  }
  std::vector<float> scores;
  for (std::size_t i = 0; i < tokens.size(); ++i) scores.push_back(-static_cast<float>(i));
  to.add("tokenizer.ggml.model", std::string("llama"));
  to.add("tokenizer.ggml.pre", std::string("default"));
  to.add("tokenizer.ggml.tokens", tokens);
  to.add("tokenizer.ggml.scores", scores);
  to.add("tokenizer.ggml.token_type", types);
  to.add("tokenizer.ggml.bos_token_id", std::uint32_t{1});
  to.add("tokenizer.ggml.eos_token_id", std::uint32_t{2});
  to.add("tokenizer.ggml.unknown_token_id", std::uint32_t{0});
  to.add("tokenizer.ggml.add_bos_token", true);
  to.add("tokenizer.ggml.add_eos_token", false);
}

inline const nlohmann::json& all_goldens() {
  static const nlohmann::json goldens = [] {
    const std::string path = std::string(QUOKA_DECODER_GOLDENS) + "/transformer.json";
    std::ifstream file(path);
    if (!file) throw std::runtime_error("could not read " + path);
    return nlohmann::json::parse(file);
  }();
  return goldens;
}

// Throws std::out_of_range if there is no such model.
inline const nlohmann::json& golden_json(const std::string& name) {
  const auto found = all_goldens().find(name);
  if (found == all_goldens().end()) throw std::out_of_range("no tiny model is called " + name);
  return *found;
}

}  // namespace tiny

// In alphabetical order.
inline std::vector<std::string> tiny_model_names() {
  std::vector<std::string> names;
  for (const auto& entry : tiny::all_goldens().items()) names.push_back(entry.key());
  return names;
}

// Throws std::out_of_range if there is no such model.
inline TinyModel tiny_model(const std::string& name) {
  const nlohmann::json& json = tiny::golden_json(name);
  const nlohmann::json& model = json.at("model");
  return {
      .name = name,
      .architecture = model.at("architecture"),
      .layers = model.at("layers"),
      .d_model = model.at("d_model"),
      .heads = model.at("heads"),
      .kv_heads = model.at("kv_heads"),
      .head_dim = model.at("head_dim"),
      .ffn = model.at("ffn"),
      .vocabulary = model.at("vocabulary"),
      .context = model.at("context"),
      .rms_epsilon = model.at("rms_epsilon"),
      .rope_base = model.at("rope_base"),
      .rope_linear_factor = model.at("rope_linear_factor"),
      .rope_factors = model.value("rope_factors", std::vector<float>{}),
      .tied = model.at("tied"),
      .matrices = tiny::type_named(model.at("matrices")),
      .tokens = json.at("tokens"),
  };
}

// Throws std::out_of_range if there is no such model.
inline Golden golden(const std::string& name) {
  const nlohmann::json& json = tiny::golden_json(name);
  return {
      .tokens = json.at("tokens"),
      .top1 = json.at("top1"),
      .weighted_sums = json.at("weighted_sums"),
      .first_position = json.at("first_position"),
      .logits = json.at("logits"),
  };
}

// The GGUF file. Throws std::out_of_range if there is no such model, std::logic_error if the
// weights are not those the goldens were made with.
inline std::vector<std::byte> write_tiny_model(const std::string& name,
                                               StoreMatrices how = StoreMatrices::as_stated) {
  const TinyModel model = tiny_model(name);
  const bool widen = how == StoreMatrices::as_f32;
  GgufWriter writer;
  writer.add("general.architecture", model.architecture);
  writer.add("general.name", model.name);
  writer.add("general.file_type", tiny::file_type(widen ? TensorType::f32 : model.matrices));
  writer.add("general.quantization_version", std::uint32_t{2});
  tiny::add_architecture(writer, model);
  tiny::add_tokenizer(writer, model.vocabulary);

  std::uint64_t hash = tiny::fnv1a64_start;
  for (const tiny::Tensor& tensor : tiny::tensors_of(model)) {
    const TensorType type = tiny::type_of(model, tensor);
    std::vector<float> values = tiny::values_of(model, tensor);
    const std::vector<std::byte> stored = tiny::store(values, type);
    hash = tiny::fnv1a64(stored, hash);
    if (widen) {
      dequantize(type, stored.data(), std::ssize(values), values.data());
      writer.add_tensor(tensor.name, tensor.shape, values);
    } else {
      writer.add_tensor(tensor.name, tensor.shape, type, stored);
    }
  }
  const std::uint64_t expected =
      std::stoull(tiny::golden_json(name).at("weights_hash").get<std::string>(), nullptr, 16);
  if (hash != expected) {
    throw std::logic_error("the weights of the tiny model " + name + " have the hash " +
                           std::to_string(hash) + " here, " + std::to_string(expected) +
                           " where its goldens were made");
  }
  return writer.bytes();
}

}  // namespace quoka_decoder
