// Scores of blocks of keys: the common part of XAttention and FlashPrefill.
//
//   x[i][t]   = row i . key row t
//   each_row  score[s][j] = sum over rows i of set s of (sum over t in block j of e^x[i][t])
//                                                     / (sum over all t of e^x[i][t])
//   whole_set score[s][j] = sum over rows i of s and t in j of e^(x[i][t] - m[s]), m[s] their largest x
//
// A method makes the rows of the queries, in sets (one query head's block of queries). Key rows
// are keys, or `stride` keys side by side, the last one filled up with zeros; those of the chunk
// follow those of the past. It uses attention's register tile: 2 * rows * key rows * stride * dim FLOPs, and one exp
// per row and key row. The keys are read once for as many panels of rows as have room for their logits, 4 bytes per row
// and key row (tuning::mass_weight_bytes). A row with a NaN or an infinity is left out, and so is a key row with one.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/select/query_scores.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The keys that the rows are multiplied with.
struct BlockKeys {
  Rows k;                // [batch, kv_heads, len, dim]
  Rows chunk_k = {};     // [batch, kv_heads, chunk_len, dim], after those; optional
  Index stride = 1;      // keys of a key row, counted from the first
  Index block_rows = 1;  // key rows of a block
  bool causal = false;   // a row sees the key rows before its end, else all

  Index len() const { return k.len() + chunk_k.len(); }  // keys
  // Rows of `stride` keys, the last one filled up.
  Index key_rows() const { return ceil_div(len(), stride); }
  // Blocks of key rows; the last one may be short.
  Index blocks() const { return ceil_div(key_rows(), block_rows); }
};

// Which rows there are at most for a KV head, and into how many sets they fall. A row has stride * dim
// channels. They are made from rows of `read`; empty: from floats.
struct BlockQueries {
  Index max_rows, sets;  // of a KV head
  Rows read = {};        // what the rows are made from
};

// Which of the two scores at the top of block_scores.hpp.
enum class BlockNormaliser { each_row, whole_set };

// Where rows are written, set after set, as by a RowWriter; rows that are not finite are not kept.
class BlockRowWriter {
 public:
  // `sets` and `ends` are [max_rows]: of each row, its set and the end of the key rows that it sees.
  BlockRowWriter(RowWriter rows, Index* sets, Index* ends)
      : rows_(rows), sets_(sets), ends_(ends) {}

  // Row i of a head of q as floats: good until the next.
  const float* read(const Rows& q, Index b, Index head, Index i) const {
    return rows_.read(q, b, head, i);
  }
  // The place of the next row, which counts once kept.
  float* next() const { return rows_.next(); }
  // Sets ascend. The row sees the key rows [0, end).
  void keep(Index set, Index end) {
    const Index at = rows_.count();
    sets_[at] = set, ends_[at] = end;
    rows_.keep();
  }
  Index count() const { return rows_.count(); }  // rows kept so far

 private:
  RowWriter rows_;
  Index *sets_, *ends_;
};

// Writes the rows of one KV head, times the logit scale.
using FillBlockRows = FunctionRef<void(Index b, Index kv_head, BlockRowWriter& rows)>;

// scores [batch, kv_heads, sets, keys.blocks()], an array. `capacity`: as many keys as there may be in
// later calls, for scratch memory, which `workers` keep.
void block_scores(const BlockQueries& shape, FillBlockRows fill, const BlockKeys& keys,
                  Index capacity, BlockNormaliser normaliser, float* scores, Arenas& workers,
                  ExecutorRef executor);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/panel_scores.hpp>

#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Key rows handled together: their logits stay in L1, their packed tiles in L2.
inline Index block_step(Index stride) {
  return stride == 1 ? kernel_sizes().block_keys
                     : Index{tuning::strided_tiles} * kernel_sizes().tile_rows;
}

// Scratch of one worker for a KV head.
struct BlockScratch {
  const Index width = kernel_sizes().panel_rows;

  BlockScratch(Arena& arena, const BlockQueries& shape, const BlockKeys& keys, Index key_rows)
      : panels(ceil_div(shape.max_rows, width)),
        at_once(std::clamp(tuning::mass_weight_bytes / (key_rows * width * Index{sizeof(float)}),
                           Index{1}, std::min(panels, kernel_sizes().panels_per_task))),
        rows(arena.take<float>(shape.max_rows * keys.stride * keys.k.dim())),
        sets(arena.take<Index>(shape.max_rows)),
        ends(arena.take<Index>(shape.max_rows)),
        queries(arena.take<float>(at_once * keys.stride * keys.k.dim() * width)),
        tiles(arena.take<float>(keys.stride * block_step(keys.stride) / kernel_sizes().tile_rows *
                                key_tile_size(keys.k.dim()))),
        logits(arena.take<float>(at_once * (key_rows + kernel_sizes().tile_rows) * width)),
        sums(arena.take<float>(panels * (ceil_div(key_rows, keys.block_rows) + 1) * width)),
        states(arena.take<PanelState>(panels)),
        tail(arena.take<float>((ceil_div(keys.chunk_k.len(), keys.stride) + 1) * keys.stride *
                               keys.k.dim())),
        found(arena.take<ConstRow>(2 * block_step(keys.stride) * keys.stride)),
        reader(arena, std::max(shape.read.dim(), keys.k.dim())) {}

