// Principal directions of a layer's keys, for Loki.
//
//   covariance   of each KV head's keys, all sequences together, in double
//   directions   its eigenvectors, largest eigenvalue first; the sign is such that the component of largest
//                magnitude is positive, so that fits repeat
//
// 2 * kv_heads * head_dim^2 FLOPs per key; the eigenvectors are Eigen's. A key with a NaN or an infinity is left out.
#pragma once

#include <quoka/rows/row_reader.hpp>
#include <quoka/select/query_scores.hpp>

#include <Eigen/Core>

#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

class LokiBasis {
 public:
  // The basis of keys [batch, kv_heads, n, head_dim]; unit axes for a head without a finite key.
  explicit LokiBasis(const Rows& keys);

  // [head_dim, head_dim], a direction each column
  const Eigen::MatrixXf& directions(Index kv_head) const {
    return directions_[static_cast<std::size_t>(kv_head)];
  }
  // to [rank] = factor * row [head_dim] in the first `rank` directions.
  void project(Index kv_head, const float* row, float factor, Index rank, float* to) const {
    const Eigen::MatrixXf& of = directions(kv_head);
    for (Index i = 0; i < rank; ++i) to[i] = factor * dot(row, of.col(i).data(), of.rows());
  }

 private:
  std::vector<Eigen::MatrixXf> directions_;  // [kv_heads]
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <Eigen/Eigenvalues>
#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC LokiBasis::LokiBasis(const Rows& keys) {
  constexpr Index block_size = 256;
  const Index dim = keys.dim();
  Eigen::MatrixXd block(dim, block_size);
  RowReader reader;
  for (Index head = 0; head < keys.heads(); ++head) {
    double n = 0.0;
    Eigen::VectorXd sum = Eigen::VectorXd::Zero(dim);
    Eigen::MatrixXd products = Eigen::MatrixXd::Zero(dim, dim);
    for (Index b = 0; b < keys.batch(); ++b) {
      for (Index first = 0; first < keys.len(); first += block_size) {
        Index count = 0;
        for (Index i = first; i < std::min(first + block_size, keys.len()); ++i) {
          const float* const key = reader.read(keys, b, head, i);
          if (!is_finite_row(key, dim)) continue;
          for (Index c = 0; c < dim; ++c) block(c, count) = static_cast<double>(key[c]);
          ++count;
        }
        const auto columns = block.leftCols(count);
        n += static_cast<double>(count);
        sum += columns.rowwise().sum();
        products.noalias() += columns * columns.transpose();
      }
    }
    const Eigen::VectorXd mean = sum / std::max(n, 1.0);
    const Eigen::MatrixXd covariance = products / std::max(n, 1.0) - mean * mean.transpose();
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(covariance);
    Eigen::MatrixXd vectors = solver.eigenvectors().rowwise().reverse();  // largest first
    for (Index i = 0; i < dim; ++i) {
      Index largest = 0;
      vectors.col(i).cwiseAbs().maxCoeff(&largest);
      if (vectors(largest, i) < 0.0) vectors.col(i) *= -1.0;
    }
    directions_.push_back(vectors.cast<float>());
  }
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
