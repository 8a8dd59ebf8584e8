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

#include <quoka/core/inverse_norm.hpp>
#include <quoka/select/evicting_selector.hpp>
#include <quoka/select/pre_aggregate.hpp>

namespace quoka::inline QUOKA_ABI {

struct KeyDiffOptions {
  Budget budget = 1024;  // keys retained
  Index keep_first = 0;  // attention sinks that are never evicted, inside the budget
};

class KeyDiffEviction {
 public:
  using Options = KeyDiffOptions;

  struct Scratch {
    Buffer<float> anchor;   // [head_dim]
    Buffer<float> inverse;  // [candidates]

    void reserve(Index candidates, Index, Index dim) {
      anchor.reserve(dim);
      inverse.reserve_amortised(candidates);
    }
    Index bytes() const { return anchor.bytes() + inverse.bytes(); }
  };

  explicit KeyDiffEviction(const Options& = {}) {}

  template <class T>
  Index score(const SelectorInput<T>& input, Index b, Index kv_head,
              std::span<const Position> candidates, float* scores, Scratch& s) const {
    const Index dim = input.k.dim(), count = std::ssize(candidates);
    float *anchor = s.anchor.data(), *inverse = s.inverse.data();
    const auto key = [&](Index i) {
      return input.k.row(b, kv_head, candidates[static_cast<std::size_t>(i)]);
    };
    std::fill_n(anchor, dim, 0.0f);
    for (Index i = 0; i < count; ++i) {
      inverse[i] = inverse_norm(key(i), dim);
      if (is_finite_row(key(i), dim, inverse[i]))
        detail::add_scaled(key(i), dim, inverse[i], anchor);
    }
    const float unit = inverse_norm(anchor, dim);
    for (Index i = 0; i < count; ++i)
      scores[i] = -detail::sum_of_products(key(i), anchor, dim) * inverse[i] * unit;
    return 0;
  }
};

using KeyDiffSelector = EvictingSelector<KeyDiffEviction>;
static_assert(Selector<KeyDiffSelector>);

}  // namespace quoka::inline QUOKA_ABI
