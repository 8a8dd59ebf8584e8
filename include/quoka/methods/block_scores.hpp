// Scores of blocks of keys: what XAttention and FlashPrefill share.
//
//   x[i][t]   = row i . key row t
//   each_row  score[s][j] = sum over rows i of set s of (sum over t in block j of e^x[i][t])
//                                                     / (sum over all t of e^x[i][t])
//   whole_set score[s][j] = sum over rows i of s and t in j of e^(x[i][t] - m[s]), m[s] their largest x
//
// Rows are what a method makes of the queries, in sets (one query head's block of queries). Key rows
// are keys, or `stride` keys side by side, the last one filled up with zeros; those of the chunk
// follow those of the past. The register tile and the online softmax of attention, one group of
// panels over all keys at a time: 2 * rows * key rows * stride * dim FLOPs and one exp per row and
// key row, one read of the keys per group (all rows of a KV head where they are at most 16 panels), 4
// bytes of scratch per row and block, and per row and step of keys. A row with a NaN or an infinity is
// left out, and so is a key row with one.
#pragma once

#include <quoka/select/query_scores.hpp>

#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What the rows are multiplied with.
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

// Where rows are written, set after set, as by a RowWriter; what is not finite is not to be kept.
class BlockRowWriter {
 public:
  // `sets` and `ends` are [max_rows]: of each row, its set and where what it sees ends.
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

// Scratch of one worker.
struct BlockScratch {
  Buffer<float> rows;              // [rows][stride * dim]
  Buffer<Index> sets, ends;        // [rows]
  Buffer<float> queries;           // a group of panels, transposed
  Buffer<float> tiles;             // one packed step of key rows: [stride][tile][dim]
  Buffer<float> logits;            // [key rows of a step][lane]
  Buffer<float> sums;              // [panel][segment][lane]: weights of a block within a step
  Buffer<float> references;        // [panel][step][lane]: what they are taken against
  Buffer<std::byte> states;        // softmax states
  Buffer<float> tail;              // the key rows that are not of the past alone
  Buffer<float> set_tops;          // [set]
  Buffer<const std::byte*> found;  // rows of a step, and of the next one
  FloatRow query, key;

