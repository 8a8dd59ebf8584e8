// Loki: approximate logits in the few principal directions of the keys.
//
//   basis     P[g] = the r leading eigenvectors of the covariance of KV head g's keys (post-RoPE)
//   logits    l[h][j][t] = scale * (q[h][j] P[g]) . (k[t] P[g]), the mean not subtracted
//   score[t]  = mean over heads and queries of softmax over t of l
//
// 2 * q_heads * q_len * kv_len * r FLOPs, and 2 * head_dim * r per query and new key for the
// projections. Keeps r floats per key. r >= head_dim is the exact scorer, up to rounding. Source:
// Singhania et al., "Loki: Low-rank Keys for Efficient Sparse Attention", arXiv 2406.02542.
// Deviations: the basis is fitted to the first keys of the sequences themselves, not to another
// text. Until these keys are there, scores are exact. One key set per KV head and chunk; r is a
// count, not a share of the variance.
#pragma once

#include <quoka/methods/kept_rows.hpp>
#include <quoka/methods/rows_scorer.hpp>
#include <quoka/rows/row_reader.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <memory>
#include <vector>

#if QUOKA_DEFINES
#include <Eigen/Eigenvalues>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Principal directions of a layer's keys: eigenvectors of the covariance of each KV head's keys,
// all sequences together, in double, largest eigenvalue first. The component of largest magnitude
// is positive, so that fits repeat. A key with a NaN or an infinity is left out. 2 * kv_heads *
// head_dim^2 FLOPs per key; the eigenvectors are Eigen's.
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

// Options of LokiSelector.
struct LokiOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index rank = 64;                     // r: directions used; head_dim or more: all
  Index fitted = 512;                  // first keys that the basis is of, at least 2 * head_dim
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;   // 8-bit logits
};

// The rows that score.
class LokiRows {
 public:
  using Options = LokiOptions;
  static constexpr bool every_query = true;  // of the chunk scores

  // The keys' projections [batch, kv_heads, kv_len, r], and what they are projected on.
  struct State : KeptRows {
    std::unique_ptr<const LokiBasis> basis;
    Index fitted = 0;  // first keys that it is of

    void truncate(Index kv_len) {
      if (kv_len < fitted) basis = nullptr, fitted = kv_len = 0;
      KeptRows::truncate(kv_len);
    }
  };

  // Throws std::invalid_argument for a rank or `fitted` < 1.
  explicit LokiRows(const Options& options = {}) : options_(options) {
    detail::require_at_least("rank", options.rank, 1);
    detail::require_at_least("fitted", options.fitted, 1);
  }

  // The projections, or the keys themselves while there is no basis.
  ScoredKeys keys(const SelectorInput& input, State& state, ExecutorRef executor) const {
    const Rows& k = input.k;
    if (state.basis == nullptr) {
      const Index wanted = std::max(2 * k.dim(), options_.fitted);
      if (k.len() < wanted) return {k, nullptr, false};
      state.basis = std::make_unique<const LokiBasis>(k.slice(0, wanted));
      state.fitted = wanted;
    }
    const Index rank = std::min(options_.rank, k.dim());
    state.append(k, input.capacity, 1, rank, executor,
                 [&](Index kv_head, Index, auto&& key, float* row) {
                   state.basis->project(kv_head, key(0), 1.0f, rank, row);
                 });
    return {state.rows().view(), nullptr};
  }
  // At most this number of rows of a KV head,
  static Index max_rows(const SelectorInput& input) { return input.group() * input.q.len(); }

  // and these rows of one, times the logit scale.
  void fill(const SelectorInput& input, State& state, Index b, Index kv_head,
            RowWriter& rows) const {
    const Rows& q = input.q;
    const Index rank = std::min(options_.rank, q.dim());
    for_each_query(input, kv_head, [&](Index head, Index i) {
      if (state.basis == nullptr) return rows.add(q, b, head, i, input.logit_scale());
      state.basis->project(kv_head, rows.read(q, b, head, i), input.logit_scale(), rank,
                           rows.next());
      rows.keep_if_finite();
    });
  }

 private:
  Options options_;
};

// Loki scores: the softmax of rows in principal directions.
using LokiScorer = RowsScorer<LokiRows>;
using LokiSelector = ScoredSelector<LokiScorer>;

#if QUOKA_DEFINES

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

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
