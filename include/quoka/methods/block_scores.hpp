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
#include <quoka/kernels/key_blocks.hpp>

#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Key rows handled together: their logits stay in L1, their packed tiles in L2.
inline Index block_step(Index stride) {
  return stride == 1 ? Index{tuning::block_keys} : Index{tuning::strided_tiles} * tuning::tile_rows;
}

// Scratch of one worker for a KV head.
struct BlockScratch {
  static constexpr Index width = tuning::panel_rows;

  BlockScratch(Arena& arena, const BlockQueries& shape, const BlockKeys& keys, Index key_rows)
      : panels(ceil_div(shape.max_rows, width)),
        at_once(std::clamp(tuning::mass_weight_bytes / (key_rows * width * Index{sizeof(float)}),
                           Index{1}, std::min(panels, tuning::max_panels_per_task))),
        rows(arena.take<float>(shape.max_rows * keys.stride * keys.k.dim())),
        sets(arena.take<Index>(shape.max_rows)),
        ends(arena.take<Index>(shape.max_rows)),
        queries(arena.take<float>(at_once * keys.stride * keys.k.dim() * width)),
        tiles(arena.take<float>(keys.stride * block_step(keys.stride) / tuning::tile_rows *
                                key_tile_size(keys.k.dim()))),
        logits(arena.take<float>(at_once * (key_rows + tuning::tile_rows) * width)),
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

// The key rows of one KV head, packed as [key of the row][tile], so that a block is `stride` products of dim channels.
// Those of the past alone are walked first, then the tail: those that hold keys of the chunk, or fewer than stride
// keys.
class StridedKeys final : public KeyBlocks {
 public:
  StridedKeys(const BlockKeys& keys, Index b, Index kv_head, BlockScratch& scratch)
      : KeyBlocks(keys.key_rows(), block_step(keys.stride)),
        s_(scratch),
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
  float* tile(Index s, Index i, Index tiles) const {
    return s_.tiles + (s * tiles + i) * key_tile_size(dim_);
  }
  bool finite(Index row) {
    if (row >= past_rows_) return all_finite(tail(row), stride_ * dim_);
    for (Index s = 0; s < stride_; ++s)
      if (!all_finite(s_.reader.read(past_, row * stride_ + s), dim_)) return false;
    return true;
  }

  const PackedBlock& pack(const KeyRange& rows) override {
    const Index tiles = ceil_div(rows.count(), tuning::tile_rows);
    const bool in_past = rows.begin < past_rows_;
    const Format& format = in_past ? *past_.format : float_format();
    if (in_past) past_.find(rows.begin * stride_, rows.count() * stride_, s_.found);
    for (Index i = 0; i < tiles; ++i) {
      const Index first = i * tuning::tile_rows,
                  n = std::min<Index>(tuning::tile_rows, rows.count() - first);
      for (Index s = 0; s < stride_; ++s) {
        ConstRow tile_rows[tuning::tile_rows];
        for (Index r = 0; r < n; ++r)
          tile_rows[r] = in_past
                             ? s_.found[(first + r) * stride_ + s]
                             : reinterpret_cast<ConstRow>(tail(rows.begin + first + r) + s * dim_);
        format.pack_key_tile(tile_rows, n, in_past ? past_.shape : RowShape{dim_},
                             tile(s, i, tiles));
      }
    }
    return block_;
  }
  BlockPrefetch prefetch(const KeyRange& rows, Index panels) override {
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
  PackedBlock block_;
};

// One KV head: all its rows, over all key rows.
class BlockAccumulator {
  static constexpr Index width = tuning::panel_rows;
  static constexpr int packets = tuning::tile_packets;

 public:
  BlockAccumulator(const BlockKeys& keys, StridedKeys& key_rows, Index rows,
                   const BlockScratch& scratch)
      : keys_(keys),
        key_blocks_(key_rows),
        s_(scratch),
        row_dim_(keys.stride * keys.k.dim()),
        key_rows_(keys.key_rows()),
        blocks_(keys.blocks()),
        rows_(rows) {}

