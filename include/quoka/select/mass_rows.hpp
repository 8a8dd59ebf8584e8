// The rows of one KV head in a softmax mass, and their softmax over the chunk's own keys. Both ways
// to multiply the past's keys, FloatMass (float_mass.hpp) and CodeMass (code_mass.hpp), begin here
// and share what follows:
//
//   MassShape     sizes of a KV head of a call
//   MassScratch   memory of one worker
//   MassRows      the rows, list after list; what the chunk's keys get
//   RowKeys       keys packed a block at a time, for float
//
// A list has one score for each key (SoftmaxScoring). Its last rows may be unused: they are
// zeros and count as nothing. The chunk's keys are always multiplied in float; they get no score of
// their own.
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
#include <quoka/select/query_rows.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

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
        gathered(arena.take<std::uint8_t>(2 * code_block_bytes(shape.dim))),
        kept(arena.take<std::uint8_t>(2 * code_block_bytes(shape.dim))),
        channel_sums(arena.take<float>(block_sums_size(shape.dim))) {}

  RowReader reader;
  float* tiles;            // a packed block of keys
  float* logits;           // of a block of keys and a panel
  float* weights;          // the same
  float* sums;             // [rows][lanes]
  std::uint8_t* gathered;  // two blocks of codes
  std::uint8_t* kept;      // their channels that are multiplied
  float* channel_sums;     // of a sample of keys
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
        chunk_score(arena.take<float>(shape.lists)),
        chunk(arena.take<SoftmaxState<float>>(shape.rows())),
        ends(arena.take<Index>(round_up(shape.rows(), width()))),
        shape_(shape),
        panels_(arena.take<float>(shape.panels() * width() * shape.dim)) {}

  float* const data;                 // [rows][dim] times the logit scale; zeros in unused rows
  float* const part;                 // [rows] 1 / the list's rows for a mean, else 1; 0: unused
  float* const chunk_score;          // [lists] the chunk's part
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
    chunk_score[list] = 0.0f;
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
    chunk_score[row / shape_.list_rows] += static_cast<float>(share * of_chunk);
    return share;
  }

 private:
  float* panel(Index p) const { return panels_ + p * width() * shape_.dim; }

  const MassShape& shape_;
  float* panels_;  // the rows packed
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
