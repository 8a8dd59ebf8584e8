// SparQ: approximate logits from the few channels in which the queries are largest.
//
//   channels  C = the r channels with the largest sum of |q| over the chunk and the group's heads
//   logits    l[h][j][t] = scale * sum over c in C of q[h][j][c] k[t][c] / sqrt(share[h][j]),
//             share[h][j] = sum over C of |q[h][j]| / sum over all channels; 0 / 0 counts as 1
//   score[t]  = mean over heads and queries of softmax over t of l
//
// 2 * q_heads * q_len * kv_len * r FLOPs by its formula. Here rows have zeros for the channels that
// are not chosen: that takes head_dim / r times as many FLOPs, but no copy of the keys. r >=
// head_dim is the exact scorer. Source: Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM
// Inference", arXiv 2312.04985, and Graphcore's code, which decodes one query at a time.
// Deviations: one channel set and one key set per KV head and chunk; no forced local keys; no
// mean-value term for the keys left out.
#pragma once

#include <quoka/methods/rows_scorer.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of SparqSelector.
struct SparqOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index rank = 64;                     // r: channels used; head_dim or more: all
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;   // 8-bit logits
};

// The rows that score.
class SparqRows {
 public:
  using Options = SparqOptions;
  static constexpr bool every_query = true;  // of the chunk scores

  // Reused memory.
  struct State : NoState {
    Buffer<float> magnitudes;  // [batch, kv_heads, head_dim], sum of |q|
    Buffer<Index> channels;    // [batch, kv_heads, head_dim], the largest first
  };

  // Throws std::invalid_argument for a rank < 1.
  explicit SparqRows(const Options& options = {}) : options_(options) {
    detail::require_at_least("rank", options.rank, 1);
  }

  // The interface of RowsScorer: the keys that rows are multiplied with,
  static ScoredKeys keys(const SelectorInput& input, State& state, ExecutorRef) {
    const Index size = input.k.batch() * input.k.heads() * input.k.dim();
    state.magnitudes.reserve(size), state.channels.reserve(size);
    return {input.k, input.sketch};
  }
  // at most this number of rows of a KV head,
  static Index max_rows(const SelectorInput& input) { return input.group() * input.q.len(); }

  // and these rows of one, times the logit scale.
  void fill(const SelectorInput& input, State& state, Index b, Index kv_head,
            RowWriter& rows) const {
    const Index dim = input.k.dim(), rank = std::min(options_.rank, dim);
    const Index at = (b * input.k.heads() + kv_head) * dim;
    float* const magnitudes = state.magnitudes.data() + at;
    Index* const channels = state.channels.data() + at;
    const auto each_query = [&](auto&& f) {
      for_each_query(input, kv_head, [&](Index head, Index i) {
        const float* const x = rows.read(input.q, b, head, i);
        if (is_finite_row(x, dim)) f(x);
      });
    };
    std::fill_n(magnitudes, dim, 0.0f);
    each_query([&](const float* x) {
      for (Index c = 0; c < dim; ++c) magnitudes[c] += std::abs(x[c]);
    });
    std::iota(channels, channels + dim, Index{0});
    std::partial_sort(channels, channels + rank, channels + dim, [&](Index x, Index y) {
      return magnitudes[x] > magnitudes[y] || (magnitudes[x] == magnitudes[y] && x < y);
    });
    std::sort(channels, channels + rank);
    each_query([&](const float* x) {
      float all = 0.0f, some = 0.0f;
      for (Index c = 0; c < dim; ++c) all += std::abs(x[c]);
      for (Index i = 0; i < rank; ++i) some += std::abs(x[channels[i]]);
      const float share = all > 0.0f && some > 0.0f ? some / all : 1.0f;
      const float factor = input.logit_scale() / std::sqrt(share);
      float* const row = rows.next();
      std::fill_n(row, dim, 0.0f);
      for (Index i = 0; i < rank; ++i) row[channels[i]] = x[channels[i]] * factor;
      if (std::isfinite(all)) rows.keep_if_finite();
    });
  }

 private:
  Options options_;
};

// SparQ scores: the softmax of rows of few channels.
using SparqScorer = RowsScorer<SparqRows>;
using SparqSelector = ScoredSelector<SparqScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
