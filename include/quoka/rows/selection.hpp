// Selection: which past keys each head of each sequence attends to.
//
// A list per (batch, head): ascending, unique positions in [0, kv_len), of any count. "All" holds
// no positions. Every selector writes one and attention takes it. It is written through a
// SelectionWriter, which checks it, or made from a caller's own index lists by a checked
// constructor.
//
// Heads are KV heads, whose query heads share the list, or query heads, each with its own;
// attention recognises which by their number. If many queries attend together, lists of query heads
// drop less attention at the same number of keys. Attention then packs each head's keys separately,
// which takes 1.1 to 1.15 times as long.
#pragma once

#include <quoka/rows/tensor_view.hpp>

#include <algorithm>
#include <limits>
#include <new>
#include <span>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// Allocates without writing zeros. A type of the library's, so that the vector's functions are the
// library's as well (version.hpp).
template <class T>
struct Uninitialised {
  using value_type = T;
  Uninitialised() = default;
  template <class U>
  Uninitialised(const Uninitialised<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T))); }
  void deallocate(T* p, std::size_t) { ::operator delete(p); }
  template <class U>
  void construct(U* p) {
    ::new (static_cast<void*>(p)) U;
  }
  template <class U, class... Args>
  void construct(U* p, Args&&... args) {
    ::new (static_cast<void*>(p)) U(std::forward<Args>(args)...);
  }
  friend bool operator==(const Uninitialised&, const Uninitialised&) { return true; }
};
template <class T>
using PlainVector = std::vector<T, Uninitialised<T>>;

}  // namespace detail

class Selection {
 public:
  // No sequence, no key.
  Selection() = default;
  Selection(const Selection&) = default;
  Selection& operator=(const Selection&) = default;
  // A moved-from object is as Selection().
  Selection(Selection&& other) noexcept { swap(other); }
  // A moved-from object is as Selection().
  Selection& operator=(Selection&& other) noexcept {
    Selection(std::move(other)).swap(*this);
    return *this;
  }

  // From the caller's positions [batch, heads, count]. Throws std::invalid_argument on a position
  // outside [0, kv_len) and on a list that does not ascend strictly.
  Selection(TensorView<const Position, 3> positions, Index kv_len);
  // From lists of any lengths, one for each (batch, head): lists[b * heads + head]. Throws
  // as above, and where there are not batch * heads lists.
  static Selection from_lists(Index batch, Index heads, Index kv_len,
                              std::span<const std::vector<Position>> lists);

  // Every past key: attention over it is dense attention. Throws std::invalid_argument for a kv_len
  // outside [0, max_keys].
  static Selection all(Index batch, Index heads, Index kv_len) {
    Selection selection;
    selection.select_all(batch, heads, kv_len);
    return selection;
  }
  // Makes it all(); its memory is kept. Throws as all().
  void select_all(Index batch, Index heads, Index kv_len) {
    detail::require_size("kv_len", kv_len, 0);
    batch_ = batch, heads_ = heads, kv_len_ = kv_len, is_all_ = true;
    kept_shares_.clear();
  }
  // Makes every list empty; its memory is kept.
  void select_none(Index batch, Index heads, Index kv_len);

  Index batch() const { return batch_; }    // sequences
  Index heads() const { return heads_; }    // of a sequence: KV heads, or query heads
  Index kv_len() const { return kv_len_; }  // past keys that it selects from
  bool is_all() const { return is_all_; }   // every past key, without a list of positions

  // Positions of one head.
  Index count(Index b, Index head) const {
    return is_all_ ? kv_len_ : counts_[static_cast<std::size_t>(b * heads_ + head)];
  }
  // Positions of the head that has most.
  Index max_count() const {
    return is_all_ ? kv_len_ : reduce([](Index a, Index b) { return a < b ? b : a; });
  }
  // Positions of all heads together.
  Index sum_of_counts() const {
    return is_all_ ? kv_len_ * lists() : reduce([](Index a, Index b) { return a + b; });
  }

  // The count(b, head) positions of one head; empty where is_all().
  std::span<const Position> row(Index b, Index head) const {
    if (is_all_) return {};
    return {positions_.data() + (b * heads_ + head) * room_,
            static_cast<std::size_t>(count(b, head))};
  }
  // As row(), "all" spelled out.
  std::vector<Position> positions(Index b, Index head) const {
    const auto stored = row(b, head);
    std::vector<Position> list(stored.begin(), stored.end());
    if (is_all_)
      for (Index i = 0; i < kv_len_; ++i) list.push_back(static_cast<Position>(i));
    return list;
  }

