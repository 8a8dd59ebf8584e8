// Indexer: a model's own chooser of keys, small heads that score every key for every query; the best ones become the
// lists that attention heeds (views/index_lists.hpp).
//
//   quoka::Indexer indexer({.k = 2048});
//   const quoka::IndexLists lists = indexer.choose({.q = index_q, .k = index_k, .weights = weights}, threads);
//   quoka::attention(q, {past_k, past_v}, chunk, out, {.lists = lists}, threads);
//
//   with weights      score[i, t] = sum over heads h of weights[h, i] * max(0, q[h, i] . k[t])
//   without           score[i, t] = maximum over heads of q[h, i] . k[t]
//   a block of keys   has the score of its best key that the query sees
//
// With weights it is the lightning indexer of DeepSeek-V3.2 (its report, section 2.1, equation 1) and GLM-5, without and
// by blocks that of MiniMax-M3, as llama.cpp computes it. A scale of the scores changes no list, and has no place here.
//
// Keys are numbered as attention's columns are: `k` holds the past's keys, then the chunk's own, and query i stands at
// kv_len - q_len + i. A list names keys that its query sees, in ascending order, -1 behind the last; all where they are
// no more than k. Of equal scores the earlier key is taken. A score that is not finite (NaN or infinity in a key, a
// query or a weight) ranks behind all others that the query sees.
//
// Products and sums are in float, over channels and then over heads in their order: the same bits for any executor. Cost:
// 2 * index_heads * q_len * kv_len * dim FLOPs at the rate of attention in float, and a top-k for each query. Memory:
// scores of some queries, tuning::indexer_score_bytes at most where one query's need no more.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/steps/top_k.hpp>
#include <quoka/views/float_rows.hpp>
#include <quoka/views/index_lists.hpp>
#include <quoka/views/mask.hpp>
#include <quoka/views/rows.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// What an Indexer chooses.
struct IndexerOptions {
  Index k = 2048;   // entries of a list at most: keys, or blocks
  Index block = 1;  // keys of an entry: entry e names keys [block * e, block * (e + 1))
  // The first entries that a query sees are in its list in any case, and the last ones: 1 is that of its own
  // key. They count inside k; where not all fit the first ones stay, then the most recent (top-k's rule, steps/top_k.hpp).
  Index keep_first = 0, keep_last = 0;
  // Lists for so many KV heads, each by an equal share of the index heads; 1: the same for all.
  Index lists_heads = 1;
  bool causal = true;  // query i sees no key behind its own; false: all but what the mask hides

  bool operator==(const IndexerOptions&) const = default;
};

// What a call of Indexer::choose is given.
struct IndexerInput {
  Rows q;  // [batch, index_heads, q_len, dim]
  Rows k;  // [batch, 1 or lists_heads, kv_len, dim], the chunk's q_len keys last
  // [batch, index_heads, q_len]; absent: the maximum over heads.
  TensorView<const float, 3> weights = {};
  // [batch or 1, lists_heads or 1, q_len, kv_len]: what it hides is not listed; biases are not heeded.
  Mask mask = {};
};

namespace detail {

// Of one worker.
struct IndexerScratch {
  Buffer<float> tiles;       // rows of some queries, packed as tiles
  Buffer<float> weights;     // of these rows
  Buffer<float> lanes;       // a block of keys, transposed: [panel][channel][panel_rows]
  Buffer<float> query_rows;  // those of a tile, widened
  Buffer<float> biases;      // a mask's row
  FloatRows keys;            // those of a panel
  TopKScratch top_k;

  void reserve(Index rows, Index kv_len, const Rows& k);
  Index bytes() const { return bytes_of(tiles, weights, lanes, query_rows, biases, keys, top_k); }
};

}  // namespace detail

// Scores and chooses, and keeps the memory that it needs for the next call. One call at a time.
class Indexer {
 public:
  // Throws std::invalid_argument for k, block or lists_heads below 1, for a negative keep_first or keep_last.
  explicit Indexer(const IndexerOptions& options = {});

  // The lists of a chunk, [batch, lists_heads, q_len, k], or as many entries as there are where these are fewer; good until
  // the next call. Throws std::invalid_argument where shapes do not fit together, before anything is written.
  IndexLists choose(const IndexerInput& input, ExecutorRef executor = SerialExecutor{}) {
    const Index most = write_lists(input, executor);
    return IndexLists(IndexLists::Entries(lists_.data(), {input.q.batch(), options_.lists_heads,
                                                          input.q.len(), most}),
                      options_.block);
  }

  const IndexerOptions& options() const { return options_; }  // as given
  // Of memory that is kept.
  Index bytes() const { return bytes_of(lists_, scores_, scratch_); }

 private:
  // Returns the entries of a list.
  Index write_lists(const IndexerInput& input, ExecutorRef executor);

  IndexerOptions options_;
  Buffer<Position> lists_;  // [batch, lists_heads, q_len, most]
  Buffer<float> scores_;    // [query of some units][kv_len, rounded up]
  WorkerScratch<detail::IndexerScratch> scratch_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/indexer_impl.hpp>
#endif
