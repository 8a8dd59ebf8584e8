// SparQ: approximate logits from the few channels in which the queries are largest.
//
//   channels  C = the r channels with the largest sum of |q| over the chunk and the group's heads
//   logits    l[h][j][t] = scale * sum over c in C of q[h][j][c] k[t][c] / sqrt(share[h][j]),
//             share[h][j] = sum over C of |q[h][j]| / sum over all channels; 0 / 0 counts as 1
//   score[t]  = mean over heads and queries of softmax over t of l, or of l itself (Domain)
//
// 2 * q_heads * q_len * kv_len * r FLOPs (softmax); kv_len * head_dim more (logit). r >= head_dim is the exact scorer.
// Here all channels are multiplied, zeros in the queries for those not chosen: no copy of the keys, in which a
// channel's values lie side by side, is kept. With a sketch of the keys softmax is that of 8-bit logits, nearly the
// same (select/code_mass.hpp). Source: Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference", arXiv
// 2312.04985, and Graphcore's code, which decodes one query at a time. Deviations: one channel set and one key set per
// KV head and chunk; no forced local keys; no mean-value term for the keys left out.
#pragma once

#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of SparqSelector.
struct SparqOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index rank = 64;                     // r: channels used; head_dim or more: all
  Domain domain = Domain::softmax;     // in which several queries' logits are averaged
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;   // 8-bit logits, of softmax
};

// The scores behind SparqSelector.
class SparqScorer {
 public:
  using Options = SparqOptions;

  struct State : SketchKept {
    Buffer<float> magnitudes;  // [batch, kv_heads, head_dim], sum of |q|
    Buffer<Index> channels;    // [batch, kv_heads, head_dim], the chosen first, ascending
    WorkerScratch<RowReader> rows;
    QueryScoreState scores;

    Index bytes() const { return bytes_of(sketch, magnitudes, channels, rows, scores); }
  };

  // Throws std::invalid_argument for a rank < 1.
  explicit SparqScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("rank", options.rank, 1);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const Index dim = k.dim(), group = input.group(), tasks = k.batch() * k.heads();
    const Index rank = std::min(options_.rank, dim);
    Index* const channels = state.channels.reserve(tasks * dim);
    float* const magnitudes = state.magnitudes.reserve(tasks * dim);
    state.rows.reserve(executor.workers(), q);
    for_each_kv_head(k, executor, [&](Index b, Index kv_head, int worker) {
      const Index at = (b * k.heads() + kv_head) * dim;
      choose_channels(q, b, kv_head * group, group, rank, state.rows[worker], magnitudes + at,
                      channels + at);
    });
    const float logit_scale = input.logit_scale();
    // Zeros in place of the channels that were not chosen.
    const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
      const Index* const chosen = channels + (b * k.heads() + kv_head) * dim;
      for (Index r = 0; r < group; ++r)
        for (Index j = 0; j < q.len(); ++j)
          add_row(rows.read(q, b, kv_head * group + r, j), dim, logit_scale,
                  {chosen, static_cast<std::size_t>(rank)}, rows);
    };
    const QueryRows shape{group * q.len(), dim, q};
    if (options_.domain == Domain::logit)
      return mean_logit_scores(shape, fill, k, scores, state.scores, executor);
    softmax_scores(
        {.rows = shape,
         .fill = fill,
         .keys = k,
         .capacity = input.capacity,
         .codes = uses_sketch() ? SketchedKeys::find(k, state.sketch, input.sketch) : std::nullopt},
        scores, state.scores, executor);
  }

  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    if (uses_sketch() && input.sketch == nullptr)
      state.sketch.append(input.k, input.capacity, executor);
  }

 private:
  bool uses_sketch() const {
    return options_.domain == Domain::softmax && by_codes(options_.sketch, true);
  }
  static void choose_channels(const Rows& q, Index b, Index first_head, Index group, Index rank,
                              RowReader& reader, float* magnitudes, Index* channels) {
    std::fill_n(magnitudes, q.dim(), 0.0f);
    for (Index r = 0; r < group; ++r) {
      for (Index j = 0; j < q.len(); ++j) {
        const float* const row = reader.read(q, b, first_head + r, j);
        if (!is_finite_row(row, q.dim())) continue;
        for (Index c = 0; c < q.dim(); ++c) magnitudes[c] += std::abs(row[c]);
      }
    }
    std::iota(channels, channels + q.dim(), Index{0});
    std::partial_sort(channels, channels + rank, channels + q.dim(), [&](Index x, Index y) {
      return magnitudes[x] > magnitudes[y] || (magnitudes[x] == magnitudes[y] && x < y);
    });
    std::sort(channels, channels + rank, [](Index x, Index y) { return x < y; });
  }

  static void add_row(const float* row, Index dim, float factor, std::span<const Index> channels,
                      RowWriter& rows) {
    float all = 0.0f, some = 0.0f;
    for (Index c = 0; c < dim; ++c) all += std::abs(row[c]);
    for (const Index c : channels) some += std::abs(row[c]);
    const float share = all > 0.0f && some > 0.0f ? some / all : 1.0f;
    const float scaled = factor / std::sqrt(share);
    float* to = rows.next();
    std::fill_n(to, dim, 0.0f);
    for (const Index c : channels) to[c] = row[c] * scaled;
    if (std::isfinite(all)) rows.keep_if_finite();
  }

  Options options_;
};

using SparqSelector = ScoredSelector<SparqScorer>;
static_assert(Selector<SparqSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
