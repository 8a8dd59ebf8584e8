// Owning, uninitialised, cache-line aligned scratch memory that only grows.
//
// Large buffers ask Linux for huge pages: a walk over 4 KiB pages costs a scan of the keys a fifth
// of its time, and a gather of scattered keys more. Kernels reuse a Buffer from call to call;
// growing throws the old contents away. Nothing is zeroed: who reads an element has written it.
#pragma once

#include <quoka/views/index.hpp>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : data_(std::move(other.data_)), capacity_(std::exchange(other.capacity_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    data_ = std::move(other.data_);
    capacity_ = std::exchange(other.capacity_, 0);
    return *this;
  }

  // At least `count` elements; the pointer is good until the next call with a larger count. Throws
  // std::bad_alloc where there is no such memory.
  T* reserve(Index count) {
    if (count > capacity_) {
      if (count > std::numeric_limits<Index>::max() / static_cast<Index>(sizeof(T)) / 2)
        throw std::bad_alloc();
      data_.reset();
      capacity_ = 0;
      data_.reset(static_cast<T*>(allocate(static_cast<std::size_t>(count) * sizeof(T))));
      capacity_ = count;
    }
    return data_.get();
  }
  // As reserve, but a buffer that must grow doubles: for sizes that follow the cache's length.
  T* reserve_amortised(Index count) {
    return reserve(count > capacity_ ? std::max(count, 2 * capacity_) : count);
  }
  T* data() const { return data_.get(); }
  Index capacity() const { return capacity_; }
  Index bytes() const { return capacity_ * static_cast<Index>(sizeof(T)); }

 private:
  static constexpr std::size_t huge_page = std::size_t{1} << 21;

  // Whole huge pages for large sizes, cache lines for small ones.
  static void* allocate(std::size_t bytes) {
    const std::size_t alignment = bytes < 2 * huge_page ? 64 : huge_page;
    void* const p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (p == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == huge_page) ::madvise(p, bytes, MADV_HUGEPAGE);  // a wish: failure is no error
#endif
    return p;
  }

  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  Index capacity_ = 0;
};

namespace detail {

// Allocates without writing zeros. A type of ours, so that the vector's functions are ours as well
// (version.hpp).
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
}  // namespace QUOKA_ABI
}  // namespace quoka
