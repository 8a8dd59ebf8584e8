// FlashPrefill: blocks of keys, each judged by its mean key; and CompactAttention's form of it.
//
//   mean       m[j] = mean of the keys of block j, counted from position 0; the last one of those
//              it has
//   logit      x[h][i][j] = scale * q[h][i] . m[j], for all rows i of a query block u (`block`
//              rows)
//   score      s[h][u][j] = sum over i of exp(x[h][i][j] - max over i, j of x): one normaliser for
//              the query block, not a softmax per row
//
// Two ways to choose, one list per KV head, united over the query blocks and the heads of the
// group:
//
//   .relative = alpha   blocks with s >= alpha * max over j of s for any (h, u); always the
//                       first two, and the last four that end with a query block's own.
//                       alpha: 0.18 Llama-3.1, 0.08 Qwen2.5, 0.12 Qwen3-MoE; CompactAttention 0.06
//   a budget            block 0, the last blocks from the newest back, the other first one, then
//                       by the largest s / max s of any (h, u), earlier blocks first; of the last
//                       block that is taken, the first keys
//
// 2 * q_heads * q_len * kv_len / block * head_dim FLOPs and q_heads * q_len * kv_len / block
// exponentials. Keeps the mean key of each block, head_dim floats per `block` keys, and reads
// nothing else. Source: "FlashPrefill", arXiv 2603.06199; block union: "CompactAttention", arXiv
// 2605.16839. Deviations: one list per KV head (CompactAttention's) in every form. The query
// block's own keys of the chunk do not score, since only its last row sees their mean. A row with a
// NaN or an infinity is left out; a block with one scores nothing.
#pragma once

#include <quoka/methods/block_choice.hpp>
#include <quoka/select/scored_selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of FlashPrefillSelector.
struct FlashPrefillOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head, without a threshold
  Index block = 128;                   // keys of a block, and queries

  double relative = 0.0;  // alpha in (0, 1], the method's own, in place of the budget; 0: none

  // As published: a threshold in place of a budget.
  static FlashPrefillOptions paper(double alpha = 0.12) { return {.relative = alpha}; }
  // CompactAttention-FP.
  static FlashPrefillOptions compact_attention() { return paper(0.06); }
  bool by_threshold() const { return relative > 0.0; }
};

// The scores behind FlashPrefillSelector.
class FlashPrefillScorer : public ScorerDefaults {
 public:
  using Options = FlashPrefillOptions;

  // Always kept, as published: attention sinks, and the blocks up to a query block's own.
  static constexpr Index first_blocks = 2, last_blocks = 4;

  using State = detail::BlockState;  // keeps the mean key of each block

  // Throws std::invalid_argument for a block outside [1, max_keys] and a `relative` outside [0, 1].
  explicit FlashPrefillScorer(const Options& options = {}) : options_(options) {
    detail::require_size("block", options.block, 1);
    detail::require_threshold("relative", options.relative);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  // Writes one list per KV head: the union over query blocks and the heads of the group.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const bool by_threshold = options_.by_threshold() && k.len() > 0;
    if (!by_threshold && select_unscored(k, options_.budget, selection)) return;
    appended(input, state, executor);
    const Index block = options_.block;
    const detail::BlockScoring shape{.block = block,
                                     .rows_per_block = 1,
                                     .set_rows = std::min(block, q.len()),
                                     .budget = by_threshold ? nullptr : &options_.budget,
                                     .joint = true};
    const auto fill = [&](Index b, Index head, Index begin, Index end, RowWriter& rows) {
      for (Index i = begin; i < end; ++i) rows.add(q, b, head, i, input.logit_scale());
    };
    const auto force = [&](detail::BlockChoice& choice) {
      // The first query block's own block begins at or before the chunk.
      const Index own = k.len() / block;
      choice.take(0);
      for (Index j = own; j > own - last_blocks; --j) choice.take(j);
      for (Index j = 1; j < first_blocks; ++j) choice.take(j);
    };
    detail::select_blocks(input, shape, fill, state, selection, executor, force,
                          [&](detail::BlockChoice& choice, const float* scores, float) {
                            choice.add_relative(scores, options_.relative);
                          });
  }

  // Means of the keys that have come.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    const Index dim = input.k.dim();
    state.append(input.k, input.capacity, options_.block, dim, executor,
                 [dim](Index, Index count, auto&& key, float* mean) {
                   for (Index i = 0; i < count; ++i) add_row(key(i), dim, i == 0, mean);
                   scale_row(mean, dim, 1.0f / static_cast<float>(count), mean);
                 });
  }

 private:
  Options options_;
};

using FlashPrefillSelector = ScoredSelector<FlashPrefillScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
