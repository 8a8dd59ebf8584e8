// The parts that selectors are made of: loops over KV heads and the queries of each, arithmetic of
// rows, and the rows of the queries that score (RowWriter, FillRows).
//
// key_scores.hpp takes the mean of these rows' logits, softmax_scores.hpp that of their softmax.
// The methods of this library are written with these headers. Rows with a NaN or an infinity are
// left out.
#pragma once

#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/selector.hpp>

#include <algorithm>

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

// f(head, i) for each query i of the query heads that share KV head `kv_head`.
template <class F>
void for_each_query(const SelectorInput& input, Index kv_head, F&& f) {
  const Index group = input.group();
  for (Index head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (Index i = 0; i < input.q.len(); ++i) f(head, i);
}

// 1 / |x| of x [dim]: 0 for a zero or infinite vector, NaN for one with a NaN.
inline float inverse_norm(const float* x, Index dim) { return detail::inverse_norm_of_row(x, dim); }
// sum over c of a[c] * b[c]
inline float dot(const float* a, const float* b, Index dim) {
  return detail::sum_of_products(a, b, dim);
}
// sum[c] += x[c], or from nothing: sum[c] = x[c]. [dim]
inline void add_row(const float* x, Index dim, bool first, float* sum) {
  if (first)
    std::copy_n(x, dim, sum);
  else
    detail::add_row(x, dim, sum);
}
// to[c] = x[c] * factor. [dim] Is none of to NaN or infinite?
inline bool scale_row(const float* x, Index dim, float factor, float* to) {
  return detail::scale_row(x, dim, factor, to);
}
// Is no element of x [dim] NaN or infinite?
inline bool is_finite_row(const float* x, Index dim) {
  return detail::is_finite_row(x, dim, inverse_norm(x, dim));
}

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

// Room for the rows that score for one head.
struct RowRoom {
  Index max_rows, dim;  // rows at most, and their channels
  Index query_dim = 0;  // channels of the queries that fill() reads; 0 if it reads none
};

// How softmax_scores() makes a list's scores of its rows.
struct SoftmaxRule {
  // The mean over the rows of their softmax, or its maximum.
  Aggregation over = Aggregation::mean;
  // The sum over the rows of e^(logit - m), m their largest logit, in place of their softmax.
  bool joint = false;
  float softcap = 0.0f;  // if not 0, caps the logits, as attention does

  // Codes serve neither a cap, nor a maximum over the rows, nor joint rows.
  bool is_for_float() const { return softcap != 0.0f || over != Aggregation::mean || joint; }
};

}  // namespace QUOKA_ABI
}  // namespace quoka
