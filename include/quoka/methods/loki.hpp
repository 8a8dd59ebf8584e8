// Loki: approximate logits in the few principal directions of the keys.
//
//   basis     P[g] = the r leading eigenvectors of the covariance of KV head g's keys (post-RoPE): loki_basis.hpp
//   logits    l[h][j][t] = scale * (q[h][j] P[g]) . (k[t] P[g]), the mean not subtracted
//   score[t]  = mean over heads and queries of softmax over t of l
//
// 2 * q_heads * q_len * kv_len * r FLOPs, and 2 * head_dim * r per query and new key for the projections. Keeps r
// floats per key. r >= head_dim is the exact scorer, up to rounding. Source: Singhania et al., "Loki: Low-rank Keys
// for Efficient Sparse Attention", arXiv 2406.02542. Deviations: the basis is fitted to the first keys of the
// sequences themselves, once they are there, not to another text; before that scores are exact. One key set per KV
// head and chunk; r is a count, not a share of the variance.
#pragma once

#include <quoka/methods/kept_rows.hpp>
#include <quoka/methods/loki_basis.hpp>
#include <quoka/methods/rows_scorer.hpp>

#include <algorithm>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

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
  static constexpr bool every_query = true;  // is a row

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
    state.append(k, input.capacity, 1, rank, executor, [&](const KeysOfRow& keys, float* row) {
      state.basis->project(keys.kv_head(), keys[0], 1.0f, rank, row);
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
    for (Index head = kv_head * input.group(); head < (kv_head + 1) * input.group(); ++head)
      for (Index j = 0; j < q.len(); ++j) {
        if (state.basis == nullptr) {
          rows.add(q, b, head, j, input.logit_scale());
          continue;
        }
        state.basis->project(kv_head, rows.read(q, b, head, j), input.logit_scale(), rank,
                             rows.next());
        rows.keep_if_finite();
      }
  }

 private:
  Options options_;
};

// Loki scores: the softmax of rows in principal directions.
using LokiScorer = RowsScorer<LokiRows>;
using LokiSelector = ScoredSelector<LokiScorer>;
static_assert(Selector<LokiSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
