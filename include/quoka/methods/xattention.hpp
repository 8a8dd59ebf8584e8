// XAttention: blocks of keys, by sums over antidiagonals of the attention map.
//
//   key row    K[t] = keys tS .. tS + S - 1 side by side; past and chunk, filled up with zeros
//   query row  Q[i] = queries iS + S - 1 .. iS of the chunk side by side, in reversed order
//   weight     p[i][t] = softmax over t of scale / S * Q[i] . K[t], of the key rows that begin no later
//              than the query row does
//   block      s[h][u][j] = sum of p[i][t] over query rows i of head h's query block u and key rows t
//              of block j; both blocks have `block` tokens, keys counted from position 0
//
// The product of two rows is the sum of an antidiagonal of each S x S tile. Two ways to choose, one
// list per KV head, united over the query blocks and the heads of the group:
//
//   .mass = tau   each (h, u): block 0 and its own blocks, then the best until their sum is tau of
//                 the row's total (0.9; the paper tunes 0.8 to 0.9 per head)
//   a budget      block 0, the chunk's first block where the past begins it, then by the largest
//                 s[h][u][j] / total of any (h, u), earlier blocks first; of the last block that
//                 is taken, the first keys
//
// 2 * q_heads * q_len * (kv_len + q_len) / S * head_dim FLOPs, q_heads * q_len * kv_len / S^2
// exponentials; reads each key once. Keeps nothing per key. Source: Xu et al., "XAttention: Block
// Sparse Attention with Antidiagonal Scoring", arXiv 2503.16428. Deviations: one list per KV head in
// place of one for each query block and head; the chunk is attended in full, whatever its blocks score.
// A query or key row with a NaN or an infinity is left out.
#pragma once

#include <quoka/methods/block_choice.hpp>
#include <quoka/methods/block_scores.hpp>
#include <quoka/select/scored_selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of XAttentionSelector.
struct XAttentionOptions {
  Budget budget = Budget::keys(1024);  // whole blocks up to this many keys, without a threshold
  Index stride = 8;                    // S: 8 or 16 in the paper
  Index block = 128;                   // keys of a block, and queries; a multiple of stride

  double mass = 0.0;  // tau in (0, 1], the method's own, in place of the budget; 0: none

  // As published: a threshold in place of a budget.
  static XAttentionOptions paper(double tau = 0.9) { return {.mass = tau}; }
  bool by_threshold() const { return mass > 0.0; }
};

// The scores behind XAttentionSelector.
class XAttentionScorer {
 public:
  using Options = XAttentionOptions;

  struct State : NoState {
    Arenas workers;  // of the scores
    detail::BlockChoiceState blocks;

    Index bytes() const { return bytes_of(workers, blocks); }
  };

  // Throws std::invalid_argument for a stride < 1, a block that is not a multiple of it, and a mass outside [0, 1].
  explicit XAttentionScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("stride", options.stride, 1);
    detail::require_multiple("block", options.block, "stride", options.stride);
    detail::require_threshold("mass", options.mass);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  // Writes one list per KV head: the union over query blocks and the heads of the group.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const bool by_threshold = options_.by_threshold() && k.len() > 0;
    if (!by_threshold && detail::select_unscored(k, options_.budget, selection)) return;
    const Index stride = options_.stride, block = options_.block, dim = k.dim();
    const Index rows = ceil_div(q.len(), stride), query_blocks = ceil_div(q.len(), block);
    const detail::BlockQueries shape{input.group() * rows, input.group() * query_blocks, q};
    const detail::BlockKeys keys{k, input.chunk_k, stride, block / stride, true};
    const float scale = input.logit_scale() / static_cast<float>(stride);
    const auto fill = [&](Index b, Index kv_head, detail::BlockRowWriter& to) {
      for (Index r = 0; r < input.group(); ++r) {
        for (Index i = 0; i < rows; ++i) {
          float* const row = to.next();
          bool finite = true;
          for (Index s = 0; s < stride; ++s) {
            const Index at = i * stride + stride - 1 - s;
            if (at < q.len())
              finite &= scale_row(to.read(q, b, kv_head * input.group() + r, at), dim, scale,
                                  row + s * dim);
            else
              std::fill_n(row + s * dim, dim, 0.0f);
          }
          if (finite) to.keep(r * query_blocks + i * stride / block, k.len() / stride + i + 1);
        }
      }
    };
    const Index blocks = keys.blocks(), size = shape.sets * blocks;
    float* const block_scores = state.blocks.scores.reserve_amortised(k.batch() * k.heads() * size);
    detail::block_scores(shape, fill, keys, input.capacity, detail::BlockNormaliser::each_row,
                         block_scores, state.workers, executor);
    const auto choose = [&](detail::BlockChoice& choice, Index head) {
      choice.take(0);
      if (k.len() % block != 0) choice.take(k.len() / block);
      for (Index set = 0; set < shape.sets; ++set) {
        const Index first = k.len() + set % query_blocks * block;
        choice.add_mass(block_scores + head * size + set * blocks, first / block,
                        (std::min(first + block, k.len() + q.len()) - 1) / block, options_.mass);
      }
    };
    detail::select_blocks(input, {block, blocks, by_threshold ? nullptr : &options_.budget},
                          state.blocks, selection, executor, choose);
  }

 private:
  Options options_;
};

using XAttentionSelector = ScoredSelector<XAttentionScorer>;
static_assert(Selector<XAttentionSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
