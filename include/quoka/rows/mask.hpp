// Mask: which keys each query may see, and what is added to their logits, as the caller has it.
//
//   Mask(rows)           added to the logits after the soft-cap: 0, any bias, and what hides. Rows of
//                        float, half or bfloat16 [batch, heads, q_len, keys]
//   Mask::bytes(...)     a byte for each key, 0 hides: ONNX's boolean masks
//   Mask::bits(...)      bit k % 8 of byte k / 8 for key k, 0 hides
//
// What hides: -inf, and every number at or below -60,000 (hides_from), whatever the format. It is how
// "hidden" is written where it is not -inf: the lowest half (-65,504, in bfloat16 -65,536), -1e9, the
// lowest float, sums of these. Beside a key without it such a key has a weight of 0 anyhow, and a row
// of nothing else is zeros, not their mean. Every finite number above is a bias.
//
// batch and heads may be 1: the same for all. Columns are the past's rows, in its order and before
// any selection, then the chunk's. A mask joins causality and the sliding window; with
// AttentionOptions::causal = false it alone decides, as for tree drafts, a prefix that is seen both
// ways, or cells of a cache in any order.
//
// A key that a query may not see has no influence on it, whatever its memory holds, NaN included.
// Cells that no query sees are not read. A row that sees nothing is zero. NaN and infinity are
// added as IEEE
// arithmetic has it: a row with one of them, at a key that causality and the window leave, is NaN.
#pragma once

#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

class Mask {
 public:
  using Sizes = std::array<Index, 4>;    // [batch or 1, q_heads or 1, q_len, keys]
  using Strides = std::array<Index, 3>;  // of batch, heads and q_len, in bytes

  // Biases that hide: this and all below, which no weight would survive.
  static constexpr float hides_from = -60000.0f;

  // Everything is visible.
  Mask() = default;
  // Throws std::invalid_argument for another format than float, half or bfloat16: one of rows that
  // are more than channels side by side.
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

  // The same mask, read as lists of each query's keys (index_lists.hpp): faster where a mask shows each query keys of its
  // own. Results are the same, but for rounding. No effect for one query, or beside a Selection.
  Mask as_lists() const {
    Mask mask = *this;
    mask.as_lists_ = true;
    return mask;
  }
  bool is_lists() const { return as_lists_; }  // by as_lists()

  bool absent() const { return sizes_ == Sizes{}; }    // no mask: everything is visible
  const Sizes& sizes() const { return sizes_; }        // as given
  const Strides& strides() const { return strides_; }  // in bytes
  const std::byte* data() const { return data_; }      // not owned
  Index row_bytes() const;                             // of one query's row
  Index batch() const { return sizes_[0]; }            // 1: the same for all sequences
  Index heads() const { return sizes_[1]; }            // 1: the same for all heads
  Index keys() const { return sizes_[3]; }             // columns: past and chunk

  // to[0, count) = what is added for columns [first, first + count), or for columns list[first ...].
  void read(Index b, Index head, Index query, const Position* list, Index first, Index count,
            float* to) const;

  // Does it show this query one of columns [first, first + count), or of list[first ...]? NaN is shown.
  bool shows(Index b, Index head, Index query, const Position* list, Index first,
             Index count) const;
  // Joins SeenBy of this query to that of columns [first, first + count).
  void join_seen_by(Index b, Index head, Index query, Index first, Index count,
                    std::uint8_t* seen_by) const;

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
  bool as_lists_ = false;
};

// How the queries of a chunk see a column: a sum of these.
enum SeenBy : std::uint8_t {
  seen_by_some = 1,      // at least one query sees it
  hidden_from_some = 2,  // at least one does not
  biased_for_some = 4,   // seen, with something else than 0 added
};
// seen_by[0, count) of columns [first, first + count), over all queries and heads of sequence b.
void read_seen_by(const Mask& mask, Index b, Index first, Index count, std::uint8_t* seen_by,
                  ExecutorRef executor = SerialExecutor{});

// Cells of a past of one sequence by what the chunk's queries see of them: what selection needs.
struct VisibleCells {
  std::vector<Position> to_all;   // ascending: a selection is made among these
  std::vector<Position> to_some;  // ascending, without those above: attended to exactly

  // The mask's first past_len columns, for sequence b. Throws std::invalid_argument for more
  // columns, or another sequence, than the mask has, and for more than max_keys.
  VisibleCells(const Mask& mask, Index past_len, Index b = 0,
               ExecutorRef executor = SerialExecutor{});
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/rows/mask_impl.hpp>
#endif