  void reserve(const BlockQueries& shape, const BlockKeys& keys, Index capacity);
  Index bytes() const {
    return bytes_of(rows, sets, ends, queries, tiles, logits, sums, references, states, tail,
                    set_tops, found, query, key);
  }
};

// Reused memory of block_scores().
using BlockScoreState = WorkerScratch<BlockScratch>;

// scores [batch, kv_heads, sets, keys.blocks()], an array. `capacity`: as many keys as there may be in
// later calls, for scratch memory.
void block_scores(const BlockQueries& shape, FillBlockRows fill, const BlockKeys& keys,
                  Index capacity, BlockNormaliser normaliser, float* scores, BlockScoreState& state,
                  ExecutorRef executor);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/key_blocks.hpp>

#include <algorithm>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Key rows handled together: their logits stay in L1, their packed tiles in L2.
inline Index block_step(Index stride) {
  return stride == 1 ? Index{tuning::block_keys} : Index{tuning::strided_tiles} * tuning::tile_rows;
}
// How often `rows` key rows, from key row `first` on, touch a block or a step of theirs, at most.
inline Index most_segments(Index rows, Index block_rows, Index step) {
  return ceil_div(rows, step) + ceil_div(rows, block_rows) + 2;
}

QUOKA_FUNC void BlockScratch::reserve(const BlockQueries& shape, const BlockKeys& keys,
                                      Index capacity) {
  constexpr Index width = tuning::panel_rows;
  const Index dim = keys.k.dim(), stride = keys.stride, step = block_step(stride);
  const Index panels = std::min(ceil_div(shape.max_rows, width), tuning::max_panels_per_task);
  const Index chunk_rows =
      keys.chunk_k.len() > 0 || stride > 1 ? ceil_div(keys.chunk_k.len(), stride) + 1 : 0;
  const Index most = std::max(keys.k.len(), capacity) / stride + chunk_rows;
  rows.reserve(shape.max_rows * stride * dim);
  sets.reserve(shape.max_rows), ends.reserve(shape.max_rows);
  queries.reserve(panels * stride * dim * width);
  tiles.reserve(stride * step / tuning::tile_rows * key_tile_size(dim));
  logits.reserve(step * width);
  sums.reserve_amortised(panels * (most_segments(most, keys.block_rows, step) + 2) * width);
  references.reserve_amortised(panels * (ceil_div(most, step) + 2) * width);
  states.reserve(panels * Index{sizeof(PanelState)});
  tail.reserve(chunk_rows * stride * dim);
  set_tops.reserve(shape.sets);
  found.reserve(2 * step * stride);
  query.reserve(shape.read);
  key.reserve(keys.k);
  if (keys.chunk_k.len() > 0) key.reserve(keys.chunk_k);
}

// The key rows of one KV head, packed as [key of the row][tile], so that a block is `stride` products of dim channels.
// Those of the past alone are walked first, then the tail: those that hold keys of the chunk, or fewer than stride keys.
class StridedKeys final : public KeyBlocks {
 public:
  StridedKeys(const BlockKeys& keys, Index b, Index kv_head, BlockScratch& scratch)
      : KeyBlocks(keys.key_rows(), block_step(keys.stride)),
        s_(scratch),
        past_(keys.k.head(b, kv_head)),
        stride_(keys.stride),
        dim_(keys.k.dim()),
        step_(block_step(keys.stride)),
        past_rows_(keys.k.len() / keys.stride) {
    read_tail(keys, b, kv_head);
  }

  Index past_rows() const { return past_rows_; }
  float* tile(Index s, Index i, Index tiles) const {
    return s_.tiles.data() + (s * tiles + i) * key_tile_size(dim_);
  }
  bool finite(Index row) {
    if (row >= past_rows_) return all_finite(tail(row), stride_ * dim_);
    for (Index s = 0; s < stride_; ++s)
      if (!all_finite(s_.key.read(past_, row * stride_ + s), dim_)) return false;
    return true;
  }

  const PackedBlock& pack(const KeyRange& rows) override {
    const Index tiles = ceil_div(rows.count(), tuning::tile_rows);
    const bool in_past = rows.begin < past_rows_;
    ConstRow* const keys = s_.found.data();
    if (in_past) past_.at.find(rows.begin * stride_, rows.count() * stride_, keys);
    for (Index i = 0; i < tiles; ++i) {
      const Index first = i * tuning::tile_rows,
                  n = std::min<Index>(tuning::tile_rows, rows.count() - first);
      for (Index s = 0; s < stride_; ++s) {
        ConstRow tile_rows[tuning::tile_rows];
        for (Index r = 0; r < n; ++r)
          tile_rows[r] = in_past
                             ? keys[(first + r) * stride_ + s]
                             : reinterpret_cast<ConstRow>(tail(rows.begin + first + r) + s * dim_);
        const Format& format = in_past ? *past_.format : float_format();
        format.pack_key_tile(tile_rows, n, in_past ? past_.shape : RowShape{dim_},
                             tile(s, i, tiles));
      }
    }
    return block_;
  }
  BlockPrefetch prefetch(const KeyRange& rows, Index panels) override {
    if (rows.begin >= past_rows_) return {};
    const Index count = (std::min(rows.end, past_rows_) - rows.begin) * stride_;
    ConstRow* const next = s_.found.data() + step_ * stride_;
    past_.at.find(rows.begin * stride_, count, next);
    return {{next, count, past_.row_bytes()}, {}, panels};
  }

