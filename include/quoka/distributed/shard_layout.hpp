// Which rank holds which tokens.
//
//   round_robin(block)   block i of `block` tokens lies on rank i % ranks: balanced from the start
//   contiguous(len)      rank i holds tokens [i * len, (i + 1) * len), the last one all that follow
//
// Either way a rank holds blocks of consecutive tokens, in ascending order. A method says of which length
// they must be a multiple (select/selector.hpp, shard_keys()).
#pragma once

#include <quoka/base/check.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

struct ShardLayout {
  // Tokens; 0, round robin alone: the method's least multiple of 64 or more. Larger ones leave a chunk to one
  // rank, and the others wait until that has appended it.
  Index block = 0;
  bool is_contiguous = false;  // false: round robin

  // Blocks of tokens in turn.
  static ShardLayout round_robin(Index block = 0) { return {block, false}; }
  // One range of `len` tokens each.
  static ShardLayout contiguous(Index len) { return {len, true}; }
};

// The tokens of one rank.
class ShardMap {
 public:
  ShardMap() = default;
  // `multiple`: what the method asks for. Throws std::invalid_argument for a block that is none, and for more than
  // max_keys tokens.
  ShardMap(const ShardLayout& layout, Index multiple, int rank, int ranks)
      : rank_(rank), ranks_(ranks), is_contiguous_(layout.is_contiguous) {
    block_ = layout.block == 0 && !is_contiguous_ ? round_up(64, multiple) : layout.block;
    detail::require_multiple("the tokens of a shard's block", block_, "the method's keys",
                             multiple);
    detail::require_keys("the tokens of a shard's block", block_);
  }

  Index block() const { return block_; }  // tokens of a block, or of a rank's range
  int ranks() const { return ranks_; }
  bool is_contiguous() const { return is_contiguous_; }  // else round robin

  // Of the first `len` tokens, how many are this rank's.
  Index local_len(Index len) const {
    const Index turn = block_ * ranks_, first = rank_ * block_;
    if (is_contiguous_)
      return rank_ + 1 < ranks_ ? std::clamp<Index>(len - first, 0, block_)
                                : std::max<Index>(len - first, 0);
    return len / turn * block_ + std::clamp<Index>(len % turn - first, 0, block_);
  }
  // Where this rank's token i stands.
  Index position(Index i) const {
    if (is_contiguous_) return rank_ * block_ + i;
    return (i / block_ * ranks_ + rank_) * block_ + i % block_;
  }
  // How many of this rank's tokens lie together, from any multiple of it on.
  Index run() const { return is_contiguous_ ? no_end : block_; }
  // How many runs the rank has that holds most of the first `len`.
  Index max_runs(Index len) const {
    return is_contiguous_ ? 1 : ceil_div(ceil_div(len, block_), ranks_);
  }
  // The rank whose run comes before, or after, this rank's run i, and which of its runs that is; -1: none.
  struct Neighbour {
    int rank;   // -1: there is none
    Index run;  // which of its runs
  };
  // The run before this rank's run i.
  Neighbour before(Index i) const {
    if (rank_ > 0) return {rank_ - 1, i};
    return is_contiguous_ || i == 0 ? Neighbour{-1, 0} : Neighbour{ranks_ - 1, i - 1};
  }
  // The run after this rank's run i.
  Neighbour after(Index i) const {
    if (rank_ + 1 < ranks_) return {rank_ + 1, i};
    return is_contiguous_ ? Neighbour{-1, 0} : Neighbour{0, i + 1};
  }

  // The block that a position lies in, up to `end`; an own key's place in the cache is position - shift.
  struct Block {
    Index end = 0, shift = 0;  // positions
    bool is_own = false;       // this rank's
  };
  // The block of this position.
  Block block_at(Index position) const {
    const Index block = position / block_;
    if (is_contiguous_) {
      const Index owner = std::min<Index>(block, ranks_ - 1);
      return {owner + 1 < ranks_ ? (owner + 1) * block_ : no_end, rank_ * block_, owner == rank_};
    }
    return {(block + 1) * block_, (block - block / ranks_) * block_, block % ranks_ == rank_};
  }

  // f(begin, n) for each stretch of tokens [begin, begin + n) of [first, end) that is this rank's.
  template <class F>
  void for_own(Index first, Index end, F&& f) const {
    while (first < end) {
      const Block block = block_at(first);
      const Index stop = std::min(end, block.end);
      if (block.is_own) f(first, stop - first);
      first = stop;
    }
  }

 private:
  static constexpr Index no_end = Index{1} << 40;

  Index block_ = 1;
  int rank_ = 0, ranks_ = 1;
  bool is_contiguous_ = false;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
