// From the scores of blocks to a Selection: the common part of XAttention and FlashPrefill.
//
//   a threshold   the blocks that are forced, and those that it chooses for some set (a query head's block of queries)
//   a budget      blocks in the order in which they are forced, then by rank, earlier ones first; of the last block
//                 that is taken, the first keys. A block's rank is the largest that a set gives it
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/select/query_scores.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Scratch of one worker.
struct BlockRanks {
  BlockRanks(Arena& arena, Index blocks)
      : ranks(arena.take<float>(blocks)), order(arena.take<Index>(blocks)) {}

  float* ranks;  // [blocks]
  Index* order;  // [blocks]
};

// Reused memory.
struct BlockChoiceState {
  Buffer<float> scores;  // [batch, kv_heads, sets, blocks]
  Buffer<Index> taken;   // [batch, kv_heads, blocks] keys of each block
  Arenas workers;

  Index bytes() const { return bytes_of(scores, taken, workers); }
};

// The blocks of one KV head: kv_len past keys in blocks of `block`, followed by those of the chunk if it is scored.
class BlockChoice {
 public:
  // budget: keys at most; taken [blocks]: becomes how many keys of each block are.
  BlockChoice(Index kv_len, Index block, Index blocks, Index budget, Index* taken,
              const BlockRanks& memory)
      : kv_len_(kv_len),
        block_(block),
        blocks_(blocks),
        left_(budget),
        taken_(taken),
        ranks_(memory.ranks),
        order_(memory.order) {
    std::fill_n(taken_, blocks_, Index{0});
    std::fill_n(ranks_, blocks_, 0.0f);
  }

  // One set's scores [blocks]. Ranks: shares of their total. Takes, unless tau is 0, block 0 and [own, own_last], then
  // the best until their sum is tau of the total, equal ones in their order.
  void add_mass(float* scores, Index own, Index own_last, double tau) {
    double total = 0.0, sum = 0.0;
    for (Index j = 0; j < blocks_; ++j) total += scores[j] = usable(scores[j]);
    if (!(total > 0.0)) return;
    rank(scores, 1.0 / total);
    if (tau == 0.0) return;
    Index others = 0;
    for (Index j = 0; j < blocks_; ++j) {
      if (j == 0 || (own <= j && j <= own_last))
        sum += scores[j], take(j);
      else
        order_[others++] = j;
    }
    sort_by(scores, others);
    for (Index i = 0; i < others && sum < tau * total; ++i)
      sum += scores[order_[i]], take(order_[i]);
  }

  // Throws as above. Ranks: parts of the best score. Takes, unless alpha is 0, those of at least
  // alpha.
  void add_relative(float* scores, double alpha) {
    double best = 0.0;
    for (Index j = 0; j < blocks_; ++j)
      best = std::max<double>(best, scores[j] = usable(scores[j]));
    if (!(best > 0.0)) return;
    rank(scores, 1.0 / best);
    for (Index j = 0; alpha > 0.0 && j < blocks_; ++j)
      if (scores[j] >= alpha * best) take(j);
  }

  // Takes block j, if there is one and it is not taken already, as far as the budget goes.
  void take(Index j) {
    if (j < 0 || j >= blocks_ || taken_[j] > 0) return;
    taken_[j] = std::min(std::clamp<Index>(kv_len_ - j * block_, 0, block_), left_);
    left_ -= taken_[j];
  }

  // Takes the others by their ranks.
  void take_best() {
    for (Index j = 0; j < blocks_; ++j) order_[j] = j;
    sort_by(ranks_, blocks_);
    for (Index i = 0; i < blocks_ && left_ > 0; ++i) take(order_[i]);
  }

 private:
  static float usable(float score) { return std::isfinite(score) ? score : 0.0f; }
  void rank(const float* scores, double factor) {
    for (Index j = 0; j < blocks_; ++j)
      ranks_[j] = std::max(ranks_[j], static_cast<float>(scores[j] * factor));
  }
  void sort_by(const float* x, Index count) {
    sort(order_, count, [&](Index a, Index b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  }

  Index kv_len_, block_, blocks_, left_;
  Index* taken_;
  float* ranks_;
  Index* order_;
};

// A threshold in [0, 1]; 0: there is none.
inline void require_threshold(const char* name, double threshold) {
  if (!(threshold >= 0.0 && threshold <= 1.0)) fail_range(name, threshold, "[0, 1]");
}

// The blocks of a call.
struct BlockShape {
  Index size, count;     // keys of a block; blocks, those of the chunk included
  const Budget* budget;  // of each KV head; null: as a threshold says
};

// choose(choice, head) takes the blocks of KV head `head` = b * kv_heads + kv_head that are forced, or that a threshold
// chooses, and ranks all.
template <class Choose>
void select_blocks(const SelectorInput& input, const BlockShape& shape, BlockChoiceState& state,
                   Selection& selection, ExecutorRef executor, Choose&& choose) {
  const Rows& k = input.k;
  const Index heads = k.batch() * k.heads(), kv_len = k.len(), blocks = shape.count;
  const auto most_keys = [&](Index len) {
    return shape.budget != nullptr ? shape.budget->count(len) : len;
  };
  selection.reserve(heads * most_keys(std::max(kv_len, input.capacity)));
  Index* const taken = state.taken.reserve_amortised(heads * blocks);
  state.workers.reserve(executor.workers(), [&](Arena& arena) { BlockRanks(arena, blocks); });
  executor.run(heads, [&](Index head, int worker) {
    Arena arena = state.workers[worker];
    BlockChoice choice(kv_len, shape.size, blocks, most_keys(kv_len), taken + head * blocks,
                       BlockRanks(arena, blocks));
    choose(choice, head);
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
        *to++ = static_cast<Position>(j * shape.size + i);
    writer.set_count(b, kv_head, count(head));
  });
  writer.commit();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