  // [batch * heads] The kept share of attention to past and chunk, the mean over the queries that
  // chose a list's keys: 1 if nothing is lost. Empty if the selector does not compute it, and if
  // is_all().
  std::span<const float> kept_shares() const { return kept_shares_; }

  // Throws std::invalid_argument, both numbers named, unless made for this shape.
  void require_shape(Index batch, Index heads, Index kv_len) const {
    require_keys_of(batch, kv_len);
    detail::require_equal("the selection's heads", heads_, "the keys' kv_heads", heads);
  }
  // The same of a layer: of its KV heads or of its query heads.
  void require_fits(Index batch, Index kv_heads, Index q_heads, Index kv_len) const {
    require_keys_of(batch, kv_len);
    if (heads_ != q_heads)
      detail::require_equal("the selection's heads, where they are not q_heads,", heads_,
                            "the keys' kv_heads", kv_heads);
  }
  // Reserves memory for this many lists, and positions in all of them; it is kept from call to
  // call. A cache that grows without a known capacity gets twice as many as before.
  void reserve(Index lists, Index positions) {
    counts_.reserve(static_cast<std::size_t>(lists));
    kept_shares_.reserve(static_cast<std::size_t>(lists));
    if (const auto most = static_cast<std::size_t>(positions); most > positions_.capacity())
      positions_.reserve(std::max(most, 2 * positions_.capacity()));
  }

  // The same positions for the same shape; a full list and "all" are equal.
  friend bool operator==(const Selection& a, const Selection& b) {
    if (a.batch_ != b.batch_ || a.heads_ != b.heads_ || a.kv_len_ != b.kv_len_) return false;
    if (a.is_all_ && b.is_all_) return true;
    for (Index list = 0; list < a.lists(); ++list) {
      const Index i = list / a.heads_, head = list % a.heads_;
      if (a.count(i, head) != b.count(i, head)) return false;
      const auto x = a.row(i, head), y = b.row(i, head);
      if (!a.is_all_ && !b.is_all_ && !std::equal(x.begin(), x.end(), y.begin())) return false;
    }
    return true;  // a full list and "all" hold the same
  }

 private:
  friend class SelectionWriter;

  void swap(Selection& other) noexcept {
    std::swap(batch_, other.batch_), std::swap(heads_, other.heads_);
    std::swap(kv_len_, other.kv_len_), std::swap(room_, other.room_);
    std::swap(is_all_, other.is_all_);
    counts_.swap(other.counts_), positions_.swap(other.positions_);
    kept_shares_.swap(other.kept_shares_);
  }
  void require_keys_of(Index batch, Index kv_len) const {
    detail::require_equal("the selection's batch", batch_, "the keys' batch", batch);
    detail::require_equal("the selection's kv_len", kv_len_, "the keys' kv_len", kv_len);
  }
  Index lists() const { return batch_ * heads_; }
  template <class Op>
  Index reduce(Op op) const {
    Index result = 0;
    for (Index list = 0; list < lists(); ++list)
      result = op(result, counts_[static_cast<std::size_t>(list)]);
    return result;
  }

  Index batch_ = 0, heads_ = 0, kv_len_ = 0;
  Index room_ = 0;  // positions from one head to the next
  bool is_all_ = true;
  detail::PlainVector<Index> counts_;        // [batch, heads]; unused where is_all_
  detail::PlainVector<Position> positions_;  // [batch, heads, room]; grows only
  detail::PlainVector<float> kept_shares_;   // [batch, heads], or empty
};

// Writes a Selection: fill row() of each head, set_count() where it is not full, then commit().
// Heads may be written by several threads. Until commit() has checked it the Selection is an empty
// one: of batch 0, without heads and keys.
class SelectionWriter {
 public:
  // Room for `most` positions for each head. Throws std::invalid_argument for more than kv_len,
  // for a kv_len beyond max_keys, and for a negative size.
  SelectionWriter(Selection& selection, Index batch, Index heads, Index kv_len, Index most)
      : selection_(selection), batch_(batch), heads_(heads), kv_len_(kv_len), most_(most) {
    detail::require_at_least("the selection's batch", batch, 0);
    detail::require_at_least("the selection's heads", heads, 0);
    detail::require_at_least("the number of positions", most, 0);
    detail::require_at_most("the number of positions", most, "kv_len", kv_len);
    detail::require_keys("kv_len", kv_len);
    selection_.select_all(0, 0, 0);
    const auto lists = static_cast<std::size_t>(batch * heads);
    selection_.positions_.resize(lists * static_cast<std::size_t>(most));
    selection_.counts_.resize(lists);
    for (Index& count : selection_.counts_) count = most;
  }
  SelectionWriter(const SelectionWriter&) = delete;
  SelectionWriter& operator=(const SelectionWriter&) = delete;

