// Scratch memory of a call: one block per worker, which structs of pointers divide among
// themselves.
//
// A struct takes its pieces in its constructor. Constructed from an empty Arena, it only adds up
// sizes. So one constructor says how much memory there has to be and where everything lies:
//
//   struct Scratch {
//     Scratch(Arena& arena, Index keys) : scores(arena.take<float>(keys)),
//     best(arena.take<Index>(keys)) {}
//     float* scores;  // [keys]
//     Index* best;    // [keys]
//   };
//
//   arenas.reserve(executor.workers(), [&](Arena& arena) { Scratch(arena, keys); });
//   executor.run(tasks, [&](Index task, int worker) {
//     Arena arena = arenas[worker];
//     const Scratch scratch(arena, keys);
//     ...
//   });
//
// Blocks grow before the tasks of a call start, so no task allocates, and a repeated call allocates
// nothing. They hold nothing from call to call, so a call that runs out of memory leaves nothing
// half changed. Nothing is zeroed. AddressSanitizer reports an access beyond a piece, as for memory
// of its own. Memory that must live between calls is a Buffer (buffer.hpp) or a RowStore
// (rows/row_store.hpp).
#pragma once

#include <quoka/base/buffer.hpp>

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define QUOKA_POISONS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QUOKA_POISONS 1
#endif
#endif
#if defined(QUOKA_POISONS)
#include <sanitizer/asan_interface.h>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Pieces of one block, in order. All pieces of an empty one are null.
class Arena {
 public:
  Arena() = default;
  // bytes of memory, all of them free.
  Arena(std::byte* memory, Index bytes) : memory_(memory), capacity_(bytes) {
#if defined(QUOKA_POISONS)
    ASAN_POISON_MEMORY_REGION(memory, static_cast<std::size_t>(bytes));
#endif
  }

  // Room for `count` elements, uninitialised, on a cache line. Throws std::bad_alloc where sizes
  // overflow.
  template <class T>
  T* take(Index count) {
    static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= line);
    return reinterpret_cast<T*>(take_bytes(count, Index{sizeof(T)}));
  }
  // Without memory: what takes its pieces only adds up sizes.
  bool is_empty() const { return memory_ == nullptr; }
  // Bytes of the pieces taken so far.
  Index used() const { return used_; }

 private:
  static constexpr Index line = 64;
  static constexpr Index most_bytes = std::numeric_limits<Index>::max() / 4;
#if defined(QUOKA_POISONS)
  static constexpr Index gap = line;  // so that running over the end of a piece is seen
#else
  static constexpr Index gap = 0;
#endif

  // One function for all element types, never inlined: scratch structs take some twenty pieces
  // each.
  [[gnu::noinline]] std::byte* take_bytes(Index count, Index element_bytes) {
    if (count > (most_bytes - used_) / element_bytes) throw std::bad_alloc();
    const Index begin = used_, bytes = count * element_bytes;
    used_ += round_up(bytes, line) + gap;
    if (memory_ == nullptr) return nullptr;
    assert(used_ <= capacity_);
#if defined(QUOKA_POISONS)
    ASAN_UNPOISON_MEMORY_REGION(memory_ + begin, static_cast<std::size_t>(bytes));
#endif
    return memory_ + begin;
  }

  std::byte* memory_ = nullptr;
  [[maybe_unused]] Index capacity_ = 0;  // only asserted on
  Index used_ = 0;
};

// The blocks of all workers. One call at a time.
class Arenas {
 public:
  Arenas() = default;
  Arenas(Arenas&&) = default;
  Arenas& operator=(Arenas&&) = default;
  ~Arenas() {
#if defined(QUOKA_POISONS)
    for (const Buffer<std::byte>& block : blocks_)
      ASAN_UNPOISON_MEMORY_REGION(block.data(), static_cast<std::size_t>(block.bytes()));
#endif
  }

  // Blocks for `workers` workers, each with room for what layout(Arena&) takes. One that is too
  // small grows by half at least, since sizes follow the length of a cache. Throws std::bad_alloc;
  // a later call may reserve again.
  template <class Layout>
  void reserve(int workers, Layout&& layout) {
    Arena needed;
    layout(needed);
    grow(workers, needed.used());
  }
  // The block of one worker, all of it free.
  Arena operator[](int worker) const {
    const Buffer<std::byte>& block = blocks_[static_cast<std::size_t>(worker)];
    return {block.data(), block.capacity()};
  }
  // The bytes of all blocks together.
  Index bytes() const {
    Index sum = 0;
    for (const Buffer<std::byte>& block : blocks_) sum += block.bytes();
    return sum;
  }

 private:
  void grow(int workers, Index bytes) {
    if (static_cast<std::size_t>(workers) > blocks_.size())
      blocks_.resize(static_cast<std::size_t>(workers));
    for (int worker = 0; worker < workers; ++worker) {
      Buffer<std::byte>& block = blocks_[static_cast<std::size_t>(worker)];
      if (bytes <= block.capacity()) continue;
#if defined(QUOKA_POISONS)
      ASAN_UNPOISON_MEMORY_REGION(block.data(), static_cast<std::size_t>(block.bytes()));
#endif
      block.reserve(std::max(bytes, block.capacity() + block.capacity() / 2));
    }
  }

  std::vector<Buffer<std::byte>> blocks_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
