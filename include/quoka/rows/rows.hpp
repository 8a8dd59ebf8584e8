// Rows of channels, wherever they lie and however they are stored: the library reads and writes all
// tensors through them.
//
//   Rows         [batch, heads, len, dim], read          q, k, v
//   OutputRows   [batch, heads, len, dim], written       out
//   HeadRows     the rows of one head: rows[i] is the address of row i
//
// Both are made implicitly from a TensorView and from a row-major Eigen tensor of float, half or
// bfloat16; the element type becomes a Format. Kernels get row addresses from HeadRows and never
// see strides. A cache in pages, or a list of its cells, is another way to compute addresses.
//
//   Rows(pointer, format, sizes, strides)   any format
//   rows.slice(begin, count)                some of the len axis
//   rows.gathered(cells)                    one sequence: row i is row cells[i]
//   paged(pool, block_table, len)           one sequence, whose tokens lie in pages of a pool
//   rows.with_scales(scales, step)          for formats that keep scales apart from their rows
//
// Addresses of rows, by who makes them and which driver reads them:
//
//   HeadRows        Rows::head()               all: the rows of one head, by number
//   RowRun          HeadRows::run()            decode: some rows, in order, of a list or in pages
//   RunWalk         token_kernels.hpp          decode: the rows of a RowRun, one after the other
//   RowWalk         attend_decode.hpp          decode: rows that are to be prefetched ...
//   RowsAhead       RowWalk::take()            decode: ... and the next ones of them
//   BlockRows       KeySequence::find_keys()   panels: the rows of a block, which is packed
//   RowPrefetch     BlockRows::prefetch()      panels: rows of the next block ...
//   BlockPrefetch   attend_panels.hpp          panels: ... of its keys and its values
#pragma once

#include <quoka/rows/format.hpp>
#include <quoka/rows/tensor_view.hpp>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Which rows of a pool a sequence is made of. Row i is cell first_cell + cells[i] of the sequence,
// or cell i without a list. Cell c is row c % page_size of page pages[c / page_size], or row c
// without pages.
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

// The rows of one head, or some of them in the order of a list: where they lie, and how they are
// stored. Addresses are computed where they are used: an array of addresses, written before each
// block, kept the processor from prefetching.
struct HeadRows {
  ConstRow first = nullptr;        // what rows, or those of the pool, are counted from
  Index step = 0;                  // bytes from one row to the next
  const Position* list = nullptr;  // which rows; null: all of them in order
  Index begin = 0;                 // row 0, or what the list counts from
  RowMap map = {};                 // pages and lists
  const Format* format = nullptr;  // how they are stored
  RowShape shape = {};             // what the format needs