 private:
  float* tail(Index row) const { return s_.tail.data() + (row - past_rows_) * stride_ * dim_; }
  void read_tail(const BlockKeys& keys, Index b, Index kv_head) {
    const Index first = past_rows_ * stride_, rows = keys.key_rows() - past_rows_;
    if (rows == 0) return;
    std::fill_n(s_.tail.data(), rows * stride_ * dim_, 0.0f);
    for (Index t = first; t < keys.len(); ++t) {
      const float* const key = t < keys.k.len()
                                   ? s_.key.read(past_, t)
                                   : s_.key.read(keys.chunk_k, b, kv_head, t - keys.k.len());
      std::copy_n(key, dim_, s_.tail.data() + (t - first) * dim_);
    }
  }

  BlockScratch& s_;
  HeadRows past_;
  Index stride_, dim_, step_, past_rows_;
  PackedBlock block_;
};

// One KV head: all its rows, over all key rows.
class BlockAccumulator {
  static constexpr Index width = tuning::panel_rows;

 public:
  BlockAccumulator(const BlockKeys& keys, StridedKeys& rows, Index row_count, Index sets,
                   BlockNormaliser normaliser, float* scores, BlockScratch& scratch)
      : keys_(keys),
        key_blocks_(rows),
        s_(scratch),
        dim_(keys.k.dim()),
        step_(block_step(keys.stride)),
        key_rows_(keys.key_rows()),
        blocks_(keys.blocks()),
        row_count_(row_count),
        sets_(sets),
        normaliser_(normaliser),
        scores_(scores) {
    steps_ = ceil_div(past_rows(), step_) + ceil_div(key_rows_ - past_rows(), step_);
    segments_ = most_segments(key_rows_, keys.block_rows, step_) + 2;
    std::fill_n(scores_, sets_ * blocks_, 0.0f);
    std::fill_n(s_.set_tops.data(), sets_, -simd::infinity);
  }

  void run() {
    for (Index row = 0; row < row_count_; row += tuning::max_panels_per_task * width) {
      first_row_ = row;
      panels_ = std::min(ceil_div(row_count_ - row, width), tuning::max_panels_per_task);
      find_sums();
      for (Index p = 0; p < panels_; ++p) add(p);
    }
  }

 private:
  Index stride() const { return keys_.stride; }
  Index row_dim() const { return stride() * dim_; }
  Index past_rows() const { return key_blocks_.past_rows(); }
  Index panel_count(Index p) const { return std::min(width, row_count_ - first_row_ - p * width); }
  Index row_of(Index p, Index lane) const { return first_row_ + p * width + lane; }
  float* queries(Index p) const { return s_.queries.data() + p * row_dim() * width; }
  float* sums(Index p) const { return s_.sums.data() + p * segments_ * width; }
  float* reference(Index p, Index step) const {
    return s_.references.data() + (p * steps_ + step) * width;
  }
  PanelState& state(Index p) const {
    return *reinterpret_cast<PanelState*>(s_.states.data() + p * Index{sizeof(PanelState)});
  }

  // Of the weights, for each panel and segment: what a block of the scores has in a step of the walk.
  void find_sums() {
    for (Index p = 0; p < panels_; ++p) {
      const float* rows[width];
      for (Index i = 0; i < panel_count(p); ++i)
        rows[i] = s_.rows.data() + row_of(p, i) * row_dim();
      pack_queries(rows, panel_count(p), row_dim(), 1.0f, width, queries(p));
      for (PacketState& lane : state(p)) lane = PacketState::identity();
    }
    Index step = -1, segment = 0, next_segment = 0;
    for (const KeyRange& range : {KeyRange{0, past_rows()}, KeyRange{past_rows(), key_rows_}})
      key_blocks_.walk(range, panels_, prefetch_,
                       [&](Index p, const KeyRange& keys, const PackedBlock&) {
                         if (p == 0) ++step, segment = next_segment;
                         next_segment = find_sums(p, keys, step, segment);
                       });
  }

