// Softmax mass of one KV head in float, by attention's own tiles, without values.
//
//   weight(m, t)   = e^(logit of row m and key t - a reference)
//   score[list][t] = mean, or maximum, over the list's rows m of
//                    weight(m, t) / (past(m) + chunk(m));
//                    of joint rows the sum of weight(m, t), all against the list's largest logit
//
// That score is the key's mass, which MassSelector calls its share. past(m) is the sum of row m's
// weights over the keys, chunk(m) that over the chunk's keys that it sees (mass_rows.hpp). A row
// whose sums are not finite does not count; a key with a NaN or an infinity has no weight, and the
// score -infinity.
//
// 2 * rows * keys * dim FLOPs and one read of the keys a pass. Weights are taken against a block's
// own maximum and kept, 4 bytes per row and key, until the rows' sums are known. A pass has as many
// panels of rows as fit tuning::mass_weight_bytes, and one at least. softmax_mass() of
// softmax_scores.hpp runs the stages: for each pass weigh and add, over ranges of keys, with
// find_factors between them. code_mass.hpp does the same by 8-bit codes.
//
// Not for callers: softmax_scores.hpp includes it where definitions are compiled (QUOKA_DEFINES).
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_scores.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/mass_rows.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// One KV head: memory that its tasks share, and the stages. A pass or a range beyond the last is
// empty.
class FloatMass {
 public:
  // weights: memory of a pass, weight_bytes().
  FloatMass(Arena& arena, const MassShape& shape, MassRows& rows, std::byte* weights)
      : shape_(shape),
        mass_rows_(rows),
        weights_(reinterpret_cast<float*>(weights)),
        hidden_(arena.take<std::uint8_t>(shape.keys)),
        list_max_(arena.take<float>(shape.lists)),
        list_factor_(arena.take<float>(shape.lists)) {
    const Index lanes = panels_at_once(shape) * width();
    for (float** of_blocks : {&block_max_, &block_sum_})
      *of_blocks = arena.take<float>(blocks() * lanes);
    for (float** of_rows : {&row_max_, &factors_}) *of_rows = arena.take<float>(lanes);
  }

  // Panels of a pass, as many as the weight buffer holds.
  static Index panels_at_once(const MassShape& shape) {
    const KernelSizes sizes = kernel_sizes();
    const Index panel = std::max<Index>(1, shape.keys) * sizes.panel_rows * Index{sizeof(float)};
    return std::min({shape.panels(), sizes.panels_per_task,
                     std::max<Index>(1, tuning::mass_weight_bytes / panel)});
  }
  static Index passes(const MassShape& shape) {
    return shape.rows() == 0 ? 0 : ceil_div(shape.panels(), panels_at_once(shape));
  }
  static Index weight_bytes(const MassShape& shape) {
    return panels_at_once(shape) * shape.keys * width() * Index{sizeof(float)};
  }
  // Some blocks each: enough work that a task is worth its while.
  static KeyRanges ranges(const MassShape& shape) {
    return KeyRanges::by_size(shape.keys, 8 * kernel_sizes().block_keys);
  }

  // The keys of the head.
  void take_keys(const HeadRows& keys) { keys_ = keys; }

  // Weights of a range of the keys.
  void weigh(Index pass, Index range, const MassScratch& s) {
    const auto [begin, end] = ranges(shape_).of(range);
    if (pass >= passes(shape_)) return;
    if (pass == 0) std::fill(hidden_ + begin, hidden_ + end, std::uint8_t{0});
    RowKeys keys(keys_, shape_.keys, s.tiles);
    keys.walk({begin, end}, panels(pass),
              [&](Index p, const KeyRange& block_keys, const PackedBlock& block) {
                const PanelSums sums =
                    mass_rows_.weigh(first(pass) + p, block, block_keys.count(), nullptr, s.logits,
                                     weights_of(p, block_keys.begin), hidden_ + block_keys.begin);
                const Index to = at(p, block_keys.begin / kernel_sizes().block_keys);
                std::copy_n(sums.max, width(), block_max_ + to);
                std::copy_n(sums.sum, width(), block_sum_ + to);
              });
  }