  // The address of row i.
  ConstRow operator[](Index i) const {
    const Index row = begin + (list != nullptr ? list[i] : i);
    if (map.any()) [[unlikely]]
      return first + map.offset(row, step);
    return first + row * step;
  }
  // Rows from `at` on.
  HeadRows from(Index at) const {
    HeadRows rest = *this;
    if (list != nullptr)
      rest.list += at;
    else
      rest.begin += at;
    return rest;
  }
  // Row i is row positions[i] of these.
  HeadRows gathered(const Position* positions) const {
    HeadRows some = *this;
    some.list = positions;
    return some;
  }
  Index row_bytes() const { return bytes_together(*format, shape); }  // 0 where channels lie apart
  // Rows [from, from + count); where they lie anywhere, their addresses go to memory [count].
  RowRun run(Index from, Index count, ConstRow* memory) const {
    if (!map.any()) [[likely]]
      return {first + (begin + (list != nullptr ? 0 : from)) * step, step,
              list != nullptr ? list + from : nullptr, nullptr};
    return run_of_map(from, count, memory);
  }
  // Rows [from, from + count).
  void find(Index from, Index count, ConstRow* rows) const {
    if (map.any()) [[unlikely]]
      return find_in_map(from, count, rows);
    // As a number, because the address that a list counts from may lie before the first row.
    const auto zero = reinterpret_cast<std::intptr_t>(first) + begin * step;
    if (list != nullptr)
      for (Index i = 0; i < count; ++i)
        rows[i] = reinterpret_cast<ConstRow>(zero + list[from + i] * step);
    else
      for (Index i = 0; i < count; ++i)
        rows[i] = reinterpret_cast<ConstRow>(zero + (from + i) * step);
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

// How rows lie and how they are stored: all of Rows and OutputRows but the address of the first
// row, and whether it is written to.
class RowsLayout {
 public:
  using Sizes = std::array<Index, 4>;    // [batch, heads, len, dim]
  using Strides = std::array<Index, 3>;  // of batch, heads and len, in bytes

  const Format& format() const { return *format_; }    // how rows are stored
  const Sizes& sizes() const { return sizes_; }        // [batch, heads, len, dim]
  const Strides& strides() const { return strides_; }  // of batch, heads and len, in bytes
  Index batch() const { return sizes_[0]; }            // sequences
  Index heads() const { return sizes_[1]; }            // of a sequence
  Index len() const { return sizes_[2]; }              // rows of a head
  Index dim() const { return sizes_[3]; }              // channels of a row
  // No elements at all.
  bool empty() const {
    return sizes_[0] == 0 || sizes_[1] == 0 || sizes_[2] == 0 || sizes_[3] == 0;
  }
  // Properties of one head's rows that the format needs.
  RowShape shape(Index head) const {
    return {sizes_[3], channel_step_,
            scales_ != nullptr ? scales_ + stored_head(head) * scales_step_ : nullptr};
  }
  // Are b's rows stored as these are, scales included?
  bool stored_as(const RowsLayout& b) const {
    return format_ == b.format_ && channel_step_ == b.channel_step_ && scales_ == b.scales_ &&
           scales_step_ == b.scales_step_;
  }
  // Can a row be read from its own bytes, without scales or a channel step?
  bool stores_alone() const { return channel_step_ == 0 && scales_ == nullptr; }
  // Do one token's heads lie nearer to each other than one head's tokens, or its pages?
  bool heads_side_by_side() const {
    const auto size = [](Index x) { return x < 0 ? -x : x; };
    const Index next = map_.pages != nullptr ? map_.page_step : strides_[2];
    return heads() > 1 && size(strides_[1]) < size(next);
  }

  // Pages and lists: the sizes of the pool, [pages or batch, heads, rows of a page, dim], and which
  // of its rows row i is, counted through all pages.
  bool mapped() const { return map_.any(); }
  const RowMap& map() const { return map_; }  // of pages and lists
  // Of what is stored: [pages, heads, page_size, dim] of pages; else sizes(), each head once.
  Sizes pool_sizes() const {
    const Index stored_heads = repeats_ == 1 ? sizes_[1] : sizes_[1] / repeats_;
    return mapped() ? Sizes{pool_pages_, stored_heads, pool_len_, sizes_[3]}
                    : Sizes{sizes_[0], stored_heads, sizes_[2], sizes_[3]};
  }
  // In bytes: of pages, heads and rows.
  Strides pool_strides() const {
    return map_.pages != nullptr ? Strides{map_.page_step, strides_[1], strides_[2]} : strides_;
  }
  Index pool_begin() const { return begin_; }  // row 0, counted in the map
  // Row i, counted through all pages.
  Index pool_row(Index i) const { return mapped() ? map_.pool_row(begin_ + i) : i; }
  // Throws std::invalid_argument for repeated heads: strides() does not lead from one to the next.
  void require_head_strides() const {
    detail::require_equal("the number of times that a head is repeated", repeats_,
                          "that of rows with strides between heads", 1);
  }

 protected:
  constexpr RowsLayout() = default;
  RowsLayout(const Format& format, const Sizes& sizes, const Strides& strides,
             Index channel_step = 0)
      : format_(&format), sizes_(sizes), strides_(strides), channel_step_(channel_step) {}

  // Where head h lies. Without repeated heads, the usual case, there is no division, which would be
  // most of the cost.
  Index stored_head(Index head) const { return repeats_ == 1 ? head : head / repeats_; }

  const Format* format_ = nullptr;
  Sizes sizes_{};
  Strides strides_{};
  Index channel_step_ = 0;
  const float* scales_ = nullptr;
  Index scales_step_ = 0;
  RowMap map_ = {};
  Index begin_ = 0;                      // row 0, counted in the map
  Index pool_pages_ = 0, pool_len_ = 0;  // where mapped
  Index repeats_ = 1;                    // of each head that is stored
};

// Rows and OutputRows: the template of both.
template <class Byte>  // const std::byte, or std::byte
class BasicRows : public RowsLayout {
  static constexpr bool writes = !std::is_const_v<Byte>;
  template <class T>
  using Element = std::conditional_t<writes, T, const T>;

 public:
  // No rows, of no format.
  constexpr BasicRows() = default;

  // From a view of float, half or bfloat16.
  template <class T>
  requires(Storage<std::remove_const_t<T>> && (!writes || !std::is_const_v<T>))
      BasicRows(const TensorView<T>& view)
      : RowsLayout(format_of<std::remove_const_t<T>>(), view.sizes(),
                   {view.strides()[0] * bytes<T>, view.strides()[1] * bytes<T>,
                    view.strides()[2] * bytes<T>}),
        data_(reinterpret_cast<Byte*>(view.data())) {}
  // From an Eigen tensor or map that outlives the rows.
  template <detail::AnyTensor E>
  BasicRows(E& tensor) : BasicRows(checked_view(tensor)) {}
  // From an Eigen map that is a temporary: its memory must outlive the rows.
  template <class P, int O, template <class> class M>
  BasicRows(const Eigen::TensorMap<P, O, M>&& map) : BasicRows(checked_view(map)) {}
  // A temporary tensor would be gone before the rows are used.
  template <class S, int N, int O, class I>
  BasicRows(const Eigen::Tensor<S, N, O, I>&&) = delete;
  // Writable rows are readable.
  template <class Other>
  requires(!writes && std::is_same_v<Other, std::byte>) BasicRows(const BasicRows<Other>& other)
      : RowsLayout(other), data_(other.data()) {}
  // From memory of the caller's, in any format. channel_step: bytes between channels, for formats
  // whose channels are not side by side. Throws std::invalid_argument on a negative size, on null
  // with elements, and on a channel_step where the format has none. The format must outlive the
  // rows.
  [[gnu::noinline]] BasicRows(Byte* data, const Format& format, const Sizes& sizes,
                              const Strides& strides, Index channel_step = 0)
      : RowsLayout(format, sizes, strides, channel_step), data_(data) {
    detail::require_memory("a view of rows", data, sizes);
    if (channel_step != 0 && !takes_channel_step(format))
      detail::fail(std::string("the channel_step of rows of format ") + format.name, channel_step,
                   "but their channels lie side by side, a step of", "", 0);
    if (writes && !format.writes)
      detail::fail_because(std::string("rows of format ") + format.name + " are only read");
  }
  // A temporary format would be gone before the rows are used.
  BasicRows(Byte* data, const Format&& format, const Sizes& sizes, const Strides& strides,
            Index channel_step = 0) = delete;

  Byte* data() const { return data_; }  // the first byte of the first row

  // The address of row i.
  Byte* row(Index b, Index head, Index i) const {
    Byte* const head_rows = data_ + b * strides_[0] + stored_head(head) * strides_[1];
    return head_rows + (map_.any() ? map_.offset(begin_ + i, strides_[2]) : i * strides_[2]);
  }
  // The rows of one head.
  HeadRows head(Index b, Index head) const requires(!writes) {
    return {.first = data_ + b * strides_[0] + stored_head(head) * strides_[1],
            .step = strides_[2],
            .begin = begin_,
            .map = map_,
            .format = format_,
            .shape = shape(head)};
  }

  // As a view of T. Throws std::invalid_argument where they are of another format, mapped, of
  // repeated heads, or lie a part of an element apart.
  template <Storage T>
  TensorView<const T> typed() const requires(!writes) {
    if (format_ != &format_of<T>()) fail_type(format_of<T>().name);
    if (mapped()) detail::fail_because("rows in pages, or of a list, have no strides");
    require_head_strides();
    constexpr auto size = static_cast<Index>(sizeof(T));
    const auto elements = [this](std::size_t axis) {
      if (sizes_[axis] > 1 && strides_[axis] % size != 0)
        detail::fail("a stride in bytes", strides_[axis], "but must be a multiple of",
                     "an element's bytes", size);
      return strides_[axis] / size;
    };
    return {reinterpret_cast<const T*>(data_), sizes_, {elements(0), elements(1), elements(2), 1}};
  }
  // The rows [begin, begin + count) of each head. Throws std::invalid_argument beyond the end.
  BasicRows slice(Index begin, Index count) const {
    detail::require_part("slice's begin", begin, "slice's count", count, "the rows' len", len());
    BasicRows part = *this;
    if (mapped())
      part.begin_ += begin;
    else if (data_ != nullptr)
      part.data_ += begin * strides_[2];
    part.sizes_[2] = count;
    return part;
  }

  // Each head `times` times: head h is head h / times of these. So each query head gets the keys of
  // the KV head that it shares. Read these rows head by head: they have no strides between heads,
  // so some_heads(), typed() and Mask refuse them.
  BasicRows repeated_heads(Index times) const requires(!writes) {
    detail::require_at_least("the number of times that a head is repeated", times, 1);
    BasicRows repeated = *this;
    repeated.sizes_[1] *= times, repeated.repeats_ *= times;
    return repeated;
  }

  // Sequence b alone. Throws std::invalid_argument beyond the last.
  BasicRows sequence(Index b) const {
    detail::require_at_least("a sequence", b, 0);
    detail::require_at_most("a sequence", b, "the last", batch() - 1);
    BasicRows one = *this;
    if (data_ != nullptr) one.data_ += b * strides_[0];
    one.sizes_[0] = 1;
    return one;
  }

  // Heads [begin, begin + count). Throws std::invalid_argument beyond the last.
  BasicRows some_heads(Index begin, Index count) const {
    require_head_strides();
    detail::require_part("the first of some heads", begin, "the number of heads", count,
                         "the rows' heads", heads());
    BasicRows part = *this;
    if (data_ != nullptr) part.data_ += begin * strides_[1];
    if (scales_ != nullptr) part.scales_ += begin * scales_step_;
    part.sizes_[1] = count;
    return part;
  }

  // The first `count` channels of each row. Throws std::invalid_argument for more than there are.
  BasicRows first_channels(Index count) const {
    detail::require_at_least("the number of channels", count, 0);
    detail::require_at_most("the number of channels", count, "the rows' dim", dim());
    BasicRows part = *this;
    part.sizes_[3] = count;
    return part;
  }

  // One sequence's rows cells[0], cells[1], ... in this order: cells of a cache in any order, the
  // token slots of a request. The list is read in each call and must outlive the rows. Throws
  // std::invalid_argument for a cell beyond the rows, for a batch, and for rows that are gathered.
  BasicRows gathered(std::span<const Position> cells) const requires(!writes) {
    detail::require_equal("the batch of rows in a list", batch(), "one sequence", 1);
    if (map_.cells != nullptr)
      detail::fail_because(
          "gathered rows cannot be gathered again without memory for the joined list: "
          "gathered(cells, memory)");
    require_below("a gathered cell", cells, "the rows' len", len());
    BasicRows some = *this;
    if (!mapped()) some.pool_pages_ = 1, some.pool_len_ = len();
    some.map_.cells = cells.data();
    some.map_.first_cell =
        std::exchange(some.begin_, 0);  // cells of a slice count from its first row
    some.sizes_[2] = std::ssize(cells);
    return some;
  }

  // The same of rows that may be a list themselves. The two lists are then joined in `memory`,
  // which must outlive the rows; otherwise it is not used.
  BasicRows gathered(std::span<const Position> cells, std::vector<Position>& memory) const
      requires(!writes) {
    if (map_.cells == nullptr) return gathered(cells);
    require_below("a gathered cell", cells, "the rows' len", len());
    memory.clear(), memory.reserve(cells.size());
    for (const Position i : cells) memory.push_back(map_.cells[begin_ + i]);
    BasicRows some = *this;
    some.map_.cells = memory.data(), some.begin_ = 0;
    some.sizes_[2] = std::ssize(cells);
    return some;
  }

  // A temporary list would be gone before the rows are used.
  template <class List>
  requires std::same_as<List, std::vector<Position>> BasicRows gathered(List&& cells)
  const = delete;

  // For a format that keeps scales apart: those of head h begin at scales + h * step; their number
  // is Format::separate_scales(). They must outlive the rows.
  BasicRows with_scales(const float* scales, Index step) const {
    BasicRows scaled = *this;
    scaled.scales_ = scales, scaled.scales_step_ = step;
    return scaled;
  }

 private:
  friend BasicRows<const std::byte> paged(const BasicRows<const std::byte>& pool,
                                          std::span<const Position> table, Index len);

  // Do the bytes of a row grow with the step?
  static bool takes_channel_step(const Format& format) {
    return format.row_bytes({.dim = 2, .channel_step = 4096}) != format.row_bytes({.dim = 2});
  }
  [[noreturn, gnu::cold, gnu::noinline]] void fail_type(const char* wanted) const {
    detail::fail_because(std::string("typed(): rows are of format ") +
                         (format_ != nullptr ? format_->name : "none") + ", but " + wanted +
                         " is asked for");
  }
  static void require_below(std::string_view what, std::span<const Position> list,
                            std::string_view limit_name, Index limit) {
    for (const Position x : list)
      if (x < 0 || x >= limit) [[unlikely]] {
        detail::require_at_least(what, x, 0);
        detail::fail(what, x, "but must be below", limit_name, limit);
      }
  }

  template <class T>
  static constexpr Index bytes = static_cast<Index>(sizeof(T));

  // The message for a tensor that cannot be rows.
  template <class E>
  static auto checked_view(E& tensor) {
    using Scalar = typename E::Scalar;
    constexpr bool stored = Storage<Scalar>;
    constexpr bool row_major = (int{E::Layout} & 1) == 1;
    constexpr bool rank = E::NumIndices == 4 || E::NumIndices == 3;
    constexpr bool writable =
        !writes || !std::is_const_v<std::remove_pointer_t<decltype(tensor.data())>>;
    static_assert(stored, "quoka: elements must be float, Eigen::half or Eigen::bfloat16");
    static_assert(row_major,
                  "quoka: tensors must be row-major: Eigen::Tensor<T, 4, Eigen::RowMajor>");
    static_assert(
        rank,
        "quoka: tensors must have rank 4, [batch, heads, len, dim], or rank 3, without batch");
    static_assert(writable, "quoka: an output must not be const");
    if constexpr (stored && row_major && rank && writable)
      return TensorView<Element<Scalar>>(tensor);
    else
      return TensorView<Element<float>>();
  }

  Byte* data_ = nullptr;
};

// Rows that are read: q, k, v.
using Rows = BasicRows<const std::byte>;
// Rows that are written: out.
using OutputRows = BasicRows<std::byte>;

// One sequence of a cache in pages. pool [pages, heads, page_size, dim] holds the pages of all
// sequences, with any strides; token i lies in page table[i / page_size], at i % page_size. Any
// page length; the same page may serve several sequences. With pages of one token the table is a
// list of token slots. The table is read in each call and must outlive the rows. Throws
// std::invalid_argument, before anything is read, for a table too short for len tokens, for an
// entry that is not a page of the pool, and for more than max_keys tokens.
inline Rows paged(const Rows& pool, std::span<const Position> table, Index len) {
  detail::require_size("the length of a paged sequence", len, 0);
  if (pool.mapped()) detail::fail_because("a pool of pages is itself in pages, or of a list");
  Rows rows = pool;
  rows.sizes_[0] = 1, rows.sizes_[2] = len;
  if (len == 0) return rows;
  const Index page_size = pool.len(), used = page_size > 0 ? (len - 1) / page_size + 1 : len;
  detail::require_at_least("the tokens of a page", page_size, 1);
  detail::require_at_least("the number of entries of the block table", std::ssize(table), used);
  Rows::require_below("an entry of the block table", table.first(static_cast<std::size_t>(used)),
                      "the number of pages", pool.batch());
  rows.map_ = {nullptr, 0, table.data(), page_size, pool.strides()[0], -1};
  if ((page_size & (page_size - 1)) == 0) {
    rows.map_.page_shift = 0;
    while ((Index{1} << rows.map_.page_shift) < page_size) ++rows.map_.page_shift;
  }
  rows.pool_pages_ = pool.batch(), rows.pool_len_ = page_size;
  return rows;
}

// A temporary table would be gone before the rows are used.
template <class Table>
requires std::same_as<Table, std::vector<Position>> Rows paged(const Rows& pool, Table&& table,
                                                               Index len)
= delete;

static_assert(std::is_trivially_copyable_v<Rows>);

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/kernels/format_table.hpp>
#endif
