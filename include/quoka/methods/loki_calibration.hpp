// Principal directions of a layer's keys, for Loki: fit them to keys, save them, load them.
//
//   mean, covariance   of each KV head's keys, streamed, in double
//   directions         eigenvectors of the covariance, largest eigenvalue first; the sign is such
//                      that the component of largest magnitude is positive, so that fits repeat
//
// Fit over the keys of a text like those to come (the authors use WikiText at 4,096 tokens), layer
// by layer. 2 * kv_heads * head_dim^2 FLOPs per key; the eigenvectors are Eigen's. A key with a NaN
// or an infinity is left out.
#pragma once

#include <quoka/select/query_scores.hpp>

#include <Eigen/Core>

#include <iosfwd>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

class LokiCalibration {
 public:
  // directions [head_dim, head_dim] of each KV head: column i is the direction of the i-th largest
  // eigenvalue. Throws std::invalid_argument for matrices that are not square and of one size.
  explicit LokiCalibration(std::vector<Eigen::MatrixXf> directions)
      : directions_(std::move(directions)) {
    detail::require_at_least("the calibration's kv_heads", kv_heads(), 1);
    for (const auto& head_directions : directions_) {
      detail::require_equal("directions' rows", head_directions.rows(), "head_dim", head_dim());
      detail::require_equal("directions' columns", head_directions.cols(), "head_dim", head_dim());
    }
  }

  // Directions of the layer.
  Index kv_heads() const { return std::ssize(directions_); }
  // Channels of a key.
  Index head_dim() const { return directions_.empty() ? 0 : directions_.front().rows(); }
  // [head_dim, head_dim]
  const Eigen::MatrixXf& directions(Index kv_head) const {
    return directions_[static_cast<std::size_t>(kv_head)];
  }

  // to [rank] = factor * row [head_dim] in the first `rank` directions.
  void project(Index kv_head, const float* row, float factor, Index rank, float* to) const;

  // Text header, then native floats. Throws std::runtime_error when the stream fails.
  void save(std::ostream& out) const;
  // Throws std::runtime_error for a stream that does not hold a calibration, whole.
  static LokiCalibration load(std::istream& in);

 private:
  static constexpr const char* magic = "quoka-loki-1";

  std::vector<Eigen::MatrixXf> directions_;
};

// Streams keys, then gives their principal directions.
class LokiFit {
 public:
  // Throws std::invalid_argument for a size below 1.
  LokiFit(Index kv_heads, Index head_dim) : dim_(head_dim) {
    detail::require_at_least("kv_heads", kv_heads, 1);
    detail::require_at_least("head_dim", head_dim, 1);
    heads_.resize(static_cast<std::size_t>(kv_heads),
                  {0, Eigen::VectorXd::Zero(head_dim), Eigen::MatrixXd::Zero(head_dim, head_dim)});
  }

  // keys [batch, kv_heads, n, head_dim]. Throws std::invalid_argument for other heads or channels.
  void add(const Rows& keys);

  // Directions of all that was added; unit axes for a head that saw no key.
  LokiCalibration finish() const;

 private:
  static constexpr Index block_size = 256;

  struct Sums {
    double count;
    Eigen::VectorXd sum;
    Eigen::MatrixXd products;
  };

  Index dim_;
  std::vector<Sums> heads_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <istream>
#include <ostream>
#include <stdexcept>
#include <string>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC void LokiCalibration::project(Index kv_head, const float* row, float factor, Index rank,
                                         float* to) const {
  for (Index i = 0; i < rank; ++i)
    to[i] = factor * dot(row, directions(kv_head).col(i).data(), head_dim());
}

QUOKA_FUNC void LokiCalibration::save(std::ostream& out) const {
  out << magic << ' ' << kv_heads() << ' ' << head_dim() << '\n';
  for (const auto& head_directions : directions_)
    out.write(reinterpret_cast<const char*>(head_directions.data()),
              static_cast<std::streamsize>(head_directions.size()) * Index{sizeof(float)});
  if (!out) throw std::runtime_error("quoka: a Loki calibration could not be written");
}

QUOKA_FUNC LokiCalibration LokiCalibration::load(std::istream& in) {
  std::string word;
  Index heads = 0, dim = 0;
  in >> word >> heads >> dim;
  if (!in || word != magic || in.get() != '\n')
    throw std::runtime_error("quoka: not a Loki calibration");
  if (heads < 1 || heads > 65536 || dim < 1 || dim > 4096)  // 64 MiB at a time, no more
    throw std::runtime_error("quoka: a Loki calibration of " + std::to_string(heads) +
                             " KV heads of " + std::to_string(dim) + " channels");
  std::vector<Eigen::MatrixXf> directions;
  for (Index head = 0; head < heads; ++head) {
    Eigen::MatrixXf& head_directions = directions.emplace_back(dim, dim);
    in.read(reinterpret_cast<char*>(head_directions.data()),
            static_cast<std::streamsize>(head_directions.size()) * Index{sizeof(float)});
    if (!in)
      throw std::runtime_error("quoka: a Loki calibration ends in KV head " + std::to_string(head) +
                               " of " + std::to_string(heads));
  }
  return LokiCalibration(std::move(directions));
}

QUOKA_FUNC void LokiFit::add(const Rows& keys) {
  const Index heads = std::ssize(heads_);
  detail::require_equal("the keys' heads", keys.heads(), "kv_heads", heads);
  detail::require_equal("the keys' dim", keys.dim(), "head_dim", dim_);
  Eigen::MatrixXd block(dim_, block_size);
  RowReader reader;
  reader.reserve(keys);
  for (Index b = 0; b < keys.batch(); ++b) {
    for (Index head = 0; head < heads; ++head) {
      for (Index first = 0; first < keys.len(); first += block_size) {
        Index count = 0;
        for (Index i = first; i < std::min(first + block_size, keys.len()); ++i) {
          const float* const key = reader.read(keys, b, head, i);
          if (!is_finite_row(key, dim_)) continue;
          for (Index c = 0; c < dim_; ++c) block(c, count) = static_cast<double>(key[c]);
          ++count;
        }
        Sums& sums = heads_[static_cast<std::size_t>(head)];
        const auto columns = block.leftCols(count);
        sums.count += static_cast<double>(count);
        sums.sum += columns.rowwise().sum();
        sums.products.noalias() += columns * columns.transpose();
      }
    }
  }
}

QUOKA_FUNC LokiCalibration LokiFit::finish() const {
  std::vector<Eigen::MatrixXf> directions;
  for (const Sums& sums : heads_) {
    const double n = std::max(sums.count, 1.0);
    const Eigen::VectorXd mean = sums.sum / n;
    const Eigen::MatrixXd covariance = sums.products / n - mean * mean.transpose();
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(covariance);
    Eigen::MatrixXd vectors = solver.eigenvectors().rowwise().reverse();  // largest first
    for (Index i = 0; i < dim_; ++i) {
      Index largest = 0;
      vectors.col(i).cwiseAbs().maxCoeff(&largest);
      if (vectors(largest, i) < 0.0) vectors.col(i) *= -1.0;
    }
    directions.push_back(vectors.template cast<float>());
  }
  return LokiCalibration(std::move(directions));
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
