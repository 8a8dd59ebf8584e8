#include "decoder/model/model.hpp"

#include "decoder/file/gguf.hpp"

#include <Eigen/Core>

#include <random>
#include <set>
#include <stdexcept>
#include <utility>

namespace quoka_decoder {
namespace {

// Hands out the tensors of a file and remembers which were taken.
class Tensors {
 public:
  explicit Tensors(const GgufFile& file) : file_(file) {}

  Matrix matrix(const std::string& name, Index rows, Index columns) {
    return wrapped([&] { return Matrix(take(name + ".weight"), rows, columns); });
  }
  Vector vector(const std::string& name, Index size) {
    return wrapped([&] {
      const Matrix row(take(name), 1, size);
      Vector values(static_cast<std::size_t>(size));
      row.read_row(0, values.data());
      return values;
    });
  }
  // Empty where the file has none.
  Vector optional_vector(const std::string& name, Index size) {
    return has(name) ? vector(name, size) : Vector{};
  }
  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

  // Throws where a tensor was left.
  void require_all_taken() const {
    for (const std::string& name : file_.tensor_names())
      if (!taken_.contains(name))
        throw std::runtime_error(file_.name() + ": tensor " + name +
                                 " is not one that this program knows how to use");
  }

 private:
  const GgufTensor& take(const std::string& name) {
    taken_.insert(name);
    return file_.tensor(name);
  }
  template <class F>
  auto wrapped(F&& f) -> decltype(f()) {
    try {
      return f();
    } catch (const std::runtime_error& error) {
      const std::string what = error.what();
      throw std::runtime_error(what.starts_with(file_.name()) ? what : file_.name() + ": " + what);
    }
  }

  const GgufFile& file_;
  std::set<std::string> taken_;
};

LayerWeights load_layer(Tensors& from, const std::string& prefix, const ModelConfig& c) {
  LayerWeights layer;
  const Index q_size = c.q_heads * c.head_dim, k_size = c.kv_heads * c.head_dim,
              v_size = c.kv_heads * c.v_dim;
  layer.attention_norm = from.vector(prefix + "attn_norm.weight", c.d_model);
  layer.q = from.matrix(prefix + "attn_q", q_size, c.d_model);
  layer.k = from.matrix(prefix + "attn_k", k_size, c.d_model);
  layer.v = from.matrix(prefix + "attn_v", v_size, c.d_model);
  layer.q_bias = from.optional_vector(prefix + "attn_q.bias", q_size);
  layer.k_bias = from.optional_vector(prefix + "attn_k.bias", k_size);
  layer.v_bias = from.optional_vector(prefix + "attn_v.bias", v_size);
  layer.q_norm = from.optional_vector(prefix + "attn_q_norm.weight", c.head_dim);
  layer.k_norm = from.optional_vector(prefix + "attn_k_norm.weight", c.head_dim);
  layer.attention_out = from.matrix(prefix + "attn_output", c.d_model, c.q_heads * c.v_dim);
  layer.ffn_norm = from.vector(prefix + "ffn_norm.weight", c.d_model);
  layer.gate = from.matrix(prefix + "ffn_gate", c.ffn_dim, c.d_model);
  layer.up = from.matrix(prefix + "ffn_up", c.ffn_dim, c.d_model);
  layer.down = from.matrix(prefix + "ffn_down", c.d_model, c.ffn_dim);
  return layer;
}

// Matrices of random weights, all in one buffer. A row repeats a pattern at an offset of its own:
// drawing billions of normal numbers would take longer than the run they are for.
class RandomMatrices {
 public:
  explicit RandomMatrices(TensorType type) : type_(type), pattern_(1 << 16) {
    if (type != TensorType::f32 && type != TensorType::f16 && type != TensorType::q8_0)
      throw std::invalid_argument(std::string("random weights are F32, F16 or Q8_0, not ") +
                                  name_of(type));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& value : pattern_) value = normal(random);
  }