  // scores [sets][blocks]
  void run(Index sets, BlockNormaliser normaliser, float* scores) {
    for (Index p = 0; p * width < rows_; p += s_.at_once) {
      const Index count = std::min(s_.at_once, ceil_div(rows_, width) - p);
      find_logits(p, count);
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
    return s_.logits + (i * (key_rows_ + tuning::tile_rows) + key_row) * width;
  }
  float* sums(Index p, Index block) const { return s_.sums + (p * blocks_ + block) * width; }

  // Products of panels [first, first + count) with all key rows, and the rows' largest ones.
  void find_logits(Index first, Index count) {
    for (Index i = 0; i < count; ++i) {
      const float* rows[width];
      for (Index r = 0; r < panel_count(first + i); ++r)
        rows[r] = s_.rows + ((first + i) * width + r) * row_dim_;
      pack_queries(rows, panel_count(first + i), row_dim_, 1.0f, width, queries(i));
      for (PacketState& lane : s_.states[first + i]) lane = PacketState::identity();
    }
    for (const KeyRange& range :
         {KeyRange{0, key_blocks_.past_rows()}, KeyRange{key_blocks_.past_rows(), key_rows_}})
      key_blocks_.walk(range, count, prefetch_,
                       [&](Index i, const KeyRange& keys, const PackedBlock&) {
                         find_logits(first + i, keys, queries(i), logits(i, keys.begin));
                       });
  }

  void find_logits(Index p, const KeyRange& keys, const float* queries, float* x) {
    // A key row that is not finite makes no lane's logit finite.
    if (!multiply(keys.count(), queries, x))
      for (Index i = 0; i < keys.count(); ++i)
        if (!key_blocks_.finite(keys.begin + i)) std::fill_n(x + i * width, width, -simd::infinity);
    PanelMask mask;
    if (keys_.causal && mask_after(s_.ends + p * width, panel_count(p), keys, mask))
      mask_logits(x, keys.count(), width, mask, 0);
    PanelPackets top;
    block_maximum(x, keys.count(), top);
    for (int j = 0; j < packets; ++j) s_.states[p][j].max = simd::max(s_.states[p][j].max, top[j]);
  }

  // The logits of a step; false where one of them is not finite.
  bool multiply(Index count, const float* queries, float* const x) {
    constexpr int rows = tuning::tile_rows;
    const Index stride = keys_.stride, dim = keys_.k.dim(), tiles = ceil_div(count, rows),
                lines = ceil_div(prefetch_.left(), stride * tiles);
    simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
    for (Index s = 0; s < stride; ++s) {
      const bool first = s == 0, last = s + 1 == stride;
      for (Index i = 0; i < tiles; ++i) {
        float* const to = x + i * rows * width;
        prefetch_.prefetch(lines);
        simd::Packet acc[rows][packets];
        simd::unroll<rows, packets>([&](auto r, auto j) QUOKA_INLINE_LAMBDA {
          acc[r][j] = first ? simd::zero() : simd::load(to + r * width + j * simd::lanes);
        });
        add_key_tile(acc, key_blocks_.tile(s, i, tiles), queries + s * dim * width, dim, [] {});
        simd::unroll<rows, packets>([&](auto r, auto j) QUOKA_INLINE_LAMBDA {
          simd::store(to + r * width + j * simd::lanes, acc[r][j]);
          if (last) poison = simd::fma(acc[r][j], simd::zero(), poison);
        });
      }
    }
    return simd::reduce_add(poison) == 0.0f;
  }

  // Sums of a panel's weights: for each block, and over all keys.
  void find_sums(Index p, const float* x) const {
    PacketState* const lanes = s_.states[p];
    for (Index block = 0; block < blocks_; ++block) {
      const Index end = std::min((block + 1) * keys_.block_rows, key_rows_);
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        const simd::Packet reference = lanes[j].reference();
        simd::Packet sum = simd::zero();
        for (Index t = block * keys_.block_rows; t < end; ++t)
          sum = simd::add(
              sum, simd::exp(simd::sub(simd::load(x + t * width + j * simd::lanes), reference)));
        simd::store(sums(p, block) + j * simd::lanes, sum);
        lanes[j].sum = simd::add(lanes[j].sum, sum);
      });
    }
  }

  // Rows [row, end) of one set.
  void add_set(Index row, Index end, BlockNormaliser normaliser, float* score) const {
    float top = -simd::infinity;
    for (Index i = row; i < end; ++i) top = std::max(top, max(i));
    const simd::Packet reference = simd::broadcast(std::isfinite(top) ? top : 0.0f);
    for (Index p = row / width; p * width < end; ++p) {
      simd::Packet shares[packets];
      for (int j = 0; j < packets; ++j) {
        alignas(64) float inside[simd::lanes];
        for (Index i = 0; i < simd::lanes; ++i) {
          const Index at = p * width + j * simd::lanes + i;
          inside[i] = row <= at && at < end ? 1.0f : 0.0f;
        }
        const PacketState& state = s_.states[p][j];
        shares[j] =
            simd::mul(simd::load(inside), normaliser == BlockNormaliser::each_row
                                              ? state.inverse_sum()
                                              : simd::exp(simd::sub(state.reference(), reference)));
      }
      for (Index block = 0; block < blocks_; ++block) {
        simd::Packet part = simd::zero();
        simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
          part = simd::fma(simd::load(sums(p, block) + j * simd::lanes), shares[j], part);
        });
        score[block] += simd::reduce_add(part);
      }
    }
  }
  // The largest logit of a row.
  float max(Index row) const {
    alignas(64) float lanes[simd::lanes];
    simd::store(lanes, s_.states[row / width][row % width / simd::lanes].max);
    return lanes[row % simd::lanes];
  }

  const BlockKeys& keys_;
  StridedKeys& key_blocks_;
  const BlockScratch& s_;
  Index row_dim_, key_rows_, blocks_, rows_;
  BlockPrefetch prefetch_;
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
