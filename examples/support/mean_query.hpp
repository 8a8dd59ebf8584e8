// SampleAttention, SparQ and Loki by the mean of their logits, in place of the mean of softmax:
// "sparq.logit".
//
//   score[t] = mean over the rows of a KV head of row . key[t] = (their mean row) . key[t]
//
// So the rows of a KV head, whatever they are, become one query. QuoKA's paper does not say which
// of both its comparisons take; its numbers look like this one.
#pragma once

#include "support/scoring_flops.hpp"

#include <quoka/methods/rows_scorer.hpp>
#include <quoka/select/key_scores.hpp>

#include <algorithm>

namespace quoka_examples {

// Rows: SampleAttentionRows, SparqRows, LokiRows.
template <class Rows>
struct MeanQueryOptions : Rows::Options {};

// 2 kv_heads P d, d those of a row; and what the rows take, and their sum.
template <class Rows>
double flops(const MeanQueryOptions<Rows>& o, const ChunkShape& c) {
  Index dim = c.head_dim, n = c.q_len;
  if constexpr (requires { o.n_queries; }) n = std::min(n, o.n_queries);
  if constexpr (requires { o.fitted; }) dim = std::min(dim, o.rank);  // Loki's rows are projections
  const typename Rows::Options& own = o;
  return product({2, c.kv_heads, c.kv_len, dim}) + product({c.q_heads, n, dim}) +
         flops(own, {c.q_heads, c.kv_heads, c.head_dim, c.q_len, 0});
}

template <class Rows>
class MeanQueryScorer : public quoka::ScorerDefaults {
 public:
  using Options = MeanQueryOptions<Rows>;

  struct State : Rows::State {
    quoka::Buffer<float> mean_rows;
    quoka::Arenas workers;
  };

  explicit MeanQueryScorer(const Options& options = {}) : rows_(options) {}

  static bool weighs_logits() { return true; }

  void score(const quoka::SelectorInput& input, State& state, quoka::TensorView<float, 3> scores,
             quoka::ExecutorRef executor) const {
    const quoka::Rows keys = rows_.keys(input, state, executor).rows;
    const auto fill = [&](Index b, Index kv_head, quoka::RowWriter& to) {
      rows_.fill(input, state, b, kv_head, to);
    };
    quoka::mean_logit_scores({rows_.max_rows(input), keys.dim(), input.q.dim()}, fill, keys, scores,
                             state.mean_rows, state.workers, executor);
  }
  void appended(const quoka::SelectorInput& input, State& state,
                quoka::ExecutorRef executor) const {
    (void)rows_.keys(input, state, executor);
  }

 private:
  Rows rows_;
};

template <class Rows>
using MeanQuerySelector = quoka::ScoredSelector<MeanQueryScorer<Rows>>;

// The rows of a selector that scores by some; void: of another.
template <class S>
struct RowsOf {
  using Type = void;
};
template <class Rows>
struct RowsOf<quoka::ScoredSelector<quoka::RowsScorer<Rows>>> {
  using Type = Rows;
};

}  // namespace quoka_examples