  Matrix matrix(Index rows, Index columns) {
    Matrix result;
    result.type = type_;
    result.rows = rows;
    result.columns = columns;
    const auto row_bytes = static_cast<std::size_t>(bytes_of(type_, columns));
    auto& data = blocks_->emplace_back(row_bytes * static_cast<std::size_t>(rows));
    const float scale = 1.0f / std::sqrt(static_cast<float>(columns));
    Vector row(static_cast<std::size_t>(columns));
    for (Index r = 0; r < rows; ++r) {
      std::size_t at = offset_ += 7919;
      for (float& value : row) value = scale * pattern_[at++ % pattern_.size()];
      store(row, data.data() + static_cast<std::size_t>(r) * row_bytes);
    }
    result.data = data.data();
    return result;
  }
  std::shared_ptr<const void> storage() const { return blocks_; }

 private:
  void store(const Vector& row, std::byte* out) const {
    const auto n = static_cast<Index>(row.size());
    if (type_ == TensorType::f32) {
      std::memcpy(out, row.data(), row.size() * sizeof(float));
    } else if (type_ == TensorType::f16) {
      for (Index i = 0; i < n; ++i) {
        const Eigen::half value(row[static_cast<std::size_t>(i)]);
        std::memcpy(out + 2 * i, &value, 2);
      }
    } else {
      quantize_q8_0(row.data(), n, out);
    }
  }

  TensorType type_;
  Vector pattern_;
  std::size_t offset_ = 0;
  std::shared_ptr<std::vector<std::vector<std::byte>>> blocks_ =
      std::make_shared<std::vector<std::vector<std::byte>>>();
};

Index bytes_of(const Matrix& matrix) { return matrix.rows * bytes_of(matrix.type, matrix.columns); }

}  // namespace

Index Model::bytes() const {
  Index sum = bytes_of(embedding) + (output.data == embedding.data ? 0 : bytes_of(output));
  for (const LayerWeights& l : layers)
    for (const Matrix* m : {&l.q, &l.k, &l.v, &l.attention_out, &l.gate, &l.up, &l.down})
      sum += bytes_of(*m);
  return sum;
}

Model load_model(std::shared_ptr<const GgufFile> file) {
  Model model;
  model.config = read_config(*file);
  const ModelConfig& c = model.config;
  Tensors from(*file);
  model.embedding = from.matrix("token_embd", c.vocabulary, c.d_model);
  for (Index i = 0; i < c.layers; ++i)
    model.layers.push_back(load_layer(from, "blk." + std::to_string(i) + '.', c));
  model.output_norm = from.vector("output_norm.weight", c.d_model);
  model.output =
      from.has("output.weight") ? from.matrix("output", c.vocabulary, c.d_model) : model.embedding;
  model.rope_factors = from.optional_vector("rope_freqs.weight", c.rope.dim / 2);
  from.require_all_taken();
  model.storage = std::move(file);
  return model;
}

Model random_model(const ModelConfig& config, TensorType type) {
  check_config(config);
  const ModelConfig& c = config;
  const Vector ones(static_cast<std::size_t>(c.d_model), 1.0f);
  RandomMatrices random(type);
  Model model;
  model.config = c;
  model.embedding = model.output = random.matrix(c.vocabulary, c.d_model);
  model.output_norm = ones;
  for (Index i = 0; i < c.layers; ++i) {
    LayerWeights layer;
    layer.attention_norm = layer.ffn_norm = ones;
    layer.q = random.matrix(c.q_heads * c.head_dim, c.d_model);
    layer.k = random.matrix(c.kv_heads * c.head_dim, c.d_model);
    layer.v = random.matrix(c.kv_heads * c.v_dim, c.d_model);
    layer.attention_out = random.matrix(c.d_model, c.q_heads * c.v_dim);
    layer.gate = random.matrix(c.ffn_dim, c.d_model);
    layer.up = random.matrix(c.ffn_dim, c.d_model);
    layer.down = random.matrix(c.d_model, c.ffn_dim);
    model.layers.push_back(std::move(layer));
  }
  model.storage = random.storage();
  return model;
}

}  // namespace quoka_decoder