  Index panels, at_once;  // of rows: all, and those whose logits have room
  float* rows;            // [rows][stride * dim]
  Index *sets, *ends;     // [rows]
  float* queries;         // panels, transposed
  float* tiles;           // one packed step of key rows: [stride][tile][dim]
  float* logits;          // [panel][key row][lane]
  float* sums;            // [panel][block][lane]: of weights against the row's largest logit
  PanelState* states;     // [panel]
  float* tail;            // the key rows that are not of the past alone
  ConstRow* found;        // rows of a step, and of the next one
  RowReader reader;       // of queries, and then of keys
};

// The key rows of one KV head, packed as [key of the row][tile], so that a step is `stride` products of dim channels.
// Those of the past alone come first, then the tail: those that hold keys of the chunk, or fewer than stride keys.
class StridedKeys {
 public:
  StridedKeys(const BlockKeys& keys, Index b, Index kv_head, BlockScratch& scratch)
      : s_(scratch),
        past_(keys.k.head(b, kv_head)),
        stride_(keys.stride),
        dim_(keys.k.dim()),
        past_rows_(keys.k.len() / keys.stride) {
    const Index first = past_rows_ * stride_;
    std::fill_n(s_.tail, (keys.key_rows() - past_rows_) * stride_ * dim_, 0.0f);
    for (Index t = first; t < keys.len(); ++t) {
      const float* const key = t < keys.k.len()
                                   ? s_.reader.read(past_, t)
                                   : s_.reader.read(keys.chunk_k, b, kv_head, t - keys.k.len());
      std::copy_n(key, dim_, s_.tail + (t - first) * dim_);
    }
  }

  Index past_rows() const { return past_rows_; }
  bool finite(Index row) {
    if (row >= past_rows_) return all_finite(tail(row), stride_ * dim_);
    for (Index s = 0; s < stride_; ++s)
      if (!all_finite(s_.reader.read(past_, row * stride_ + s), dim_)) return false;
    return true;
  }

  // These key rows, all of the past or all of the tail, to tiles.
  void pack(const KeyRange& rows) {
    const Index height = kernel_sizes().tile_rows;
    const bool in_past = rows.begin < past_rows_;
    const Format& format = in_past ? *past_.format : float_format();
    const RowShape shape = in_past ? past_.shape : RowShape{dim_};
    if (in_past) past_.find(rows.begin * stride_, rows.count() * stride_, s_.found);
    float* tile = s_.tiles;
    for (Index s = 0; s < stride_; ++s)
      for (Index first = 0; first < rows.count(); first += height, tile += key_tile_size(dim_)) {
        const Index n = std::min(height, rows.count() - first);
        ConstRow keys[most_tile_rows];
        for (Index r = 0; r < n; ++r)
          keys[r] = in_past ? s_.found[(first + r) * stride_ + s]
                            : reinterpret_cast<ConstRow>(tail(rows.begin + first + r) + s * dim_);
        format.pack_key_tile(keys, n, shape, tile);
      }
  }
  // The memory that packing these, the next ones, will read: a share of it for each of `panels`.
  BlockPrefetch prefetch(const KeyRange& rows, Index panels) {
    if (rows.begin >= past_rows_) return {};
    const Index count = (std::min(rows.end, past_rows_) - rows.begin) * stride_;
    ConstRow* const next = s_.found + block_step(stride_) * stride_;
    past_.find(rows.begin * stride_, count, next);
    return {{next, count, past_.row_bytes()}, {}, panels};
  }

 private:
  float* tail(Index row) const { return s_.tail + (row - past_rows_) * stride_ * dim_; }

  BlockScratch& s_;
  HeadRows past_;
  Index stride_, dim_, past_rows_;
};

// One KV head: all its rows, over all key rows.
class BlockAccumulator {
  const Index width = kernel_sizes().panel_rows;

 public:
  BlockAccumulator(const BlockKeys& keys, StridedKeys& strided, Index rows,
                   const BlockScratch& scratch)
      : keys_(keys),
        strided_(strided),
        s_(scratch),
        row_dim_(keys.stride * keys.k.dim()),
        key_rows_(keys.key_rows()),
        blocks_(keys.blocks()),
        rows_(rows) {}

  // scores [sets][blocks]
  void run(Index sets, BlockNormaliser normaliser, float* scores) {
    for (Index p = 0; p * width < rows_; p += s_.at_once) {
      const Index count = std::min(s_.at_once, ceil_div(rows_, width) - p);
      pack_rows(p, count);
      find_logits(p, count, {0, strided_.past_rows()});
      find_logits(p, count, {strided_.past_rows(), key_rows_});
      for (Index i = 0; i < count; ++i) find_sums(p + i, logits(i, 0));
    }
    std::fill_n(scores, sets * blocks_, 0.0f);
    for (Index row = 0; row < rows_;) {
      Index end = row + 1;
      while (end < rows_ && s_.sets[end] == s_.sets[row]) ++end;
      add_set(row, end, normaliser, scores + s_.sets[row] * blocks_);
      row = end;
    }
  }

