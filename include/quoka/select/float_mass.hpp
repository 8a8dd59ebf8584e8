// Softmax mass of one KV head in float, by attention's own tiles, without values.
//
//   score[set][t] = mean over the set's rows m of weight(m, t) / (past(m) + chunk(m)), or the maximum over them
//
// and, where rows are joint, the sum over them of weight(m, t), all against the set's largest logit
//
// A set is the rows of one head of the scores. past(m) is the sum of row m's weights over the keys, chunk(m) that over
// the chunk's keys that it sees, which get no score. A row whose sums are not finite does not count; a key with a NaN
// or an infinity has no weight, and the score -infinity.
//
// 2 * rows * keys * dim FLOPs and one read of the keys a pass. Weights are taken against a block's own maximum and
// kept, 4 bytes per row and key, until the rows' sums are known; a pass is as many panels of rows as have room
// (tuning::mass_weight_bytes). Stages: take_set, pack_rows, see_chunk; then for each pass weigh and add, over ranges of
// keys, with find_factors between them. Results do not depend on which worker runs them (SoftmaxMass of
// query_scores.hpp). code_mass.hpp does the same by 8-bit codes.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_scores.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/top_k.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// One KV head of a call.
struct MassShape {
  Index sets,
      set_rows;  // heads of the scores; rows of each, an even number: the last ones may be nobody's
  Index dim, keys, chunk;  // keys that get scores, and of the chunk
  Aggregation over;        // of a set's rows
  float softcap;           // 0: none
  bool joint;              // SoftmaxScoring::joint
  bool all_channels;       // of codes: else at least half (CodedChannels)

  Index rows() const { return sets * set_rows; }
  Index panels() const { return ceil_div(rows(), kernel_sizes().panel_rows); }
  Index blocks() const { return ceil_div(keys, kernel_sizes().block_keys); }
};

// The scores of one KV head: each set's `stride` behind the one before.
struct SetScores {
  float* data;
  Index stride;

  float* operator[](Index set) const { return data + set * stride; }
};

// How many panels of rows have room at a time.
inline Index panels_at_once(Index rows, Index keys) {
  const KernelSizes sizes = kernel_sizes();
  const Index panel = std::max<Index>(1, keys) * sizes.panel_rows * Index{sizeof(float)};
  return std::min({ceil_div(rows, sizes.panel_rows), sizes.panels_per_task,
                   std::max<Index>(1, tuning::mass_weight_bytes / panel)});
}

// Memory that the tasks of a KV head share: its rows, for codes as for float, and the weights in float.
struct HeadMass {
  HeadMass(Arena& arena, const MassShape& shape, Index weight_bytes)
      : HeadMass(arena, shape, panels_at_once(shape.rows(), shape.keys) * kernel_sizes().panel_rows,
                 weight_bytes) {}

  float* rows;         // [rows][dim] times the logit scale; zeros for nobody's
  float* part;         // [rows] of the row in its set's score; 0 for nobody's
  Index* ends;         // [rows] one past the last key of the chunk that it sees
  float* chunk_score;  // [sets] the chunk's part
  float *set_max,
      *set_factor;  // [sets] joint: the largest logit so far, and what earlier passes' scores are times
  SoftmaxState<float>* chunk;    // [rows] over the chunk's keys
  float* panels;                 // the rows packed
  float *block_max, *block_sum;  // [panel of the pass][block][lane]
  float *row_max, *factors;      // [panel of the pass][lane]
  std::uint8_t* hidden;          // [keys] with a NaN or an infinity
  std::byte* weights;            // of a pass: in float [panel][key][lane]

 private:
  HeadMass(Arena& arena, const MassShape& shape, Index lanes, Index weight_bytes)
      : rows(arena.take<float>(shape.rows() * shape.dim)),
        part(arena.take<float>(shape.rows())),
        ends(arena.take<Index>(round_up(shape.rows(), kernel_sizes().panel_rows))),
        chunk_score(arena.take<float>(shape.sets)),
        set_max(arena.take<float>(shape.sets)),
        set_factor(arena.take<float>(shape.sets)),
        chunk(arena.take<SoftmaxState<float>>(shape.rows())),
        panels(arena.take<float>(shape.panels() * kernel_sizes().panel_rows * shape.dim)),
        block_max(arena.take<float>(shape.blocks() * lanes)),
        block_sum(arena.take<float>(shape.blocks() * lanes)),
        row_max(arena.take<float>(lanes)),
        factors(arena.take<float>(lanes)),
        hidden(arena.take<std::uint8_t>(shape.keys)),
        weights(arena.take<std::byte>(weight_bytes)) {}
};

// Memory of one worker.
struct FloatScratch {
  FloatScratch(Arena& arena, Index dim) : FloatScratch(arena, dim, kernel_sizes()) {}

  float* tiles;    // a packed block of keys
  float* logits;   // of a block of keys and a panel
  float* weights;  // the same