  // The factors that take each row's weights to its part of the scores.
  void find_factors(Index pass) {
    for (Index p = 0; p < panels(pass); ++p)
      for (Index i = 0; i < width(); ++i) {
        const Index row = (first(pass) + p) * width() + i;
        factors_[p * width() + i] = 0.0f;
        if (row >= shape_.rows()) continue;
        const Index first_block = at(p, 0) + i;
        const auto [reference, of_chunk, sum] =
            row_sum(mass_rows_.chunk[row], block_max_ + first_block, block_sum_ + first_block,
                    blocks(), width());
        row_max_[p * width() + i] = reference;
        if (!std::isfinite(sum))
          for (Index key = 0; key < shape_.keys; ++key) weights_of(p, key)[i] = 0.0f;
        factors_[p * width() + i] = static_cast<float>(mass_rows_.share_of(row, of_chunk, sum));
      }
    if (shape_.rule.joint) join_rows(pass);
  }

  // A range to the scores of all lists.
  void add(Index pass, Index range, float* scores) {
    const auto [begin, end] = ranges(shape_).of(range);
    const Index first_row = first(pass) * width(),
                end_row = std::min(first_row + panels(pass) * width(), shape_.rows());
    for (Index list = first_row / shape_.list_rows; list * shape_.list_rows < end_row; ++list) {
      float* const to = scores + list * shape_.score_step;
      const Index list_begin = list * shape_.list_rows, list_end = list_begin + shape_.list_rows;
      if (list_begin >= first_row)
        std::fill(to + begin, to + end, 0.0f);
      else if (shape_.rule.joint)
        for (Index key = begin; key < end; ++key) to[key] *= list_factor_[list];
      for (Index key = begin; key < end; key += kernel_sizes().block_keys)
        add_rows(std::max(list_begin, first_row) - first_row,
                 std::min(list_end, end_row) - first_row - 1, key,
                 std::min(key + kernel_sizes().block_keys, end), to);
    }
    for (Index list = 0; pass + 1 == passes(shape_) && list < shape_.lists; ++list)
      for (Index t = begin; t < end; ++t)
        if (hidden_[t] != 0) scores[list * shape_.score_step + t] = -infinity;
  }

 private:
  static Index width() { return MassRows::width(); }

  Index blocks() const { return ceil_div(shape_.keys, kernel_sizes().block_keys); }
  Index first(Index pass) const { return pass * panels_at_once(shape_); }
  Index panels(Index pass) const {
    return std::clamp<Index>(shape_.panels() - first(pass), 0, panels_at_once(shape_));
  }
  Index at(Index p, Index block) const { return (p * blocks() + block) * width(); }
  float* weights_of(Index p, Index key) const {
    return weights_ + (p * shape_.keys + key) * width();
  }

  // Weights of all rows of a list are against its largest logit, which a pass may raise.
  void join_rows(Index pass) {
    const Index lanes = panels(pass) * width(), first_row = first(pass) * width();
    if (pass == 0) std::fill_n(list_max_, shape_.lists, -infinity);
    std::copy_n(list_max_, shape_.lists, list_factor_);
    for (Index i = 0; i < lanes; ++i)
      if (factors_[i] > 0.0f) {
        float& max = list_max_[(first_row + i) / shape_.list_rows];
        max = std::max(max, row_max_[i]);
      }
    for (Index list = 0; list < shape_.lists; ++list)
      list_factor_[list] =
          list_factor_[list] == -infinity ? 0.0f : std::exp(list_factor_[list] - list_max_[list]);
    for (Index i = 0; i < lanes; ++i)
      if (factors_[i] > 0.0f)
        factors_[i] = std::exp(row_max_[i] - list_max_[(first_row + i) / shape_.list_rows]);
  }

  // Rows [row, last_row] of the pass to keys [begin, end), which lie in one block.
  void add_rows(Index row, Index last_row, Index begin, Index end, float* to) const {
    alignas(64) float factors[most_panels_per_task * most_panel_rows];
    const Index first_panel = row / width(), panels = last_row / width() + 1 - first_panel,
                block = begin / kernel_sizes().block_keys;
    for (Index p = 0; p < panels; ++p) {
      const Index lane = (first_panel + p) * width();
      panel_factors(block_max_ + at(first_panel + p, block), row_max_ + lane, factors_ + lane,
                    row - lane, last_row - lane, factors + p * width());
    }
    add_weights(weights_of(first_panel, begin), panels, shape_.keys * width(), factors, end - begin,
                shape_.rule.over == Aggregation::max, to + begin);
  }

  const MassShape& shape_;
  MassRows& mass_rows_;
  HeadRows keys_;
  float* const weights_;           // [panel of the pass][key][lane]
  float *block_max_, *block_sum_;  // [panel of the pass][block][lane]
  float *row_max_, *factors_;      // [panel of the pass][lane]
  std::uint8_t* hidden_;           // [keys] with a NaN or an infinity
  // [lists] joint: the largest logit so far, and the factor that rescales scores of earlier passes.
  float *list_max_, *list_factor_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
