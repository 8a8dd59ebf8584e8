// Definitions of score.hpp.
#pragma once

#include <quoka/select/steps/score.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/steps/tile_scorer.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC void ScoreScratch::reserve(const Format* format, Index dim, Index rows) {
  tile.reserve(key_tile_size(dim));
  panels.reserve(round_up(rows, simd::lanes) * dim);
  if (format != nullptr) row.reserve(*format, dim);
}

QUOKA_FUNC void score_all_keys(const KeyScoring& scoring, float* scores,
                               WorkerScratch<ScoreScratch>& scratch, ExecutorRef executor) {
  const Rows& keys = scoring.keys;
  const Index parts = std::max<Index>(1, ceil_div(keys.len(), tuning::score_task_keys));
  scratch.reserve(executor.workers(), keys.empty() ? nullptr : &keys.format(), keys.dim(),
                  scoring.rows);
  executor.run(keys.batch() * keys.heads() * parts, [&](Index task, int worker) {
    const Index head = task / parts, begin = task % parts * tuning::score_task_keys;
    TileScorer scorer(scoring.q_bar + head * scoring.rows * keys.dim(), scoring.rows, keys.dim(),
                      scoring.aggregation, scratch[worker]);
    const HeadKeys head_keys(keys, scoring.inverse_norms, head / keys.heads(), head % keys.heads());
    score_keys_of_head(head_keys, {begin, nullptr},
                       std::min(tuning::score_task_keys, keys.len() - begin), scorer,
                       scores + head * keys.len() + begin);
  });
}

QUOKA_FUNC void write_inverse_norms(const Rows& keys, TensorView<float, 3> norms,
                                    ExecutorRef executor) {
  WorkerScratch<FloatRow> rows;
  rows.reserve(executor.workers(), keys);
  executor.run(keys.batch() * keys.heads(), [&](Index task, int worker) {
    const Index b = task / keys.heads(), head = task % keys.heads();
    for (Index t = 0; t < keys.len(); ++t)
      norms.at(b, head, t) = inverse_norm_of_row(rows[worker].read(keys, b, head, t), keys.dim());
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
