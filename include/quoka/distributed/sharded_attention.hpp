// Attention over keys that lie on several ranks.
//
//   home     each output row has a home among the ranks: KV heads are dealt out in ranges, and where there are
//            more ranks than heads, each head's rows in as many ranges as there are ranks for it
//   attend   each rank with all query heads to what was selected of its own keys, and with the rows at home to
//            the chunk itself: at once where heads are whole at home
//   merge    at home all ranks' partial results for its rows: rank 0's, rank 1's, ..., then the chunk's where it is
//            apart, by log-sum-exp (attention/merge.hpp)
//   result   all homes' to all ranks, the same bits on each
//
// What is sent, in floats, with c = ceil(kv_heads / ranks) KV heads at a home and all their rows, r = q_len;
// with more ranks than KV heads c = 1, r = ceil(q_len / floor(ranks / kv_heads)):
//
//   (q_heads * q_len - rows at home) * batch * (v_dim + 1)      in ranks - 1 messages, partial results
//   c * group * r * batch * (v_dim + 1)                         in one allgather, merged results
//
// One rank attends as ChunkedPrefill does, and sends nothing.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/distributed/rounds.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Which output rows have their home on which rank.
class Homes {
 public:
  struct Home {
    Index kv_head, heads;  // KV heads
    Index row, rows;       // of q_len
  };

  Homes(Index kv_heads, Index q_len, Index ranks)
      : kv_heads_(kv_heads),
        q_len_(q_len),
        ranges_(std::max<Index>(1, ranks / std::max<Index>(1, kv_heads))),
        heads_each_(ceil_div(kv_heads, ranks)),
        rows_each_(ceil_div(q_len, ranges_)) {}

  Home of(Index rank) const {
    const Index kv_head = std::min(rank / ranges_ * heads_each_, kv_heads_),
                row = std::min(rank % ranges_ * rows_each_, q_len_);
    return {kv_head, std::min(heads_each_, kv_heads_ - kv_head), row,
            std::min(rows_each_, q_len_ - row)};
  }
  bool whole_heads() const { return ranges_ == 1; }
  // The most at a home.
  Index heads_each() const { return heads_each_; }
  Index rows_each() const { return rows_each_; }

 private:
  Index kv_heads_, q_len_;
  Index ranges_;  // of a head's rows
  Index heads_each_, rows_each_;
};

class ShardedAttention {
 public:
  // past: this rank's keys and values, with its part of the Selection. Collective.
  void run(const Rows& q, const Past& past, const Chunk& chunk, const AttentionOutput& output,
           const AttentionOptions& options, Rounds& rounds, ExecutorRef executor);


 private:
  // Of each head its rows, [batch][q_len][v_dim], then their log-sum-exp: a range of heads is one message.
  struct Layout {
    Index batch, q_len, v_dim;  // q_len: the rows at a home, or all

    Index rows() const { return batch * q_len; }
    Index head() const { return rows() * (v_dim + 1); }
    OutputRows out(float* x, Index heads) const;
    TensorView<float, 3> lse(float* x, Index heads) const;
  };

  // Writes parts_, at home of the chunk, too.
  void attend_whole_heads(const Rows& q, const Past& past, const Chunk& chunk,
                          const AttentionOptions& options, const Homes::Home& home,
                          ExecutorRef executor);
  // Writes parts_, and chunk_parts_.
  void attend_past_and_chunk(const Rows& q, const Past& past, const Chunk& chunk,
                             const AttentionOptions& options, const Homes::Home& home,
                             ExecutorRef executor);

  AttentionWorkspace workspace_;
  Buffer<float> parts_;        // of own keys, all rows; with the chunk where these are one call
  Buffer<float> packed_;       // thereof a home's, where these are not whole heads
  Buffer<float> received_;     // [ranks], of other ranks' keys, the rows at home
  Buffer<float> chunk_parts_;  // the rows at home
  Buffer<float> results_;      // [ranks], what each is home to
  // Of the heads before home, at home, behind it.
  Selection keep_[3];
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/distributed/sharded_attention_impl.hpp>
#endif
