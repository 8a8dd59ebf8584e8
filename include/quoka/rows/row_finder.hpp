// Where rows lie: the answers that kernels get, in place of strides, pages and lists.
#pragma once

#include <quoka/base/index.hpp>

#include <algorithm>
#include <cstddef>

namespace quoka {
inline namespace QUOKA_ABI {

// The first byte of a row.
using ConstRow = const std::byte*;

// Which rows of a pool a sequence is made of. Row i is cell first_cell + cells[i] of the sequence, or
// cell i without a list. Cell c is row c % page_size of page pages[c / page_size], or row c without pages.
struct RowMap {
  const Position* cells = nullptr;  // [len] of a list; null: all in order
  Index first_cell = 0;             // what cells count from
  const Position* pages = nullptr;  // the block table; null: no pages
  Index page_size = 1;              // rows of a page
  Index page_step = 0;              // bytes from one page to the next
  Index page_shift = -1;            // log2(page_size), or -1

  bool any() const { return cells != nullptr || pages != nullptr; }  // else rows lie in order
  Index cell(Index i) const { return cells != nullptr ? first_cell + cells[i] : i; }  // of row i
  // Index in the block table.
  Index page_of(Index cell) const {
    return page_shift >= 0 ? cell >> page_shift : cell / page_size;
  }
  // The row of the pool, counted through all its pages, that is row i.
  Index pool_row(Index i) const {
    const Index c = cell(i);
    if (pages == nullptr) return c;
    const Index page = page_of(c);
    return pages[page] * page_size + (c - page * page_size);
  }
  // Bytes from the pool's first row to row i, rows being `step` apart.
  Index offset(Index i, Index step) const {
    const Index c = cell(i);
    if (pages == nullptr) return c * step;
    const Index page = page_of(c);
    return pages[page] * page_step + (c - page * page_size) * step;
  }
};

// Some rows, as a kernel that is bound by memory takes them. Their addresses are computed where they
// are used, unless they lie anywhere: an array of addresses, written before the rows are read, keeps
// the processor from reading ahead and costs half of the bandwidth.
struct RowRun {
  ConstRow first = nullptr;        // row 0, or what a list counts from
  Index step = 0;                  // bytes from one row to the next
  const Position* list = nullptr;  // which rows; null: all of them in order
  const ConstRow* rows = nullptr;  // the rows themselves, in place of all above

  // The address of row i.
  ConstRow operator[](Index i) const {
    if (rows != nullptr) [[unlikely]]
      return rows[i];
    return first + (list != nullptr ? list[i] : i) * step;
  }
};

// The rows of a run, first to last. Streams: of rows in order the addresses are added up. Computed from a row's number, by
// two tests and a multiplication, they let one core of a Zen 4 read rows of 96 and 128 floats from memory at .7 and .4 of
// the rate where one query row gives it little else to do; where several rows do, adding up costs as much as it saves.
template <bool Streams>
class RunWalk {
 public:
  // At the run's first row. The run must outlive it.
  explicit RunWalk(const RowRun& run)
      : run_(run), in_order_(run.rows == nullptr && run.list == nullptr), at_(run.first) {}

  // Row i, which is the one that is reached. The next call has the one behind it, or with moves_on = false the same again.
  ConstRow next(Index i, bool moves_on = true) {
    if constexpr (!Streams) return run_[i];
    const ConstRow row = in_order_ ? at_ : run_[i];
    at_ += moves_on ? run_.step : 0;
    return row;
  }

 private:
  const RowRun& run_;
  const bool in_order_;
  ConstRow at_;
};

// The rows of one head, or those of a list. Addresses are computed where they are used: an array of
// addresses, written before each block, kept the processor from reading ahead.
struct RowFinder {
  ConstRow first = nullptr;        // of the pool, where there is a map
  Index step = 0;                  // bytes from one row to the next
  const Position* list = nullptr;  // which rows; null: all of them in order
  Index begin = 0;                 // of them, where there is a map
  RowMap map = {};                 // pages and lists

  // The address of row i.
  ConstRow operator[](Index i) const {
    if (map.any()) [[unlikely]]
      return first + map.offset(list != nullptr ? begin + list[i] : begin + i, step);
    return first + (list != nullptr ? list[i] : i) * step;
  }
  // Rows from `at` on.
  RowFinder from(Index at) const {
    RowFinder rest = *this;
    if (list != nullptr)
      rest.list += at;
    else if (map.any())
      rest.begin += at;
    else
      rest.first += at * step;
    return rest;
  }
  // Row i is row positions[i] of these.
  RowFinder gathered(const Position* positions) const {
    RowFinder some = *this;
    some.list = positions;
    return some;
  }
  // Rows [from, from + count); where they lie anywhere, their addresses go to memory [count].
  RowRun run(Index from, Index count, ConstRow* memory) const {
    if (!map.any()) [[likely]]
      return {first + (list != nullptr ? 0 : from * step), step,
              list != nullptr ? list + from : nullptr, nullptr};
    return run_of_map(from, count, memory);
  }
  // Rows [from, from + count).
  void find(Index from, Index count, ConstRow* rows) const {
    if (map.any()) [[unlikely]]
      return find_in_map(from, count, rows);
    if (list != nullptr)
      for (Index i = 0; i < count; ++i) rows[i] = first + list[from + i] * step;
    else
      for (Index i = 0; i < count; ++i) rows[i] = first + (from + i) * step;
  }

 private:
  [[gnu::noinline]] void find_in_map(Index from, Index count, ConstRow* rows) const {
    for (Index i = 0; i < count; ++i) rows[i] = (*this)[from + i];
  }
  [[gnu::noinline]] RowRun run_of_map(Index from, Index count, ConstRow* memory) const {
    if (list == nullptr && map.cells == nullptr &&
        map.page_of(begin + from) == map.page_of(begin + from + count - 1))
      return {(*this)[from], step, nullptr, nullptr};
    find(from, count, memory);
    return {nullptr, 0, nullptr, memory};
  }
};

// Rows [at, end) of some heads whose rows lie side by side, in the order of memory; or of one head.
class RowWalk {
 public:
  RowWalk() = default;
  // Rows of one head.
  RowWalk(const RowFinder& rows, Index row_bytes, Index at, Index end)
      : RowWalk(rows, row_bytes, at, end, 1, 0) {}
  // `heads` of them, `head_step` bytes apart: token by token, or, where a page holds one head's rows
  // after the other's, page by page.
  RowWalk(const RowFinder& rows, Index row_bytes, Index at, Index end, Index heads, Index head_step)
      : rows_(rows),
        row_bytes_(row_bytes),
        at_(at),
        end_(end),
        first_(at),
        heads_(heads),
        head_step_(head_step),
        by_pages_(rows.map.pages != nullptr && rows.map.cells == nullptr && rows.list == nullptr &&
                  (heads == 1 || head_step > rows.step)) {
    begin_turn();
  }

  Index row_bytes() const { return row_bytes_; }  // that lie side by side
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

  RowFinder rows_;
  ConstRow row_ = nullptr;  // the next one
  Index row_bytes_ = 0, at_ = 0, end_ = 0;
  Index first_ = 0, turn_ends_ = 0;
  Index heads_ = 1, head_step_ = 0, head_ = 0;
  bool by_pages_ = false;
};

// The next rows of a walk, to be asked for one by one while others are used.
struct RowsAhead {
  static constexpr Index most = 16;  // rows at a time

  ConstRow rows[most];  // null past the end
  Index row_bytes;      // of each

  // The next `count` <= most rows of the walk.
  void take(RowWalk& walk, Index count) {
    row_bytes = walk.row_bytes();
    walk.take(count, rows);
    std::fill(rows + count, rows + most, nullptr);
  }
};

}  // namespace QUOKA_ABI
}  // namespace quoka