 private:
  Index panel_count(Index p) const { return std::min(width, rows_ - p * width); }
  float* queries(Index i) const { return s_.queries + i * row_dim_ * width; }
  float* logits(Index i, Index key_row) const {
    return s_.logits + (i * (key_rows_ + kernel_sizes().tile_rows) + key_row) * width;
  }
  float* sums(Index p, Index block) const { return s_.sums + (p * blocks_ + block) * width; }

  // Panels [first, first + count), which have seen nothing.
  void pack_rows(Index first, Index count) {
    for (Index i = 0; i < count; ++i) {
      const float* rows[most_panel_rows];
      for (Index r = 0; r < panel_count(first + i); ++r)
        rows[r] = s_.rows + ((first + i) * width + r) * row_dim_;
      pack_queries(rows, panel_count(first + i), row_dim_, 1.0f, width, queries(i));
      s_.states[first + i] = PanelState::identity();
    }
  }
  // Their products with key rows, all of the past or all of the tail, and the rows' largest ones. Keys of a step are
  // packed once for all panels, and those of the next one prefetched beside them.
  void find_logits(Index first, Index count, const KeyRange& range) {
    for (KeyRange keys{range.begin, range.begin}; keys.begin < range.end; keys.begin = keys.end) {
      const Index step = block_step(keys_.stride);
      keys.end = std::min(keys.begin + step, range.end);
      strided_.pack(keys);
      BlockPrefetch next =
          strided_.prefetch({keys.end, std::min(keys.end + step, key_rows_)}, count);
      for (Index i = 0; i < count; ++i) {
        next.begin_panel();
        find_logits(first + i, keys, queries(i), next, logits(i, keys.begin));
        next.end_panel();
      }
    }
  }
  void find_logits(Index p, const KeyRange& keys, const float* queries, BlockPrefetch& next,
                   float* x) {
    const bool finite =
        strided_logits(s_.tiles, queries, keys_.stride, keys_.k.dim(), keys.count(), next, x);
    // A key row that is not finite makes no lane's logit finite.
    for (Index i = 0; !finite && i < keys.count(); ++i)
      if (!strided_.finite(keys.begin + i)) std::fill_n(x + i * width, width, -infinity);
    LaneRanges ranges;
    if (keys_.causal && ranges_until(s_.ends + p * width, panel_count(p), keys, ranges))
      hide_outside(x, keys.count(), width, ranges, 0);
    raise_maxima(x, keys.count(), s_.states[p]);
  }

  // Sums of a panel's weights: for each block, and over all keys.
  void find_sums(Index p, const float* x) const {
    for (Index block = 0; block < blocks_; ++block) {
      const Index begin = block * keys_.block_rows;
      weigh_keys(x + begin * width, std::min(keys_.block_rows, key_rows_ - begin), s_.states[p],
                 sums(p, block));
    }
  }

  // Rows [row, end) of one set.
  void add_set(Index row, Index end, BlockNormaliser normaliser, float* scores) const {
    float top = -infinity;
    for (Index i = row; i < end; ++i) top = std::max(top, s_.states[i / width].max[i % width]);
    for (Index p = row / width; p * width < end; ++p) {
      alignas(64) float shares[most_panel_rows];
      if (normaliser == BlockNormaliser::each_row)
        inverse_sums(s_.states[p], shares);
      else
        factors_below(s_.states[p], std::isfinite(top) ? top : 0.0f, shares);
      for (Index i = 0; i < width; ++i)
        if (p * width + i < row || p * width + i >= end) shares[i] = 0.0f;
      add_row_sums(sums(p, 0), shares, blocks_, scores);
    }
  }

  const BlockKeys& keys_;
  StridedKeys& strided_;
  const BlockScratch& s_;
  Index row_dim_, key_rows_, blocks_, rows_;
};

QUOKA_FUNC void block_scores(const BlockQueries& shape, FillBlockRows fill, const BlockKeys& keys,
                             Index capacity, BlockNormaliser normaliser, float* scores,
                             Arenas& workers, ExecutorRef executor) {
  const Index heads = keys.k.heads(), size = shape.sets * keys.blocks();
  // A fuller cache may take fewer panels at once: whichever needs more.
  for (const Index len : {keys.len(), std::max(keys.len(), capacity + keys.chunk_k.len())})
    workers.reserve(executor.workers(), [&](Arena& arena) {
      BlockScratch(arena, shape, keys, ceil_div(len, keys.stride));
    });
  executor.run(keys.k.batch() * heads, [&](Index task, int worker) {
    const Index b = task / heads, head = task % heads;
    Arena arena = workers[worker];
    BlockScratch s(arena, shape, keys, keys.key_rows());
    BlockRowWriter rows(RowWriter(s.rows, keys.stride * keys.k.dim(), s.reader), s.sets, s.ends);
    fill(b, head, rows);
    StridedKeys key_rows(keys, b, head, s);
    BlockAccumulator(keys, key_rows, rows.count(), s)
        .run(shape.sets, normaliser, scores + task * size);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
