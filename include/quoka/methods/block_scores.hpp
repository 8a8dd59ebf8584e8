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

#if !defined(QUOKA_COMPILED)
#include <quoka/methods/block_scores_impl.hpp>
#endif
