// Loki: approximate logits in the few principal directions of the keys.
//
//   basis     P[g] = the r leading eigenvectors of the covariance of KV head g's keys (post-RoPE)
//   logits    l[h][j][t] = scale * (q[h][j] P[g]) . (k[t] P[g]), the mean not subtracted
//   score[t]  = mean over heads and queries of softmax over t of l, or of l itself (Domain)
//
// 2 * q_heads * q_len * kv_len * r FLOPs (softmax), 2 * kv_heads * kv_len * r (logit), and 2 *
// head_dim * r per query and new key for the projections. Keeps r floats per key. With a sketch of these
// softmax is that of 8-bit logits, nearly the same (select/code_mass.hpp). The basis comes
// from a calibration (loki_calibration.hpp: fit, save, load); without one it is fitted to the first
// max(2 * head_dim, 512) keys, once they are there; before that scores are exact. r >= head_dim is the exact scorer, up
// to rounding. Source: Singhania et al., "Loki: Low-rank Keys for Efficient Sparse Attention", arXiv 2406.02542.
// Deviations: one key set per KV head and chunk; r is a count, not a share of the variance.
#pragma once

#include <quoka/methods/loki_calibration.hpp>
#include <quoka/rows/row_store.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <algorithm>
#include <memory>
#include <optional>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of LokiSelector.
struct LokiOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index rank = 64;                     // r: directions used; head_dim or more: all
  Domain domain = Domain::softmax;     // in which several queries' logits are averaged
  std::shared_ptr<const LokiCalibration> calibration = nullptr;  // of this layer; null: of its keys
  Index keep_first = 0;               // attention sinks, inside the budget
  Index keep_last = 0;                // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;  // 8-bit logits, of softmax
};

// The scores behind LokiSelector.
class LokiScorer {
 public:
  using Options = LokiOptions;

  struct State {
    std::shared_ptr<const LokiCalibration> own;  // fitted to the first keys that are `projected`
    RowStore<float> projected;                   // [batch, kv_heads, kv_len, r]
    KeySketch sketch;                            // of these
    WorkerScratch<RowReader> rows;
    QueryScoreState scores;

    void truncate(Index kv_len) {
      if (own != nullptr && kv_len < fitted(own->head_dim())) own = nullptr, kv_len = 0;
      projected.truncate(kv_len), sketch.truncate(kv_len);
    }
    Index kept_len() const { return projected.len(); }
    Index kept_bytes() const { return projected.bytes() + sketch.bytes(); }
    Index bytes() const { return bytes_of(projected, sketch, scores); }
  };

  // Keys that a basis of the cache's own is fitted to.
  static Index fitted(Index head_dim) { return std::max<Index>(2 * head_dim, 512); }

  // Throws std::invalid_argument for a rank < 1.
  explicit LokiScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("rank", options.rank, 1);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  // Throws std::invalid_argument when the calibration is for other heads.
  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const LokiCalibration* basis = catch_up(input, state, executor);
    if (basis == nullptr)
      return exact_scores(
          input, q.len(), [](Index m) { return m; }, options_.domain, Aggregation::mean, scores,
          state.scores, executor);
    const Index rank = std::min(options_.rank, k.dim()), group = input.group();
    const float logit_scale = input.logit_scale();
    const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
      for (Index r = 0; r < group; ++r) {
        for (Index j = 0; j < q.len(); ++j) {
          const float* const row = rows.read(q, b, kv_head * group + r, j);
          basis->project(kv_head, row, logit_scale, rank, rows.next());
          rows.keep_if_finite();
        }
      }
    };
    const QueryRows shape{group * q.len(), rank, q};
    const Rows keys = state.projected.view();
    if (options_.domain == Domain::logit)
      return mean_logit_scores(shape, fill, keys, scores, state.scores, executor);
    softmax_scores(
        {.rows = shape,
         .fill = fill,
         .keys = keys,
         .capacity = input.capacity,
         .codes = sketches() ? SketchedKeys::find(keys, state.sketch, nullptr) : std::nullopt},
        scores, state.scores, executor);
  }

  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    if (catch_up(input, state, executor) == nullptr) return;
    if (sketches()) state.sketch.append(state.projected.view(), input.capacity, executor);
  }

 private:
  bool sketches() const {
    return options_.domain == Domain::softmax && by_codes(options_.sketch, true);
  }
  // Projects the keys not yet projected; the basis, or null while there is none.
  const LokiCalibration* catch_up(const SelectorInput& input, State& state,
                                  ExecutorRef executor) const {
    const Rows& k = input.k;
    if (options_.calibration == nullptr && state.own == nullptr) {
      if (k.len() < fitted(k.dim())) return nullptr;
      LokiFit fit(k.heads(), k.dim());
      fit.add(k.slice(0, fitted(k.dim())));
      state.own = std::make_shared<const LokiCalibration>(fit.finish());
    }
    const LokiCalibration* basis =
        options_.calibration != nullptr ? options_.calibration.get() : state.own.get();
    detail::require_equal("the calibration's kv_heads", basis->kv_heads(), "k's heads", k.heads());
    detail::require_equal("the calibration's head_dim", basis->head_dim(), "k's dim", k.dim());
    const Index rank = std::min(options_.rank, k.dim());
    state.projected.reshape(k.batch(), k.heads(), rank);
    const Index known = state.projected.len();
    if (known == k.len()) return basis;
    state.projected.grow(k.len(), input.capacity);
    state.rows.reserve(executor.workers(), k);
    for_each_kv_head(k, executor, [&](Index b, Index kv_head, int worker) {
      for (Index t = known; t < k.len(); ++t)
        basis->project(kv_head, state.rows[worker].read(k, b, kv_head, t), 1.0f, rank,
                       state.projected.row(b, kv_head, t));
    });
    state.projected.resize(k.len());  // now that all are written
    return basis;
  }

  Options options_;
};

using LokiSelector = ScoredSelector<LokiScorer>;
static_assert(Selector<LokiSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
