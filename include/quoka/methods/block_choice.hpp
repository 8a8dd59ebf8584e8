// Selections by blocks of keys, each judged by rows that a State keeps in place of the keys: the
// common part of XAttention and FlashPrefill.
//
//   scores        of softmax_scores(), for sets of rows of the queries: a set is a query head's
//                 block of queries
//   a threshold   the blocks that are forced, and those that it chooses for some set
//   a budget      blocks in the order in which they are forced, then by rank, earlier ones first;
//                 of the last block that is taken, the first keys. A block's rank is the largest
//                 that a set gives it
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/methods/kept_rows.hpp>
#include <quoka/select/softmax_scores.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Rows that are kept in place of the keys, and reused memory.
struct BlockState : KeptRows {
  SoftmaxScoreState mass;
  Buffer<float> scores;        // [batch, kv_heads, sets, rows]
  Buffer<float> chunk_scores;  // [batch, kv_heads, sets]
  Buffer<Index> taken;         // [batch, kv_heads, blocks] keys of each block
  Arenas workers;
};

// The rows that score, and the blocks of kept rows that they choose.
struct BlockScoring {
  Index block;           // keys of a block, and queries of a set
  Index rows_per_block;  // kept rows of a block; 1 where a row is of all its keys
  Index set_rows;        // rows of a set at most
  const Budget* budget;  // of each KV head; null: as a threshold says
  bool joint = false;    // SoftmaxRule::joint
  Rows chunk_k = {};     // as the kept rows are made: [batch, kv_heads, rows, dim]
};
// Writes the rows of a set: those of queries [begin, end) of a query head.
using FillSet = FunctionRef<void(Index b, Index q_head, Index begin, Index end, RowWriter& rows)>;

// The blocks of one KV head.
class BlockChoice {
 public:
  // Room in the arena for the blocks of kv_len past keys. `rows`: that are kept of them.
  BlockChoice(Arena& arena, const BlockScoring& shape, Index kv_len, Index rows)
      : kv_len_(kv_len),
        block_(shape.block),
        blocks_(ceil_div(kv_len, shape.block)),
        rows_(rows),
        rows_per_block_(shape.rows_per_block),
        scores_(arena.take<float>(blocks_)),
        ranks_(arena.take<float>(blocks_)),
        order_(arena.take<Index>(blocks_)) {}

  // budget: keys at most; taken [blocks]: becomes how many keys of each block are.
  void start(Index budget, Index* taken) {
    left_ = budget, taken_ = taken;
    std::fill_n(taken_, blocks_, Index{0});
    std::fill_n(ranks_, blocks_, 0.0f);
  }

  // Takes block j, if there is one and it is not taken already, as far as the budget goes.
  void take(Index j) {
    if (j < 0 || j >= blocks_ || taken_[j] > 0) return;
    taken_[j] = std::min({block_, kv_len_ - j * block_, left_});
    left_ -= taken_[j];
  }

  // One set's scores of the kept rows and of the chunk. Ranks: shares of their total. Takes, unless
  // tau is 0, the best until the sum is tau of the total, equal ones in their order. Block 0, the
  // block that the past ends in and the chunk are in that sum from the start.
  void add_mass(const float* of_rows, float of_chunk, double tau) {
    double total = of_chunk, sum = of_chunk;
    add_up(of_rows);
    for (Index j = 0; j < blocks_; ++j) total += scores_[j];
    if (!(total > 0.0)) return;
    rank(1.0 / total);
    if (tau == 0.0) return;
    Index others = 0;
    for (Index j = 0; j < blocks_; ++j) {
      if (j == 0 || (j + 1) * block_ > kv_len_)
        sum += scores_[j];
      else
        order_[others++] = j;
    }
    sort_by(scores_, others);
    for (Index i = 0; i < others && sum < tau * total; ++i)
      sum += scores_[order_[i]], take(order_[i]);
  }

  // The same by parts of the best score. Takes, unless alpha is 0, those of at least alpha.
  void add_relative(const float* of_rows, double alpha) {
    add_up(of_rows);
    const double best = *std::max_element(scores_, scores_ + blocks_);
    if (!(best > 0.0)) return;
    rank(1.0 / best);
    for (Index j = 0; alpha > 0.0 && j < blocks_; ++j)
      if (scores_[j] >= alpha * best) take(j);
  }

  // Takes the others by their ranks.
  void take_best() {
    std::iota(order_, order_ + blocks_, Index{0});
    sort_by(ranks_, blocks_);
    for (Index i = 0; i < blocks_ && left_ > 0; ++i) take(order_[i]);
  }

