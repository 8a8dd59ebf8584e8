// Mask: which keys each query may see, and what is added to their logits, in the caller's own
// memory.
//
//   Mask(rows)           added to the logits after the soft-cap: 0, any bias, and what hides. Rows
//                        of float, half or bfloat16 [batch, heads, q_len, keys]
//   Mask::bytes(...)     a byte for each key, 0 hides: ONNX's boolean masks
//   Mask::bits(...)      bit k % 8 of byte k / 8 for key k, 0 hides
//
// -inf hides a key, as does every number at or below -60,000 (hides_from), in every format.
// Engines write such numbers for "hidden": the lowest half (-65,504, in bfloat16 -65,536), -1e9,
// the lowest float, sums of these. Beside a visible key their weight would be 0 anyway; a row of
// hidden keys only is zeros. Every finite number above is a bias.
//
// batch and heads may be 1: the same for all. Columns are the past's rows, in its order and before
// any selection, then the chunk's. A mask applies in addition to causality and the sliding window.
// With AttentionOptions::causal = false the mask alone decides: for tree drafts, a bidirectional
// prefix, or cells of a cache in any order.
//
// A key that a query may not see has no influence on it, even if its memory holds NaN. Cells that
// no query sees are not read. A row that sees nothing is zero. NaN and infinity are added as in
// IEEE arithmetic: they make their row NaN, unless causality or the window hides the key.
#pragma once

#include <quoka/rows/index_lists.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#include <vector>

#if QUOKA_DEFINES
#include <quoka/rows/format.hpp>
#include <quoka/base/index.hpp>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Columns of a mask: list[first, first + count), or those from `first` on without a list.
struct Columns {
  const Position* list = nullptr;  // null: none
  Index first = 0;                 // of the list, or of the mask
  Index count = 0;                 // how many

  // The i-th of them.
  Index operator[](Index i) const { return list != nullptr ? list[first + i] : first + i; }
  // `n` of them, from the i-th on.
  Columns part(Index i, Index n) const { return {list, first + i, n}; }
};

class Mask {
 public:
  using Sizes = std::array<Index, 4>;    // [batch or 1, q_heads or 1, q_len, keys]
  using Strides = std::array<Index, 3>;  // of batch, heads and q_len, in bytes

  // Biases hide at this number and below, where every weight would be 0.
  static constexpr float hides_from = -60000.0f;

  // Everything is visible.
  Mask() = default;
  // Throws std::invalid_argument for another format than float, half or bfloat16.
  template <class R>
  requires(std::is_convertible_v<R, Rows> && !std::is_same_v<std::remove_cvref_t<R>, Mask>)
      Mask(R&& added)
      : Mask(Rows(std::forward<R>(added)), Checked{}) {}
  // From a byte for each key, 0 hides. Strides in bytes. Throws std::invalid_argument on a negative
  // size, and on null with elements.
  static Mask bytes(const void* data, const Sizes& sizes, const Strides& strides) {
    return {data, Kind::bytes, sizes, strides};
  }
  // From a bit for each key, bit k % 8 of byte k / 8, 0 hides. Strides in bytes. Throws as bytes().
  static Mask bits(const void* data, const Sizes& sizes, const Strides& strides) {
    return {data, Kind::bits, sizes, strides};
  }

  // The same mask, read as lists of each query's keys (index_lists.hpp): faster where a mask shows
  // each query keys of its own. Results are the same except for rounding. No effect for one query,
  // or beside a Selection.
  template <class Work = detail::ListWork>
  Mask as_lists() const {
    Mask mask = *this;
    mask.driver_ = Work::attend;
    return mask;
  }
  bool is_lists() const { return driver_ != nullptr; }  // by as_lists()
  detail::Driver driver() const { return driver_; }     // the library's own

  bool absent() const { return sizes_ == Sizes{}; }    // no mask: everything is visible
  const Sizes& sizes() const { return sizes_; }        // as given
  const Strides& strides() const { return strides_; }  // in bytes
  const std::byte* data() const { return data_; }      // not owned
  Index row_bytes() const;                             // of one query's row
  Index batch() const { return sizes_[0]; }            // 1: the same for all sequences
  Index heads() const { return sizes_[1]; }            // 1: the same for all heads
  Index keys() const { return sizes_[3]; }             // columns: past and chunk

  // to[0, columns.count) = the biases of these columns.
  void read(Index b, Index head, Index query, const Columns& columns, float* to) const;

  // Does it leave this query one of these columns? NaN is left.
  bool any_visible(Index b, Index head, Index query, const Columns& columns) const;
  // Adds what this query sees of columns [first, first + count) to their visibility.
  void join_visibility(Index b, Index head, Index query, Index first, Index count,
                       std::uint8_t* visibility) const;

  // Throws std::invalid_argument unless the mask serves this shape.
  void check(Index batch, Index q_heads, Index q_len, Index keys) const;

 private:
  enum class Kind { added, bytes, bits };
  struct Checked {};

  const std::byte* row(Index b, Index head, Index query) const;

