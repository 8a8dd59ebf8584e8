// KeyDiff: evicts the keys that are most like the average key.
//
//   anchor    mean over the candidates of k / |k|
//   score[t]  = -cos(k[t], anchor)
//
// 4 * kv_heads * (budget + chunk) * head_dim FLOPs; looks at keys only. Ranked as by the cosine
// with the candidates' summed directions, which has the anchor's direction. Source: Park et al.,
// "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
// Resource-Constrained Environments", arXiv 2504.15364. Deviations: no sliding window of recent
// keys; a key with a NaN or an infinity is left out of the anchor and goes first.
#pragma once

#include <quoka/methods/evicting_selector.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/select/query_rows.hpp>

#include <algorithm>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of KeyDiffSelector.
struct KeyDiffOptions {
  Budget budget = Budget::keys(1024);  // keys retained
  Index keep_first = 0;                // attention sinks that are never evicted, inside the budget
};

// The scores by which KeyDiffSelector evicts.
class KeyDiffEviction {
 public:
  using Options = KeyDiffOptions;

  struct Scratch {
    Buffer<float> anchor;   // [head_dim]
    Buffer<float> inverse;  // [candidates]
    RowReader row;
  };

  // Its scores need no options.
  explicit KeyDiffEviction(const Options& = {}) {}

  static bool weighs_logits() { return false; }

  Index score(const SelectorInput& input, Index b, Index kv_head,
              std::span<const Position> candidates, std::span<float> scores, Scratch& s) const {
    const Index dim = input.k.dim();
    float* const anchor = s.anchor.reserve(dim);
    float* const inverse =
        s.inverse.reserve_amortised(std::max(std::ssize(candidates), input.capacity));
    const auto key = [&](std::size_t i) { return s.row.read(input.k, b, kv_head, candidates[i]); };
    std::fill_n(anchor, dim, 0.0f);
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const float* const x = key(i);
      inverse[i] = inverse_norm(x, dim);
      if (!is_finite_row(x, dim)) continue;
      for (Index c = 0; c < dim; ++c) anchor[c] += x[c] * inverse[i];
    }
    const float unit = inverse_norm(anchor, dim);
    for (std::size_t i = 0; i < candidates.size(); ++i)
      scores[i] = -dot(key(i), anchor, dim) * inverse[i] * unit;
    return 0;
  }
};

using KeyDiffSelector = EvictingSelector<KeyDiffEviction>;

}  // namespace QUOKA_ABI
}  // namespace quoka
