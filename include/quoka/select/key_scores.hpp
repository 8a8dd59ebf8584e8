// Products of rows with all keys: a score per key.
//
//   score_all_keys      score[kv] = max over m of q_bar[m] . k[kv] / |k[kv]|
//   mean_logit_scores   score[kv] = mean over a head's rows m of the logit m . k[kv], which is the
//                       logit of the mean row
//
// The first is the third stage of QuoKA's Algorithm 1: the largest cosine of each cached key with a
// kept query; Aggregation::mean takes the mean over m. The inverse norms come from the cache that
// computed them at append, or are taken from the keys on the way; the bits are the same. Scores are
// what the formula gives. A key with a NaN or an infinity, or whose products overflow, has a score
// that is not finite.
//
// Cost: 2 * kv_heads * rows * kv_len * head_dim FLOPs over one read of the keys. That is 8 FLOPs
// per byte with 16 float rows, near the balance of arithmetic and memory on present CPUs. Nothing
// of the size rows x kv_len is kept.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/row_walk.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/query_rows.hpp>

#if QUOKA_DEFINES
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/panel_scores.hpp>
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// Scratch of one worker, for `rows` kept queries.
struct ScoreScratch {
  ScoreScratch(Arena& arena, Index dim, Index rows);

  RowReader row;
  float* tile;    // one packed tile of keys
  float* panels;  // q_bar, transposed, in panels of one or two packets
};

// The input of scores of keys.
struct KeyScoring {
  const float* q_bar;  // [batch, kv_heads, rows, head_dim], contiguous
  Index rows;          // kept queries of each KV head
  Rows keys;           // [batch, kv_heads, kv_len, head_dim]
  // [batch, kv_heads, kv_len]; absent: taken from the keys; null: products with the keys as they
  // are.
  const TensorView<const float, 3>* inverse_norms;
  Aggregation aggregation;
};

// scores [batch, kv_heads, kv_len], contiguous.
void score_all_keys(const KeyScoring& scoring, float* scores, Arenas& workers,
                    ExecutorRef executor);

}  // namespace detail

// scores [batch, kv_heads, keys]; keys [batch, kv_heads, keys, dim]. means, workers: reused memory.
// Throws std::invalid_argument for scores of another shape than the keys', or other strides than
// score_view() has.
void mean_logit_scores(const RowRoom& shape, FillRows fill, const Rows& keys,
                       TensorView<float, 3> scores, Buffer<float>& means, Arenas& workers,
                       ExecutorRef executor);

#if QUOKA_DEFINES
namespace detail {

// Keys are scored a tile at a time, not in packed blocks, because memory bounds it: a key meets at
// most one panel. A tile is multiplied while it is in L1, by its present rows (up to four in place,
// without packing), and only its best score is stored.

// The kept queries of one KV head against one tile of keys at a time, all in L1. Up to four queries
// would leave most lanes of a panel empty: they go across the channels instead, where those fill
// whole packets.
class TileScorer {
 public:
  // q_bar [rows, dim], contiguous; scratch reserved for it.
  [[gnu::noinline]] TileScorer(const float* q_bar, Index rows, Index dim, Aggregation aggregation,
                               ScoreScratch& scratch)
      : row_(scratch.row),
        rows_{scratch.panels, rows, dim, aggregation == Aggregation::mean},
        tile_(scratch.tile) {
    float* const panels = scratch.panels;
    if (!few()) {
      pack_score_rows(q_bar, rows, dim, rows_.mean, panels);
      return;
    }
    for (Index m = 0; m < token_tile_rows(rows); ++m) {
      if (m < rows || !rows_.mean)
        std::copy_n(q_bar + (m < rows ? m : 0) * dim, dim, panels + m * dim);
      else
        std::fill_n(panels + m * dim, dim, 0.0f);
    }
  }

  // scores[0, count) of keys [begin, begin + count), at most tile_rows, not yet scaled by the
  // inverse norms. Rows [next, next + next_count) are prefetched on the way.
  void score(const HeadRows& keys, Index begin, Index count, float* scores, Index next_begin,
             Index next_count) {
    if (few()) return score_few(keys, begin, count, scores, next_begin, next_count);
    ConstRow rows[most_tile_rows], next_rows[most_tile_rows];
    keys.find(begin, count, rows);
    keys.find(next_begin, next_count, next_rows);
    RowPrefetch next(next_rows, next_count, keys.row_bytes());
    keys.format->pack_key_tile(rows, count, keys.shape, tile_);
    score_tile(rows_, tile_, count, next, scores);
  }

  RowReader& row() const { return row_; }  // to read a key as floats

 private:
  bool few() const {
    const Index lanes = kernel_sizes().lanes;
    return rows_.rows <= 4 && lanes >= 4 && rows_.dim % lanes == 0;
  }

  void score_few(const HeadRows& keys, Index begin, Index count, float* scores, Index next_begin,
                 Index next_count) const {
    const Index height = token_tile_rows(rows_.rows);
    alignas(64) float x[round_up(most_tile_rows * 4, most_lanes)];
    RowWalk next(keys, next_begin, next_begin + next_count);
    ConstRow memory[most_tile_rows];
    const RowsAhead ahead = next.take(count);
    keys.format->token_logits(height, keys.run(begin, count, memory), count, keys.shape,
                              rows_.panels, x, &ahead);
    const float share = 1.0f / static_cast<float>(rows_.rows);
    for (Index i = 0; i < count; ++i) {
      const float* const products = x + i * height;
      float best = products[0];
      for (Index m = 1; m < height; ++m)
        best = rows_.mean ? best + products[m] : std::max(best, products[m]);
      scores[i] = rows_.mean ? best * share : best;
    }
  }