  Mask(const Rows& added, Checked);
  Mask(const void* data, Kind kind, const Sizes& sizes, const Strides& strides);

  const std::byte* data_ = nullptr;
  Kind kind_ = Kind::added;
  const Format* format_ = nullptr;  // of what is added
  Sizes sizes_{};
  Strides strides_{};
  detail::Driver driver_ = nullptr;  // where it is read as lists
};

// How the queries of a chunk see a column: a sum of these.
enum Visibility : std::uint8_t {
  visible_to_some = 1,   // at least one query sees it
  hidden_from_some = 2,  // at least one does not
  biased_for_some = 4,   // seen, with something else than 0 added
};
// visibility[0, count) of columns [first, first + count), over all queries and heads of sequence b.
void read_visibility(const Mask& mask, Index b, Index first, Index count, std::uint8_t* visibility,
                     ExecutorRef executor = SerialExecutor{});

// Cells of one sequence's past, by how the chunk's queries see them, for selection.
struct VisibleCells {
  std::vector<Position> to_all;   // ascending: a selection is made among these
  std::vector<Position> to_some;  // ascending, without those above: attended to exactly

  // The mask's first past_len columns, for sequence b. Throws std::invalid_argument for more
  // columns, or another sequence, than the mask has, and for more than max_keys.
  VisibleCells(const Mask& mask, Index past_len, Index b = 0,
               ExecutorRef executor = SerialExecutor{});
};

#if QUOKA_DEFINES

QUOKA_FUNC Mask::Mask(const void* data, Kind kind, const Sizes& sizes, const Strides& strides)
    : data_(static_cast<const std::byte*>(data)), kind_(kind), sizes_(sizes), strides_(strides) {
  static constexpr detail::AxisNames axes = {"batch", "heads", "q_len", "keys"};
  detail::require_memory("a mask", data, sizes, axes);
}

QUOKA_FUNC Mask::Mask(const Rows& added, Checked)
    : data_(added.data()), sizes_(added.sizes()), strides_(added.strides()) {
  if (added.empty()) return;
  format_ = &added.format();
  if (added.mapped()) detail::fail_because("a mask in pages, or of a list, is not supported");
  added.require_head_strides();
  if (format_->element_bytes == 0)
    detail::fail_because(std::string("a mask's format must be float, half or bfloat16, not ") +
                         format_->name);
}

QUOKA_FUNC Index Mask::row_bytes() const {
  switch (kind_) {
    case Kind::added:
      return format_ != nullptr ? format_->element_bytes * sizes_[3] : 0;
    case Kind::bytes:
      return sizes_[3];
    case Kind::bits:
      return ceil_div(sizes_[3], 8);
  }
  return 0;
}

QUOKA_FUNC void Mask::check(Index batch, Index q_heads, Index q_len, Index keys) const {
  if (sizes_[0] != 1) detail::require_equal("the mask's batch", sizes_[0], "q's batch", batch);
  if (sizes_[1] != 1) detail::require_equal("the mask's heads", sizes_[1], "q_heads", q_heads);
  detail::require_equal("the mask's q_len", sizes_[2], "q_len", q_len);
  detail::require_equal("the mask's keys", sizes_[3], "the past's and the chunk's keys", keys);
}

namespace detail {

// A mask's bytes. Neighbouring bytes are mostly equal, so eight equal ones are handled together:
// same(i, shown) for bytes [i, i + 8), one(i, shown) for a byte. Either ends the walk by true,
// which is returned.
template <class Same, class One>
bool walk_bytes(const std::byte* bytes, Index count, Same&& same, One&& one) {
  constexpr Index together = sizeof(std::uint64_t);
  constexpr std::uint64_t all_shown = 0x0101010101010101u;
  const auto each = [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i)
      if (one(i, bytes[i] != std::byte{0})) return true;
    return false;
  };
  Index i = 0;
  for (; i + together <= count; i += together) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i, sizeof word);
    const bool is_same = word == 0 || word == all_shown;
    if (is_same ? same(i, word != 0) : each(i, i + together)) return true;
  }
  return each(i, count);
}

}  // namespace detail

QUOKA_FUNC const std::byte* Mask::row(Index b, Index head, Index query) const {
  return data_ + (sizes_[0] > 1 ? b : 0) * strides_[0] + (sizes_[1] > 1 ? head : 0) * strides_[1] +
         query * strides_[2];
}

