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

  // Of the layer.
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

#if !defined(QUOKA_COMPILED)
#include <quoka/methods/loki_calibration_impl.hpp>
#endif