 private:
  // Scores of blocks: sums over their rows. A row that is not finite counts as 0.
  void add_up(const float* of_rows) {
    std::fill_n(scores_, blocks_, 0.0f);
    for (Index row = 0; row < rows_; ++row)
      if (std::isfinite(of_rows[row])) scores_[row / rows_per_block_] += of_rows[row];
  }
  void rank(double factor) {
    for (Index j = 0; j < blocks_; ++j)
      ranks_[j] = std::max(ranks_[j], static_cast<float>(scores_[j] * factor));
  }
  void sort_by(const float* x, Index count) {
    sort(order_, count, [&](Index a, Index b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  }

  Index kv_len_, block_, blocks_, rows_, rows_per_block_, left_ = 0;
  float *scores_, *ranks_;  // [blocks]
  Index* order_;            // [blocks]
  Index* taken_ = nullptr;
};

// A threshold in [0, 1]; 0: there is none.
inline void require_threshold(const char* name, double threshold) {
  if (!(threshold >= 0.0 && threshold <= 1.0)) fail_range(name, threshold, "[0, 1]");
}

// force(choice) takes the blocks of a KV head that are forced, and rank(choice, of_rows, of_chunk)
// those that a set's scores choose, and ranks all.
template <class Force, class Rank>
void select_blocks(const SelectorInput& input, const BlockScoring& shape, FillSet fill,
                   BlockState& state, Selection& selection, ExecutorRef executor, Force&& force,
                   Rank&& rank) {
  const Rows &k = input.k, kept = state.rows().view();
  const Index heads = k.batch() * k.heads(), kv_len = k.len(), rows = kept.len(),
              blocks = ceil_div(kv_len, shape.block),
              query_blocks = ceil_div(input.q.len(), shape.block),
              sets = input.group() * query_blocks;
  const auto most_keys = [&](Index len) {
    return shape.budget != nullptr ? shape.budget->count(len) : len;
  };
  // Of a full cache: then a decode loop does not allocate.
  const Index capacity = std::max(kv_len, input.capacity),
              most_blocks = ceil_div(capacity, shape.block),
              most_rows = ceil_div(capacity, shape.block / shape.rows_per_block);
  selection.reserve(heads, heads * most_keys(capacity));
  float* const scores = state.scores.reserve_amortised(heads * sets * most_rows);
  float* const chunk_scores = state.chunk_scores.reserve(heads * sets);
  Index* const taken = state.taken.reserve_amortised(heads * most_blocks);
  state.workers.reserve(executor.workers(),
                        [&](Arena& arena) { BlockChoice(arena, shape, capacity, most_rows); });
  const auto fill_set = [&](Index b, Index set, RowWriter& to) {
    const Index begin = set % query_blocks * shape.block;
    fill(b, set / query_blocks, begin, std::min(begin + shape.block, input.q.len()), to);
  };
  if (rows > 0)
    softmax_scores({.rows = {shape.set_rows, kept.dim(), input.q.dim()},
                    .fill = fill_set,
                    .keys = kept,
                    .capacity = most_rows,
                    .rule = {.joint = shape.joint},
                    .chunk_k = shape.chunk_k,
                    .chunk_scores = chunk_scores},
                   score_view(scores, k.batch(), k.heads() * sets, rows), state.mass, executor);
  executor.run(heads, [&](Index head, int worker) {
    Arena arena = state.workers[worker];
    BlockChoice choice(arena, shape, kv_len, rows);
    choice.start(most_keys(kv_len), taken + head * blocks);
    force(choice);
    for (Index set = 0; set < sets; ++set)
      rank(choice, scores + (head * sets + set) * rows,
           rows > 0 ? chunk_scores[head * sets + set] : 0.0f);
    if (shape.budget != nullptr) choice.take_best();
  });
  const auto count = [&](Index head) {
    return std::accumulate(taken + head * blocks, taken + (head + 1) * blocks, Index{0});
  };
  Index most = 0;
  for (Index head = 0; head < heads; ++head) most = std::max(most, count(head));
  SelectionWriter writer(selection, k.batch(), k.heads(), kv_len, most);
  executor.run(heads, [&](Index head, int) {
    const Index b = head / k.heads(), kv_head = head % k.heads();
    Position* to = writer.row(b, kv_head).data();
    for (Index j = 0; j < blocks; ++j)
      for (Index i = 0; i < taken[head * blocks + j]; ++i)
        *to++ = static_cast<Position>(j * shape.block + i);
    writer.set_count(b, kv_head, count(head));
  });
  writer.commit();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
