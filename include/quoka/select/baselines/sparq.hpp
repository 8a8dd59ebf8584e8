// SparQ: approximate logits from the few channels in which the queries are largest.
//
//   channels  C = the r channels with the largest sum of |q| over the chunk and the group's heads
//   logits    l[h][j][t] = scale * sum over c in C of q[h][j][c] k[t][c] / sqrt(share[h][j]),
//             share[h][j] = sum over C of |q[h][j]| / sum over all channels; 0 / 0 counts as 1
//   score[t]  = mean over heads and queries of softmax over t of l, or of l itself (Domain)
//
// 2 * q_heads * q_len * kv_len * r FLOPs (softmax); kv_len * head_dim more (logit). Keeps a second,
// channel-major copy of the keys in float, in blocks of tuning::block_keys keys, made as they come:
// a chosen channel is a contiguous run, so r of head_dim channels are read. r >= head_dim is the
// exact scorer. Source: Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference", arXiv
// 2312.04985, and Graphcore's code, which decodes one query at a time. Deviations: one channel set
// and one key set per KV head and chunk; no forced local keys; no mean-value term for the keys left
// out.
#pragma once

#include <quoka/select/channel_keys.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <numeric>

namespace quoka::inline QUOKA_ABI {

struct SparqOptions {
  Budget budget = 1024;
  Index rank = 64;  // r: channels used; head_dim or more: all
  Domain domain = Domain::softmax;
  Index window = 1;      // neighbouring keys kept together; 1: none
  Index keep_first = 0;  // attention sinks, inside the budget
  Index keep_last = 0;   // recent keys, inside the budget
};

class SparqScorer {
 public:
  using Options = SparqOptions;

  struct State {
    detail::ChannelMajorKeys keys;
    Buffer<float> magnitudes;  // [batch, kv_heads, head_dim], sum of |q|
    Buffer<Index> channels;    // [batch, kv_heads, head_dim], the chosen first, ascending
    detail::QueryScoreState scores;

    void truncate(Index kv_len) { keys.len = std::min(keys.len, kv_len); }
    Index kept_bytes() const { return keys.blocks.bytes(); }
    Index bytes() const {
      return keys.blocks.bytes() + magnitudes.bytes() + channels.bytes() + scores.bytes();
    }
  };

  // Throws std::invalid_argument for a rank < 1.
  explicit SparqScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("rank", options.rank, 1);
  }

  template <class T>
  void score(const SelectorInput<T>& input, State& state, float* scores,
             ExecutorRef executor) const {
    const TensorView<const T>&q = input.q, &k = input.k;
    const Index dim = k.dim(), group = input.group(), tasks = k.batch() * k.heads();
    const Index rank = std::min(options_.rank, dim);
    Index* channels = state.channels.reserve(tasks * dim);
    float* magnitudes = state.magnitudes.reserve(tasks * dim);
    executor.run(tasks, [&](Index task, int) {
      choose(q, task / k.heads(), task % k.heads() * group, group, rank, magnitudes + task * dim,
             channels + task * dim);
    });
    const auto chosen = [&](Index task) {
      return std::span<const Index>(channels + task * dim, static_cast<std::size_t>(rank));
    };
    // A row of the chosen channels alone, or of all with zeros in place of the others.
    const auto fill_with = [&](bool packed) {
      return [&, packed](Index task, float factor, detail::RowWriter& rows) {
        for (Index r = 0; r < group; ++r)
          for (Index j = 0; j < q.len(); ++j)
            add_row(q.row(task / k.heads(), task % k.heads() * group + r, j), dim,
                    factor * input.logit_scale(), chosen(task), packed, rows);
      };
    };
    if (options_.domain == Domain::logit)
      return detail::mean_logit_scores({tasks, group * q.len(), dim}, fill_with(false), k, scores,
                                       state.scores, executor);
    state.keys.catch_up(k, input.capacity);
    const auto keys_of = [&](Index task) {
      const RowStore<float>& blocks = state.keys.blocks;
      return detail::ChannelKeys(blocks.row(task / k.heads(), task % k.heads(), 0), blocks.dim(),
                                 k.len(), chosen(task));
    };
    detail::softmax_scores({tasks, group * q.len(), rank}, fill_with(true), k.len(), input.capacity,
                           keys_of, detail::MassOver::sum, scores, state.scores, executor);
  }

  // The copy is made as keys come, so that a chunk pays for its own.
  template <class T>
  void appended(const SelectorInput<T>& input, State& state, ExecutorRef) const {
    if (options_.domain == Domain::softmax) state.keys.catch_up(input.k, input.capacity);
  }

 private:
  template <class T>
  static void choose(const TensorView<const T>& q, Index b, Index first_head, Index group,
                     Index rank, float* magnitudes, Index* channels) {
    std::fill_n(magnitudes, q.dim(), 0.0f);
    for (Index r = 0; r < group; ++r) {
      for (Index j = 0; j < q.len(); ++j) {
        const T* row = q.row(b, first_head + r, j);
        if (!is_finite_row(row, q.dim(), inverse_norm(row, q.dim()))) continue;
        for (Index c = 0; c < q.dim(); ++c) magnitudes[c] += std::abs(static_cast<float>(row[c]));
      }
    }
    std::iota(channels, channels + q.dim(), Index{0});
    std::partial_sort(channels, channels + rank, channels + q.dim(), [&](Index x, Index y) {
      return magnitudes[x] > magnitudes[y] || (magnitudes[x] == magnitudes[y] && x < y);
    });
    std::sort(channels, channels + rank);
  }

  template <class T>
  static void add_row(const T* row, Index dim, float factor, std::span<const Index> channels,
                      bool packed, detail::RowWriter& rows) {
    float all = 0.0f, some = 0.0f;
    for (Index c = 0; c < dim; ++c) all += std::abs(static_cast<float>(row[c]));
    for (const Index c : channels) some += std::abs(static_cast<float>(row[c]));
    const float share = all > 0.0f && some > 0.0f ? some / all : 1.0f;
    const float scaled = factor / std::sqrt(share);
    float* to = rows.next();
    if (!packed) std::fill_n(to, dim, 0.0f);
    for (std::size_t s = 0; s < channels.size(); ++s) {
      const Index c = channels[s];
      to[packed ? static_cast<Index>(s) : c] = static_cast<float>(row[c]) * scaled;
    }
    if (std::isfinite(all)) rows.keep_if_finite();
  }

  Options options_;
};

using SparqSelector = ScoredSelector<SparqScorer>;
static_assert(Selector<SparqSelector>);

}  // namespace quoka::inline QUOKA_ABI
