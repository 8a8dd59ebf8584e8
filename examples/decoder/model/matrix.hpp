// A matrix of weights in the form its file stores it in, and its product with activations in float.
//
//   y[t][r] = sum over c of x[t][c] * w[r][c]
//
// Blocks of rows are made float in a worker's own cache (block_types.hpp) and multiplied at once,
// with a BLAS where CMake has found one, with Eigen otherwise: 2 * tokens * rows * columns FLOPs, a
// pass over the weights for every call. One token is a dot product per row, bound by the weights'
// bytes. Rows are shared out over the threads; results do not depend on their number.
#pragma once

#include "decoder/file/block_types.hpp"

#include <quoka/runtime/thread_pool.hpp>

#include <Eigen/Core>

#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

namespace quoka_decoder {

struct GgufTensor;

// Floats on a packet's alignment: the order of Eigen's sums hangs on it.
using Vector = std::vector<float, Eigen::aligned_allocator<float>>;

struct Matrix {
  Matrix() = default;
  // A view of a tensor of its file, which must outlive it. Throws std::runtime_error, with both
  // shapes, unless it has `rows` rows of `columns`.
  Matrix(const GgufTensor& tensor, Index rows, Index columns);

  const std::byte* row(Index r) const { return data + r * bytes_of(type, columns); }
  // Row r as float, [columns].
  void read_row(Index r, float* out) const { dequantize(type, row(r), columns, out); }

  TensorType type = TensorType::f32;
  Index rows = 0;     // outputs
  Index columns = 0;  // inputs
  const std::byte* data = nullptr;
};

// Activations: [tokens, size] with a row stride, not owned.
template <class T>
struct Rows {
  T* data;
  Index tokens;
  Index size;
  Index stride;

  Rows(T* data_in, Index tokens_in, Index size_in, Index stride_in)
      : data(data_in), tokens(tokens_in), size(size_in), stride(stride_in) {}
  Rows(T* data_in, Index tokens_in, Index size_in) : Rows(data_in, tokens_in, size_in, size_in) {}
  template <class U>
  requires(std::is_same_v<const U, T>) Rows(const Rows<U>& other)
      : Rows(other.data, other.tokens, other.size, other.stride) {}

  T* operator[](Index token) const { return data + token * stride; }
};

enum class Write { assign, add };

// The product, with one scratch block per worker.
class MatrixProduct {
 public:
  explicit MatrixProduct(quoka::ThreadPool& threads);

  // y = x w^T, or y += x w^T. x [tokens, w.columns], y [tokens, w.rows]. Throws
  // std::invalid_argument where the sizes do not fit.
  void operator()(const Matrix& w, Rows<const float> x, Rows<float> y, Write write = Write::assign);

 private:
  quoka::ThreadPool& threads_;
  std::vector<Vector> scratch_;
};

// "OpenBLAS 0.3.21 Zen" or "Eigen 3.4.0": what multiplies.
std::string product_backend();

}  // namespace quoka_decoder
