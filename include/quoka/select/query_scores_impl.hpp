// Definitions of query_scores.hpp.
#pragma once

#include <quoka/packing/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/steps/softmax_mass.hpp>

#include <algorithm>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {

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
  simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
  float tail = 0.0f;
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet scaled = simd::mul(simd::load_unaligned(x + c), simd::broadcast(factor));
    simd::store_unaligned(to + c, scaled);
    poison = simd::fma(scaled, simd::zero(), poison);
  }
  for (; c < dim; ++c) {
    to[c] = x[c] * factor;
    tail += to[c] * 0.0f;
  }
  return simd::reduce_add(poison) + tail == 0.0f;
}
QUOKA_FUNC bool is_finite_row(const float* x, Index dim) {
  return detail::is_finite_row(x, dim, detail::inverse_norm_of_row(x, dim));
}

namespace detail {

QUOKA_FUNC void MassScratch::reserve(Index row_count, Index keys, Index dim) {
  // A shorter cache may take more panels at once: whichever needs more.
  const Index panels =
      std::min(ceil_div(row_count, tuning::panel_rows), tuning::max_panels_per_task);
  const Index blocks = ceil_div(keys, tuning::block_keys), panel = keys * tuning::panel_rows;
  rows.reserve(row_count * dim);
  tiles.reserve(ceil_div(tuning::block_keys, tuning::tile_rows) * key_tile_size(dim));
  queries.reserve(panels * dim * tuning::panel_rows);
  const Index most = tuning::mass_weight_bytes / Index{sizeof(float)};
  weights.reserve_amortised(std::max(panel, std::min(panels * panel, most)));
  block_max.reserve_amortised(panels * blocks * tuning::panel_rows);
  block_sum.reserve_amortised(panels * blocks * tuning::panel_rows);
  row_max.reserve(panels * tuning::panel_rows);
  row_sum.reserve(panels * tuning::panel_rows);
}
}  // namespace detail

QUOKA_FUNC void RowSource::with_keys(Index b, Index head, Index heads,
                                     FunctionRef<void(detail::MassKeys&)> use) const {
  detail::RowKeys keys(rows_.head(b, head / (heads / rows_.heads())), rows_.len());
  use(keys);
}

QUOKA_FUNC void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                               QueryScoreState& state, ExecutorRef executor) {
  const Index max_rows = scoring.rows.max_rows, dim = scoring.rows.dim;
  const Index heads = scores.heads(), key_count = scores.len();
  if (key_count > 0)
    detail::require_equal("the scores' inner stride", scores.strides()[2], "that of an array", 1);
  state.mass.reserve(executor.workers(), max_rows, std::max(key_count, scoring.capacity), dim);
  for (int worker = 0; worker < executor.workers(); ++worker)  // so that no task allocates
    state.mass[worker].query.reserve(scoring.rows.read);
  executor.run(scores.batch() * heads, [&](Index task, int worker) {
    const Index b = task / heads, head = task % heads;
    detail::MassScratch& s = state.mass[worker];
    RowWriter rows(s.rows.data(), dim, s.query);
    scoring.fill(b, head, rows);
    float* const mass = key_count > 0 ? scores.row(b, head, 0) : nullptr;
    std::fill_n(mass, key_count, 0.0f);
    const float share = scoring.over == Aggregation::max
                            ? 1.0f
                            : 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    const auto add = [&](detail::MassKeys& head_keys) {
      detail::MassAccumulator(s.rows.data(), rows.count(), dim, head_keys, key_count, s, nullptr,
                              detail::LogitRule{.softcap = scoring.softcap})
          .add_to(mass, share, scoring.over);
    };
    scoring.keys.with_keys(b, head, heads, add);
  });
}

QUOKA_FUNC void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                                  TensorView<float, 3> scores, QueryScoreState& state,
                                  ExecutorRef executor) {
  detail::require_sizes("scores", scores.sizes(), {keys.batch(), keys.heads(), keys.len()});
  const auto whole = score_view(scores.data(), scores.batch(), scores.heads(), scores.len());
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (scores.sizes()[axis] > 1)
      detail::require_equal("a stride of the scores", scores.strides()[axis],
                            "that of score_view()", whole.strides()[axis]);
  state.mass.reserve(executor.workers(), shape.max_rows, 0, shape.dim);
  for (int worker = 0; worker < executor.workers(); ++worker)
    state.mass[worker].query.reserve(shape.read);
  float* const means = state.mean.reserve(keys.batch() * keys.heads() * shape.dim);
  executor.run(keys.batch() * keys.heads(), [&](Index task, int worker) {
    detail::MassScratch& s = state.mass[worker];
    float* const first = s.rows.data();
    RowWriter rows(first, shape.dim, s.query);
    fill(task / keys.heads(), task % keys.heads(), rows);
    float* const mean = means + task * shape.dim;
    std::fill_n(mean, shape.dim, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    for (Index i = 0; i < rows.count(); ++i)
      for (Index c = 0; c < shape.dim; ++c) mean[c] += first[i * shape.dim + c] * share;
  });
  detail::multiply_all_keys(means, keys, scores.data(), state.score, executor);
}

QUOKA_FUNC void exact_scores(const SelectorInput& input, Index n,
                             FunctionRef<Index(Index m)> position_of, Domain domain,
                             Aggregation over, TensorView<float, 3> scores, QueryScoreState& state,
                             ExecutorRef executor) {
  const Rows &q = input.q, &k = input.k;
  const Index group = input.group();
  const float logit_scale = input.logit_scale();
  const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
    for (Index r = 0; r < group; ++r)
      for (Index m = 0; m < n; ++m)
        rows.add(q, b, kv_head * group + r, position_of(m), logit_scale);
  };
  const QueryRows shape{group * n, k.dim(), q};
  if (domain == Domain::logit) return mean_logit_scores(shape, fill, k, scores, state, executor);
  softmax_scores({shape, fill, RowSource(k), input.capacity, over, input.softcap()}, scores, state,
                 executor);
}

QUOKA_FUNC void add_causal_mass(Index rows, const Index* ends, const HeadRows& keys,
                                Index key_count, Index dim, float share, float* mass,
                                CausalMassScratch& scratch) {
  std::fill_n(mass, key_count, 0.0f);
  detail::RowKeys head_keys(keys, key_count);
  detail::MassAccumulator(scratch.rows.data(), rows, dim, head_keys, key_count, scratch, ends)
      .add_to(mass, share, Aggregation::mean);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
