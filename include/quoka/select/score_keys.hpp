// Key scoring (QuoKA, Algorithm 1, third stage): how much some kept query wants each cached key.
//
//   score[kv] = max over m of q_bar[m] . k[kv] / |k[kv]|
//
// Switches: dot scoring drops 1 / |k|; mean aggregation takes the mean over m. The inverse norms
// come from the cache that computed them at append, or are taken from the keys on the way; the bits
// are the same. Scores are what the formula gives: a key with a NaN or an infinity, or so large
// that its products overflow, has a score that is not finite. 2 * kv_heads * rows * kv_len *
// head_dim FLOPs over one read of the keys: 8 FLOPs per byte with 16 float rows, near the balance
// of arithmetic and memory on CPUs of today. Nothing of the size rows x kv_len is kept.
#pragma once

#include <quoka/core/packing.hpp>
#include <quoka/core/register_tile.hpp>
#include <quoka/core/token_kernels.hpp>
#include <quoka/core/buffer.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/core/inverse_norm.hpp>
#include <quoka/core/view.hpp>
#include <quoka/core/worker_scratch.hpp>
#include <quoka/select/options.hpp>

namespace quoka::inline QUOKA_ABI {

struct ScoreOptions {
  Scoring scoring = Scoring::cosine;
  Aggregation aggregation = Aggregation::max;
};

namespace detail {

using TileScores = simd::Packet[tuning::tile_rows];

// Scratch of one worker.
struct ScoreScratch {
  Buffer<float> tile;    // one packed tile of keys
  Buffer<float> panels;  // q_bar, transposed, in panels of one or two packets

  void reserve(Index rows, Index dim) {
    tile.reserve(key_tile_size(dim));
    panels.reserve(round_up(rows, simd::lanes) * dim);
  }
  Index bytes() const { return tile.bytes() + panels.bytes(); }
};

// Rows by their pointers.
template <class T>
struct RowPointers {
  const T* const* rows;
  QUOKA_INLINE const T* operator[](Index i) const { return rows[i]; }
};

// The kept queries of one KV head against one tile of keys at a time, all in L1. Up to four queries
// would leave most lanes of a panel empty: they go across the channels instead, where those fill
// whole packets.
class TileScorer {
 public:
  // q_bar [rows, dim], contiguous; scratch reserved for it.
  TileScorer(const float* q_bar, Index rows, Index dim, Aggregation aggregation,
             ScoreScratch& scratch)
      : rows_(rows),
        dim_(dim),
        packets_(ceil_div(rows, simd::lanes)),
        aggregation_(aggregation),
        tile_(scratch.tile.data()),
        panels_(scratch.panels.data()) {
    if (few())
      keep_few(q_bar);
    else
      pack_panels(q_bar);
  }

  // scores[0, count) of the keys at rows[0, count), not yet scaled by the inverse norms.
  // Rows that will be scored later are asked for on the way.
  template <class T>
  void score(const T* const* rows, Index count, float* scores, RowPrefetch<T> later) {
    if (few()) return score_few(rows, count, scores, later);
    pack_key_tile(rows, count, dim_, tile_);
    TileScores best;
    const bool mean = aggregation_ == Aggregation::mean;
    for (auto& lane : best) lane = simd::broadcast(mean ? 0.0f : -simd::infinity);
    const float* panel = panels_;
    Index left = packets_;
    for (; left >= tuning::tile_packets;
         left -= tuning::tile_packets, panel += tuning::panel_rows * dim_)
      score_panel<tuning::tile_packets>(panel, mean, best, later);
    for (; left > 0; --left, panel += simd::lanes * dim_) score_panel<1>(panel, mean, best, later);
    const float share = 1.0f / static_cast<float>(rows_);
    alignas(64) float of_key[round_up(tuning::tile_rows, simd::lanes)];
    for (int i = 0; i < tuning::tile_rows; i += simd::lanes) {
      simd::Square square;
      simd::unroll<simd::lanes>([&](auto j) QUOKA_INLINE_LAMBDA {
        square.packet[j] = best[std::min<int>(i + j, tuning::tile_rows - 1)];
      });
      simd::store(of_key + i, mean ? simd::mul(simd::sums(square), simd::broadcast(share))
                                   : simd::maxima(square));
    }
    std::copy_n(of_key, count, scores);
  }

