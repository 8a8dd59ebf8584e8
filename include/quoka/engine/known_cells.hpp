// Data that a layer keeps of its keys in one stream's cache: a hash of each cell, and a sketch
// (select/key_sketch.hpp). Selection scores the sketch in place of the keys themselves.
//
// An engine overwrites, shifts, removes, copies and loads cells without notice to a backend, and
// makes a new cache where an old one lay. So before each use all bytes of every cell are hashed,
// and cells whose hash has changed are sketched again. The hash is NH (Black and others, UMAC,
// 1999) with a random key: one change in 2^32 goes unnoticed, whatever was written. The key is then
// scored by its old codes, and attention reads its new numbers.
//
// The hashes also show which cell a chunk's first query wrote. The mask does not say: that cell is
// one of those that all of the chunk see. It must be attended to, selected or not. Where a chunk's
// cells lie side by side it is the last of them. Elsewhere (after removals and shifts) it is the
// nearest changed cell before the chunk's next cell. If none has changed, it is the nearest cell. A
// wrong answer costs one query's own key.
#pragma once

#include <quoka/rows/key_checksums.hpp>
#include <quoka/select/softmax_scores.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// For the keys of one layer in one stream's cache. One call at a time.
class KnownCells {
 public:
  // Hashes all cells of k [1, kv_heads, cells, dim], any format, and sketches those that have
  // changed. sketch: from now on there is one. After a throw (std::bad_alloc, the executor's) the
  // next refresh finds what this one would have.
  void refresh(const Rows& k, bool sketch, ExecutorRef executor) {
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
  // Makes the next refresh report the changes of the last one again: the call that it was for has
  // failed and will be repeated.
  void find_again() { again_ = true; }
  // The sketch of the cells as they were at the last refresh; null: none.
  const KeySketch* sketch() const { return sketched_ ? &sketch_ : nullptr; }

  // Moves the cell that a chunk's first query wrote to the end of cells[0, seen), all that it sees.
  void find_own(std::vector<Position>& cells, Index seen) const {
    if (seen < 2) return;
    const auto begin = cells.begin(), end = begin + seen;
    const auto changed = [&](Position cell) {
      return static_cast<std::size_t>(cell) < changed_.size() &&
             changed_[static_cast<std::size_t>(cell)] != 0;
    };
    const auto nearest = [&](bool among_changed) {  // before the next cell; else the last of all
      auto found = end, last = end;
      for (auto cell = begin; cell != end; ++cell) {
        if (among_changed && !changed(*cell)) continue;
        last = cell;
        if (end != cells.end() && *cell < *end) found = cell;
      }
      return found != end ? found : last;
    };
    auto own = nearest(true);
    if (own == end) own = nearest(false);
    std::rotate(own, own + 1, end);
  }

 private:
  static constexpr Index together = 64;        // cells of a task
  static constexpr Index prefetch_cells = 16;  // from the cell at hand to the prefetched one

  void make_key(Index words) {
    std::random_device random;
    while (std::ssize(key_) < words) key_.push_back(std::uint64_t{random()} << 32 | random());
  }
  // Writes the sum of the heads' hashes of each cell to now_.
  void hash_cells(const Rows& k, ExecutorRef executor) {
    const Index bytes = k.format().row_bytes({k.dim()}), words = ceil_div(bytes, Index{8});
    make_key(words * k.heads());
    executor.run(ceil_div(k.len(), together), [&](Index task, int) {
      const Index first = task * together, count = std::min(together, k.len() - first);
      std::uint64_t hashes[together] = {};
      // Heads' rows may lie far apart, so heads are read one after the other.
      for (Index head = 0; head < k.heads(); ++head) {
        const std::uint64_t* const key = key_.data() + head * words;
        for (Index i = 0; i < count; ++i) {
          if (const Index ahead = first + i + prefetch_cells; ahead < k.len())
            for (Index at = 0; at < bytes; at += 64)
              __builtin_prefetch(k.row(0, head, ahead) + at, 0, 2);
          hashes[i] += detail::keyed_hash(k.row(0, head, first + i), bytes,
                                          [key](Index word) { return key[word]; });
        }
      }
      std::copy_n(hashes, count, now_.begin() + first);
    });
  }
  template <class T>
  static T& at(std::vector<T>& per_cell, Position cell) {
    return per_cell[static_cast<std::size_t>(cell)];
  }

  const Format* format_ = nullptr;
  Index dim_ = 0;
  bool sketched_ = false;
  bool again_ = false;
  std::vector<std::uint64_t> hashes_, now_,
      key_;                            // of cells, as known and as they are; random words
  std::vector<std::uint8_t> changed_;  // cells, since the refresh before
  std::vector<Position> list_;         // of these
  KeySketch sketch_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