  RowReader& row_;
  ScoreRows rows_;
  float* tile_;
};

// Keys of one KV head: those of a list, or without one all from `first` on; and their scales.
struct HeadKeys {
  HeadKeys(const Rows& keys, const TensorView<const float, 3>* norms, Index batch, Index head,
           Index first_in, const Position* list_in)
      : rows(list_in != nullptr ? keys.head(batch, head).gathered(list_in)
                                : keys.head(batch, head).from(first_in)),
        inverse_norms(norms),
        b(batch),
        kv_head(head),
        dim(keys.dim()),
        first(first_in),
        list(list_in) {}

  Index position(Index i) const { return list != nullptr ? list[i] : first + i; }

  HeadRows rows;                                    // row i is the key at position(i)
  const TensorView<const float, 3>* inverse_norms;  // absent: taken from the keys; null: no scale
  Index b, kv_head, dim, first;
  const Position* list;
};

// scores[0, count) of the first `count` keys.
[[gnu::noinline]] inline void score_keys_of_head(const HeadKeys& keys, Index count,
                                                 TileScorer& scorer, float* scores) {
  const Index tile = kernel_sizes().tile_rows, ahead = tuning::score_prefetch_tiles * tile;
  const bool known = keys.inverse_norms != nullptr && !keys.inverse_norms->absent();
  for (Index i = 0; i < count; i += tile) {
    const Index n = std::min(tile, count - i), next = std::clamp<Index>(count - i - ahead, 0, tile);
    if (known && keys.list != nullptr)  // their norms lie scattered, too
      for (Index j = 0; j < next; ++j)
        prefetch(keys.inverse_norms->row(keys.b, keys.kv_head, keys.position(i + ahead + j)));
    scorer.score(keys.rows, i, n, scores + i, i + ahead, next);
    if (keys.inverse_norms == nullptr) continue;
    for (Index j = 0; j < n; ++j)
      scores[i + j] *= known ? keys.inverse_norms->at(keys.b, keys.kv_head, keys.position(i + j))
                             : inverse_norm_of_row(scorer.row().read(keys.rows, i + j), keys.dim);
  }
}

QUOKA_FUNC ScoreScratch::ScoreScratch(Arena& arena, Index dim, Index rows)
    : row(arena, dim),
      tile(arena.take<float>(key_tile_size(dim))),
      panels(arena.take<float>(score_panels_size(rows, dim))) {}

QUOKA_FUNC void score_all_keys(const KeyScoring& scoring, float* scores, Arenas& workers,
                               ExecutorRef executor) {
  const Rows& keys = scoring.keys;
  const Index parts = std::max<Index>(1, ceil_div(keys.len(), tuning::score_task_keys));
  workers.reserve(executor.workers(),
                  [&](Arena& arena) { ScoreScratch(arena, keys.dim(), scoring.rows); });
  executor.run(keys.batch() * keys.heads() * parts, [&](Index task, int worker) {
    const Index head = task / parts, begin = task % parts * tuning::score_task_keys;
    Arena arena = workers[worker];
    ScoreScratch scratch(arena, keys.dim(), scoring.rows);
    TileScorer scorer(scoring.q_bar + head * scoring.rows * keys.dim(), scoring.rows, keys.dim(),
                      scoring.aggregation, scratch);
    const HeadKeys head_keys(keys, scoring.inverse_norms, head / keys.heads(), head % keys.heads(),
                             begin, nullptr);
    score_keys_of_head(head_keys, std::min(tuning::score_task_keys, keys.len() - begin), scorer,
                       scores + head * keys.len() + begin);
  });
}

}  // namespace detail

QUOKA_FUNC void mean_logit_scores(const RowRoom& shape, FillRows fill, const Rows& keys,
                                  TensorView<float, 3> scores, Buffer<float>& means,
                                  Arenas& workers, ExecutorRef executor) {
  detail::require_sizes("scores", scores.sizes(), {keys.batch(), keys.heads(), keys.len()});
  const auto whole = score_view(scores.data(), scores.batch(), scores.heads(), scores.len());
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (scores.sizes()[axis] > 1)
      detail::require_equal("a stride of the scores", scores.strides()[axis],
                            "that of score_view()", whole.strides()[axis]);
  const auto rows_in = [&](Arena& arena) { return arena.take<float>(shape.max_rows * shape.dim); };
  float* const mean_rows = means.reserve_amortised(keys.batch() * keys.heads() * shape.dim);
  workers.reserve(executor.workers(), [&](Arena& arena) {
    RowReader(arena, shape.query_dim);
    rows_in(arena);
  });
  executor.run(keys.batch() * keys.heads(), [&](Index task, int worker) {
    Arena arena = workers[worker];
    RowReader reader(arena, shape.query_dim);
    float* const first = rows_in(arena);
    RowWriter rows(first, shape.dim, reader);
    fill(task / keys.heads(), task % keys.heads(), rows);
    float* const mean = mean_rows + task * shape.dim;
    std::fill_n(mean, shape.dim, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    for (Index i = 0; i < rows.count(); ++i)
      for (Index c = 0; c < shape.dim; ++c) mean[c] += first[i * shape.dim + c] * share;
  });
  detail::score_all_keys({mean_rows, 1, keys, nullptr, Aggregation::max}, scores.data(), workers,
                         executor);
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
