// Blocks of keys by their mean, blocks of such blocks by the mean of the means, and so on: what a look
// at few rows proposes for the next look (TwoLevels of options.hpp).
//
//   level 0      the keys, n[0] of them
//   level j      row i is the mean of rows [i b, (i + 1) b) of level j - 1, b = TwoLevels::block; whole
//                blocks alone, n[j] = n[j - 1] / b rounded down. Keys with a NaN or an infinity do not count
//   wanted[0]    = budget; wanted[j] = c wanted[j - 1] / b rounded up, c = TwoLevels::candidates
//
// Selection goes down from the highest level of which fewer rows are wanted than there are, and below
// which each level wants fewer, too: a level's scorer picks its wanted[j] best rows, among all rows of the
// highest level, and on the levels below among candidates: the rows of the blocks that were picked, and
// those behind the last whole block. The first block is always picked, and so are those that hold
// forced keys. Scorers are those of one level, for the means as for the keys: cosines, exact as
// ever; in Domain::softmax the largest share of a row's attention on the means of a level, and below, on
// the keys, shares among the candidates.
//
// What is guaranteed: the Selection is the best of the candidates, bit for bit (cosine; softmax within
// sketched_mass.hpp's bound); it is one level's where the candidates are all keys. Nothing is promised of
// keys in blocks that were not picked: a key alone in its direction adds 1 / b of itself to the mean.
//
// A scan of at most n[j] (highest) + sum of c wanted[j] rows: with a budget of 1,024, b = 32 and c = 8 no
// more than 12,500 of any number of keys. Each level's sketch and means take 5 * head_dim + 12 bytes a
// row, with b = 32 and 128 channels 21 bytes a key in all, beside 140 of the keys' sketch. A mean is made
// when the last key of its block comes.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/cache/row_store.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/sketch/candidates.hpp>

#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class BlockLevels {
 public:
  // Rows of level j, from 1 on, and how many levels there are above the keys.
  Rows means(Index j) const { return level(j).means.view(); }
  const KeySketch& sketch(Index j) const { return level(j).sketch; }
  Index levels() const { return std::ssize(levels_); }

  // Means of the blocks that keys [len, k.len()) complete; room for those of `capacity` keys.
  void append(const Rows& k, Index block, Index capacity, ExecutorRef executor);
  void truncate(Index kv_len);
  Index bytes() const;

 private:
  struct Level {
    RowStore<float> means;
    KeySketch sketch;
  };
  const Level& level(Index j) const { return levels_[static_cast<std::size_t>(j - 1)]; }

  Index block_ = 1;
  std::vector<Level> levels_;
  WorkerScratch<FloatRow> floats_;
};

// How many rows of each level are picked, from the keys' own (0) on to the highest that is looked at.
// One entry: all keys are scored.
struct LevelPlan {
  struct Level {
    Index rows = 0, wanted = 0;        // n[j], wanted[j]
    Index keep_first = 0, keep_last = 0;
  };
  static constexpr Index most = 16;  // blocks have 16 keys at least
  Level level[most];
  Index count = 0;

  LevelPlan(Index kv_len, Index budget, const TwoLevels& two_levels, const TopKOptions& forced);
  Index highest() const { return count - 1; }
  // Of level j, below the highest.
  Index candidates(Index j, Index block) const {
    return level[j + 1].wanted * block + level[j].rows % block;
  }
};

// candidates [batch, kv_heads, plan.candidates(j)] of level j: the rows of the picked blocks, and those
// behind the last whole block.
void expand_blocks(const Selection& picked, Index block, Index rows, Candidates& candidates,
                   ExecutorRef executor);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/sketch/block_levels_impl.hpp>
#endif
