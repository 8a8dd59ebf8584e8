// Definitions of past_sums.hpp.
#pragma once

#include <quoka/base/check.hpp>
#include <quoka/cache/past_sums.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/packing/format_table.hpp>
#include <quoka/simd/simd.hpp>

#include <algorithm>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
QUOKA_FUNC void PastSums::Scratch::reserve(const Rows& keys, const Rows& values) {
  k.reserve(keys), v.reserve(values);
  part.reserve(round_up(keys.dim(), simd::lanes) + round_up(values.dim(), simd::lanes));
  total.reserve(1 + keys.dim() + values.dim());
}

QUOKA_FUNC void PastSums::begin(const Rows& k, const Rows& v, Index capacity, int workers) {
  detail::require_sizes("the values", v.sizes(), {k.batch(), k.heads(), k.len(), v.dim()});
  k_ = k, v_ = v;
  if (k.dim() != k_dim_) sums_.truncate(0);
  k_dim_ = k.dim();
  sums_.reshape(k.batch(), k.heads(), width());
  known_ = sums_.len();
  sums_.grow(k.len() / step, capacity / step);
  scratch_.reserve(workers, k, v);
}

QUOKA_FUNC void PastSums::rest(Index head, std::span<const Position> kept, float* to, int worker) {
  Scratch& scratch = scratch_[worker];
  const Index b = head / k_.heads(), kv_head = head % k_.heads();
  const Index len = k_.len(), steps = len / step, n = std::ssize(kept), channels = width();
  for (Index i = known_; i < steps; ++i) {
    double* const sum = sums_.row(b, kv_head, i);
    if (i > 0)
      std::copy_n(sums_.row(b, kv_head, i - 1), channels, sum);
    else
      std::fill_n(sum, channels, 0.0);
    add(head, {i * step, (i + 1) * step}, 1.0, sum, scratch);
  }
  double* const total = scratch.total.data();
  std::fill_n(total, channels, 0.0);
  if (2 * n > len) {
    Index at = 0;
    for (const Position position : kept) {
      add(head, {at, position}, 1.0, total, scratch);
      at = Index{position} + 1;
    }
    add(head, {at, len}, 1.0, total, scratch);
  } else {
    if (steps > 0) std::copy_n(sums_.row(b, kv_head, steps - 1), channels, total);
    add(head, {steps * step, len}, 1.0, total, scratch);
    add(head, {0, n, kept.data()}, -1.0, total, scratch);
  }
  const double count = total[0], share = count > 0.0 ? 1.0 / count : 0.0;
  to[0] = count > 0.0 ? static_cast<float>(std::log(count)) : -simd::infinity;
  for (Index c = 1; c < channels; ++c) to[c] = static_cast<float>(total[c] * share);
}

QUOKA_FUNC void PastSums::add(Index head, const Some& rows, double sign, double* to,
                              Scratch& scratch) const {
  constexpr Index together = 64;
  for (Index first = rows.begin; first < rows.end; first += together) {
    const Some few{first, std::min(rows.end, first + together), rows.list};
    if (add_together(head, few, sign, to, scratch)) continue;
    const Index b = head / k_.heads(), kv_head = head % k_.heads();
    for (Index i = few.begin; i < few.end; ++i)  // but those that are not finite
      add_sums(scratch.k.read(k_, b, kv_head, few[i]), scratch.v.read(v_, b, kv_head, few[i]), 1,
               sign, to);
  }
}

namespace detail {

// to += rows [begin, end), channel by channel, in float. Rows of whole packets are read where they lie.
inline void sum_rows(const HeadRows& rows, Index begin, Index end, FloatRow& reader, float* to) {
  if (rows.shape.dim % simd::lanes != 0) {
    for (Index i = begin; i < end; ++i) add_row(reader.read(rows, i), rows.shape.dim, to);
    return;
  }
  const float one = 1.0f;
  const float* const weight = &one;
  const HeadRows some = rows.from(begin);
  RowWalk walk(some.at, some.row_bytes(), RowsAhead::most, end - begin);
  for (Index i = 0; i < end - begin; i += RowsAhead::most) {
    const Index n = std::min(RowsAhead::most, end - begin - i);
    ConstRow memory[RowsAhead::most];
    RowsAhead ahead;
    ahead.take(walk, n);
    rows.format->token_values(some.at.run(i, n, memory), n, rows.shape, &weight, 0, 1, to, &ahead);
  }
}

}  // namespace detail

QUOKA_FUNC bool PastSums::add_together(Index head, const Some& rows, double sign, double* to,
                                       Scratch& scratch) const {
  const Index b = head / k_.heads(), kv_head = head % k_.heads();
  const Index dim = k_.dim(), v_dim = v_.dim();
  const auto of = [&](const Rows& all) {
    const HeadRows x = all.head(b, kv_head);
    return rows.list != nullptr ? x.listed(rows.list) : x;
  };
  float *const keys = scratch.part.data(), *const values = keys + round_up(dim, simd::lanes);
  std::fill_n(keys, dim, 0.0f), std::fill_n(values, v_dim, 0.0f);
  detail::sum_rows(of(k_), rows.begin, rows.end, scratch.k, keys);
  detail::sum_rows(of(v_), rows.begin, rows.end, scratch.v, values);
  return add_sums(keys, values, rows.end - rows.begin, sign, to);
}

QUOKA_FUNC bool PastSums::add_sums(const float* keys, const float* values, Index rows, double sign,
                                   double* to) const {
  const Index dim = k_.dim(), v_dim = v_.dim();
  if (!detail::all_finite(keys, dim) || !detail::all_finite(values, v_dim)) return false;
  to[0] += sign * static_cast<double>(rows);
  for (Index c = 0; c < dim; ++c) to[1 + c] += sign * static_cast<double>(keys[c]);
  for (Index c = 0; c < v_dim; ++c) to[1 + dim + c] += sign * static_cast<double>(values[c]);
  return true;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
