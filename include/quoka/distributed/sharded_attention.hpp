// Attention over keys that lie on several ranks.
//
//   past     each rank attends with all query heads to what was selected of its own keys
//   home     KV heads are dealt out to the ranks in ranges; a rank is home to its range's query heads. It
//            gets all ranks' partial results for them, and attends to the chunk itself for them alone
//   merge    at home: rank 0's, rank 1's, ..., then the chunk's, by log-sum-exp (attention/merge.hpp)
//   result   all homes' to all ranks, the same bits on each
//
// With c = ceil(kv_heads / ranks) KV heads at a home, each rank sends in floats
//
//   (q_heads - those at home) * batch * q_len * (v_dim + 1)     in ranks - 1 messages, partial results
//   c * group * batch * q_len * (v_dim + 1)                     in one allgather, merged results
//
// One rank attends as ChunkedPrefill does, and sends nothing.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/distributed/rounds.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class ShardedAttention {
 public:
  // past: this rank's keys and values, with its part of the Selection. Collective.
  void run(const Rows& q, const Past& past, const Chunk& chunk, const AttentionOutput& output,
           const AttentionOptions& options, Rounds& rounds, ExecutorRef executor);

  Index bytes() const {
    return workspace_.bytes() + parts_.bytes() + received_.bytes() + of_chunk_.bytes() +
           results_.bytes();
  }

 private:
  // Of each head its rows, [batch][q_len][v_dim], then their log-sum-exp: a range of heads is one message.
  struct Layout {
    Index batch, q_len, v_dim;

    Index rows() const { return batch * q_len; }
    Index head() const { return rows() * (v_dim + 1); }
    OutputRows out(float* x, Index heads) const;
    TensorView<float, 3> lse(float* x, Index heads) const;
  };

  AttentionWorkspace workspace_;
  Buffer<float> parts_;     // of own keys, all query heads
  Buffer<float> received_;  // [ranks], of other ranks' keys, the query heads at home
  Buffer<float> of_chunk_;  // the query heads at home
  Buffer<float> results_;   // all query heads
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/distributed/sharded_attention_impl.hpp>
#endif