  // The logits of a step, and their maximum over whole tiles; false where one of them is not finite.
  bool multiply(Index p, Index count, PanelPackets& top) {
    constexpr int packets = tuning::tile_packets, rows = tuning::tile_rows;
    const Index tiles = ceil_div(count, rows), lines = ceil_div(prefetch_.left(), stride() * tiles);
    simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
    for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
    for (Index s = 0; s < stride(); ++s) {
      const float* const panel = queries(p) + s * dim_ * width;
      const bool first = s == 0, last = s + 1 == stride();
      float* x = s_.logits.data();
      for (Index i = 0; i < tiles; ++i, x += Index{rows} * width) {
        prefetch_.prefetch(lines);
        simd::Packet acc[rows][packets];
        simd::unroll<rows, packets>([&](auto r, auto j) QUOKA_INLINE_LAMBDA {
          acc[r][j] = first ? simd::zero() : simd::load(x + r * width + j * simd::lanes);
        });
        add_key_tile(acc, key_blocks_.tile(s, i, tiles), panel, dim_, [] {});
        simd::unroll<rows, packets>([&](auto r, auto j) QUOKA_INLINE_LAMBDA {
          simd::store(x + r * width + j * simd::lanes, acc[r][j]);
          if (last) {
            top[j] = simd::max(top[j], acc[r][j]);
            poison = simd::fma(acc[r][j], simd::zero(), poison);
          }
        });
      }
    }
    return simd::reduce_add(poison) == 0.0f;
  }

