// One attention call with its defaults filled in. check_call.hpp checks the arguments, resolved_call() makes this of
// them, plan.hpp cuts it into items, and the items read it. It counts in three ways:
//
//   row       of a KV head: one query of one of the `group` heads that share its keys, ordered query by query
//   column    of the keys as the caller has them: the past's rows, selected or not, then the chunk's. Masks and lists
//             count columns. key_sequence.hpp counts the keys of a head, which are those that are attended to
//   position  of a token in its sequence, whatever memory it lies in
#pragma once

#include <quoka/attention/attention_options.hpp>
#include <quoka/attention/logits.hpp>
#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The cells of a past that are kept and that some query sees.
//
// Found once per call, before any key is read: one pass over the mask. Cells that no query sees are
// never touched, so masked holes, padding and other sequences' cells cost nothing more, and what
// their memory holds is of no consequence. Columns that some rows see and others do not, or whose
// logits are biased, are remembered: only blocks that hold one are masked.
class VisiblePast {
 public:
  // Memory for find(). selection: of the past, or null.
  VisiblePast(Arena& arena, const Mask& mask, const Selection* selection, Index batch,
              Index kv_heads, Index past_len)
      : batch_(mask.batch()),
        sequences_(selection != nullptr ? batch : batch_),
        heads_(selection != nullptr ? kv_heads : 1),
        columns_(mask.keys()),
        past_len_(past_len),
        room_(selection != nullptr ? selection->max_count() : past_len),
        seen_by_(arena.take<std::uint8_t>(batch_ * columns_)),
        positions_(arena.take<Position>(sequences_ * heads_ * room_)),
        counts_(arena.take<Index>(sequences_ * heads_)),
        chunk_rows_(arena.take<Index>(batch_)) {}

  void find(const Mask& mask, const Selection* selection, ExecutorRef executor) {
    gathers_ = false;
    for (Index b = 0; b < batch_; ++b) {
      std::uint8_t* const seen_by = seen_by_ + b * columns_;
      read_seen_by(mask, b, 0, columns_, seen_by, executor);
      for (Index i = 0; i < past_len_; ++i) gathers_ |= (seen_by[i] & seen_by_some) == 0;
      Index row = past_len_;
      while (row < columns_ && (seen_by[row] & seen_by_some) == 0) ++row;
      chunk_rows_[b] = row < columns_ ? row - past_len_ : -1;
    }
    if (gathers_) list(selection);
  }

  // Are some cells hidden from all queries? Then row() lists the others.
  bool gathers() const { return gathers_; }
  std::span<const Position> row(Index b, Index kv_head) const {
    const Index head = (sequences_ > 1 ? b : 0) * heads_ + (heads_ > 1 ? kv_head : 0);
    return {positions_ + head * room_, static_cast<std::size_t>(counts_[head])};
  }
  // For each column of the mask.
  const std::uint8_t* seen_by(Index b) const { return seen_by_ + (batch_ > 1 ? b : 0) * columns_; }
  // A row of the chunk that some query sees; -1 where there is none.
  Index chunk_row(Index b) const { return chunk_rows_[batch_ > 1 ? b : 0]; }

 private:
  void list(const Selection* selection) {
    for (Index b = 0; b < sequences_; ++b)
      for (Index head = 0; head < heads_; ++head) {
        const std::uint8_t* const seen_by = this->seen_by(b);
        Position* const to = positions_ + (b * heads_ + head) * room_;
        const auto kept =
            selection != nullptr ? selection->row(b, head) : std::span<const Position>{};
        const Index candidates = selection != nullptr ? std::ssize(kept) : past_len_;
        Index count = 0;
        for (Index i = 0; i < candidates; ++i) {
          const Position cell =
              selection != nullptr ? kept[static_cast<std::size_t>(i)] : static_cast<Position>(i);
          to[count] = cell;
          count += (seen_by[cell] & seen_by_some) != 0 ? 1 : 0;
        }
        counts_[b * heads_ + head] = count;
      }
  }

  Index batch_, sequences_, heads_, columns_, past_len_, room_;
  std::uint8_t* seen_by_;  // [batch, columns]
  Position* positions_;    // [sequences, heads, room]
  Index* counts_;          // [sequences, heads]
  Index* chunk_rows_;      // [batch]
  bool gathers_ = false;
};

inline void attend_lists(const AttentionCall& call, Index head, Index first, Index panels,
                         Index part, const Partials& partials, Arena arena);  // attend_lists.hpp