  // Room for the positions of one head: [most].
  std::span<Position> row(Index b, Index head) {
    return {selection_.positions_.data() + (b * heads_ + head) * most_,
            static_cast<std::size_t>(most_)};
  }
  // Only the first `count` of row() count. Throws std::invalid_argument beyond the room.
  void set_count(Index b, Index head, Index count) {
    const Index list = b * heads_ + head;
    if (count < 0) fail_at(list, "the number of positions", count, "but must be at least", "", 0);
    if (count > most_)
      fail_at(list, "the number of positions", count, "but must be at most", "the room for them",
              most_);
    selection_.counts_[static_cast<std::size_t>(list)] = count;
  }
  // Sets what Selection::kept_shares() returns: one share for each list, [batch * heads], or none.
  // Throws std::invalid_argument for another number of them.
  void set_kept_shares(std::span<const float> shares) {
    if (!shares.empty())
      detail::require_equal("the number of kept shares", std::ssize(shares), "batch * heads",
                            batch_ * heads_);
    selection_.kept_shares_.resize(shares.size());
    std::copy(shares.begin(), shares.end(), selection_.kept_shares_.begin());
  }
  // Throws std::invalid_argument unless each row ascends strictly within [0, kv_len).
  void commit() {
    for (Index list = 0; list < batch_ * heads_; ++list) check(list);
    selection_.batch_ = batch_, selection_.heads_ = heads_, selection_.kv_len_ = kv_len_;
    selection_.room_ = most_, selection_.is_all_ = false;
  }

 private:
  void check(Index list) const {
    const Position* const x = selection_.positions_.data() + list * most_;
    const Index count = selection_.counts_[static_cast<std::size_t>(list)];
    if (count == 0) return;
    unsigned descends = 0;
    for (Index i = 1; i < count; ++i) descends |= x[i] <= x[i - 1] ? 1u : 0u;
    if (descends != 0u) fail_order(list, x, count);
    if (x[0] < 0) fail_at(list, "a selected position", x[0], "but must be at least", "", 0);
    if (x[count - 1] >= kv_len_)
      fail_at(list, "a selected position", x[count - 1], "but must be at most",
              "the last past position", kv_len_ - 1);
  }
  [[noreturn, gnu::cold]] void fail_order(Index list, const Position* x, Index count) const {
    Index i = 1;
    while (i + 1 < count && x[i] > x[i - 1]) ++i;
    fail_at(list, "a selected position", x[i], "but must be larger than", "the one before",
            x[i - 1]);
  }
  // detail::fail of one head, by name.
  [[noreturn, gnu::cold, gnu::noinline]] void fail_at(Index list, const char* what, Index value,
                                                      const char* relation, const char* limit,
                                                      Index limit_value) const {
    char name[128];
    std::snprintf(name, sizeof name, "%s of batch %td, head %td", what, list / heads_,
                  list % heads_);
    detail::fail(name, value, relation, limit, limit_value);
  }

  Selection& selection_;
  Index batch_, heads_, kv_len_, most_;
};

inline Selection::Selection(TensorView<const Position, 3> positions, Index kv_len) {
  detail::require_at_least("kv_len", kv_len, 0);
  SelectionWriter writer(*this, positions.batch(), positions.heads(), kv_len, positions.len());
  for (Index b = 0; b < positions.batch(); ++b)
    for (Index head = 0; head < positions.heads(); ++head)
      for (Index i = 0; i < positions.len(); ++i)
        writer.row(b, head)[static_cast<std::size_t>(i)] = positions.at(b, head, i);
  writer.commit();
}

inline Selection Selection::from_lists(Index batch, Index heads, Index kv_len,
                                       std::span<const std::vector<Position>> lists) {
  detail::require_equal("the number of lists", std::ssize(lists), "batch * heads", batch * heads);
  Index most = 0;
  for (const auto& list : lists) most = std::max(most, std::ssize(list));
  Selection selection;
  SelectionWriter writer(selection, batch, heads, kv_len, most);
  for (Index i = 0; i < std::ssize(lists); ++i) {
    const auto& list = lists[static_cast<std::size_t>(i)];
    std::copy(list.begin(), list.end(), writer.row(i / heads, i % heads).begin());
    writer.set_count(i / heads, i % heads, std::ssize(list));
  }
  writer.commit();
  return selection;
}

inline void Selection::select_none(Index batch, Index heads, Index kv_len) {
  SelectionWriter(*this, batch, heads, kv_len, 0).commit();
}

}  // namespace QUOKA_ABI
}  // namespace quoka
