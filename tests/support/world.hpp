// The world of the tests: rows, masks and lists of keys as a caller may store them, in any format and layout, in memory that
// ends at a fence; and executors that fail or run tasks in any order.
//
//   Random random(7);
//   const StoredRows k(random.tensor<float>(1, 2, 37, 64), quoka::q8_0_format(), StoredRows::Layout::pages, random);
//   k.rows();    // what the library reads
//   k.floats();  // the numbers that the format holds
#pragma once

#include <quoka/rows/index_lists.hpp>
#include <quoka/rows/mask.hpp>

#include "support/executors.hpp"
#include "support/fenced.hpp"
#include "support/fixtures.hpp"

namespace quoka_test {

using quoka::Format;

// Every format: the first `written_formats` of them can be written.
std::span<const Format* const> every_format();
inline constexpr Index written_formats = 8;
// Scales of rows of this format, where they lie apart: [heads][separate_scales].
std::vector<float> scales_of(const Format& format, Index heads, Index dim);

// Rows of any format in memory of their own, laid out in any way. Memory that holds no row is 0xff:
// NaN in all formats that have one.
class StoredRows {
 public:
  // Tokens: the heads of each side by side, with something between them. The last three are of one sequence.
  enum class Layout { dense, tokens, padded, pages, list, list_of_pages };
  static constexpr Layout layouts[] = {Layout::dense, Layout::tokens, Layout::padded,
                                       Layout::pages, Layout::list,   Layout::list_of_pages};

  StoredRows() = default;
  // x rounded to the format, dense or in a layout.
  StoredRows(const Tensor4<float>& x, const Format& format);
  StoredRows(const Tensor4<float>& x, const Format& format, Layout layout, Random& random);
  // The same rows, byte by byte, in another layout.
  StoredRows(const StoredRows& from, Layout layout, Random& random);
  StoredRows(const StoredRows& from);  // in other memory, laid out alike
  StoredRows(StoredRows&&) = default;
  StoredRows& operator=(StoredRows&&) = default;

  const Rows& rows() const { return rows_; }
  Rows rows(Index count) const { return rows_.slice(0, count); }
  Rows sequence(Index b) const;  // one sequence of the batch; of pages and lists there is one
  const Tensor4<float>& floats() const { return floats_; }  // as the format holds them
  std::span<const float> scales() const { return scales_; }
  std::byte* row(Index b, Index head, Index i);
  // The memory that rows() is a part, a list or pages of, as rows; all of them, and where row i lies among them.
  const Rows& pool() const { return pool_; }
  Index pool_rows() const { return pool_.batch() * pool_.len(); }
  Index pool_row(Index i) const { return rows_.mapped() ? rows_.pool_row(i) : first_row_ + i; }

  // Row i becomes all NaN, or what 0xff is.
  void ruin(Index b, Index head, Index i);
  // Channel c of row i becomes x; channels that share a scale with it change accordingly.
  void set(Index b, Index head, Index i, Index c, float x);
  // Row i becomes another one.
  void change(Index b, Index head, Index i);

 private:
  void lay_out(Layout layout, std::uint64_t seed);
  void write(Index b, Index head, Index i, const float* values);
  template <class F>
  void for_each_row(F&& f) const;

  const Format* format_ = nullptr;
  Layout layout_ = Layout::dense;
  std::uint64_t seed_ = 0;                                // of the layout
  Index element_ = 0, channel_step_ = 0, first_row_ = 0;  // of channels that lie apart: bytes
  Fenced memory_;  // the last row of the pool may end at a fence
  std::vector<float> scales_;
  std::vector<Position> table_, cells_;
  Tensor4<float> floats_;
  Rows rows_, pool_;
};

// The numbers added to the logits, [batch or 1, q_heads or 1, q_len, keys], as a caller may have
// them.
class StoredMask {
 public:
  enum class Kind { single, half, bfloat16, bytes, bits };  // the last two hide what is not 0

  // `padding` elements of something else lie between the rows.
  StoredMask(const Tensor4<float>& x, Kind kind, Index padding = 3);
  quoka::Mask mask() const;
  quoka::Mask sequence(Index b) const;

 private:
  quoka::Mask at(const std::uint8_t* data, const std::array<Index, 4>& sizes) const;

  Kind kind_;
  std::array<Index, 4> sizes_;
  std::array<Index, 3> strides_;
  std::vector<std::uint8_t> memory_;
};

// Lists of each query's keys, as a caller may have them: in any order, some named twice, padded
// with -1 or counted.
class StoredLists {
 public:
  StoredLists(Index batch, Index heads, Index q_len, Index keys, Index block)
      : batch_(batch),
        heads_(heads),
        q_len_(q_len),
        keys_(keys),
        block_(block),
        named_(uz(batch * heads * q_len * keys)) {}

  // Query i of these names the entries of `list`, negative ones nothing.
  void set(Index b, Index head, Index i, const std::vector<Index>& list);
  // Once all are set: room for some more entries than the longest list has, padded or counted.
  void store(Random& random);
  quoka::IndexLists lists() const;
  quoka::IndexLists sequence(Index b) const { return lists().sequence(b); }
  // The same lists in another order and in other memory, with some entries repeated.
  void store_otherwise(Random& random);
  // For KV heads and sequences as a call has them.
  bool names(Index b, Index kv_head, Index i, Index key) const {
    return named_[uz(((b % batch_ * heads_ + kv_head % heads_) * q_len_ + i) * keys_ + key)] != 0;
  }
  // The lists of keys [begin, end), one by one.
  StoredLists part(Index begin, Index end, Random& random) const;
  Index block() const { return block_; }
  std::string describe() const;

 private:
  Index batch_, heads_, q_len_, keys_, block_;
  std::vector<std::uint8_t> named_;  // [batch, heads, q_len, keys]
  std::vector<std::vector<Index>> entries_;
  std::vector<Position> memory_, counts_;
  Index most_ = 0, step_ = 0;
};

}  // namespace quoka_test
