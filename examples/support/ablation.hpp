// QuoKA with one choice of the paper changed: a selector of the library's stages, for programs that
// compare them.
//
//   kept      = subselect_queries(q, n), or mixed_queries(q, n, group)
//   q_bar     = pre_aggregate(kept, kv_heads), or the kept queries of each head, normalised
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
#include <vector>

namespace quoka_examples {

using quoka::Index;

struct AblationOptions {
  quoka::Budget budget = quoka::Budget::keys(1024);
  Index n_queries = 16;   // of each query head
  bool of_group = false;  // n_queries are those of all heads of a KV head, at least 4 of each
  bool mixed = false;     // mixed_queries()
  bool per_head = false;  // no average: group * n rows of a KV head score
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
  const bool ranked = c.q_len > n && (!o.mixed || n >= 4);
  return product({2, o.per_head ? c.q_heads : c.kv_heads, n, c.kv_len, c.head_dim}) +
         product({4, c.q_heads, n, c.head_dim}) +
         (ranked ? product({5, c.q_heads, c.q_len, c.head_dim}) : 0.0);
}

// The last ceil(n / 4) queries of the chunk, the floor(n / 4) most dissimilar of the others, and the
// rest evenly spaced, head r of a group of g at floor((m g + r) rest / (spaced g)): [batch, q_heads,
// n, head_dim], the dissimilar ones first.
template <class Q>
quoka::Tensor<float> mixed_queries(const Q& q, Index n_queries, Index group,
                                   quoka::ExecutorRef executor) {
  const Index len = q.len(), n = std::min(n_queries, len);
  if (n == len) return quoka::subselect_queries(q, n, executor);
  const Index dissimilar = n / 4, last = (n + 3) / 4, spaced = n - dissimilar - last,
              rest = len - last;
  // All but the most similar one, which is none of them.
  const auto order = quoka::subselect_query_positions(q, len - 1, executor);
  quoka::Tensor<float> kept(q.batch(), q.heads(), n, q.dim());
  for (Index b = 0; b < q.batch(); ++b)
    for (Index head = 0; head < q.heads(); ++head) {
      std::vector<Index> taken;
      for (Index m = 0; m < spaced; ++m)
        taken.push_back((m * group + head % group) * rest / (spaced * group));
      for (Index i = rest; i < len; ++i) taken.push_back(i);
      std::vector<Index> chosen;
      for (Index i = 0; std::ssize(chosen) < dissimilar; ++i)
        if (std::find(taken.begin(), taken.end(), order(b, head, i)) == taken.end())
          chosen.push_back(order(b, head, i));
      chosen.insert(chosen.end(), taken.begin(), taken.end());
      for (Index m = 0; m < n; ++m)
        std::copy_n(q.row(b, head, chosen[static_cast<std::size_t>(m)]), q.dim(),
                    &kept(b, head, m, 0));
    }
  return kept;
}

class AblationScorer : public quoka::ScorerDefaults {
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
    const Index wanted = options_.queries_per_head(group);
    const auto kept = options_.mixed ? mixed_queries(q, wanted, group, executor)
                                     : quoka::subselect_queries(q, wanted, executor);
    if (!options_.softmax) {
      quoka::Tensor<float> q_bar =
          quoka::pre_aggregate(kept, options_.per_head ? q.heads() : heads, executor);
      if (options_.per_head)  // the rows of a group lie side by side
        q_bar = quoka::Tensor<float>(q_bar.reshape(Eigen::array<Index, 4>{
            k.batch(), heads, group * kept.dimension(2), kept.dimension(3)}));
      const auto cosines =
          quoka::score_keys(q_bar, k, options_.aggregation, input.inverse_norms, executor);
      std::copy_n(cosines.data(), cosines.size(), scores.data());
      return;
    }
    const Index n = kept.dimension(2), dim = q.dim();
    const bool per_head = options_.per_head;
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
                           .rule = {.over = options_.aggregation, .softcap = input.softcap()}},
                          scores, state, executor);
  }

  bool weighs_logits() const { return options_.softmax; }
  static bool supports_softcap() { return true; }

 private:
  Options options_;
};

using AblationSelector = quoka::ScoredSelector<AblationScorer>;

}  // namespace quoka_examples
