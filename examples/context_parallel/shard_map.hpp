// Which rank holds which tokens: block i of `block` tokens lies on rank i % ranks, so that all have
// about as many from the start. A rank keeps its tokens in ascending order.
#pragma once

#include <quoka/base/check.hpp>

#include <algorithm>

namespace quoka_examples {

using quoka::Index;

class ShardMap {
 public:
  // Tokens of a block. More of them leave a whole chunk to one rank.
  static constexpr Index usual_block = 64;

  // Throws std::invalid_argument for a block below 1 or beyond max_keys.
  ShardMap(Index block, int rank, int ranks) : block_(block), rank_(rank), ranks_(ranks) {
    quoka::detail::require_size("the tokens of a shard's block", block, 1);
  }

  // How many of the first `len` tokens are this rank's.
  Index local_len(Index len) const {
    const Index turn = block_ * ranks_;
    return len / turn * block_ + std::clamp<Index>(len % turn - rank_ * block_, 0, block_);
  }
  // Where this rank's token i stands.
  Index position(Index i) const { return (i / block_ * ranks_ + rank_) * block_ + i % block_; }
  bool is_own(Index position) const { return position / block_ % ranks_ == rank_; }
  // The position of one of this rank's tokens.
  Index place(Index position) const {
    return position / block_ / ranks_ * block_ + position % block_;
  }

  // f(begin, n) for each stretch of tokens [begin, begin + n) of [first, end) that is this rank's.
  template <class F>
  void for_own(Index first, Index end, F&& f) const {
    for (Index begin = first; begin < end;) {
      const Index stop = std::min(end, (begin / block_ + 1) * block_);
      if (is_own(begin)) f(begin, stop - begin);
      begin = stop;
    }
  }

 private:
  Index block_;
  int rank_, ranks_;
};

}  // namespace quoka_examples