 private:
  bool few() const { return rows_ <= 4 && simd::lanes >= 4 && dim_ % simd::lanes == 0; }

  void pack_panels(const float* q_bar) {
    Index first = 0;
    for (Index left = packets_; left > 0;
         left -= tuning::tile_packets, first += tuning::panel_rows) {
      float* panel = panels_ + first * dim_;
      if (left >= tuning::tile_packets)
        pack<tuning::tile_packets>(q_bar, first, panel);
      else
        for (Index one = 0; one < left; ++one)
          pack<1>(q_bar, first + one * simd::lanes, panel + one * simd::lanes * dim_);
    }
  }

  void keep_few(const float* q_bar) {
    const bool mean = aggregation_ == Aggregation::mean;
    for (Index m = 0; m < token_tile_rows(rows_); ++m) {
      float* const to = panels_ + m * dim_;
      if (m < rows_ || !mean)
        std::copy_n(q_bar + (m < rows_ ? m : 0) * dim_, dim_, to);
      else
        std::fill_n(to, dim_, 0.0f);
    }
  }

  template <class T>
  void score_few(const T* const* rows, Index count, float* scores, RowPrefetch<T>& later) const {
    const Index height = token_tile_rows(rows_), lines = ceil_div(later.lines(), count);
    alignas(64) float x[round_up(tuning::tile_rows * 4, simd::lanes)];
    token_logits(height, RowPointers<T>{rows}, count, dim_, panels_, x,
                 [&](Index) { later.next(lines); });
    const float share = 1.0f / static_cast<float>(rows_);
    for (Index i = 0; i < count; ++i) {
      const float* const of_key = x + i * height;
      float best = of_key[0];
      for (Index m = 1; m < height; ++m)
        best = aggregation_ == Aggregation::mean ? best + of_key[m] : std::max(best, of_key[m]);
      scores[i] = aggregation_ == Aggregation::mean ? best * share : best;
    }
  }

  // Lanes beyond the last query repeat the first one: a maximum does not notice. For a mean they
  // are 0.
  template <int Packets>
  void pack(const float* q_bar, Index first, float* panel) {
    const float* rows[Packets * simd::lanes];
    Index count = Packets * simd::lanes;
    for (Index i = 0; i < Packets * simd::lanes; ++i)
      rows[i] = q_bar + (first + i < rows_ ? first + i : 0) * dim_;
    if (aggregation_ == Aggregation::mean) count = std::min(count, rows_ - first);
    pack_queries<float, Packets>(rows, count, dim_, 1.0f, panel);
  }

  template <int Packets, class T>
  void score_panel(const float* panel, bool mean, TileScores& best, RowPrefetch<T>& later) const {
    constexpr int rows = tuning::tile_rows;
    simd::Packet acc[rows][Packets];
    const Index lines = ceil_div(later.lines(), ceil_div(dim_, slab));
    multiply_key_tile(acc, tile_, panel, dim_, [&] { later.next(lines); });
    simd::unroll<rows, Packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      best[i] = mean ? simd::add(best[i], acc[i][j]) : simd::max(best[i], acc[i][j]);
    });
  }

  Index rows_, dim_, packets_;
  Aggregation aggregation_;
  float* tile_;
  float* panels_;
};

// Which keys are scored: one after the other, or those of a list, whose norms then lie scattered.
struct ConsecutiveKeys {
  Index first;
  static constexpr bool scattered = false;
  Index operator()(Index i) const { return first + i; }
};
struct ListedKeys {
  const Position* positions;
  static constexpr bool scattered = true;
  Index operator()(Index i) const { return positions[i]; }
};

