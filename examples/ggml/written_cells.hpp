// Which cell the first query of a chunk wrote. The mask does not say: that cell is one of those that
// all of the chunk see. It must be attended to, selected or not.
//
// Where a chunk's cells lie side by side it is the last of them. Elsewhere (after removals and shifts)
// keys are compared with what they were when the same layer was computed last: the cell that changed
// is the one. A fingerprint is taken of 64 bytes of each cell. Where several changed it is the nearest
// before the chunk's next cell; where none is known to have, the nearest of all.
//
// This is all that the backend remembers of a cache. A wrong answer, after a context whose memory
// another one got, costs one query's own key.
#pragma once

#include <quoka/views/rows.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

namespace quoka_ggml {

using quoka::Index, quoka::Position;

class WrittenCells {
 public:
  // Moves that cell to the end of cells[0, seen). k [1, kv_heads, cells, dim] is the cache.
  void find(const quoka::Rows& k, std::vector<Position>& cells, Index seen) const {
    if (seen < 2) return;
    const auto begin = cells.begin(), end = begin + seen;
    const auto known = caches_.find(k.data());
    const auto changed = [&](Position cell) {
      const auto at = static_cast<std::size_t>(cell);
      return at >= known->second.size() || known->second[at] != fingerprint(k, cell);
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
    auto own = known != caches_.end() ? nearest(true) : end;
    if (own == end) own = nearest(false);
    std::rotate(own, own + 1, end);
  }
  // Remembers the cells as they are now.
  void remember(const quoka::Rows& k) {
    constexpr std::size_t most = 4096;  // caches; old ones are forgotten all at once
    if (caches_.size() >= most) caches_.clear();
    auto& of_cells = caches_[k.data()];
    of_cells.resize(std::max(of_cells.size(), static_cast<std::size_t>(k.len())));
    for (Index i = 0; i < k.len(); ++i) of_cells[static_cast<std::size_t>(i)] = fingerprint(k, i);
  }

 private:
  static std::uint64_t fingerprint(const quoka::Rows& k, Index cell) {
    const std::byte* const row = k.row(0, 0, cell);
    const Index bytes = std::min<Index>(k.format().row_bytes({k.dim()}), 64);
    std::uint64_t hash = 0;
    for (Index at = 0; at < bytes; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, row + at, static_cast<std::size_t>(std::min<Index>(8, bytes - at)));
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
    return hash;
  }

  std::map<const void*, std::vector<std::uint64_t>> caches_;  // by where a layer's keys begin
};

}  // namespace quoka_ggml
