// Levels of blocks: keys in blocks by their mean, these in blocks again, and so on. A look at few rows
// proposes what the next look is at (TwoLevels of quoka.hpp).
//
//   level 0      the keys, n[0] of them
//   level j      row i is the mean of rows [i b, (i + 1) b) of level j - 1, b = TwoLevels::block: whole
//                blocks alone, n[j] = n[j - 1] / b rounded down. Keys with a NaN or an infinity do not count
//   wanted[0]    = budget
//   wanted[j]    = c wanted[j - 1] / b rounded up, c = TwoLevels::candidates; no fewer than are forced
//
// Level j is used where c wanted[j - 1] <= n[j - 1], wanted[j] < n[j], and level j - 1 is used. Of the
// highest one all rows are scored, and the wanted[j] best are picked. Below, candidates are scored: the
// rows of the blocks that were picked, and those behind the last whole block. Forced are the first block
// of each level and the blocks that hold forced keys. A level is scored as keys are in one level: by
// cosines, exactly; in Domain::softmax by each row's shares among the candidates, of blocks their largest.
//
// What is guaranteed: the Selection is the best of the candidates, bit for bit what one level would make of
// these keys alone, neighbours of a window (of Domain::softmax) being neighbours among them; where candidates
// would be all keys it is one level's. Nothing is promised of keys in
// other blocks: a key that its neighbours do not resemble adds 1 / b of itself to their mean.
//
// Scores n of the highest level + the sum of c wanted[j] rows: with a budget of 1,024, b = 32 and c = 8
// some 11,000 of any number of keys. Keeps 5 head_dim + 12 bytes a row of levels 1 and up. A mean is
// made when the last key of its block comes: one more read of the key.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/cache/row_store.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/sketch/candidates.hpp>
#include <quoka/views/selection.hpp>

#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class BlockLevels {
 public:
  // Rows of level j, from 1 on.
  Rows means(Index j) const { return level(j).means.view(); }
  const KeySketch& sketch(Index j) const { return level(j).sketch; }

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
    Index rows = 0, wanted = 0;  // n[j], wanted[j]
    Index keep_first = 0, keep_last = 0;
  };
  static constexpr Index most_levels = 16;  // blocks have 16 keys at least
  Level level[most_levels];
  Index count = 0;

  LevelPlan(Index kv_len, Index budget, Index block, Index times, const TopKOptions& forced);
  Index highest() const { return count - 1; }
  // Of any level, for this length and for those up to the next whole block.
  Index most_candidates(Index block) const;
};

// The candidates among `rows` rows: those of the picked blocks, and those behind the last whole block.
void expand_blocks(const Selection& picked, Index block, Index rows, Candidates& candidates,
                   ExecutorRef executor);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/sketch/block_levels_impl.hpp>
#endif