// scores[0, count) of the keys at position(0) ... position(count - 1) of one KV head.
template <class T, class Positions>
void score_positions(const TensorView<const T>& keys,
                     const TensorView<const float, 3>& inverse_norms, Index b, Index kv_head,
                     Index count, const Positions& position, TileScorer& scorer, Scoring scoring,
                     float* scores) {
  constexpr Index rows = tuning::tile_rows, ahead = tuning::score_prefetch_tiles * rows;
  const bool known = scoring == Scoring::cosine && !inverse_norms.absent();
  const T *row[rows], *later[rows];
  for (Index i = 0; i < count; i += rows) {
    const Index n = std::min(rows, count - i),
                later_n = std::clamp<Index>(count - i - ahead, 0, rows);
    for (Index j = 0; j < n; ++j) row[j] = keys.row(b, kv_head, position(i + j));
    for (Index j = 0; j < later_n; ++j) {
      const Index kv = position(i + ahead + j);
      later[j] = keys.row(b, kv_head, kv);
      if (Positions::scattered && known) simd::prefetch(inverse_norms.row(b, kv_head, kv));
    }
    scorer.score(row, n, scores + i, RowPrefetch<T>(later, later_n, keys.dim()));
    if (scoring == Scoring::dot) continue;
    for (Index j = 0; j < n; ++j)
      scores[i + j] *=
          known ? inverse_norms.at(b, kv_head, position(i + j)) : inverse_norm(row[j], keys.dim());
  }
}

// scores [batch, kv_heads, kv_len], contiguous; q_bar [batch, kv_heads, rows, head_dim],
// contiguous.
template <class T>
void score_all_keys(const float* q_bar, Index rows, const TensorView<const T>& keys,
                    const TensorView<const float, 3>& inverse_norms, const ScoreOptions& options,
                    float* scores, WorkerScratch<ScoreScratch>& scratch, ExecutorRef executor) {
  const Index parts = std::max<Index>(1, ceil_div(keys.len(), tuning::score_task_keys));
  scratch.reserve(executor.workers(), rows, keys.dim());
  executor.run(keys.batch() * keys.heads() * parts, [&](Index task, int worker) {
    const Index head = task / parts, begin = task % parts * tuning::score_task_keys;
    TileScorer scorer(q_bar + head * rows * keys.dim(), rows, keys.dim(), options.aggregation,
                      scratch[worker]);
    score_positions(keys, inverse_norms, head / keys.heads(), head % keys.heads(),
                    std::min(tuning::score_task_keys, keys.len() - begin), ConsecutiveKeys{begin},
                    scorer, options.scoring, scores + head * keys.len() + begin);
  });
}

}  // namespace detail

// 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, kv_len] of keys [batch, kv_heads,
// kv_len, head_dim]. For a caller whose cache is not KvCache: computed once per key and handed to
// the selector with every chunk, they save it a quarter of the scoring time.
template <TensorLike K>
Tensor<float, 3> inverse_norms(const K& keys, ExecutorRef executor = SerialExecutor{}) {
  const auto k = view_of(keys);
  Tensor<float, 3> norms(k.batch(), k.heads(), k.len());
  executor.run(k.batch() * k.heads(), [&](Index task, int) {
    const Index b = task / k.heads(), head = task % k.heads();
    for (Index t = 0; t < k.len(); ++t)
      norms(b, head, t) = inverse_norm(k.row(b, head, t), k.dim());
  });
  return norms;
}

// q_bar [batch, kv_heads, rows, head_dim] (float), keys [batch, kv_heads, kv_len, head_dim],
// inverse_norms [batch, kv_heads, kv_len] or absent: scores [batch, kv_heads, kv_len]. Throws
// std::invalid_argument when shapes do not fit together.
template <TensorLike K>
Tensor<float, 3> score_keys(const Tensor<float>& q_bar, const K& keys,
                            const ScoreOptions& options = {},
                            TensorView<const float, 3> inverse_norms = {},
                            ExecutorRef executor = SerialExecutor{}) {
  const auto k = view_of(keys);
  detail::require_at_least("q_bar's rows", q_bar.dimension(2), 1);
  detail::require_at_least("head_dim", k.dim(), 1);
  detail::require_sizes("k", k.sizes(),
                        {q_bar.dimension(0), q_bar.dimension(1), k.len(), q_bar.dimension(3)});
  if (!inverse_norms.absent())
    detail::require_sizes("inverse_norms", inverse_norms.sizes(), {k.batch(), k.heads(), k.len()});
  Tensor<float, 3> scores(k.batch(), k.heads(), k.len());
  WorkerScratch<detail::ScoreScratch> scratch;
  detail::score_all_keys(q_bar.data(), q_bar.dimension(2), k, inverse_norms, options, scores.data(),
                         scratch, executor);
  return scores;
}

}  // namespace quoka::inline QUOKA_ABI
