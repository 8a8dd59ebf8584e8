// One attention call with its defaults filled in. resolved_call() makes it of the arguments,
// check_call.hpp checks them, plan.hpp cuts the call into items, and the items read it. It counts
// in three ways:
//
//   row       of a KV head: one query of one of the `group` heads that share its keys, ordered
//             query by query
//   column    of the keys as the caller has them: the past's, selected or not, then the chunk's.
//             Masks and lists count columns. key_sequence.hpp counts the keys of a head, which are
//             those that are attended to
//   position  of a token in its sequence, whatever memory it lies in
#pragma once

#include <quoka/attention/attention_options.hpp>
#include <quoka/attention/logits.hpp>
#include <quoka/attention/visible_past.hpp>
#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/token_kernels.hpp>

#include <algorithm>
#include <limits>
#include <optional>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// resolved_call() sets all but `visible` and `arithmetic`. prepare_call() then splits groups and
// chooses the arithmetic; find_visible() sets `visible`.
struct AttentionCall {
  Rows q;                                // [batch, q_heads, q_len, head_dim]
  Rows past_k, past_v;                   // [batch, kv_heads, kv_len, head_dim | v_dim]
  Rows chunk_k, chunk_v;                 // [batch, kv_heads, q_len or 0, head_dim | v_dim]
  OutputRows out;                        // [batch, q_heads, q_len, v_dim]
  TensorView<float, 3> lse;              // [batch, q_heads, q_len], or empty
  const Selection* selection;            // of the past; null: all
  const IndexLists* lists;               // of each query; null: none
  const VisiblePast* visible = nullptr;  // the past that the mask shows; null without a mask
  Index kv_heads, group, v_dim;
  Logits logits;                                // from a product to a logit
  const PanelArithmetic* arithmetic = nullptr;  // chosen before anything runs
  bool codes_queries;  // may decode's queries be rounded to codes (token_codes.hpp)?

  // A Selection of query heads: each head attends by itself, as if each head of the group had a
  // copy of its KV head's rows. All that follows sees heads without a group.
  // Lists never meet it, since kv_heads is then no longer theirs: a Selection that leaves keys out
  // is refused beside them.
  void split_groups() {
    if (selection == nullptr || selection->heads() == kv_heads) return;
    for (Rows* const x : {&past_k, &past_v, &chunk_k, &chunk_v}) *x = x->repeated_heads(group);
    kv_heads = q.heads(), group = 1;
  }

  Index block_keys() const { return arithmetic->block_keys(); }
  Index heads() const { return q.batch() * kv_heads; }  // KV heads of all sequences
  Index rows() const { return group * q.len(); }        // query rows of a KV head
  Index panels() const { return ceil_div(rows(), kernel_sizes().panel_rows); }
  // Those of head b * kv_heads + kv_head from `first` on, `count` or as many as there are.
  HeadQueries rows_of(Index head, Index first, Index count) const {
    return {head / kv_heads, head % kv_heads, group, first, std::min(count, rows() - first)};
  }
  // May a block have rows of two formats, the past's last and the chunk's first ones? They are
  // widened to this many floats.
  Index mixed_k_floats() const { return mixes(past_k, chunk_k) ? block_keys() * q.dim() : 0; }
  Index mixed_v_floats() const { return mixes(past_v, chunk_v) ? block_keys() * v_dim : 0; }
  // The queries of these rows, scaled: whole tiles of token_tile_rows(), of whole packets, with
  // zeros beyond.
  void read_queries(const HeadQueries& of, float* to) const {
    const Index width = whole_packets(q.dim());
    std::fill_n(to, round_up(of.count, token_tile_rows(of.count)) * width, 0.0f);
    for (Index i = 0; i < of.count; ++i, to += width) {
      const auto [q_head, query] = of[i];
      q.format().widen(q.row(of.b, q_head, query), q.shape(q_head), to);
      for (Index c = 0; c < q.dim(); ++c) to[c] *= logits.rule.scale;
    }
  }
  // Are some rows of the past left out? Then kept() lists the others.
  bool leaves_out() const {
    return selection != nullptr || (visible != nullptr && visible->leaves_out());
  }
  std::span<const Position> kept(Index b, Index kv_head) const {
    if (visible != nullptr && visible->leaves_out()) return visible->cells(b, kv_head);
    return selection != nullptr ? selection->row(b, kv_head) : std::span<const Position>{};
  }
  // Has each query keys of its own (attend_lists.hpp), by lists or by a mask that is read as lists?
  bool own_keys() const {
    return lists != nullptr || (logits.mask != nullptr && logits.mask->is_lists() &&
                                selection == nullptr && q.len() > 1);
  }
  // Is it one query with few rows for each KV head (attend_decode.hpp)? A mask must be the same for
  // all heads: what it hides is hidden from all of the call, and KeySequence leaves it out.
  bool is_decode() const {
    return q.len() == 1 && !own_keys() && group <= kernel_sizes().token_rows &&
           (logits.mask == nullptr || logits.mask->heads() == 1);
  }
  // Do a token's heads share one pass over the past, because their rows lie side by side?
  bool heads_interleaved() const {
    return !leaves_out() && past_k.heads_side_by_side() && past_v.heads_side_by_side();
  }
  // May a logit get a bias? One of -infinity hides a key from a row alone.
  bool biased() const { return logits.mask != nullptr || own_keys() || logits.has_distances(); }

 private:
  static bool mixes(const Rows& past, const Rows& chunk) {
    return past.len() > 0 && chunk.len() > 0 && !past.stored_as(chunk);
  }
};

// A call with its defaults filled in, before it is checked. A sequence's own mask, lists and
// position come before the options'; they outlive the call.
[[gnu::noinline]] inline AttentionCall resolved_call(const AttentionSequence& x,
                                                     const AttentionOptions& options) {
  const Past& past = x.past;
  const Mask& mask = x.mask.absent() ? options.mask : x.mask;
  const IndexLists& lists = x.lists.absent() ? options.lists : x.lists;
  const std::optional<Index> position = x.q_offset ? x.q_offset : options.q_offset;
  // An empty part may leave its shape open.
  const bool by_past = past.k.len() > 0 || x.chunk.k.len() == 0;
  const Index kv_heads = by_past ? past.k.heads() : x.chunk.k.heads();
  const bool all = past.selection == nullptr || past.k.len() == 0 || past.selection->is_all();
  return {.q = x.q,
          .past_k = past.k,
          .past_v = past.v,
          .chunk_k = x.chunk.k,
          .chunk_v = x.chunk.v,
          .out = x.out.out,
          .lse = x.out.lse_nat,
          .selection = all ? nullptr : past.selection,
          .lists = lists.absent() ? nullptr : &lists,
          .kv_heads = kv_heads,
          .group = kv_heads > 0 ? x.q.heads() / kv_heads : 0,
          .v_dim = by_past ? past.v.dim() : x.chunk.v.dim(),
          .logits = {.rule = LogitRule::from(options, x.q.dim()),
                     .mask = mask.absent() ? nullptr : &mask,
                     .past_len = past.k.len(),
                     .chunk_len = x.chunk.k.len(),
                     .first_position = past.first_position,
                     .q_offset = position.value_or(past.first_position + past.k.len()),
                     .window = options.sliding_window > 0 ? options.sliding_window
                                                          : std::numeric_limits<Index>::max(),
                     .causal = options.causal,
                     .sinks = options.sinks,
                     .mask_factors = options.mask_factors,
                     .alibi_slopes = options.alibi_slopes},
          .codes_queries = options.arithmetic == Arithmetic::automatic};
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
