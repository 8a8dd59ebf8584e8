// SnapKV: evicts the keys that the last queries of the chunk do not look at.
//
//   window    the chunk's last w = min(window_size, q_len) queries, and their keys, which stay
//   mass[t]   = mean over the group's heads of the sum over the window's queries of their causal
//               softmax over all candidates, for candidates before the window
//   score[t]  = mean mass of `kernel_size` neighbours in retained order, zeros beyond the ends
//
// 2 * q_heads * w * (budget + chunk) * head_dim FLOPs. Source: Li et al., "SnapKV: LLM Knows What
// You are Looking for Before Generation", arXiv 2404.14469, and its code, whose prompt comes whole.
// Deviations: runs at each chunk over the keys retained until then. One set per KV head: the mean
// over the group, as in NVIDIA's kvpress, taken before the pooling. Keys that came without queries
// are dropped by age.
#pragma once

#include <quoka/methods/evicting_selector.hpp>
#include <quoka/select/softmax_scores.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of SnapKvSelector.
struct SnapKvOptions {
  Budget budget = Budget::keys(1024);  // keys retained
  Index window_size = 32;              // w: queries at the end of the chunk that judge
  Index kernel_size = 5;               // neighbours pooled, odd; 1: none
  Index keep_first = 0;                // attention sinks that are never evicted, inside the budget
};

// The scores by which SnapKvSelector evicts.
class SnapKvEviction {
 public:
  using Options = SnapKvOptions;

  struct Scratch {
    SoftmaxScoreState mass;
    Buffer<float> raw;  // [candidates]
    std::vector<Position> before,
        window;  // the candidates' cells, where the keys are gathered rows
  };

  // Throws std::invalid_argument for a window_size < 1 and a kernel_size that is not odd and
  // positive.
  explicit SnapKvEviction(const Options& options = {}) : options_(options) {
    detail::require_at_least("window_size", options.window_size, 1);
    detail::require_at_least("kernel_size", options.kernel_size, 1);
    detail::require_equal("kernel_size % 2", options.kernel_size % 2, "that of an odd number", 1);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  Index score(const SelectorInput& input, Index b, Index kv_head,
              std::span<const Position> candidates, std::span<float> scores, Scratch& s) const {
    const Rows &q = input.q, &k = input.k;
    const Index count = std::ssize(candidates);
    const Index window = std::min({options_.window_size, q.len(), count});
    if (window == 0) {
      std::fill(scores.begin(), scores.end(), 0.0f);
      return count;
    }
    const Index before = count - window, group = input.group();
    const Rows head = k.sequence(b).some_heads(kv_head, 1);
    Index rows_kept = 0;
    const auto fill = [&](Index, Index, RowWriter& rows) {
      for (Index r = 0; r < group; ++r)
        for (Index j = 0; j < window; ++j)
          rows.add(rows.read(q, b, kv_head * group + r, q.len() - window + j), input.logit_scale(),
                   j + 1);
      rows_kept = rows.count();
    };
    float* const raw = s.raw.reserve_amortised(std::max(count, input.capacity));
    softmax_scores(
        {.rows = {group * window, k.dim(), q.dim()},
         .fill = fill,
         .keys = head.gathered(candidates.first(static_cast<std::size_t>(before)), s.before),
         .capacity = input.capacity,
         .chunk_k = head.gathered(candidates.last(static_cast<std::size_t>(window)), s.window)},
        score_view(raw, 1, 1, before), s.mass, SerialExecutor{});
    const float queries = static_cast<float>(rows_kept) / static_cast<float>(group);
    for (Index t = 0; t < before; ++t) raw[t] *= queries;
    average_pool(raw, before, scores.data());
    std::fill_n(scores.data() + before, window, 0.0f);
    return window;
  }

 private:
  // A key that is not finite has a mass of NaN: it keeps it, and counts as 0 for its neighbours.
  void average_pool(const float* raw, Index count, float* pooled) const {
    const Index reach = options_.kernel_size / 2;
    for (Index i = 0; i < count; ++i) {
      const Index first = std::max<Index>(0, i - reach), end = std::min(count, i + reach + 1);
      float sum = 0.0f;
      for (Index j = first; j < end; ++j) sum += std::isfinite(raw[j]) ? raw[j] : 0.0f;
      pooled[i] = std::isfinite(raw[i]) ? sum / static_cast<float>(options_.kernel_size) : raw[i];
    }
  }

  Options options_;
};

using SnapKvSelector = EvictingSelector<SnapKvEviction>;

}  // namespace QUOKA_ABI
}  // namespace quoka
