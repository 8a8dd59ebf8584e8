// Scores from several queries per KV head, in either domain: what the methods that compare queries
// with keys (or with something that stands for keys) share.
//
//   softmax   score[t] = mean over rows of softmax(logits of the row)[t]
//   logit     score[t] = mean over rows of logit[t] = logit of the mean row
//
// A method says how a KV head's rows come about (fill) and what lies in place of the keys. Rows
// with a NaN or an infinity are left out. softmax: 2 * rows * keys * dim FLOPs per KV head and a
// weight per row and key, tuning::mass_weight_bytes of them at a time; logit: 2 * keys * dim.
#pragma once

#include <quoka/core/worker_scratch.hpp>
#include <quoka/select/concepts.hpp>
#include <quoka/select/score_keys.hpp>
#include <quoka/select/softmax_mass.hpp>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// Reused memory of the functions below.
struct QueryScoreState : NoState {
  WorkerScratch<MassScratch> mass;
  WorkerScratch<ScoreScratch> score;
  Buffer<float> mean;  // [batch, kv_heads, 1, dim]

  Index bytes() const { return mass.bytes() + score.bytes() + mean.bytes(); }
};

// Where rows are written: add(row, factor) appends a query's channels times factor, if they are
// finite.
class RowWriter {
 public:
  RowWriter(float* rows, Index dim) : rows_(rows), dim_(dim) {}

  template <class T>
  void add(const T* row, float factor) {
    float* to = next();
    for (Index c = 0; c < dim_; ++c) to[c] = static_cast<float>(row[c]) * factor;
    keep_if_finite();
  }
  // The place of the next row, for those who write it themselves; it counts once kept.
  float* next() const { return rows_ + count_ * dim_; }
  void keep_if_finite() {
    const float* row = next();
    float poison = 0.0f;
    for (Index c = 0; c < dim_; ++c) poison += row[c] * 0.0f;
    if (poison == 0.0f) ++count_;
  }
  Index count() const { return count_; }

 private:
  float* rows_;
  Index dim_, count_ = 0;
};

// Tasks are KV heads of sequences, b * kv_heads + kv_head; each has at most max_rows rows of dim
// channels; fill(task, factor, writer) writes them times `factor`.
struct QueryRows {
  Index tasks, max_rows, dim;
};

// scores [tasks, keys]; keys_of(task) is the Keys of softmax_mass.hpp.
template <class Fill, class KeysOf>
void softmax_scores(const QueryRows& shape, Fill&& fill, Index keys, Index capacity,
                    KeysOf&& keys_of, MassOver over, float* scores, QueryScoreState& state,
                    ExecutorRef executor) {
  state.mass.reserve(executor.workers(), shape.max_rows, std::max(keys, capacity), shape.dim);
  executor.run(shape.tasks, [&](Index task, int worker) {
    MassScratch& scratch = state.mass[worker];
    RowWriter rows(scratch.rows.data(), shape.dim);
    fill(task, log2_e, rows);
    float* mass = scores + task * keys;
    std::fill_n(mass, keys, 0.0f);
    auto of_task = keys_of(task);
    const float share =
        over == MassOver::max ? 1.0f : 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    MassAccumulator(scratch.rows.data(), rows.count(), shape.dim, of_task, keys, scratch)
        .add_to(mass, share, over);
  });
}

// scores [tasks, keys.len()]; keys [batch, kv_heads, keys, dim].
template <class T, class Fill>
void mean_logit_scores(const QueryRows& shape, Fill&& fill, const TensorView<const T>& keys,
                       float* scores, QueryScoreState& state, ExecutorRef executor) {
  state.mass.reserve(executor.workers(), shape.max_rows, 0, shape.dim);
  float* means = state.mean.reserve(shape.tasks * shape.dim);
  executor.run(shape.tasks, [&](Index task, int worker) {
    float* const first = state.mass[worker].rows.data();
    RowWriter rows(first, shape.dim);
    fill(task, 1.0f, rows);
    float* mean = means + task * shape.dim;
    std::fill_n(mean, shape.dim, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    for (Index i = 0; i < rows.count(); ++i)
      for (Index c = 0; c < shape.dim; ++c) mean[c] += first[i * shape.dim + c] * share;
  });
  score_all_keys(means, 1, keys, {}, {Scoring::dot, Aggregation::max}, scores, state.score,
                 executor);
}

// The cached keys of a KV head, by their exact channels.
template <class T>
auto cached_keys(const TensorView<const T>& k, Index task) {
  const auto row_of = [&k, b = task / k.heads(), head = task % k.heads()](Index i) {
    return k.row(b, head, i);
  };
  return RowKeys<T, decltype(row_of)>(row_of, k.len(), k.dim());
}

// Exact logits of the queries at position_of(m), m < n, of every head of the group.
template <class T, class PositionOf>
void exact_scores(const SelectorInput<T>& input, Index n, PositionOf&& position_of, Domain domain,
                  MassOver over, float* scores, QueryScoreState& state, ExecutorRef executor) {
  const TensorView<const T>&q = input.q, &k = input.k;
  const Index group = input.group();
  const QueryRows shape{k.batch() * k.heads(), group * n, k.dim()};
  const auto fill = [&](Index task, float factor, RowWriter& rows) {
    for (Index r = 0; r < group; ++r)
      for (Index m = 0; m < n; ++m)
        rows.add(q.row(task / k.heads(), task % k.heads() * group + r, position_of(m)),
                 factor * input.logit_scale());
  };
  if (domain == Domain::logit) return mean_logit_scores(shape, fill, k, scores, state, executor);
  softmax_scores(
      shape, fill, k.len(), input.capacity, [&](Index task) { return cached_keys(k, task); }, over,
      scores, state, executor);
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
