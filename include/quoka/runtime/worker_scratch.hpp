// Scratch memory of a parallel call: one part per worker of the executor.
//
// Parts are sized before the tasks start and for every worker, whichever of them will run a task,
// so no task allocates (but where at_least() says so) and a repeated call allocates nothing. A Part has reserve(sizes...) and
// bytes(). Not to be shared by concurrent calls.
#pragma once

#include <quoka/base/index.hpp>

#include <array>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// As many elements as were ever asked for, which stay when more are. Less code than a std::vector, of
// which each type is compiled anew; cold: memory comes seldom, and small code compiles sooner.
template <class T>
class GrowingArray {
 public:
  GrowingArray() = default;
  GrowingArray(GrowingArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  GrowingArray& operator=(GrowingArray&& other) noexcept {
    GrowingArray taken(std::move(other));
    swap(taken);
    return *this;
  }
  [[gnu::cold, gnu::noinline]] ~GrowingArray() { delete[] data_; }

  void at_least(Index count) {
    if (count > count_) grow(count);
  }
  Index count() const { return count_; }
  T& operator[](Index i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + count_; }
  Index bytes() const {
    Index sum = 0;
    for (const T& element : *this) sum += element.bytes();
    return sum;
  }

 private:
  [[gnu::cold, gnu::noinline]] void grow(Index count) {
    GrowingArray more;
    more.data_ = new T[static_cast<std::size_t>(count)];
    more.count_ = count;
    for (Index i = 0; i < count_; ++i) more[i] = std::move(data_[i]);
    swap(more);
  }
  void swap(GrowingArray& other) { std::swap(data_, other.data_), std::swap(count_, other.count_); }

  T* data_ = nullptr;
  Index count_ = 0;
};

}  // namespace detail

template <class Part>
class WorkerScratch {
 public:
  WorkerScratch() = default;
  // Takes the memory over; the other one is then empty.
  WorkerScratch(WorkerScratch&& other) noexcept
      : parts_(std::move(other.parts_)), reserved_(std::exchange(other.reserved_, {})) {}
  // Likewise.
  WorkerScratch& operator=(WorkerScratch&& other) noexcept {
    parts_ = std::move(other.parts_), reserved_ = std::exchange(other.reserved_, {});
    return *this;
  }

  // At least `workers` parts, each of them with part.reserve(sizes...).
  template <class... Sizes>
  void reserve(int workers, const Sizes&... sizes) {
    if constexpr (sizeof...(sizes) > 0 && (is_number<Sizes> && ...)) {
      // With a hundred workers looking at every buffer of each takes its time.
      const std::array<Index, most_sizes> asked{Index{workers}, number(sizes)...};
      constexpr std::array<bool, most_sizes> kinds{false, std::is_pointer_v<Sizes>...};
      bool known = parts_.count() >= workers;
      for (std::size_t i = 0; i < asked.size(); ++i)
        known = known && (kinds[i] ? asked[i] == reserved_[i] : asked[i] <= reserved_[i]);
      if (known) return;
      reserved_ = {};  // if memory runs out halfway
      reserve_all(workers, sizes...);
      reserved_ = asked;
    } else {
      reserve_all(workers, sizes...);
    }
  }
  // As many without memory: parts for which a task reserves it, where that is seldom needed.
  void at_least(int workers) { parts_.at_least(workers); }
  Part& operator[](int worker) { return parts_[worker]; }  // that of one worker
  Index bytes() const { return parts_.bytes(); }           // of all parts

 private:
  static constexpr std::size_t most_sizes = 6;

  // A size, or the kind of what has it: a pointer that need not be read.
  template <class T>
  static constexpr bool is_number = std::is_same_v<T, Index> || std::is_pointer_v<T>;
  static Index number(Index size) { return size; }
  static Index number(const void* kind) { return reinterpret_cast<Index>(kind); }

  template <class... Sizes>
  [[gnu::cold, gnu::noinline]] void reserve_all(int workers, const Sizes&... sizes) {
    parts_.at_least(workers);
    for (Part& part : parts_) part.reserve(sizes...);
  }

  detail::GrowingArray<Part> parts_;
  std::array<Index, most_sizes> reserved_{};  // by the last call that was not for less
};

}  // namespace QUOKA_ABI
}  // namespace quoka
