// Softmax mass of one KV head: the rows, and their products with its keys in float, by attention's
// own tiles, without values. code_mass.hpp multiplies the same rows by 8-bit codes.
//
//   weight(m, t)   = e^(logit of row m and key t - a reference)
//   score[list][t] = mean, or maximum, over the list's rows m of
//                    weight(m, t) / (past(m) + chunk(m));
//                    of joint rows the sum of weight(m, t), all against the list's largest logit
//
// That score is the key's mass, which MassSelector calls its share. past(m) is the sum of row m's
// weights over the keys, chunk(m) that over the chunk's keys that it sees: these are always
// multiplied in float, and get no score of their own. A row whose sums are not finite does not
// count; a key with a NaN or an infinity has no weight, and the score -infinity.
//
//   MassShape     sizes of a KV head of a call
//   MassScratch   memory of one worker
//   MassRows      the rows, list after list; what the chunk's keys get
//   RowKeys       keys packed a block at a time
//   FloatMass     the scores of the past's keys
//
// 2 * rows * keys * dim FLOPs and one read of the keys a pass. Weights are taken against a block's
// own maximum and kept, 4 bytes per row and key, until the rows' sums are known. A pass has as many
// panels of rows as fit tuning::mass_weight_bytes, and one at least. softmax_mass() of
// softmax_scores.hpp runs the stages: for each pass weigh and add, over ranges of keys, with
// find_factors between them.
//
// A mass p of a row and a key among `keys` is off by at most p times
// exp(2 D) - 1 + 2^-24 (3 ln(keys / p) + 160). D is the largest error of the row's logits
// (FloatError of kernels/error_bounds.hpp). A score is off by 2^-24 of itself for each packet of
// rows, too.
//
// Not for callers: softmax_scores.hpp includes it where definitions are compiled (QUOKA_DEFINES).
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/codes.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_scores.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/query_rows.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- the rows of a head -------------------------------------------------------------------------
//
// A list has one score for each key (SoftmaxScoring). Its last rows may be unused: they are zeros
// and count as nothing.

// One KV head of a call.
struct MassShape {
  Index lists;             // that share this KV head's keys
  Index list_rows;         // rows of each, an even number: the last ones may be unused
  Index score_step;        // from the scores of one list to those of the next
  Index dim, keys, chunk;  // keys that get scores, and of the chunk
  SoftmaxRule rule;        // of the call

  Index rows() const { return lists * list_rows; }
  Index panels() const { return ceil_div(rows(), kernel_sizes().panel_rows); }
};

// Memory of one worker: tiles, logits and weights for float, the rest for codes.
struct MassScratch {
  // query_dim: channels of the queries that rows are made from.
  MassScratch(Arena& arena, const MassShape& shape, Index query_dim,
              const KernelSizes& sizes = kernel_sizes())
      : reader(arena, std::max(shape.dim, query_dim)),
        tiles(arena.take<float>(ceil_div(sizes.block_keys, sizes.tile_rows) *
                                key_tile_size(shape.dim))),
        logits(arena.take<float>(round_up(Index{tuning::most_block_keys}, sizes.tile_rows) *
                                 sizes.panel_rows)),
        weights(arena.take<float>(sizes.block_keys * sizes.panel_rows)),
        sums(arena.take<float>(shape.rows() * sizes.lanes)),
        gathered(arena.take<std::uint8_t>(2 * code_block_bytes(shape.dim))) {}

  RowReader reader;
  float* tiles;            // a packed block of keys
  float* logits;           // of a block of keys and a panel
  float* weights;          // the same
  float* sums;             // [rows][lanes]
  std::uint8_t* gathered;  // two blocks of codes
};

// Keys as rows of memory, packed for float. A block's key_factors are NaN for a key that is not
// finite.
class RowKeys {
 public:
  RowKeys(const HeadRows& rows, Index count, float* tiles) : rows_(rows), count_(count) {
    found_.format = rows.format, found_.shape = rows.shape;
    block_.keys = reinterpret_cast<std::byte*>(tiles);
  }

  // fold(p, keys of the block, block) for panels p < panels and each block of `range`, which may be
  // part of the keys. A block is packed once for all panels, and rows of the next one are
  // prefetched beside them.
  template <class Fold>
  void walk(const KeyRange& range, Index panels, Fold&& fold) {
    const Index step = kernel_sizes().block_keys;
    for (KeyRange keys{range.begin, range.begin}; keys.begin < range.end; keys.begin = keys.end) {
      keys.end = std::min(keys.begin + step, range.end);
      pack(keys);
      find({keys.end, std::min(keys.end + step, count_)});
      BlockPrefetch next(found_.prefetch(), {}, panels);
      for (Index p = 0; p < panels; ++p) {
        next.begin_panel();
        fold(p, keys, block_);
        next.end_panel();
      }
    }
  }

