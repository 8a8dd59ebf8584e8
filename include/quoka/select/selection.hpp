// Selection: which past keys each KV head of each sequence attends to.
//
// Per (batch, KV head): ascending, unique positions in [0, kv_len), the same count for all. "All"
// and "none" hold no positions. It is what every selector emits and what attention takes; a
// caller's own index lists enter by the checked constructor.
#pragma once

#include <quoka/core/view.hpp>

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

namespace quoka::inline QUOKA_ABI {

class Selection {
 public:
  // Nothing of nothing.
  Selection() = default;

  // From the caller's positions [batch, kv_heads, count]. Throws std::invalid_argument on a
  // position outside [0, kv_len) and on a list that does not ascend strictly.
  Selection(const Tensor<Position, 3>& positions, Index kv_len) {
    detail::require_at_least("kv_len", kv_len, 0);
    resize(positions.dimension(0), positions.dimension(1), kv_len, positions.dimension(2));
    std::copy_n(positions.data(), positions.size(), positions_.data());
    for (Index row = 0; row < batch_ * kv_heads_; ++row) {
      Index before = -1;
      for (Index i = 0; i < count_; ++i) {
        const Index position = positions_[static_cast<std::size_t>(row * count_ + i)];
        detail::require_at_most("a selected position", position, "the last past position",
                                kv_len - 1);
        detail::require_at_least("a selected position", position, before + 1);
        before = position;
      }
    }
  }

  // Every past key: attention over it is dense attention.
  static Selection all(Index batch, Index kv_heads, Index kv_len) {
    Selection selection;
    selection.select_all(batch, kv_heads, kv_len);
    return selection;
  }

  Index batch() const { return batch_; }
  Index kv_heads() const { return kv_heads_; }
  Index kv_len() const { return kv_len_; }
  // Positions per (batch, KV head).
  Index count() const { return count_; }
  bool is_all() const { return count_ == kv_len_; }

  // The count() positions of one head; empty where is_all().
  std::span<const Position> row(Index b, Index kv_head) const {
    if (is_all()) return {};
    return {positions_.data() + (b * kv_heads_ + kv_head) * count_,
            static_cast<std::size_t>(count_)};
  }
  // As row(), "all" spelled out.
  std::vector<Position> positions(Index b, Index kv_head) const {
    const auto stored = row(b, kv_head);
    std::vector<Position> list(stored.begin(), stored.end());
    if (is_all())
      for (Index i = 0; i < kv_len_; ++i) list.push_back(static_cast<Position>(i));
    return list;
  }

  // Throws std::invalid_argument, both numbers named, unless made for this shape.
  void require_shape(Index batch, Index kv_heads, Index kv_len) const {
    detail::require_equal("the selection's batch", batch_, "the keys' batch", batch);
    detail::require_equal("the selection's kv_heads", kv_heads_, "the keys' kv_heads", kv_heads);
    detail::require_equal("the selection's kv_len", kv_len_, "the keys' kv_len", kv_len);
  }

  // For selectors. The memory is kept from call to call; resize leaves the positions to be written.
  void reserve(Index positions) { positions_.reserve(static_cast<std::size_t>(positions)); }
  void select_all(Index batch, Index kv_heads, Index kv_len) {
    batch_ = batch, kv_heads_ = kv_heads, kv_len_ = count_ = kv_len;
  }
  void resize(Index batch, Index kv_heads, Index kv_len, Index count) {
    detail::require_at_most("count", count, "kv_len", kv_len);
    detail::require_at_most("kv_len", kv_len, "the largest Position",
                            std::numeric_limits<Position>::max());
    positions_.resize(static_cast<std::size_t>(batch * kv_heads * count));
    batch_ = batch, kv_heads_ = kv_heads, kv_len_ = kv_len, count_ = count;
  }
  std::span<Position> mutable_row(Index b, Index kv_head) {
    return {positions_.data() + (b * kv_heads_ + kv_head) * count_,
            static_cast<std::size_t>(count_)};
  }

  friend bool operator==(const Selection& a, const Selection& b) {
    if (a.batch_ != b.batch_ || a.kv_heads_ != b.kv_heads_ || a.kv_len_ != b.kv_len_ ||
        a.count_ != b.count_)
      return false;
    return a.is_all() || a.positions_ == b.positions_;
  }

 private:
  Index batch_ = 0, kv_heads_ = 0, kv_len_ = 0, count_ = 0;
  std::vector<Position> positions_;  // [batch, kv_heads, count]; unused where is_all()
};

}  // namespace quoka::inline QUOKA_ABI
