// Top-k of scores that lie on several ranks: the Selection that steps/top_k.hpp makes of all of them on
// one machine, from each rank's best alone.
//
// With k = budget - forced keys, no key outside a rank's k best is among the k best of all. So each rank
// sends its k best of each KV head as numbers whose order is that of top-k, descending:
//
//   candidate   32 bits of score, in the order of floats | 32 bits, 2^32 - 1 - position
//
// No two are equal, 0 is none, and every rank finds the same k largest. Forced keys are known without
// scores. With a window w > 1, runs of keys exchange the w - 1 scores at their ends first.
//
// k from each rank are more than are taken. From the second selection on each sends m <= k: an eighth and 16
// more than the last one took from any rank for any KV head. Where all m of a rank are taken there may be
// better ones behind them: select() says so, to all ranks alike, and all are asked for.
#pragma once

#include <quoka/distributed/rounds.hpp>
#include <quoka/distributed/shard_layout.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/steps/top_k.hpp>

#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

using Candidate = std::uint64_t;

class GlobalTopK {
 public:
  // kv_len keys on all ranks, of which `budget` < kv_len are wanted, budget > 0.
  void begin(const ShardMap& map, Index kv_len, Index budget, Index batch, Index kv_heads,
             const TopKOptions& options, int workers);

  // How many keys must be found by their scores; 0: none.
  Index wanted() const { return wanted_; }

  // How many of them each rank proposes.
  Index proposed() const { return each_; }
  // In this selection: all that are wanted. From the next one on, as in the first.
  void propose_all();
  void forget() { most_taken_ = 0; }

  // One of these, for this rank's keys: scores [batch, kv_heads, local_len]; or the scores [batch,
  // kv_heads, stride] of a Selection that holds the best of them, window 1.
  void propose(const float* scores, Rounds& rounds, ExecutorRef executor);
  void propose(const Selection& best, const float* scores, Index stride, ExecutorRef executor);

  // Collective: the Selection of all keys, and this rank's part of it by the places in its cache. False on
  // all ranks, and neither is of use, where too few were proposed: propose_all().
  bool select(Selection& selection, Selection& own, Rounds& rounds, ExecutorRef executor);

  // Bytes that each rank sends in propose() and select(), without headers.
  Index bytes() const;

 private:
  struct Scratch {
    TopKScratch top_k;
    Buffer<Candidate> best, listed;
    Buffer<Position> kept;
    Buffer<float> run;   // a run of scores, and what it needs of its neighbours
    Buffer<Index> next;  // [ranks]

    void reserve(Index local_len, Index wanted, Index ranks, Index window);
    Index bytes() const { return bytes_of(top_k, best, listed, kept, run, next); }
  };

  const float* pooled(const float* scores, Rounds& rounds, ExecutorRef executor);
  // Writes to most_of_head_, too.
  Position* merge_candidates(Index head, Scratch& s, Position* to) const;
  void reserve_candidates();
  Index keep_best(Candidate* candidates, Index n, Candidate* copy) const;
  Index halo() const { return options_.window - 1; }
  // Where run i of a head on a rank has its ends: the first window / 2 scores, then the last.
  Index ends_at(int rank, Index head, Index run) const {
    return ((rank * heads_ + head) * runs_ + run) * halo();
  }

  ShardMap map_;
  TopKOptions options_;
  Index kv_len_ = 0, local_len_ = 0, batch_ = 0, kv_heads_ = 0, heads_ = 0, runs_ = 0, ranks_ = 1;
  Index first_ = 0, last_ = 0, wanted_ = 0;  // forced at both ends; by scores
  Index each_ = 0;                           // thereof proposed by each rank
  Index most_taken_ = 0;                     // of these in the last selection; 0: not known
  Index local_first_ = 0, local_end_ = 0;    // this rank's keys that are not forced
  Buffer<Candidate> mine_, all_;             // [batch, kv_heads, proposed], of each rank
  Buffer<Index> most_of_head_;               // [batch, kv_heads]: taken of a rank
  Buffer<float> ends_, all_ends_, pooled_;
  WorkerScratch<Scratch> scratch_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/distributed/global_top_k_impl.hpp>
#endif
