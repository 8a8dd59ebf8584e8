// FlashPrefill: blocks of keys, each judged by its mean key; and CompactAttention's form of it.
//
//   mean       m[j] = mean of the keys of block j, counted from position 0; the last one of those it has
//   logit      x[h][i][j] = scale * q[h][i] . m[j], for all rows i of a query block u (`block` rows)
//   score      s[h][u][j] = sum over i of exp(x[h][i][j] - max over i, j of x): one normaliser for the
//              query block, not a softmax per row
//
// Two ways to choose, one list per KV head, united over the query blocks and the heads of the group:
//
//   .relative = alpha   blocks with s >= alpha * max over j of s for any (h, u); always the
//                       first two, and the last four that end with a query block's own.
//                       alpha: 0.18 Llama-3.1, 0.08 Qwen2.5, 0.12 Qwen3-MoE; CompactAttention 0.06
//   a budget            block 0, the last blocks from the newest back, the other first one, then
//                       by the largest s / max s of any (h, u), earlier blocks first; of the last
//                       block that is taken, the first keys
//
// 2 * q_heads * q_len * kv_len / block * head_dim FLOPs and q_heads * q_len * kv_len / block
// exponentials. Keeps the mean key of each block, head_dim floats per `block` keys, and reads nothing
// else. Source: "FlashPrefill", arXiv 2603.06199; block union: "CompactAttention", arXiv 2605.16839.
// Deviations: one list per KV head (CompactAttention's) in every form; the query block's own keys of
// the chunk, of which only its last row looks at the mean, do not score. A row with a NaN or an infinity
// is left out; a block with one scores nothing.
#pragma once

#include <quoka/methods/block_choice.hpp>
#include <quoka/methods/block_scores.hpp>
#include <quoka/methods/chunk_shape.hpp>
#include <quoka/rows/row_store.hpp>
#include <quoka/select/scored_selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// What FlashPrefillSelector leaves open.
struct FlashPrefillOptions {
  Budget budget = Budget::keys(1024);  // whole blocks up to so many keys, without a threshold
  Index block = 128;                   // keys of a block, and queries

  double relative = 0.0;  // alpha in (0, 1], the method's own, in place of the budget; 0: none

  // As published: a threshold in place of a budget.
  static FlashPrefillOptions paper(double alpha = 0.12) { return {.relative = alpha}; }
  // CompactAttention-FP.
  static FlashPrefillOptions compact_attention() { return paper(0.06); }
  bool by_threshold() const { return relative > 0.0; }
};
// FLOPs of a chunk's scores (chunk_shape.hpp): 2 q_heads B (P / block) d, and kv_heads B d for the means.
inline double flops(const FlashPrefillOptions& o, const ChunkShape& c) {
  const Index blocks = ceil_div(c.kv_len, o.block);
  return detail::product({2, c.q_heads, c.q_len, blocks, c.head_dim}) +
         detail::product({c.kv_heads, c.q_len, c.head_dim});
}

// The scores behind FlashPrefillSelector.
class FlashPrefillScorer {
 public:
  using Options = FlashPrefillOptions;

  // Always kept, as published: attention sinks, and the blocks up to a query block's own.
  static constexpr Index first_blocks = 2, last_blocks = 4;

  struct State {
    RowStore<float> means;  // [batch, kv_heads, blocks, head_dim]
    RowStore<float> sums;   // [batch, kv_heads, 1, head_dim], of the last block's keys
    WorkerScratch<RowReader> readers;
    detail::BlockScoreState rows;
    detail::BlockChoiceState blocks;
    Index len = 0;     // keys whose means are up to date
    bool cut = false;  // the sums may hold keys that are gone, or too few

    void truncate(Index kv_len) {
      if (kv_len >= len) return;
      len = kv_len, cut = true;
    }
    Index kept_len() const { return len; }
    Index kept_bytes() const { return means.bytes() + sums.bytes(); }
    Index bytes() const { return kept_bytes() + rows.bytes() + blocks.bytes() + readers.bytes(); }
  };

