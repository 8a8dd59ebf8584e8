// XAttention: blocks of keys, by sums over antidiagonals of the attention map.
//
//   key row    K[t] = keys tS .. tS + S - 1 side by side; past and chunk, filled up with zeros
//   query row  Q[i] = queries iS + S - 1 .. iS of the chunk side by side, in reversed order
//   weight     p[i][t] = softmax over t of scale / S * Q[i] . K[t], of the key rows that begin no
//              later than the query row does
//   block      s[h][u][j] = sum of p[i][t] over query rows i of head h's query block u and key rows
//              t of block j; both blocks have `block` tokens, keys counted from position 0
//
// The product of two rows is the sum of an antidiagonal of each S x S tile. Two ways to choose, one
// list per KV head, united over the query blocks and the heads of the group:
//
//   .mass = tau   each (h, u): the chunk, block 0 and the block that the past ends in, then the
//                 best until the sum is tau of the total (0.9; the paper tunes 0.8 to 0.9 per head)
//   a budget      block 0 and the block that the past ends in, then by the largest
//                 s[h][u][j] / total of any (h, u), earlier blocks first; of the last block that
//                 is taken, the first keys
//
// The block that the past ends in is the one that the chunk's first keys complete, if there is one.
//
// 2 * q_heads * q_len * (kv_len + q_len) / S * head_dim FLOPs, q_heads * q_len * kv_len / S^2
// exponentials. Keeps a copy of the keys in float, key rows side by side. Source: Xu et al.,
// "XAttention: Block Sparse Attention with Antidiagonal Scoring", arXiv 2503.16428. Deviations: one
// list per KV head in place of one for each query block and head. The chunk is attended in full. A
// query or key row with a NaN or an infinity is left out.
#pragma once

#include <quoka/methods/block_choice.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/select/scored_selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of XAttentionSelector.
struct XAttentionOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head, without a threshold
  Index stride = 8;                    // S: 8 or 16 in the paper
  Index block = 128;                   // keys of a block, and queries; a multiple of stride

  double mass = 0.0;  // tau in (0, 1], the method's own, in place of the budget; 0: none

  // As published: a threshold in place of a budget.
  static XAttentionOptions paper(double tau = 0.9) { return {.mass = tau}; }
  bool by_threshold() const { return mass > 0.0; }
};

// The scores behind XAttentionSelector.
class XAttentionScorer : public ScorerDefaults {
 public:
  using Options = XAttentionOptions;

  // Keeps the key rows of the past alone.
  struct State : detail::BlockState {
    Buffer<float> tail;  // [batch, kv_heads, key rows of the chunk, stride * head_dim]
    RowReader reader;
  };

  // Throws std::invalid_argument for a stride or a block outside [1, max_keys], a block that is not
  // a multiple of the stride, and a mass outside [0, 1].
  explicit XAttentionScorer(const Options& options = {}) : options_(options) {
    detail::require_size("stride", options.stride, 1);
    detail::require_size("block", options.block, 1);
    detail::require_multiple("block", options.block, "stride", options.stride);
    detail::require_threshold("mass", options.mass);
  }

  // The scores are made from attention's logits, and use its scale.
  static bool weighs_logits() { return true; }

  // Writes one list per KV head: the union over query blocks and the heads of the group.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const bool by_threshold = options_.by_threshold() && k.len() > 0;
    if (!by_threshold && select_unscored(k, options_.budget, selection)) return;
    appended(input, state, executor);
    const Index stride = options_.stride, block = options_.block, dim = k.dim();
    const detail::BlockScoring shape{.block = block,
                                     .rows_per_block = block / stride,
                                     .set_rows = ceil_div(std::min(block, q.len()), stride),
                                     .budget = by_threshold ? nullptr : &options_.budget,
                                     .chunk_k = chunk_rows(input, state)};
    const float scale = input.logit_scale() / static_cast<float>(stride);
    const auto fill = [&](Index b, Index head, Index begin, Index end, RowWriter& to) {
      for (Index i = begin; i < end; i += stride) {
        float* const row = to.next();
        bool finite = true;
        for (Index s = 0; s < stride; ++s) {
          const Index at = i + stride - 1 - s;
          if (at < q.len())
            finite &= scale_row(to.read(q, b, head, at), dim, scale, row + s * dim);
          else
            std::fill_n(row + s * dim, dim, 0.0f);
        }
        if (finite) to.keep(i / stride + 1);
      }
    };
    const auto force = [&](detail::BlockChoice& choice) {
      choice.take(0);
      if (k.len() % block != 0) choice.take(k.len() / block);
    };
    detail::select_blocks(input, shape, fill, state, selection, executor, force,
                          [&](detail::BlockChoice& choice, const float* scores, float of_chunk) {
                            choice.add_mass(scores, of_chunk, options_.mass);
                          });
  }

  // Key rows of the keys that have come: those that are full.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    const Index stride = options_.stride, dim = input.k.dim();
    state.append(input.k.slice(0, input.k.len() / stride * stride), input.capacity, stride,
                 stride * dim, executor, [dim](Index, Index count, auto&& key, float* row) {
                   for (Index s = 0; s < count; ++s) std::copy_n(key(s), dim, row + s * dim);
                 });
  }

 private:
  // The key rows that the chunk is in: the first may begin in the past, and the last is filled up
  // with zeros.
  Rows chunk_rows(const SelectorInput& input, State& state) const {
    const Rows &k = input.k, &chunk = input.chunk_k;
    const Index stride = options_.stride, dim = k.dim(), first = k.len() / stride * stride;
    const Index keys = k.len() - first + chunk.len(), rows = ceil_div(keys, stride);
    const Index size = rows * stride * dim;
    float* const tail = state.tail.reserve(k.batch() * k.heads() * size);
    for (Index head = 0; head < k.batch() * k.heads(); ++head) {
      float* to = tail + head * size;
      std::fill_n(to, size, 0.0f);
      for (Index t = first; t < first + keys; ++t, to += dim) {
        const Index in_chunk = t - k.len(), b = head / k.heads(), kv_head = head % k.heads();
        std::copy_n(in_chunk < 0 ? state.reader.read(k, b, kv_head, t)
                                 : state.reader.read(chunk, b, kv_head, in_chunk),
                    dim, to);
      }
    }
    return TensorView<const float>(tail, {k.batch(), k.heads(), rows, stride * dim});
  }

  Options options_;
};

using XAttentionSelector = ScoredSelector<XAttentionScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
