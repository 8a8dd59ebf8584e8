// The cells of a past that a mask leaves: those that are kept and that some query sees.
//
// They are found once per call, before any key is read, by one pass over the mask. Cells that no
// query sees are never read. So masked holes, padding and other sequences' cells cost nothing more,
// and their contents have no influence. Columns that some rows see and others do not, or whose
// logits are biased, are remembered: only blocks that hold one are masked. The chunk's columns are
// remembered, too (visibility(), chunk_row()), but they are never listed.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/executor.hpp>

#include <cstdint>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class VisiblePast {
 public:
  // Memory for find(). selection: of the past, or null. Cells are listed for each KV head of each
  // sequence if there is one; else for each sequence of the mask, since all heads see the same.
  VisiblePast(Arena& arena, const Mask& mask, const Selection* selection, Index batch,
              Index kv_heads, Index past_len)
      : mask_batch_(mask.batch()),
        listed_sequences_(selection != nullptr ? batch : mask_batch_),
        listed_heads_(selection != nullptr ? kv_heads : 1),
        columns_(mask.keys()),
        past_len_(past_len),
        room_(selection != nullptr ? selection->max_count() : past_len),
        visibility_(arena.take<std::uint8_t>(mask_batch_ * columns_)),
        positions_(arena.take<Position>(listed_sequences_ * listed_heads_ * room_)),
        counts_(arena.take<Index>(listed_sequences_ * listed_heads_)),
        chunk_rows_(arena.take<Index>(mask_batch_)) {}

  void find(const Mask& mask, const Selection* selection, ExecutorRef executor) {
    leaves_out_ = false;
    for (Index b = 0; b < mask_batch_; ++b) {
      std::uint8_t* const visibility = visibility_ + b * columns_;
      read_visibility(mask, b, 0, columns_, visibility, executor);
      for (Index i = 0; i < past_len_; ++i) leaves_out_ |= (visibility[i] & visible_to_some) == 0;
      Index row = past_len_;
      while (row < columns_ && (visibility[row] & visible_to_some) == 0) ++row;
      chunk_rows_[b] = row < columns_ ? row - past_len_ : -1;
    }
    if (leaves_out_) list_cells(selection);
  }

  // Are some cells hidden from all queries? Then cells() lists the others.
  bool leaves_out() const { return leaves_out_; }
  std::span<const Position> cells(Index b, Index kv_head) const {
    const Index head =
        (listed_sequences_ > 1 ? b : 0) * listed_heads_ + (listed_heads_ > 1 ? kv_head : 0);
    return {positions_ + head * room_, static_cast<std::size_t>(counts_[head])};
  }
  // For each column of the mask: visible_to_some, hidden_from_some, biased_for_some (mask.hpp).
  const std::uint8_t* visibility(Index b) const {
    return visibility_ + (mask_batch_ > 1 ? b : 0) * columns_;
  }
  // A row of the chunk that some query sees; -1 where there is none.
  Index chunk_row(Index b) const { return chunk_rows_[mask_batch_ > 1 ? b : 0]; }

 private:
  void list_cells(const Selection* selection) {
    for (Index b = 0; b < listed_sequences_; ++b)
      for (Index head = 0; head < listed_heads_; ++head) {
        const std::uint8_t* const visibility = this->visibility(b);
        Position* const to = positions_ + (b * listed_heads_ + head) * room_;
        const auto kept =
            selection != nullptr ? selection->row(b, head) : std::span<const Position>{};
        const Index candidates = selection != nullptr ? std::ssize(kept) : past_len_;
        Index count = 0;
        for (Index i = 0; i < candidates; ++i) {
          const Position cell =
              selection != nullptr ? kept[static_cast<std::size_t>(i)] : static_cast<Position>(i);
          to[count] = cell;
          count += (visibility[cell] & visible_to_some) != 0 ? 1 : 0;
        }
        counts_[b * listed_heads_ + head] = count;
      }
  }

  Index mask_batch_, listed_sequences_, listed_heads_, columns_, past_len_, room_;
  std::uint8_t* visibility_;  // [batch, columns]
  Position* positions_;       // [sequences, heads, room]
  Index* counts_;             // [sequences, heads]
  Index* chunk_rows_;         // [batch]
  bool leaves_out_ = false;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