struct AttentionCall {
  Rows q;                                // [batch, q_heads, q_len, head_dim]
  Rows past_k, past_v;                   // [batch, kv_heads, kv_len, head_dim | v_dim]
  Rows chunk_k, chunk_v;                 // [batch, kv_heads, q_len or 0, head_dim | v_dim]
  OutputRows out;                        // [batch, q_heads, q_len, v_dim]
  TensorView<float, 3> lse;              // [batch, q_heads, q_len], or empty
  const Selection* selection;            // of the past; null: all
  const IndexLists* lists;               // of each query; null: none
  const VisiblePast* visible = nullptr;  // what the mask leaves of the past; null without a mask
  Index kv_heads, group, v_dim;
  Logits logits;                                // from a product to a logit
  const PanelArithmetic* arithmetic = nullptr;  // chosen before anything runs
  bool codes_queries;  // may one token's queries be rounded to codes (token_codes.hpp)?

  // A Selection of query heads: each head attends by itself, as if K and V had its KV head's rows once for each head of
  // the group. All that follows sees heads without a group.
  void part_groups() {
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
  // May a block have rows of two formats, the past's last and the chunk's first ones? They are widened to this many
  // floats.
  Index mixed_k_floats() const { return mixes(past_k, chunk_k) ? block_keys() * q.dim() : 0; }
  Index mixed_v_floats() const { return mixes(past_v, chunk_v) ? block_keys() * v_dim : 0; }
  // A query's channels, scaled.
  void read_query(Index b, const QueryRow& row, float* to) const {
    q.format().widen(q.row(b, row.q_head, row.query), q.shape(row.q_head), to);
    for (Index c = 0; c < q.dim(); ++c) to[c] *= logits.rule.scale;
  }
  // Does attended() say which rows of the past are attended to? Else it is all of them.
  bool gathers() const {
    return selection != nullptr || (visible != nullptr && visible->gathers());
  }
  std::span<const Position> attended(Index b, Index kv_head) const {
    if (visible != nullptr && visible->gathers()) return visible->row(b, kv_head);
    return selection != nullptr ? selection->row(b, kv_head) : std::span<const Position>{};
  }
  // Has each query keys of its own (attend_lists.hpp), by lists or by a mask that is read as lists?
  bool own_keys() const {
    return lists != nullptr || (logits.mask != nullptr && logits.mask->is_lists() &&
                                selection == nullptr && q.len() > 1);
  }
  // What attends to them.
  AttendLists attend_lists() const {
#if defined(QUOKA_COMPILED)
    return detail::attend_lists;
#else
    return lists != nullptr ? lists->attend() : logits.mask->attend();
#endif
  }
  // One query, whose heads see the same keys: what a mask hides is not among them.
  bool is_decode() const {
    return q.len() == 1 && !own_keys() && group <= kernel_sizes().token_rows &&
           (logits.mask == nullptr || logits.mask->heads() == 1);
  }
  // May something be added to a logit, or hide it from a row alone?
  bool biased() const { return logits.mask != nullptr || own_keys() || logits.has_distances(); }

 private:
  static bool mixes(const Rows& past, const Rows& chunk) {
    return past.len() > 0 && chunk.len() > 0 && !past.stored_as(chunk);
  }
};

// KV heads and channels of a value: an empty part may leave its shape open.
struct KeyShape {
  Index kv_heads, v_dim;
};
inline KeyShape key_shape(const Past& past, const Chunk& chunk) {
  const bool by_past = past.k.len() > 0 || chunk.k.len() == 0;
  return {by_past ? past.k.heads() : chunk.k.heads(), by_past ? past.v.dim() : chunk.v.dim()};
}
inline Index first_query(const Past& past, std::optional<Index> position) {
  return position.value_or(past.first_position + past.k.len());
}

// Options that each sequence of a batch may have of its own.
struct SequenceOptions {
  const Mask& mask;
  const IndexLists& lists;
  std::optional<Index> position;
};
inline SequenceOptions sequence_options(const AttentionOptions& options) {
  return {options.mask, options.lists, options.q_offset};
}

// A checked call with its defaults filled in. The mask and the lists outlive the call.
[[gnu::noinline]] inline AttentionCall resolved_call(const Rows& q, const Past& past,
                                                     const Chunk& chunk,
                                                     const AttentionOutput& output,
                                                     const AttentionOptions& options,
                                                     const SequenceOptions& own) {
  const auto& [mask, lists, position] = own;
  const auto [kv_heads, v_dim] = key_shape(past, chunk);
  const bool all = past.selection == nullptr || past.k.len() == 0 || past.selection->is_all();
  return {.q = q,
          .past_k = past.k,
          .past_v = past.v,
          .chunk_k = chunk.k,
          .chunk_v = chunk.v,
          .out = output.out,
          .lse = output.lse_nat,
          .selection = all ? nullptr : past.selection,
          .lists = lists.absent() ? nullptr : &lists,
          .kv_heads = kv_heads,
          .group = q.heads() / kv_heads,
          .v_dim = v_dim,
          .logits = {.rule = LogitRule::from(options, q.dim()),
                     .mask = mask.absent() ? nullptr : &mask,
                     .past_len = past.k.len(),
                     .chunk_len = chunk.k.len(),
                     .first_position = past.first_position,
                     .q_offset = first_query(past, position),
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
