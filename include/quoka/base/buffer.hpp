// Owning, uninitialised, cache-line aligned scratch memory that only grows.
//
// Large buffers ask Linux for huge pages. With pages of 4 KiB a scan of the keys loses a fifth of
// its time to page walks, and a gather of scattered keys more. Kernels reuse a Buffer from call to
// call; growing throws the old contents away. Nothing is zeroed: write an element before you read
// it.
#pragma once

#include <quoka/base/index.hpp>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstddef>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// The memory of a Buffer, whatever its elements are: compiled once.
class BufferMemory {
 public:
  BufferMemory() = default;
  BufferMemory(BufferMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        capacity_(std::exchange(other.capacity_, 0)),
        alignment_(other.alignment_) {}
  [[gnu::noinline]] BufferMemory& operator=(BufferMemory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(capacity_, other.capacity_);
    std::swap(alignment_, other.alignment_);
    other.release();
    return *this;
  }
  ~BufferMemory() { release(); }

 protected:
  [[gnu::noinline]] void grow(Index count, Index element_bytes) {
    if (count > std::numeric_limits<Index>::max() / element_bytes / 2) throw std::bad_alloc();
    release();
    allocate(static_cast<std::size_t>(count * element_bytes));
    capacity_ = count;
  }

  void* data_ = nullptr;
  Index capacity_ = 0;

 private:
  static constexpr std::size_t huge_page = std::size_t{1} << 21;

  void release() {
    ::operator delete(data_, std::align_val_t{alignment_});
    data_ = nullptr, capacity_ = 0;
  }
  // Whole huge pages for large sizes, cache lines for small ones.
  void allocate(std::size_t bytes) {
    alignment_ = bytes < 2 * huge_page ? 64 : huge_page;
    data_ = ::operator new((bytes + alignment_ - 1) / alignment_ * alignment_,
                           std::align_val_t{alignment_});
#if defined(__linux__)
    if (alignment_ == huge_page) ::madvise(data_, bytes, MADV_HUGEPAGE);  // a wish, no more
#endif
  }

  std::size_t alignment_ = 64;
};

}  // namespace detail

// Bytes of several memories together.
template <class... Memory>
Index bytes_of(const Memory&... memories) {
  return (Index{0} + ... + memories.bytes());
}

template <class T>
class Buffer : private detail::BufferMemory {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  static constexpr Index element_bytes = static_cast<Index>(sizeof(T));

 public:
  // At least `count` elements; the pointer is valid until the next call with a larger count. Throws
  // std::bad_alloc if the system has not that much memory.
  T* reserve(Index count) {
    if (count > capacity_) grow(count, element_bytes);
    return data();
  }
  // As reserve(), except that a buffer that must grow doubles: for sizes that follow the cache's
  // length.
  T* reserve_amortised(Index count) {
    return reserve(count > capacity_ ? std::max(count, 2 * capacity_) : count);
  }
  // The first element; null before the first reserve().
  T* data() const { return static_cast<T*>(data_); }
  Index capacity() const { return capacity_; }               // elements
  Index bytes() const { return capacity_ * element_bytes; }  // of memory
};

}  // namespace QUOKA_ABI
}  // namespace quoka
