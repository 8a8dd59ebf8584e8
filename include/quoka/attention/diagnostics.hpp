// Measures of a selection's loss, for engines that want to watch it: attention that it keeps, error
// of the output, and agreement of two selections.
//
//   mass kept      share[row] = sum over kept t of p[row][t], p = softmax over the past of the
//                  row's logits; by exp(lse over the kept keys - lse over all of them)
//   output error   |out - reference| / |reference|, Frobenius norms over all that was added
//   overlap        keys that two selections share, as a share of the second's
//
// mass_kept: 2 * q_heads * q_len * keys * head_dim FLOPs for keys = count and keys = kv_len;
// past_lse is the second part alone; call it once to compare several selections. All else is linear
// in what it reads. The mass is that of the past, whose keys the selection was made from: neither
// the chunk's own keys nor sink logits take part. Mass is not answers: a key that decides one may
// hold little of it. Not included by quoka.hpp.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/rows/tensor.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Log-sum-exp over the past's keys (all, or those of `selection`), without values: [batch, q_heads,
// q_len], -inf for a row that sees none of them. q [batch, q_heads, q_len, head_dim], past_k
// [batch, kv_heads, kv_len, head_dim]. Scale, soft-cap and sliding window as in attention(); sink
// logits are left out. Throws std::invalid_argument when shapes do not fit together.
inline Tensor<float, 3> past_lse(const Rows& q, const Rows& past_k,
                                 const AttentionOptions& options = {},
                                 ExecutorRef executor = SerialExecutor{},
                                 const Selection* selection = nullptr) {
  // Attention needs values: the keys' first channel is the least there is to read.
  detail::require_at_least("head_dim", past_k.dim(), 1);
  Past past(past_k, past_k.first_channels(1));
  past.selection = selection;
  AttentionOptions past_alone = options;
  past_alone.sinks = {};
  past_alone.causal = false;  // there is no chunk
  Tensor<float> out(q.batch(), q.heads(), q.len(), 1);
  Tensor<float, 3> lse(q.batch(), q.heads(), q.len());
  attention(q, past, {}, {out, lse}, past_alone, executor);
  return lse;
}

// Share of each query row's attention to the past that falls on the kept keys: [batch, q_heads,
// q_len], in [0, 1] up to rounding. 1 for a row that sees no key of the past. lse is past_lse() of
// all keys. Shapes, options and exceptions are those of past_lse.
inline Tensor<float, 3> mass_kept(const Rows& q, const Rows& past_k, const Selection& selection,
                                  TensorView<const float, 3> lse,
                                  const AttentionOptions& options = {},
                                  ExecutorRef executor = SerialExecutor{}) {
  Tensor<float, 3> share = past_lse(q, past_k, options, executor, &selection);
  const TensorView<float, 3> rows = share;
  detail::require_sizes("lse", lse.sizes(), rows.sizes());
  for (Index b = 0; b < rows.batch(); ++b)
    for (Index head = 0; head < rows.heads(); ++head)
      for (Index i = 0; i < rows.len(); ++i) {
        const float all = lse.at(b, head, i);
        float& kept = rows.at(b, head, i);
        kept = all == -std::numeric_limits<float>::infinity() ? 1.0f : std::exp(kept - all);
      }
  return share;
}
// The same, with past_lse() computed here.
inline Tensor<float, 3> mass_kept(const Rows& q, const Rows& past_k, const Selection& selection,
                                  const AttentionOptions& options = {},
                                  ExecutorRef executor = SerialExecutor{}) {
  const Tensor<float, 3> lse = past_lse(q, past_k, options, executor);
  return mass_kept(q, past_k, selection, lse, options, executor);
}

// The shares of many rows, over chunks, layers and prompts: 4 bytes each. NaN in one row is NaN in
// every figure.
class RowShares {
 public:
  // The rows of one call, as mass_kept() returns them.
  void add(TensorView<const float, 3> shares) {  // [batch, q_heads, q_len]
    for (Index b = 0; b < shares.batch(); ++b)
      for (Index head = 0; head < shares.heads(); ++head)
        for (Index i = 0; i < shares.len(); ++i) rows_.push_back(shares.at(b, head, i));
  }
  // All rows of another collection.
  void add(const RowShares& other) {
    rows_.insert(rows_.end(), other.rows_.begin(), other.rows_.end());
  }