 private:
  void pack(const KeyRange& keys) {
    if (found_at_ != keys.begin) find(keys);
    float* const tiles = reinterpret_cast<float*>(block_.keys);
    pack_keys(*rows_.format, found_.at, keys.count(), rows_.shape, tiles);
    block_.keys_fit = finite(tiles, 0, keys.count());
    for (Index i = 0; !block_.keys_fit && i < keys.count(); ++i)
      block_.key_factors[i] =
          finite(tiles, i, i + 1) ? 1.0f : std::numeric_limits<float>::quiet_NaN();
  }
  void find(const KeyRange& keys) {
    rows_.find(keys.begin, keys.count(), found_.at);
    found_.count = keys.count(), found_at_ = keys.begin;
  }
  // Are keys [first, last) of the tiles finite?
  bool finite(const float* tiles, Index first, Index last) const {
    return packed_keys_finite(tiles, first, last, rows_.shape.dim);
  }

  HeadRows rows_;
  Index count_;
  BlockRows found_;
  PackedBlock block_;
  Index found_at_ = -1;  // the first key of the rows that were found last
};

// Sums of a panel's rows over a block of keys.
struct PanelSums {
  alignas(64) float max[most_panel_rows], sum[most_panel_rows];
};

// The rows of one KV head, which its tasks share. take_rows() for each list and pack() come first,
// then see_chunk().
class MassRows {
 public:
  MassRows(Arena& arena, const MassShape& shape)
      : data(arena.take<float>(shape.rows() * shape.dim)),
        part(arena.take<float>(shape.rows())),
        chunk_score(arena.take<double>(shape.lists)),
        chunk(arena.take<SoftmaxState<float>>(shape.rows())),
        ends(arena.take<Index>(round_up(shape.rows(), width()))),
        shape_(shape),
        panels_(arena.take<float>(shape.panels() * width() * shape.dim)) {}

  float* const data;                 // [rows][dim] times the logit scale; zeros in unused rows
  float* const part;                 // [rows] 1 / the list's rows for a mean, else 1; 0: unused
  double* const chunk_score;         // [lists] the chunk's part
  SoftmaxState<float>* const chunk;  // [rows] over the chunk's keys
  Index* const ends;                 // [rows] one past the last key of the chunk that it sees

  static Index width() { return kernel_sizes().panel_rows; }  // of a panel
  Index panel_count(Index p) const { return std::min(width(), shape_.rows() - p * width()); }

  // The first `count` rows of a list are there; its others are unused.
  void take_rows(Index list, Index count) {
    const Index first = list * shape_.list_rows, unused = shape_.list_rows - count;
    const float of_row = shape_.rule.over == Aggregation::max || shape_.rule.joint
                             ? 1.0f
                             : 1.0f / static_cast<float>(std::max<Index>(count, 1));
    std::fill_n(part + first, count, of_row);
    std::fill_n(part + first + count, unused, 0.0f);
    std::fill_n(ends + first + count, unused, Index{0});
    std::fill_n(data + (first + count) * shape_.dim, unused * shape_.dim, 0.0f);
    chunk_score[list] = 0.0;
  }
  // Packs all rows for weigh(), and empties their softmax states over the chunk.
  void pack() {
    for (Index p = 0; p < shape_.panels(); ++p) {
      const float* of_panel[most_panel_rows];
      for (Index i = 0; i < panel_count(p); ++i)
        of_panel[i] = data + (p * width() + i) * shape_.dim;
      pack_queries(of_panel, panel_count(p), shape_.dim, 1.0f, width(), panel(p));
    }
    std::fill_n(chunk, shape_.rows(), empty_row);
  }
  void see_chunk(const HeadRows& chunk_k, const MassScratch& s) {
    RowKeys keys(chunk_k, shape_.chunk, s.tiles);
    keys.walk({0, shape_.chunk}, shape_.panels(),
              [&](Index p, const KeyRange& range, const PackedBlock& block) {
                LaneRanges ranges;
                const bool cut =
                    find_ranges(nullptr, ends + p * width(), panel_count(p), range, ranges);
                const PanelSums sums = weigh(p, block, range.count(), cut ? &ranges : nullptr,
                                             s.logits, s.weights, nullptr);
                merge_rows(sums.max, sums.sum, panel_count(p), chunk + p * width());
              });
  }

  // Weights of panel p for the block's first `count` keys, against the largest logit. hidden: takes
  // note of keys that have none.
  PanelSums weigh(Index p, const PackedBlock& block, Index count, const LaneRanges* ranges,
                  float* logits, float* to, std::uint8_t* hidden) const {
    PanelSums sums;
    weigh_block({reinterpret_cast<const float*>(block.keys), panel(p), shape_.dim,
                 block.keys_fit ? nullptr : block.key_factors},
                {count, ranges, nullptr, {.softcap = shape_.rule.softcap}}, logits, to, sums.max,
                sums.sum, hidden);
    return sums;
  }

  // What a row's weights count by: its part over their sum, in which the chunk has `of_chunk`. 0
  // where the sum is 0 or not finite. Adds the chunk's share to its score.
  double share_of(Index row, double of_chunk, double sum) {
    if (!(sum > 0.0 && std::isfinite(sum))) return 0.0;
    if (shape_.rule.joint) return static_cast<double>(part[row]);
    const double share = static_cast<double>(part[row]) / sum;
    chunk_score[row / shape_.list_rows] += share * of_chunk;
    return share;
  }

 private:
  float* panel(Index p) const { return panels_ + p * width() * shape_.dim; }

  const MassShape& shape_;
  float* panels_;  // the rows packed
};

// ---- in float -----------------------------------------------------------------------------------

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
