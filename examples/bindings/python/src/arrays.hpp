// Arrays of Python as views of the library: whatever hands out its memory by DLPack or the buffer
// protocol, with any strides, and without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <quoka/quoka.hpp>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace quoka_python {

namespace nb = nanobind;
using quoka::Index;

// An array of floats, halves or bfloat16 of rank 4 [batch, heads, len, dim], or of rank 3 without
// batch. Holds the array: made, copied and destroyed with the GIL.
class Array {
 public:
  // Throws std::invalid_argument for another object, rank or element type.
  Array(nb::handle of, const char* name);

  // Throws std::invalid_argument where strides are not a whole number of elements from channel to
  // channel, or descend.
  quoka::Rows rows() const;
  // A pool of pages for paged(): of an array [pages, page_size, kv_heads, dim]. Throws besides for
  // another rank than 4.
  quoka::Rows pages() const;
  // The same of queries: those whose channels lie apart are copied, because the library reads only
  // keys and values in this layout. Valid as long as the array.
  quoka::Rows queries();
  // The same, written: channels lie side by side. Throws std::invalid_argument where the array is
  // read-only.
  quoka::OutputRows output_rows() const;
  int rank() const { return rank_; }

 private:
  void check_writable() const;

  nb::ndarray<nb::ro> held_;
  nb::object original_;
  bool may_write_ = false;  // set for tensors that torch handed out; others are asked again
  std::string name_;
  std::vector<float> copy_;
  int rank_ = 0;
  const void* data_ = nullptr;
  const quoka::Format* format_ = nullptr;
  Index element_bytes_ = 0;
  std::array<Index, 4> sizes_{}, strides_{};  // strides in elements
};

// A mask [q_len, keys], [q_heads or 1, q_len, keys] or [batch or 1, q_heads or 1, q_len, keys]:
// bool or uint8, where 0 hides, or floats, halves and bfloat16 that are added to the logits.
//
// As torch's attention has it, an axis of one query or one key is that of all. Where a row's keys
// do not lie side by side, as in a mask that was expanded over them, the mask is copied, each of
// its different rows once.
class MaskArray {
 public:
  // The mask of a call with this many queries and keys.
  MaskArray(nb::handle of, Index q_len, Index keys);
  const quoka::Mask& mask() const { return mask_; }
  // Sequence b's first `keys` columns.
  quoka::Mask sequence(Index b, Index keys) const;

 private:
  quoka::Mask view(const void* data, const quoka::Mask::Sizes& sizes) const;
  const void* copy_rows(std::array<Index, 4> sizes, std::array<Index, 4>& steps, Index bytes);

  nb::ndarray<nb::ro> held_;
  std::vector<std::byte> copy_;
  const quoka::Format* format_ = nullptr;  // of what is added; null: bytes
  quoka::Mask::Strides strides_{};
  quoka::Mask mask_;
};

// Lists of keys [q_len, k], [kv_heads or 1, q_len, k] or [batch or 1, kv_heads or 1, q_len, k], and
// how many entries of each count, without the last axis; None: all. int32 is read where it lies,
// int64 is copied.
class ListsArray {
 public:
  ListsArray(nb::handle entries, nb::handle counts, Index block);
  ListsArray(const ListsArray&) = delete;
  ListsArray& operator=(const ListsArray&) = delete;
  const quoka::IndexLists& lists() const { return lists_; }

 private:
  // An array of integers, as [.., .., .., k] or, without entries, [.., .., ..].
  struct Numbers {
    nb::ndarray<nb::ro> held;
    std::vector<quoka::Position> copy;
    const quoka::Position* data = nullptr;
    std::array<Index, 4> sizes{1, 1, 1, 1}, strides{};  // the last axis is k; of counts 1

    Numbers(nb::handle of, const std::string& name, int missing_axes);
  };

  std::optional<Numbers> entries_, counts_;
  quoka::IndexLists lists_;
};

// Which pages each sequence has, [batch, most], and how many tokens, [batch]; of one sequence
// [most] and a number. int32 whose entries lie side by side is read where it lies, others are
// copied as far as tokens go.
class PageTables {
 public:
  PageTables(nb::handle table, nb::handle lengths, Index page_size);
  PageTables(PageTables&&) = default;  // views stay good: they are of heap memory
  PageTables& operator=(PageTables&&) = default;

  Index batch() const { return std::ssize(lengths_); }
  // The tokens of the longest sequence.
  Index longest() const {
    return lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end());
  }
  Index len(Index b) const { return lengths_[static_cast<std::size_t>(b)]; }
  // Keys or values of one sequence. Throws as paged(), with the sequence's number where there are
  // several.
  quoka::Rows sequence(const quoka::Rows& pool, Index b) const;

 private:
  nb::ndarray<nb::ro> held_;
  std::vector<Index> lengths_;
  std::vector<std::vector<quoka::Position>> copies_;
  std::vector<std::span<const quoka::Position>> tables_;
};

// A weight of each head and query, [heads, q_len] or [batch, heads, q_len], of float32. Read where
// it lies.
class HeadWeights {
 public:
  explicit HeadWeights(nb::handle of);
  const quoka::TensorView<const float, 3>& view() const { return view_; }

 private:
  nb::ndarray<nb::ro> held_;
  quoka::TensorView<const float, 3> view_;
};

// Some floats: an array of rank 1, or a sequence of numbers. None: none.
std::vector<float> floats(nb::handle of, const char* name);

// A new numpy array of float32.
nb::object new_floats(std::span<const Index> sizes);
// The same of int32, with these entries; sizes are of all of them.
nb::object new_positions(std::span<const quoka::Position> of, std::span<const Index> sizes);
nb::object new_floats(std::span<const float> of, std::span<const Index> sizes);

}  // namespace quoka_python