QUOKA_FUNC void Mask::read(Index b, Index head, Index query, const Columns& columns,
                           float* to) const {
  const std::byte* const row = this->row(b, head, query);
  const Index first = columns.first, count = columns.count;
  const auto seen = [](bool visible) { return visible ? 0.0f : -detail::infinity; };
  const auto each = [&](Index begin, auto&& at) {
    if (columns.list != nullptr)
      for (Index i = begin; i < count; ++i) to[i] = at(Index{columns.list[first + i]});
    else
      for (Index i = begin; i < count; ++i) to[i] = at(first + i);
  };
  switch (kind_) {
    case Kind::added: {
      const Index size = format_->element_bytes;
      if (columns.list == nullptr) {
        format_->widen(row + first * size, {count}, to);
        break;
      }
      constexpr Index step = 64;  // gathered, then widened together
      alignas(64) std::byte elements[step * sizeof(float)];
      for (Index i = 0; i < count; i += step) {
        const Index n = std::min(step, count - i);
        const Position* const cells = columns.list + first + i;
        if (size == 2)
          for (Index j = 0; j < n; ++j) std::memcpy(elements + j * 2, row + cells[j] * Index{2}, 2);
        else
          for (Index j = 0; j < n; ++j) std::memcpy(elements + j * 4, row + cells[j] * Index{4}, 4);
        format_->widen(elements, {n}, to + i);
      }
      break;
    }
    case Kind::bytes: {
      constexpr Index step = 16;  // a copy, which `to` cannot be: compilers vectorise the loop
      std::byte bytes[step];
      Index begin = 0;
      if (columns.list == nullptr)
        for (; begin + step <= count; begin += step) {
          std::memcpy(bytes, row + first + begin, step);
          for (Index i = 0; i < step; ++i) to[begin + i] = seen(bytes[i] != std::byte{0});
        }
      return each(begin, [=](Index k) { return seen(row[k] != std::byte{0}); });
    }
    case Kind::bits:
      return each(
          0, [=](Index k) { return seen((row[k / 8] >> (k % 8) & std::byte{1}) != std::byte{0}); });
  }
  // From here on only minus infinity hides.
  for (Index i = 0; i < count; ++i) to[i] = to[i] <= hides_from ? -detail::infinity : to[i];
}

QUOKA_FUNC bool Mask::any_visible(Index b, Index head, Index query, const Columns& columns) const {
  if (kind_ == Kind::bytes && columns.list == nullptr) {
    const auto is_shown = [](Index, bool shown) { return shown; };
    return detail::walk_bytes(row(b, head, query) + columns.first, columns.count, is_shown,
                              is_shown);
  }
  constexpr Index step = 128;
  float added[step];
  for (Index i = 0; i < columns.count; i += step) {
    const Index n = std::min(step, columns.count - i);
    read(b, head, query, columns.part(i, n), added);
    if (std::any_of(added, added + n, [](float x) { return x != -detail::infinity; })) return true;
  }
  return false;
}

QUOKA_FUNC void Mask::join_visibility(Index b, Index head, Index query, Index first, Index count,
                                      std::uint8_t* visibility) const {
  const auto shown_to_one = [](bool shown) { return shown ? visible_to_some : hidden_from_some; };
  if (kind_ == Kind::bytes) {
    detail::walk_bytes(
        row(b, head, query) + first, count,
        [&](Index i, bool shown) {
          std::uint64_t eight;
          std::memcpy(&eight, visibility + i, sizeof eight);
          eight |= 0x0101010101010101u * shown_to_one(shown);
          std::memcpy(visibility + i, &eight, sizeof eight);
          return false;
        },
        [&](Index i, bool shown) { return visibility[i] |= shown_to_one(shown), false; });
    return;
  }
  constexpr Index step = 128;
  float added[step];
  for (Index i = 0; i < count; ++i) {
    if (i % step == 0) read(b, head, query, {nullptr, first + i, std::min(step, count - i)}, added);
    const float x = added[i % step];
    const bool shown = x != -detail::infinity;
    visibility[i] |=
        static_cast<std::uint8_t>(shown_to_one(shown) | (shown && x != 0.0f ? biased_for_some : 0));
  }
}

QUOKA_FUNC void read_visibility(const Mask& mask, Index b, Index first, Index count,
                                std::uint8_t* visibility, ExecutorRef executor) {
  constexpr Index step = 1024;
  executor.run(ceil_div(count, step), [&](Index task, int) {
    const Index begin = task * step, n = std::min(step, count - begin);
    std::memset(visibility + begin, 0, static_cast<std::size_t>(n));
    for (Index head = 0; head < mask.heads(); ++head)
      for (Index query = 0; query < mask.sizes()[2]; ++query)
        mask.join_visibility(b, head, query, first + begin, n, visibility + begin);
  });
}

QUOKA_FUNC VisibleCells::VisibleCells(const Mask& mask, Index past_len, Index b,
                                      ExecutorRef executor) {
  detail::require_at_least("past_len", past_len, 0);
  detail::require_at_most("past_len", past_len, "the mask's keys", mask.keys());
  detail::require_keys("past_len", past_len);
  detail::require_at_least("the mask's sequence", b, 0);
  if (mask.batch() > 1)
    detail::require_at_most("the mask's sequence", b, "its last one", mask.batch() - 1);
  std::vector<std::uint8_t> visibility(static_cast<std::size_t>(past_len));
  read_visibility(mask, b, 0, past_len, visibility.data(), executor);
  for (Index i = 0; i < past_len; ++i) {
    const std::uint8_t of_cell = visibility[static_cast<std::size_t>(i)];
    if ((of_cell & visible_to_some) == 0) continue;
    ((of_cell & hidden_from_some) != 0 ? to_some : to_all).push_back(static_cast<Position>(i));
  }
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
