// The parts that selectors are made of: loops over KV heads, arithmetic of rows, the rows of the
// queries that score (RowWriter, FillRows), and the mean of their logits:
//
//   mean_logit_scores   score[h][t] = mean over head h's rows m of logit(m, t), which is the logit
//                       of the mean row
//
// softmax_scores.hpp has the mean of their softmax. The methods of this library are written with
// these two headers. Rows with a NaN or an infinity are left out.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#if QUOKA_DEFINES
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/select/score.hpp>

#include <algorithm>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// A selector's own scores [batch, heads, len], in memory of its own.
inline TensorView<float, 3> score_view(float* scores, Index batch, Index heads, Index len) {
  return {scores, {batch, heads, len}, {heads * len, len, 1}};
}

// f(b, kv_head, worker) for every KV head of every sequence.
template <class F>
void for_each_kv_head(const Rows& k, ExecutorRef executor, F&& f) {
  executor.run(k.batch() * k.heads(),
               [&](Index task, int worker) { f(task / k.heads(), task % k.heads(), worker); });
}

// 1 / |x| of x [dim]: 0 for a zero or infinite vector, NaN for one with a NaN.
float inverse_norm(const float* x, Index dim);
// sum over c of a[c] * b[c]
float dot(const float* a, const float* b, Index dim);
// sum[c] += x[c], or from nothing: sum[c] = x[c]. [dim]
void add_row(const float* x, Index dim, bool first, float* sum);
// to[c] = x[c] * factor. [dim] Is none of to NaN or infinite?
bool scale_row(const float* x, Index dim, float factor, float* to);
// Is no element of x [dim] NaN or infinite?
bool is_finite_row(const float* x, Index dim);

// Where the rows of one head are written: add(row, factor) appends a query's channels times factor,
// if they are finite.
class RowWriter {
 public:
  // `rows` has room for all of them, [max_rows, dim]; `ends`, if given, for as many.
  RowWriter(float* rows, Index dim, RowReader& reader, Index* ends = nullptr)
      : rows_(rows), ends_(ends), dim_(dim), reader_(&reader) {}

  // Row i of one head of q. It sees the first i + 1 of the chunk's keys, if there are any.
  void add(const Rows& q, Index b, Index head, Index i, float factor) {
    add(read(q, b, head, i), factor, i + 1);
  }
  // The same of a row of floats [dim], which sees the first `end` of the chunk's keys.
  void add(const float* row, float factor, Index end = 0) {
    if (scale_row(row, dim_, factor, next())) keep(end);
  }
  // Row i of a head of q as floats: good until the next.
  const float* read(const Rows& q, Index b, Index head, Index i) const {
    return reader_->read(q, b, head, i);
  }
  // The place of the next row, for those who write it themselves; it counts once kept.
  float* next() const { return rows_ + count_ * dim_; }
  // Counts next().
  void keep(Index end = 0) {
    if (ends_ != nullptr) ends_[count_] = end;
    ++count_;
  }
  // Counts next(), unless it holds a NaN or an infinity.
  void keep_if_finite(Index end = 0) {
    if (is_finite_row(next(), dim_)) keep(end);
  }
  Index count() const { return count_; }  // rows kept so far

 private:
  float* rows_;
  Index* ends_;
  Index dim_, count_ = 0;
  RowReader* reader_;
};

// Writes the rows that score for one head of the scores, times the logit scale.
using FillRows = FunctionRef<void(Index b, Index head, RowWriter& rows)>;

// The rows that score for one head.
struct QueryRows {
  Index max_rows, dim;  // rows at most, and their channels
  Rows read = {};       // fill() makes them from rows like these; empty: from floats
};

// scores [batch, kv_heads, keys]; keys [batch, kv_heads, keys, dim]. means, workers: reused memory.
// Throws std::invalid_argument for scores of another shape than the keys', or other strides than
// score_view() has.
void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                       TensorView<float, 3> scores, Buffer<float>& means, Arenas& workers,
                       ExecutorRef executor);

#if QUOKA_DEFINES

QUOKA_FUNC float inverse_norm(const float* x, Index dim) {
  return detail::inverse_norm_of_row(x, dim);
}
QUOKA_FUNC float dot(const float* a, const float* b, Index dim) {
  return detail::sum_of_products(a, b, dim);
}
QUOKA_FUNC void add_row(const float* x, Index dim, bool first, float* sum) {
  if (first)
    std::copy_n(x, dim, sum);
  else
    detail::add_row(x, dim, sum);
}
QUOKA_FUNC bool scale_row(const float* x, Index dim, float factor, float* to) {
  return detail::scale_row(x, dim, factor, to);
}
QUOKA_FUNC bool is_finite_row(const float* x, Index dim) {
  return detail::is_finite_row(x, dim, detail::inverse_norm_of_row(x, dim));
}

QUOKA_FUNC void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                                  TensorView<float, 3> scores, Buffer<float>& means,
                                  Arenas& workers, ExecutorRef executor) {
  detail::require_sizes("scores", scores.sizes(), {keys.batch(), keys.heads(), keys.len()});
  const auto whole = score_view(scores.data(), scores.batch(), scores.heads(), scores.len());
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (scores.sizes()[axis] > 1)
      detail::require_equal("a stride of the scores", scores.strides()[axis],
                            "that of score_view()", whole.strides()[axis]);
  const auto rows_in = [&](Arena& arena) { return arena.take<float>(shape.max_rows * shape.dim); };
  float* const mean_rows = means.reserve_amortised(keys.batch() * keys.heads() * shape.dim);
  workers.reserve(executor.workers(), [&](Arena& arena) {
    RowReader(arena, shape.read.dim());
    rows_in(arena);
  });
  executor.run(keys.batch() * keys.heads(), [&](Index task, int worker) {
    Arena arena = workers[worker];
    RowReader reader(arena, shape.read.dim());
    float* const first = rows_in(arena);
    RowWriter rows(first, shape.dim, reader);
    fill(task / keys.heads(), task % keys.heads(), rows);
    float* const mean = mean_rows + task * shape.dim;
    std::fill_n(mean, shape.dim, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    for (Index i = 0; i < rows.count(); ++i)
      for (Index c = 0; c < shape.dim; ++c) mean[c] += first[i * shape.dim + c] * share;
  });
  detail::score_all_keys({mean_rows, 1, keys, nullptr, Aggregation::max}, scores.data(), workers,
                         executor);
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
