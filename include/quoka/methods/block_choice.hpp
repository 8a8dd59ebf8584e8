// From the scores of blocks to a score per key: what XAttention and FlashPrefill share.
//
//   forced blocks       above all others, in the order in which they were forced
//   blocks of a choice  1 + their rank: at least `bar`
//   all others          their rank, below `bar`
//
// A block's rank in [0, 1] is the largest of those that the sets (a query head's block of queries) give
// it; a choice is the union of the sets'. Each key has the score of its block, so that top-k takes
// whole blocks, best first, and of the last one its first keys.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/base/index.hpp>
#include <quoka/select/selector.hpp>

#include <algorithm>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

struct BlockChoiceScratch {
  Buffer<float> scores;  // [blocks] scores of keys, as they stand
  Buffer<Index> order;   // [blocks]

  void reserve(Index blocks) { scores.reserve_amortised(blocks), order.reserve_amortised(blocks); }
  Index bytes() const { return scores.bytes() + order.bytes(); }
};

struct BlockChoiceState {
  Buffer<float> scores;      // [batch, kv_heads, sets, blocks]
  Buffer<float> key_scores;  // [batch, kv_heads, kv_len], of a threshold
  Buffer<Index> counts;      // [batch, kv_heads], likewise
  WorkerScratch<BlockChoiceScratch> scratch;

  float* reserve(int workers, Index heads, Index sets, Index blocks) {
    scratch.reserve(workers, blocks);
    return scores.reserve_amortised(heads * sets * blocks);
  }
  Index bytes() const { return bytes_of(scores, key_scores, counts, scratch); }
};

// Of one KV head: kv_len past keys in blocks of `block`, followed by those of the chunk if it is scored.
class BlockChoice {
 public:
  static constexpr float bar = 1.0f;

  BlockChoice(BlockChoiceScratch& scratch, Index kv_len, Index block, Index blocks)
      : scores_(scratch.scores.data()),
        order_(scratch.order.data()),
        kv_len_(kv_len),
        block_(block),
        blocks_(blocks) {
    std::fill_n(scores_, blocks_, 0.0f);
  }

  // Ranks: shares of the set's total. Chosen, unless tau is 0: block 0 and [own, own_last], then the
  // best until their sum is tau of the total, equal ones in their order.
  void add_mass(float* scores, Index own, Index own_last, double tau) {
    double total = 0.0;
    for (Index j = 0; j < blocks_; ++j) total += scores[j] = usable(scores[j]);
    if (!(total > 0.0)) return;
    rank(scores, 1.0 / total);
    if (tau == 0.0) return;
    double sum = 0.0;
    Index others = 0;
    for (Index j = 0; j < blocks_; ++j) {
      if (j == 0 || (j >= own && j <= own_last))
        sum += scores[j], choose(j, scores[j] / total);
      else
        order_[others++] = j;
    }
    sort(order_, others,
         [&](Index a, Index b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    for (Index i = 0; i < others && sum < tau * total; ++i) {
      const Index j = order_[i];
      sum += scores[j], choose(j, scores[j] / total);
    }
  }

  // Ranks: parts of the set's best. Chosen, unless alpha is 0: those of at least alpha.
  void add_relative(float* scores, double alpha) {
    double best = 0.0;
    for (Index j = 0; j < blocks_; ++j)
      best = std::max<double>(best, scores[j] = usable(scores[j]));
    if (!(best > 0.0)) return;
    rank(scores, 1.0 / best);
    if (alpha == 0.0) return;
    for (Index j = 0; j < blocks_; ++j)
      if (scores[j] >= alpha * best) choose(j, scores[j] / best);
  }

  // Above all that is not forced already.
  void force(Index j) {
    if (j < 0 || j >= blocks_ || scores_[j] > 2.0f) return;
    scores_[j] = 0x1p24f - static_cast<float>(forced_++);
  }

  // To scores [kv_len].
  void write(float* scores) const {
    for (Index t = 0, j = 0; t < kv_len_; t += block_, ++j)
      std::fill_n(scores + t, std::min(block_, kv_len_ - t), scores_[j]);
  }

 private:
  static float usable(float score) { return std::isfinite(score) ? score : 0.0f; }

  void rank(const float* scores, double factor) {
    constexpr float below_bar = 0x1.fffffep-1f;
    for (Index j = 0; j < blocks_; ++j)
      scores_[j] =
          std::max(scores_[j], std::min(below_bar, static_cast<float>(scores[j] * factor)));
  }
  void choose(Index j, double rank) {
    scores_[j] = std::max(scores_[j], bar + std::min(1.0f, static_cast<float>(rank)));
  }

  float* scores_;
  Index* order_;
  Index kv_len_, block_, blocks_, forced_ = 0;
};

// A threshold in [0, 1]; 0: there is none.
inline void require_threshold(const char* name, double threshold) {
  if (!(threshold >= 0.0 && threshold <= 1.0)) fail_range(name, threshold, "[0, 1]");
}

// The keys of the blocks that a threshold keeps: those that `scorer` scores at least BlockChoice::bar.
template <class Scorer>
void select_chosen_blocks(const Scorer& scorer, const SelectorInput& input,
                          typename Scorer::State& state, Selection& selection,
                          ExecutorRef executor) {
  const Rows& k = input.k;
  const Index heads = k.batch() * k.heads(), len = k.len(),
              most_len = std::max(len, input.capacity);
  float* const scores = state.blocks.key_scores.reserve_amortised(heads * most_len);
  Index* const counts = state.blocks.counts.reserve(heads);
  selection.reserve(heads * most_len);
  scorer.score(input, state, TensorView<float, 3>(scores, {k.batch(), k.heads(), len}), executor);
  executor.run(heads, [&](Index head, int) {
    const float* const x = scores + head * len;
    counts[head] = std::count_if(x, x + len, [](float s) { return s >= BlockChoice::bar; });
  });
  SelectionWriter writer(selection, k.batch(), k.heads(), len,
                         *std::max_element(counts, counts + heads));
  executor.run(heads, [&](Index head, int) {
    const float* const x = scores + head * len;
    Position* to = writer.row(head / k.heads(), head % k.heads()).data();
    for (Index t = 0; t < len; ++t)
      if (x[t] >= BlockChoice::bar) *to++ = static_cast<Position>(t);
    writer.set_count(head / k.heads(), head % k.heads(), counts[head]);
  });
  writer.commit();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