 private:
  FloatScratch(Arena& arena, Index dim, const KernelSizes& sizes)
      : tiles(arena.take<float>(ceil_div(sizes.block_keys, sizes.tile_rows) * key_tile_size(dim))),
        logits(arena.take<float>(round_up(Index{tuning::most_block_keys}, sizes.tile_rows) *
                                 sizes.panel_rows)),
        weights(arena.take<float>(sizes.block_keys * sizes.panel_rows)) {}
};

// Keys as rows of memory, packed for float. A block's key_factors are NaN for a key that is not finite.
class RowKeys {
 public:
  RowKeys(const HeadRows& rows, Index count, float* tiles) : rows_(rows), count_(count) {
    found_.format = rows.format, found_.shape = rows.shape;
    block_.keys = reinterpret_cast<std::byte*>(tiles);
  }

  // fold(p, keys of the block, block) for panels p < panels and each block of `range`, which may be part of the keys.
  // A block is packed once for all panels, and rows of the next one are prefetched beside them.
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

class FloatMass {
 public:
  FloatMass(const MassShape& shape, const HeadMass& memory) : shape_(shape), m_(memory) {}

  static Index passes(const MassShape& shape) {
    return shape.rows() == 0 ? 0
                             : ceil_div(shape.panels(), panels_at_once(shape.rows(), shape.keys));
  }
  static Index weight_bytes(const MassShape& shape) {
    return panels_at_once(shape.rows(), shape.keys) * shape.keys * width() * Index{sizeof(float)};
  }
  // Some blocks each: enough work that a task is worth its while.
  static KeyRanges ranges(const MassShape& shape) {
    return KeyRanges::by_size(shape.keys, 8 * kernel_sizes().block_keys);
  }

  // Set `set` has its first `count` rows; the others are unused.
  void take_set(Index set, Index count) const {
    const Index first = set * shape_.set_rows;
    const float part = shape_.over == Aggregation::max || shape_.joint
                           ? 1.0f
                           : 1.0f / static_cast<float>(std::max<Index>(count, 1));
    std::fill_n(m_.part + first, count, part);
    std::fill_n(m_.part + first + count, shape_.set_rows - count, 0.0f);
    std::fill_n(m_.ends + first + count, shape_.set_rows - count, Index{0});
    std::fill_n(m_.rows + (first + count) * shape_.dim, (shape_.set_rows - count) * shape_.dim,
                0.0f);
    m_.chunk_score[set] = 0.0f;
    m_.set_max[set] = -infinity;
  }
  // Packs all rows, and empties their softmax states over the chunk.
  void pack_rows() const {
    for (Index p = 0; p < shape_.panels(); ++p) {
      const float* rows[most_panel_rows];
      for (Index i = 0; i < panel_count(p); ++i) rows[i] = m_.rows + (p * width() + i) * shape_.dim;
      pack_queries(rows, panel_count(p), shape_.dim, 1.0f, width(), panel(p));
    }
    std::fill_n(m_.chunk, shape_.rows(), empty_row);
  }
  void see_chunk(const HeadRows& chunk, const FloatScratch& s) const {
    RowKeys keys(chunk, shape_.chunk, s.tiles);
    keys.walk({0, shape_.chunk}, shape_.panels(),
              [&](Index p, const KeyRange& range, const PackedBlock& block) {
                LaneRanges ranges;
                const bool cut = ranges_until(m_.ends + p * width(), panel_count(p), range, ranges);
                const PanelSums sums = weigh(p, block, range.count(), cut ? &ranges : nullptr,
                                             s.logits, s.weights, nullptr);
                merge_rows(sums.max, sums.sum, panel_count(p), m_.chunk + p * width());
              });
  }

  // Weights of a range of `k`.
  void weigh(Index pass, Index range, const HeadRows& k, const FloatScratch& s) const {
    const auto [begin, end] = ranges(shape_).of(range);
    if (pass == 0) std::fill(m_.hidden + begin, m_.hidden + end, std::uint8_t{0});
    RowKeys keys(k, shape_.keys, s.tiles);
    keys.walk({begin, end}, panels(pass),
              [&](Index p, const KeyRange& block_keys, const PackedBlock& block) {
                const PanelSums sums =
                    weigh(first(pass) + p, block, block_keys.count(), nullptr, s.logits,
                          weights(p, block_keys.begin), m_.hidden + block_keys.begin);
                const Index to = at(p, block_keys.begin / kernel_sizes().block_keys);
                std::copy_n(sums.max, width(), m_.block_max + to);
                std::copy_n(sums.sum, width(), m_.block_sum + to);
              });
  }

  // The factors that take each row's weights to its part of the scores.
  void find_factors(Index pass) const {
    for (Index p = 0; p < panels(pass); ++p)
      for (Index i = 0; i < width(); ++i) {
        const Index row = (first(pass) + p) * width() + i;
        m_.factors[p * width() + i] = 0.0f;
        if (row >= shape_.rows()) continue;
        const Index first_block = at(p, 0) + i;
        const auto [reference, of_chunk, sum] =
            row_sum(m_.chunk[row], m_.block_max + first_block, m_.block_sum + first_block,
                    shape_.blocks(), width());
        m_.row_max[p * width() + i] = reference;
        if (!std::isfinite(sum))
          for (Index key = 0; key < shape_.keys; ++key) weights(p, key)[i] = 0.0f;
        if (!(sum > 0.0 && std::isfinite(sum))) continue;
        if (shape_.joint) {
          m_.factors[p * width() + i] = m_.part[row];
          continue;
        }
        const double part = static_cast<double>(m_.part[row]) / sum;
        m_.factors[p * width() + i] = static_cast<float>(part);
        m_.chunk_score[row / shape_.set_rows] += static_cast<float>(part * of_chunk);
      }
    if (shape_.joint) join_rows(pass);
  }

