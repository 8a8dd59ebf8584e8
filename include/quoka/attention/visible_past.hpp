// What a mask leaves of a past: the cells that some query sees, among those that are kept.
//
// Found once per call, before any key is read: one pass over the mask. Cells that no query sees are
// never touched, so masked holes, padding and other sequences' cells cost nothing more, and what
// their memory holds is of no consequence. Columns that some rows see and others do not, or whose
// logits are biased, are remembered: only blocks that hold one are masked.
#pragma once

#include <quoka/attention/attention_options.hpp>
#include <quoka/views/mask.hpp>
#include <quoka/base/buffer.hpp>

#include <algorithm>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class VisiblePast {
 public:
  // keep: of the past, or null.
  void find(const Mask& mask, const Selection* keep, Index batch, Index kv_heads, Index past_len,
            ExecutorRef executor) {
    columns_ = mask.keys(), batch_ = mask.batch();
    heads_ = keep != nullptr ? kv_heads : 1;
    sequences_ = keep != nullptr ? batch : batch_;
    std::uint8_t* const seen_by = seen_by_.reserve_amortised(batch_ * columns_);
    for (Index b = 0; b < batch_; ++b)
      read_seen_by(mask, b, 0, columns_, seen_by + b * columns_, executor);
    listed_ = false;
    for (Index b = 0; b < batch_; ++b)
      for (Index i = 0; i < past_len; ++i)
        listed_ |= (seen_by[b * columns_ + i] & seen_by_some) == 0;
    if (listed_) list(keep, past_len);
    Index* const rows = chunk_rows_.reserve(batch_);
    for (Index b = 0; b < batch_; ++b) {
      rows[b] = past_len;
      while (rows[b] < columns_ && (seen_by[b * columns_ + rows[b]] & seen_by_some) == 0) ++rows[b];
      rows[b] = rows[b] < columns_ ? rows[b] - past_len : -1;
    }
  }

  // Are cells hidden from all, so that row() says which are left?
  bool listed() const { return listed_; }
  std::span<const Position> row(Index b, Index kv_head) const {
    const Index head = (sequences_ > 1 ? b : 0) * heads_ + (heads_ > 1 ? kv_head : 0);
    return {positions_.data() + head * room_, static_cast<std::size_t>(counts_.data()[head])};
  }
  // Of each of the mask's columns.
  const std::uint8_t* seen_by(Index b) const {
    return seen_by_.data() + (batch_ > 1 ? b : 0) * columns_;
  }
  // A row of the chunk that some query sees; -1 where there is none.
  Index chunk_row(Index b) const { return chunk_rows_.data()[batch_ > 1 ? b : 0]; }
  Index bytes() const { return bytes_of(seen_by_, positions_, counts_, chunk_rows_); }

 private:
  void list(const Selection* keep, Index past_len) {
    room_ = keep != nullptr ? keep->max_count() : past_len;
    Position* const positions = positions_.reserve_amortised(sequences_ * heads_ * room_);
    Index* const counts = counts_.reserve(sequences_ * heads_);
    for (Index b = 0; b < sequences_; ++b)
      for (Index head = 0; head < heads_; ++head) {
        const std::uint8_t* const seen_by = this->seen_by(b);
        Position* const to = positions + (b * heads_ + head) * room_;
        const auto kept = keep != nullptr ? keep->row(b, head) : std::span<const Position>{};
        const Index candidates = keep != nullptr ? std::ssize(kept) : past_len;
        Index count = 0;
        for (Index i = 0; i < candidates; ++i) {
          const Position cell =
              keep != nullptr ? kept[static_cast<std::size_t>(i)] : static_cast<Position>(i);
          to[count] = cell;
          count += (seen_by[cell] & seen_by_some) != 0 ? 1 : 0;
        }
        counts[b * heads_ + head] = count;
      }
  }

  Buffer<std::uint8_t> seen_by_;  // [batch, columns]
  Buffer<Position> positions_;    // [sequences, heads, room]
  Buffer<Index> counts_;          // [sequences, heads]
  Buffer<Index> chunk_rows_;      // [batch]
  Index batch_ = 1, sequences_ = 1, heads_ = 1, columns_ = 0, room_ = 0;
  bool listed_ = false;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