  // Throws std::invalid_argument for a block < 1 and a `relative` outside [0, 1].
  explicit FlashPrefillScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("block", options.block, 1);
    detail::require_threshold("relative", options.relative);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const Index block = options_.block, query_blocks = ceil_div(q.len(), block);
    catch_up(k, input.capacity, state, executor);
    const Rows means = state.means.view();
    const detail::BlockQueries shape{input.group() * q.len(), input.group() * query_blocks, q};
    const float logit_scale = input.logit_scale();
    const auto fill = [&](Index b, Index kv_head, detail::BlockRowWriter& to) {
      for (Index r = 0; r < input.group(); ++r) {
        for (Index i = 0; i < q.len(); ++i) {
          const float* const row = to.read(q, b, kv_head * input.group() + r, i);
          if (scale_row(row, k.dim(), logit_scale, to.next()))
            to.keep(r * query_blocks + i / block, means.len());
        }
      }
    };
    const Index blocks = means.len(), heads = k.batch() * k.heads();
    float* const block_scores = state.blocks.reserve(executor.workers(), heads, shape.sets, blocks);
    detail::block_scores(shape, fill, {.k = means}, ceil_div(input.capacity, block),
                         detail::BlockNormaliser::whole_set, block_scores, state.rows, executor);
    for_each_kv_head(k, executor, [&](Index b, Index head, int worker) {
      float* const head_scores = block_scores + (b * k.heads() + head) * shape.sets * blocks;
      detail::BlockChoice choice(state.blocks.scratch[worker], k.len(), block, blocks);
      for (Index set = 0; set < shape.sets; ++set)
        choice.add_relative(head_scores + set * blocks, options_.relative);
      // The first query block's own block begins at or before the chunk.
      const Index own = k.len() / block;
      choice.force(0);
      for (Index j = own; j > own - last_blocks && j >= 0; --j) choice.force(j);
      for (Index j = 1; j < first_blocks && j < blocks; ++j) choice.force(j);
      choice.write(scores.row(b, head, 0));
    });
  }

  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    catch_up(input.k, input.capacity, state, executor);
  }

  // By the threshold, if there is one.
  bool choose(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    if (!options_.by_threshold()) return false;
    detail::select_chosen_blocks(*this, input, state, selection, executor);
    return true;
  }

 private:
  // Means of the blocks that hold keys from state.len on. Sums run in the order of the keys.
  void catch_up(const Rows& k, Index capacity, State& state, ExecutorRef executor) const {
    if (state.means.batch() != k.batch() || state.means.heads() != k.heads() ||
        state.means.dim() != k.dim() || state.len > k.len())
      state.len = 0;
    const Index block = options_.block, dim = k.dim();
    state.means.reshape(k.batch(), k.heads(), dim);
    state.means.resize(ceil_div(k.len(), block), ceil_div(capacity, block));
    state.sums.reshape(k.batch(), k.heads(), dim);
    state.sums.resize(1);
    state.readers.reserve(executor.workers(), k);
    const Index first = state.cut ? state.len / block * block : state.len;
    state.cut = true;  // until all heads are done
    for_each_kv_head(k, executor, [&](Index b, Index head, int worker) {
      float* const sum = state.sums.row(b, head, 0);
      for (Index t = first; t < k.len(); ++t) {
        const float* const key = state.readers[worker].read(k, b, head, t);
        add_row(key, dim, t % block == 0, sum);
        if ((t + 1) % block != 0 && t + 1 != k.len()) continue;
        const float share = 1.0f / static_cast<float>(t % block + 1);
        float* const mean = state.means.row(b, head, t / block);
        for (Index c = 0; c < dim; ++c) mean[c] = sum[c] * share;
      }
    });
    state.len = k.len(), state.cut = false;
  }

  Options options_;
};

using FlashPrefillSelector = ScoredSelector<FlashPrefillScorer>;
static_assert(Selector<FlashPrefillSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
