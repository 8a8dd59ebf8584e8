#include "decoder/model/matrix.hpp"

#include "decoder/file/gguf.hpp"

#include "support/require.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef QUOKA_DECODER_OPENBLAS
#include <cblas.h>
#endif

namespace quoka_decoder {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class M>
using Strided = Eigen::Map<M, 0, Eigen::OuterStride<>>;

// Fewer tokens than this are dot products: packing for a matrix product would cost more.
constexpr Index few_tokens = 4;
// Floats of one block of rows. A BLAS packs the activations anew for each: with 64 rows of 2,048 it
// spent a fifth of its time on that, with 512 a thirtieth.
constexpr Index block_floats = 1024 * 1024;

// y [tokens, n] (+)= x [tokens, columns] w^T, w [n, columns] in a row.
void multiply_by_eigen(Rows<const float> x, const float* w, Rows<float> y, Write write) {
  const Strided<const RowMajor> in(x.data, x.tokens, x.size, Eigen::OuterStride<>(x.stride));
  const Eigen::Map<const RowMajor> weights(w, y.size, x.size);
  Strided<RowMajor> out(y.data, y.tokens, y.size, Eigen::OuterStride<>(y.stride));
  if (write == Write::add)
    out.noalias() += in * weights.transpose();
  else
    out.noalias() = in * weights.transpose();
}

#ifdef QUOKA_DECODER_OPENBLAS
// A build of OpenBLAS without threads has no locks either: calls from two of ours at once would
// write over each other's packed matrices, and do.
bool blas_is_thread_safe() { return openblas_get_parallel() != OPENBLAS_SEQUENTIAL; }

void multiply(Rows<const float> x, const float* w, Rows<float> y, Write write) {
  if (!blas_is_thread_safe()) return multiply_by_eigen(x, w, y, write);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(x.tokens),
              static_cast<blasint>(y.size), static_cast<blasint>(x.size), 1.0f, x.data,
              static_cast<blasint>(x.stride), w, static_cast<blasint>(x.size),
              write == Write::add ? 1.0f : 0.0f, y.data, static_cast<blasint>(y.stride));
}
#else
void multiply(Rows<const float> x, const float* w, Rows<float> y, Write write) {
  multiply_by_eigen(x, w, y, write);
}
#endif

void multiply_few(Rows<const float> x, const float* w, Rows<float> y, Write write) {
  for (Index r = 0; r < y.size; ++r, w += x.size) {
    const Eigen::Map<const Eigen::VectorXf> row(w, x.size);
    for (Index t = 0; t < x.tokens; ++t) {
      const float dot = row.dot(Eigen::Map<const Eigen::VectorXf>(x[t], x.size));
      y[t][r] = write == Write::add ? y[t][r] + dot : dot;
    }
  }
}

// A file may put floats anywhere.
bool readable_as_float(const Matrix& w) {
  return w.type == TensorType::f32 &&
         reinterpret_cast<std::uintptr_t>(w.data) % alignof(float) == 0;
}

}  // namespace

Matrix::Matrix(const GgufTensor& tensor, Index rows_in, Index columns_in)
    : type(tensor.type), rows(tensor.rows()), columns(tensor.columns()), data(tensor.data.data()) {
  if (rows != rows_in || columns != columns_in)
    throw std::runtime_error("tensor " + tensor.name + " has " + std::to_string(rows) +
                             " rows of " + std::to_string(columns) + ", not " +
                             std::to_string(rows_in) + " of " + std::to_string(columns_in));
}

MatrixProduct::MatrixProduct(quoka::ThreadPool& threads)
    : threads_(threads), scratch_(static_cast<std::size_t>(threads.workers())) {
#ifdef QUOKA_DECODER_OPENBLAS
  // The threads are ours. Once: products may be made by several of them.
  [[maybe_unused]] static const bool done = (openblas_set_num_threads(1), true);
#endif
}

void MatrixProduct::operator()(const Matrix& w, Rows<const float> x, Rows<float> y, Write write) {
  quoka_examples::require_equal("x's size", x.size, "the matrix's columns", w.columns);
  quoka_examples::require_equal("y's size", y.size, "the matrix's rows", w.rows);
  quoka_examples::require_equal("y's tokens", y.tokens, "x's tokens", x.tokens);
  const bool few = x.tokens < few_tokens;
  // As many rows as fit, but enough blocks for threads to balance; never by their number, on which
  // the order of a sum could then hang. Dot products make one row float at a time.
  const Index fit = std::max<Index>(1, block_floats / w.columns);
  const Index block = std::min(fit, std::max<Index>(64, quoka::round_up(w.rows / 8, 16)));

  threads_.run(quoka::ceil_div(w.rows, block), [&](Index task, int worker) {
    const Index begin = task * block, end = std::min(w.rows, begin + block);
    Vector& scratch = scratch_[static_cast<std::size_t>(worker)];
    const Index step = few ? 1 : end - begin;
    scratch.resize(std::max(scratch.size(), static_cast<std::size_t>(step * w.columns)));
    for (Index r = begin; r < end; r += step) {
      const float* floats = scratch.data();
      if (readable_as_float(w))
        floats = reinterpret_cast<const float*>(w.row(r));
      else
        dequantize(w.type, w.row(r), step * w.columns, scratch.data());
      const Rows<float> out(y.data + r, y.tokens, step, y.stride);
      few ? multiply_few(x, floats, out, write) : multiply(x, floats, out, write);
    }
  });
}

std::string product_backend() {
#ifdef QUOKA_DECODER_OPENBLAS
  if (blas_is_thread_safe()) {
    const std::string config = openblas_get_config();  // "OpenBLAS 0.3.21 NO_LAPACKE ..."
    return config.substr(0, config.find(' ', config.find(' ') + 1)) + ' ' + openblas_get_corename();
  }
#endif
  return "Eigen " + std::to_string(EIGEN_WORLD_VERSION) + '.' +
         std::to_string(EIGEN_MAJOR_VERSION) + '.' + std::to_string(EIGEN_MINOR_VERSION);
}

}  // namespace quoka_decoder
