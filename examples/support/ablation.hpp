// QuoKA with one choice of the paper changed: a selector of the library's stages, for programs that
// compare them.
//
//   kept      = subselect_queries(q, n)
//   q_bar     = pre_aggregate(kept, kv_heads), or the kept queries as they are
//   scores    = score_keys(q_bar, past_k), or the kept queries' own attention to the past
//   selection = top_k(scores, budget)
//
// In float, and with tensors in between: for its answers, not for its speed.
#pragma once

#include "support/scoring_flops.hpp"

#include <quoka/select/softmax_scores.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/stages.hpp>

#include <algorithm>

namespace quoka_examples {

using quoka::Index;

struct AblationOptions {
  quoka::Budget budget = quoka::Budget::keys(1024);
  Index n_queries = 16;   // of each query head
  bool of_group = false;  // n_queries are those of all heads of a KV head, at least 4 of each
  quoka::QueryChoice choice = quoka::QueryChoice::dissimilar;
  quoka::GroupMode group_mode = quoka::GroupMode::mean;
  quoka::Aggregation aggregation = quoka::Aggregation::max;
  bool softmax = false;  // shares of attention, not cosines
  Index kernel_size = 1, keep_first = 0, keep_last = 0;

  Index queries_per_head(Index group) const {
    return of_group ? std::max<Index>(4, n_queries / group) : n_queries;
  }
};

// 2 kv_heads R P d, R = N, or group N rows with per_head, + 4 q_heads N d, + 5 q_heads B d where
// queries are ranked; N queries of a head, or B if that is less.
inline double flops(const AblationOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.queries_per_head(c.q_heads / c.kv_heads), c.q_len);
  const bool per_head = o.group_mode == quoka::GroupMode::per_head,
             ranked = c.q_len > n && (o.choice == quoka::QueryChoice::dissimilar || n >= 4);
  return product({2, per_head ? c.q_heads : c.kv_heads, n, c.kv_len, c.head_dim}) +
         product({4, c.q_heads, n, c.head_dim}) +
         (ranked ? product({5, c.q_heads, c.q_len, c.head_dim}) : 0.0);
}

class AblationScorer {
 public:
  using Options = AblationOptions;
  using State = quoka::NoState;

  explicit AblationScorer(const Options& options = {}) : options_(options) {
    quoka::detail::require_at_least("n_queries", options.n_queries, 1);
  }

  void score(const quoka::SelectorInput& input, State&, quoka::TensorView<float, 3> scores,
             quoka::ExecutorRef executor) const {
    const auto q = input.q.typed<float>(), k = input.k.typed<float>();
    const Index group = input.group(), heads = k.heads();
    const auto kept = quoka::subselect_queries(q, options_.queries_per_head(group),
                                               {options_.choice, group}, executor);
    if (!options_.softmax) {
      const auto q_bar = quoka::pre_aggregate(kept, heads, options_.group_mode, executor);
      const auto cosines =
          quoka::score_keys(q_bar, k, options_.aggregation, input.inverse_norms, executor);
      std::copy_n(cosines.data(), cosines.size(), scores.data());
      return;
    }
    const Index n = kept.dimension(2), dim = q.dim();
    const bool per_head = options_.group_mode == quoka::GroupMode::per_head;
    const Index rows = per_head ? group * n : n;
    const float scale = input.logit_scale() / (per_head ? 1.0f : static_cast<float>(group));
    const auto fill = [&](Index b, Index kv_head, quoka::RowWriter& to) {
      std::vector<float> row(static_cast<std::size_t>(dim));
      for (Index m = 0; m < rows; ++m) {
        std::fill(row.begin(), row.end(), 0.0f);
        for (Index r = per_head ? m / n : 0; r < (per_head ? m / n + 1 : group); ++r)
          for (Index c = 0; c < dim; ++c)
            row[static_cast<std::size_t>(c)] += kept(b, kv_head * group + r, m % n, c);
        to.add(row.data(), scale);
      }
    };
    quoka::SoftmaxScoreState state;
    quoka::softmax_scores({.rows = {rows, dim},
                           .fill = fill,
                           .keys = input.k,
                           .capacity = input.capacity,
                           .over = options_.aggregation,
                           .softcap = input.softcap()},
                          scores, state, executor);
  }

  bool weighs_logits() const { return options_.softmax; }
  static bool supports_softcap() { return true; }

 private:
  Options options_;
};

using AblationSelector = quoka::ScoredSelector<AblationScorer>;

}  // namespace quoka_examples