  // Returns the segment after those of this step.
  Index find_sums(Index p, const KeyRange& keys, Index step, Index segment) {
    PanelPackets top;
    // A key row that is not finite makes no lane's logit finite.
    const bool finite = multiply(p, keys.count(), top);
    float* const x = s_.logits.data();
    PanelMask mask;
    const bool masked =
        keys_.causal && mask_after(s_.ends.data() + row_of(p, 0), panel_count(p), keys, mask);
    const VisibleKeys visible{keys.count(), masked ? &mask : nullptr, nullptr, {}};
    visible.finish_logits(x, top);
    if (!finite) leave_out(x, keys, top);
    PacketState* const lanes = state(p);
    for (int j = 0; j < tuning::tile_packets; ++j) lanes[j].raise(top[j]);
    for (Index at = keys.begin; at < keys.end; ++segment) {
      const Index end = std::min(keys.end, (at / keys_.block_rows + 1) * keys_.block_rows);
      float* const sum = sums(p) + segment * width;
      simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        const simd::Packet reference = lanes[j].reference();
        simd::Packet weights = simd::zero();
        for (Index i = at - keys.begin; i < end - keys.begin; ++i)
          weights = simd::add(
              weights,
              simd::exp(simd::sub(simd::load(x + i * width + j * simd::lanes), reference)));
        simd::store(sum + j * simd::lanes, weights);
        lanes[j].sum = simd::add(lanes[j].sum, weights);
      });
      at = end;
    }
    for (int j = 0; j < tuning::tile_packets; ++j)
      simd::store(reference(p, step) + j * simd::lanes, lanes[j].reference());
    return segment;
  }

  void leave_out(float* x, const KeyRange& keys, PanelPackets& top) {
    for (Index i = 0; i < keys.count(); ++i)
      if (!key_blocks_.finite(keys.begin + i)) std::fill_n(x + i * width, width, -simd::infinity);
    block_maximum(x, keys.count(), top);
  }

  // A panel's sums to the scores of the sets that have rows in it.
  void add(Index p) {
    for (Index lane = 0; lane < panel_count(p);) {
      const Index set = s_.sets.data()[row_of(p, lane)];
      Index end = lane + 1;
      while (end < panel_count(p) && s_.sets.data()[row_of(p, end)] == set) ++end;
      add_set(p, set, lane, end);
      lane = end;
    }
  }

  void add_set(Index p, Index set, Index lane, Index end) {
    float* const score = scores_ + set * blocks_;
    simd::Packet shares[tuning::tile_packets];
    set_shares(p, set, lane, end, shares);
    Index step = 0, segment = 0;
    for (const bool in_past : {true, false}) {
      const Index last = in_past ? past_rows() : key_rows_;
      for (Index t = in_past ? 0 : past_rows(); t < last; t += step_, ++step) {
        simd::Packet factors[tuning::tile_packets];
        for (int j = 0; j < tuning::tile_packets; ++j)
          factors[j] = simd::mul(
              shares[j], simd::exp(simd::sub(simd::load(reference(p, step) + j * simd::lanes),
                                             state(p)[j].reference())));
        const Index until = (std::min(t + step_, last) - 1) / keys_.block_rows;
        for (Index block = t / keys_.block_rows; block <= until; ++block, ++segment) {
          const float* const sum = sums(p) + segment * width;
          simd::Packet part = simd::zero();
          simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
            part = simd::fma(simd::load(sum + j * simd::lanes), factors[j], part);
          });
          score[block] += simd::reduce_add(part);
        }
      }
    }
  }

  // What the weights of lanes [lane, end) count for, against their own maximum; of other lanes 0.
  void set_shares(Index p, Index set, Index lane, Index end,
                  simd::Packet (&shares)[tuning::tile_packets]) {
    alignas(64) float inside[width], tops[width];
    float top = -simd::infinity;
    for (int j = 0; j < tuning::tile_packets; ++j)
      simd::store(tops + j * simd::lanes, state(p)[j].max);
    for (Index i = 0; i < width; ++i) {
      inside[i] = i >= lane && i < end ? 1.0f : 0.0f;
      if (i >= lane && i < end) top = std::max(top, tops[i]);
    }
    if (normaliser_ == BlockNormaliser::each_row) {
      for (int j = 0; j < tuning::tile_packets; ++j)
        shares[j] = simd::mul(simd::load(inside + j * simd::lanes), state(p)[j].inverse_sum());
      return;
    }
    float& before = s_.set_tops.data()[set];
    if (top > before) {
      const float shrink = std::exp(before - top);  // 0 where there was none
      for (Index block = 0; block < blocks_; ++block) scores_[set * blocks_ + block] *= shrink;
      before = top;
    }
    const float reference = std::isfinite(before) ? before : 0.0f;
    for (int j = 0; j < tuning::tile_packets; ++j)
      shares[j] =
          simd::mul(simd::load(inside + j * simd::lanes),
                    simd::exp(simd::sub(state(p)[j].reference(), simd::broadcast(reference))));
  }

  const BlockKeys& keys_;
  StridedKeys& key_blocks_;
  BlockScratch& s_;
  Index dim_, step_, key_rows_, blocks_, row_count_, sets_;
  BlockNormaliser normaliser_;
  float* scores_;
  Index steps_ = 0, segments_ = 0;
  Index first_row_ = 0, panels_ = 0;
  BlockPrefetch prefetch_;
};

QUOKA_FUNC void block_scores(const BlockQueries& shape, FillBlockRows fill, const BlockKeys& keys,
                             Index capacity, BlockNormaliser normaliser, float* scores,
                             BlockScoreState& state, ExecutorRef executor) {
  const Index heads = keys.k.heads(), size = shape.sets * keys.blocks();
  state.reserve(executor.workers(), shape, keys, capacity);
  executor.run(keys.k.batch() * heads, [&](Index task, int worker) {
    detail::BlockScratch& s = state[worker];
    BlockRowWriter rows(RowWriter(s.rows.data(), keys.stride * keys.k.dim(), s.query),
                        s.sets.data(), s.ends.data());
    fill(task / heads, task % heads, rows);
    detail::StridedKeys key_rows(keys, task / heads, task % heads, s);
    detail::BlockAccumulator(keys, key_rows, rows.count(), shape.sets, normaliser,
                             scores + task * size, s)
        .run();
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