  Index rows() const { return std::ssize(rows_); }     // added so far
  double mean() const { return mean_of_worst(1.0); }   // over all rows; 1 without rows
  double worst() const { return mean_of_worst(0.0); }  // the least share of a row; 1 without rows
  // Mean of the worst part of the rows: of fraction * rows() of them, rounded up, at least one; 1
  // where there are no rows. Throws std::invalid_argument for a fraction outside [0, 1].
  double mean_of_worst(double fraction) const {
    if (!(fraction >= 0.0 && fraction <= 1.0))
      detail::fail_range("the fraction of rows", fraction, "[0, 1]");
    if (rows_.empty()) return 1.0;
    const auto wanted = static_cast<Index>(std::ceil(fraction * static_cast<double>(rows())));
    const Index count = std::clamp<Index>(wanted, 1, rows());
    std::vector<float> ordered = rows_;
    for (const float share : ordered)
      if (std::isnan(share)) return static_cast<double>(share);
    std::nth_element(ordered.begin(), ordered.begin() + (count - 1), ordered.end());
    double sum = 0.0;
    for (Index i = 0; i < count; ++i) sum += static_cast<double>(ordered.data()[i]);
    return sum / static_cast<double>(count);
  }

 private:
  std::vector<float> rows_;
};

// |out - reference| / |reference|, summed in double over every pair that is added.
class RelativeError {
 public:
  // Rows of one shape, of any formats. Throws std::invalid_argument when shapes differ.
  void add(const Rows& out, const Rows& reference) {
    detail::require_sizes("out", out.sizes(), reference.sizes());
    if (out.empty()) return;
    const auto dim = static_cast<std::size_t>(out.dim());
    std::vector<float> is(dim), should(dim);
    for (Index b = 0; b < out.batch(); ++b)
      for (Index head = 0; head < out.heads(); ++head)
        for (Index i = 0; i < out.len(); ++i) {
          out.format().widen(out.row(b, head, i), out.shape(head), is.data());
          reference.format().widen(reference.row(b, head, i), reference.shape(head), should.data());
          for (std::size_t c = 0; c < dim; ++c) {
            const double difference = double{is[c]} - double{should[c]};
            difference_ += difference * difference;
            norm_ += double{should[c]} * double{should[c]};
          }
        }
  }
  // All that was added to another one.
  void add(const RelativeError& other) {
    difference_ += other.difference_;
    norm_ += other.norm_;
  }

  // 0 where nothing differs, infinity where only the reference is zero.
  double value() const { return difference_ == 0.0 ? 0.0 : std::sqrt(difference_ / norm_); }

 private:
  double difference_ = 0.0, norm_ = 0.0;
};

// The same of one pair.
inline double output_error(const Rows& out, const Rows& reference) {
  RelativeError error;
  error.add(out, reference);
  return error.value();
}

// Share of `other`'s keys that `selection` holds too, over all sequences and heads; 1 where `other`
// holds none. One of KV heads and one of query heads are compared query head by query head. Throws
// std::invalid_argument when the two are for caches of different shape.
inline double overlap(const Selection& selection, const Selection& other) {
  const Index heads = std::max(selection.heads(), other.heads());
  detail::require_multiple("the more heads of two selections", heads, "the fewer",
                           std::min(selection.heads(), other.heads()));
  selection.require_fits(other.batch(), other.heads(), selection.heads(), other.kv_len());
  const Index selection_group = heads / selection.heads(), other_group = heads / other.heads();
  if (other.sum_of_counts() == 0 || selection.is_all()) return 1.0;
  const auto wanted_in_all = static_cast<double>(other.sum_of_counts() * other_group);
  if (other.is_all())
    return static_cast<double>(selection.sum_of_counts() * selection_group) / wanted_in_all;
  Index common = 0;
  for (Index b = 0; b < other.batch(); ++b)
    for (Index head = 0; head < heads; ++head) {
      const auto kept = selection.row(b, head / selection_group);
      auto at = kept.begin();
      for (const Position wanted : other.row(b, head / other_group)) {  // both ascend
        while (at != kept.end() && *at < wanted) ++at;
        if (at != kept.end() && *at == wanted) ++common;
      }
    }
  return static_cast<double>(common) / wanted_in_all;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
