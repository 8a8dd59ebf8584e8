// KnownCells: what MaskedAttention asks of a cache's cells (CacheCells), by a hash of each cell and
// a sketch of its keys.
//
// An engine overwrites, shifts, removes, copies and loads cells without notice to a backend, and
// makes a new cache where an old one lay. So before each use all bytes of every cell are hashed,
// and cells whose hash has changed are sketched again. The hash is NH (Black and others, UMAC,
// 1999) with a random key: one change in 2^32 goes unnoticed, whatever was written. The key is then
// scored by its old codes, and attention reads its new numbers.
#pragma once

#include <quoka/engine/masked_attention.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

namespace quoka_ggml {

using quoka::Index, quoka::Position, quoka::Rows;

// NH of `count` bytes, of which key has a word for each 8: the sum of (low + its key) * (high + the
// key's) over the words, sums of 32 bits.
inline std::uint64_t keyed_hash(const std::byte* bytes, Index count, const std::uint64_t* key) {
  std::uint64_t hash = 0;
  const auto add = [&hash](std::uint64_t word, std::uint64_t own) {
    constexpr std::uint64_t half = 0xffffffff;
    hash += ((word + own) & half) * (((word >> 32) + (own >> 32)) & half);
  };
  const Index whole = count / 8;
  for (Index i = 0; i < whole; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    add(word, key[i]);
  }
  std::uint64_t rest = 0;
  std::memcpy(&rest, bytes + 8 * whole, static_cast<std::size_t>(count % 8));
  if (count % 8 != 0) add(rest, key[whole]);
  return hash;
}

// For the keys of one layer in one stream's cache. One call at a time.
class KnownCells final : public quoka::CacheCells {
 public:
  // Hashes all cells of k [1, kv_heads, cells, dim], any format, and sketches those that have
  // changed. sketch: from now on there is one. After a throw (std::bad_alloc, the executor's) the
  // next refresh finds what this one would have.
  void refresh(const Rows& k, bool sketch, quoka::ExecutorRef executor) override {
    const bool sketched = sketched_ || sketch;
    const bool anew = &k.format() != format_ || k.dim() != dim_ || sketched != sketched_;
    const auto cells = static_cast<std::size_t>(k.len());
    const std::size_t known = std::min(anew ? 0 : hashes_.size(), cells);
    now_.resize(cells), changed_.resize(cells), hashes_.resize(cells);
    if (!again_) std::fill(changed_.begin(), changed_.end(), std::uint8_t{0});
    hash_cells(k, executor);
    list_.clear();
    for (std::size_t i = 0; i < cells; ++i)
      if (i >= known || now_[i] != hashes_[i]) list_.push_back(static_cast<Position>(i));
    if (sketched) {
      // Until all cells are sketched, each counts as changed.
      for (const Position cell : list_) at(hashes_, cell) = ~at(now_, cell);
      sketch_.update(k, list_, executor);
    }
    format_ = &k.format(), dim_ = k.dim(), sketched_ = sketched;
    again_ = false;
    for (const Position cell : list_) at(hashes_, cell) = at(now_, cell), at(changed_, cell) = 1;
  }
  void find_again() override { again_ = true; }
  const quoka::KeySketch* sketch() const override { return sketched_ ? &sketch_ : nullptr; }
  std::span<const std::uint8_t> changed() const override { return changed_; }

 private:
  static constexpr Index together = 64;        // cells of a task
  static constexpr Index prefetch_cells = 16;  // from the cell at hand to the prefetched one

  void make_key(Index words) {
    std::random_device random;
    while (std::ssize(key_) < words) key_.push_back(std::uint64_t{random()} << 32 | random());
  }
  // Writes the sum of the heads' hashes of each cell to now_.
  void hash_cells(const Rows& k, quoka::ExecutorRef executor) {
    const Index bytes = k.format().row_bytes({k.dim()}), words = quoka::ceil_div(bytes, Index{8});
    make_key(words * k.heads());
    executor.run(quoka::ceil_div(k.len(), together), [&](Index task, int) {
      const Index first = task * together, count = std::min(together, k.len() - first);
      std::uint64_t hashes[together] = {};
      // Heads' rows may lie far apart, so heads are read one after the other.
      for (Index head = 0; head < k.heads(); ++head) {
        const std::uint64_t* const key = key_.data() + head * words;
        for (Index i = 0; i < count; ++i) {
          if (const Index ahead = first + i + prefetch_cells; ahead < k.len())
            for (Index at = 0; at < bytes; at += 64)
              __builtin_prefetch(k.row(0, head, ahead) + at, 0, 2);
          hashes[i] += keyed_hash(k.row(0, head, first + i), bytes, key);
        }
      }
      std::copy_n(hashes, count, now_.begin() + first);
    });
  }
  template <class T>
  static T& at(std::vector<T>& per_cell, Position cell) {
    return per_cell[static_cast<std::size_t>(cell)];
  }

  const quoka::Format* format_ = nullptr;
  Index dim_ = 0;
  bool sketched_ = false;
  bool again_ = false;
  std::vector<std::uint64_t> hashes_, now_,
      key_;                            // of cells, as known and as they are; random words
  std::vector<std::uint8_t> changed_;  // cells, since the refresh before
  std::vector<Position> list_;         // of these
  quoka::KeySketch sketch_;
};

}  // namespace quoka_ggml
