// Rows that grow at the end: [batch, heads, capacity, dim], the memory behind a cache and behind
// whatever a selector keeps per key.
//
// Growth doubles, so n appends copy O(n) rows; reserve() ahead and nothing is copied or allocated.
// Rows are written by their owner; truncate forgets the last ones. Pointers and views are valid
// until the next growth.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/rows/tensor_view.hpp>

#include <algorithm>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {

template <class T>
class RowStore {
 public:
  RowStore() = default;  // no rows of no shape: see reshape
  // No rows yet, of this shape.
  RowStore(Index batch, Index heads, Index dim) : batch_(batch), heads_(heads), dim_(dim) {}
  // Takes the memory over; the other one is then empty, of no shape.
  RowStore(RowStore&& other) noexcept { swap(other); }
  // Takes the memory over.
  RowStore& operator=(RowStore&& other) noexcept {
    RowStore(std::move(other)).swap(*this);
    return *this;
  }

  Index batch() const { return batch_; }  // sequences
  Index heads() const { return heads_; }  // of a sequence
  Index dim() const { return dim_; }      // elements of a row
  // Rows per (batch, head).
  Index len() const { return len_; }
  Index capacity() const { return capacity_; }   // rows per (batch, head) that fit
  Index bytes() const { return data_.bytes(); }  // of memory

  // Takes this shape, and forgets all rows if it is another one than before.
  void reshape(Index batch, Index heads, Index dim) {
    if (batch == batch_ && heads == heads_ && dim == dim_) return;
    *this = RowStore(batch, heads, dim);
  }

  // Room for `capacity` rows. Throws std::invalid_argument for a negative one and std::bad_alloc;
  // nothing has changed then.
  [[gnu::noinline]] void reserve(Index capacity) {
    detail::require_at_least("capacity", capacity, 0);
    if (capacity <= capacity_) return;
    Index size = capacity;
    for (const Index factor : {batch_, heads_, dim_})
      if (__builtin_mul_overflow(size, factor, &size)) throw std::bad_alloc();
    Buffer<T> data;
    data.reserve(std::max<Index>(size, 1));
    for (Index head = 0; head < batch_ * heads_; ++head)
      std::copy_n(data_.data() + head * capacity_ * dim_, len_ * dim_,
                  data.data() + head * capacity * dim_);
    data_ = std::move(data);
    capacity_ = capacity;
  }
  // Room for `len` rows: for `capacity` at once, where that is known to be more; else by doubling
  // at least.
  void grow(Index len, Index capacity = 0) {
    if (capacity > len)
      reserve(capacity);
    else if (len > capacity_)
      reserve(std::max(len, 2 * capacity_));
  }
  // Room and length; rows beyond the old length are for the owner to write.
  void resize(Index len, Index capacity = 0) {
    grow(len, capacity);
    len_ = len;
  }
  void truncate(Index len) { len_ = std::min(len_, len); }  // forgets the rows from len on

  // The elements of row i, to be written: [dim].
  T* row(Index b, Index head, Index i) {
    return data_.data() + ((b * heads_ + head) * capacity_ + i) * dim_;
  }
  // The elements of row i: [dim].
  const T* row(Index b, Index head, Index i) const {
    return data_.data() + ((b * heads_ + head) * capacity_ + i) * dim_;
  }
  const T* data() const { return data_.data(); }  // row 0 of the first head: strides()
  // Elements from one sequence, head or row to the next.
  std::array<Index, 3> strides() const {
    return {heads_ * capacity_ * dim_, capacity_ * dim_, dim_};
  }
  // [batch, heads, len, dim]
  TensorView<const T> view() const {
    return {data(), {batch_, heads_, len_, dim_}, {strides()[0], strides()[1], strides()[2], 1}};
  }

 private:
  void swap(RowStore& other) noexcept {
    std::swap(batch_, other.batch_), std::swap(heads_, other.heads_), std::swap(dim_, other.dim_);
    std::swap(len_, other.len_), std::swap(capacity_, other.capacity_);
    std::swap(data_, other.data_);
  }

  Index batch_ = 0, heads_ = 0, dim_ = 0;
  Index len_ = 0, capacity_ = 0;
  Buffer<T> data_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
