// Where rows lie: the answers that kernels get, in place of strides, pages and lists.
#pragma once

#include <quoka/views/index.hpp>

#include <cstddef>

namespace quoka {
inline namespace QUOKA_ABI {

using ConstRow = const std::byte*;

// The rows of one head, or those of a list. Addresses are computed where they are used: an array of
// addresses, written before each block, kept the processor from reading ahead.
struct RowFinder {
  ConstRow first = nullptr;
  Index step = 0;                  // bytes from one row to the next
  const Position* list = nullptr;  // which rows; null: all of them in order

  ConstRow operator[](Index i) const { return first + (list != nullptr ? list[i] : i) * step; }
  RowFinder from(Index begin) const {
    return list != nullptr ? RowFinder{first, step, list + begin}
                           : RowFinder{first + begin * step, step};
  }
  RowFinder listed(const Position* positions) const { return {first, step, positions}; }
  // Rows [begin, begin + count).
  void find(Index begin, Index count, ConstRow* rows) const {
    for (Index i = 0; i < count; ++i) rows[i] = (*this)[begin + i];
  }
};

// Rows [at, end) of some heads whose rows lie side by side, in the order of memory; or of one head.
class RowWalk {
 public:
  RowWalk() = default;
  RowWalk(const RowFinder& rows, Index row_bytes, Index at, Index end)
      : rows_(rows), row_bytes_(row_bytes), at_(at), end_(end) {}
  // `heads` of them, `head_step` bytes apart.
  RowWalk(const RowFinder& rows, Index row_bytes, Index at, Index end, Index heads, Index head_step)
      : rows_(rows),
        row_bytes_(row_bytes),
        at_(at),
        end_(end),
        heads_(heads),
        head_step_(head_step) {}

  Index row_bytes() const { return row_bytes_; }
  // The next row; null at the end.
  ConstRow next() {
    if (at_ >= end_) return nullptr;
    const ConstRow row = rows_[at_] + head_ * head_step_;
    if (++head_ == heads_) head_ = 0, ++at_;
    return row;
  }

 private:
  RowFinder rows_;
  Index row_bytes_ = 0, at_ = 0, end_ = 0;
  Index heads_ = 1, head_step_ = 0, head_ = 0;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