  // A range to the scores of all sets.
  void add(Index pass, Index range, const SetScores& scores) const {
    const auto [begin, end] = ranges(shape_).of(range);
    const Index first_row = first(pass) * width(),
                end_row = std::min(first_row + panels(pass) * width(), shape_.rows());
    for (Index set = first_row / shape_.set_rows; set * shape_.set_rows < end_row; ++set) {
      float* const to = scores[set];
      const Index set_begin = set * shape_.set_rows, set_end = set_begin + shape_.set_rows;
      if (set_begin >= first_row)
        std::fill(to + begin, to + end, 0.0f);
      else if (shape_.joint)
        for (Index key = begin; key < end; ++key) to[key] *= m_.set_factor[set];
      for (Index key = begin; key < end; key += kernel_sizes().block_keys)
        add_rows(std::max(set_begin, first_row) - first_row,
                 std::min(set_end, end_row) - first_row - 1, key,
                 std::min(key + kernel_sizes().block_keys, end), to);
    }
    for (Index set = 0; pass + 1 == passes(shape_) && set < shape_.sets; ++set)
      for (Index t = begin; t < end; ++t)
        if (m_.hidden[t] != 0) scores[set][t] = -infinity;
  }

 private:
  static Index width() { return kernel_sizes().panel_rows; }  // of a panel
  // Sums of a panel's rows over a block of keys.
  struct PanelSums {
    alignas(64) float max[most_panel_rows], sum[most_panel_rows];
  };

  Index panel_count(Index p) const { return std::min(width(), shape_.rows() - p * width()); }
  float* panel(Index p) const { return m_.panels + p * width() * shape_.dim; }
  Index first(Index pass) const { return pass * panels_at_once(shape_.rows(), shape_.keys); }
  Index panels(Index pass) const {
    return std::min(panels_at_once(shape_.rows(), shape_.keys), shape_.panels() - first(pass));
  }
  Index at(Index p, Index block) const { return (p * shape_.blocks() + block) * width(); }
  float* weights(Index p, Index key) const {
    return reinterpret_cast<float*>(m_.weights) + (p * shape_.keys + key) * width();
  }

  // Weights of all rows of a set are against its largest logit, which a pass may raise.
  void join_rows(Index pass) const {
    const Index lanes = panels(pass) * width(), first_row = first(pass) * width();
    std::copy_n(m_.set_max, shape_.sets, m_.set_factor);
    for (Index i = 0; i < lanes; ++i)
      if (m_.factors[i] > 0.0f) {
        float& max = m_.set_max[(first_row + i) / shape_.set_rows];
        max = std::max(max, m_.row_max[i]);
      }
    for (Index set = 0; set < shape_.sets; ++set)
      m_.set_factor[set] =
          m_.set_factor[set] == -infinity ? 0.0f : std::exp(m_.set_factor[set] - m_.set_max[set]);
    for (Index i = 0; i < lanes; ++i)
      if (m_.factors[i] > 0.0f)
        m_.factors[i] = std::exp(m_.row_max[i] - m_.set_max[(first_row + i) / shape_.set_rows]);
  }

  // Weights of the block's first `count` keys against the largest logit. hidden: takes note of keys that have none.
  PanelSums weigh(Index p, const PackedBlock& block, Index count, const LaneRanges* ranges,
                  float* logits, float* weights, std::uint8_t* hidden) const {
    PanelSums sums;
    weigh_block({reinterpret_cast<const float*>(block.keys), panel(p), shape_.dim,
                 block.keys_fit ? nullptr : block.key_factors},
                {count, ranges, nullptr, {.softcap = shape_.softcap}}, logits, weights, sums.max,
                sums.sum, hidden);
    return sums;
  }

  // Rows [row, last_row] of the pass to keys [begin, end), which lie in one block.
  void add_rows(Index row, Index last_row, Index begin, Index end, float* to) const {
    alignas(64) float factors[most_panels_per_task * most_panel_rows];
    const Index first_panel = row / width(), panels = last_row / width() + 1 - first_panel,
                block = begin / kernel_sizes().block_keys;
    for (Index p = 0; p < panels; ++p) {
      const Index lane = (first_panel + p) * width();
      panel_factors(m_.block_max + at(first_panel + p, block), m_.row_max + lane, m_.factors + lane,
                    row - lane, last_row - lane, factors + p * width());
    }
    add_weights(weights(first_panel, begin), panels, shape_.keys * width(), factors, end - begin,
                shape_.over == Aggregation::max, to + begin);
  }

  const MassShape& shape_;
  const HeadMass& m_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
