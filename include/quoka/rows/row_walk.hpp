// RowWalk: addresses of rows in the order of memory, to be prefetched while others are used
// (attend_decode.hpp).
#pragma once

#include <quoka/rows/rows.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

// Rows [at, end) of some heads whose rows lie side by side, in the order of memory; or of one head.
class RowWalk {
 public:
  // Rows of one head, or of `heads` heads that are `head_step` bytes apart: token by token, or page
  // by page if a page holds one head's rows after the other's.
  RowWalk(const HeadRows& rows, Index at, Index end, Index heads = 1, Index head_step = 0)
      : rows_(rows),
        row_bytes_(rows.row_bytes()),
        at_(at),
        end_(end),
        first_(at),
        heads_(heads),
        head_step_(head_step),
        by_pages_(rows.map.pages != nullptr && rows.map.cells == nullptr && rows.list == nullptr &&
                  (heads == 1 || head_step > rows.step)) {
    begin_turn();
  }

  // The next `count` rows; null past the end.
  void take(Index count, ConstRow* rows) {
    Index i = 0;
    while (i < count && first_ < end_) {
      const Index n = std::min(count - i, turn_ends_ - at_);
      for (Index j = 0; j < n; ++j) rows[i + j] = row_ + j * rows_.step;
      i += n, at_ += n, row_ += n * rows_.step;
      if (at_ < turn_ends_) break;
      if (++head_ == heads_) head_ = 0, first_ = turn_ends_;
      begin_turn();
    }
    std::fill(rows + i, rows + count, nullptr);
  }
  // The next `count` <= most rows, to be prefetched one by one while others are used.
  RowsAhead take(Index count) {
    RowsAhead ahead;
    ahead.row_bytes = row_bytes_;
    take(count, ahead.rows);
    std::fill(ahead.rows + count, ahead.rows + RowsAhead::most, nullptr);
    return ahead;
  }

 private:
  void begin_turn() {
    at_ = first_, turn_ends_ = turn_end();
    if (first_ < end_) row_ = rows_[first_] + head_ * head_step_;
  }
  // Heads take turns at rows [first_, turn_end()).
  Index turn_end() const {
    if (heads_ == 1 && rows_.list == nullptr && !rows_.map.any()) return end_;
    if (!by_pages_) return first_ + 1;
    const Index in_page = (rows_.begin + first_) % rows_.map.page_size;
    return std::min(end_, first_ + rows_.map.page_size - in_page);
  }

  HeadRows rows_;
  ConstRow row_ = nullptr;  // the next one
  Index row_bytes_ = 0, at_ = 0, end_ = 0;
  Index first_ = 0, turn_ends_ = 0;
  Index heads_ = 1, head_step_ = 0, head_ = 0;
  bool by_pages_ = false;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
