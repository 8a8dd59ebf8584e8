// The walk over one head's keys: block after block, each packed once and then multiplied by every panel of queries.
//
//   where keys lie       a KeyBlocks: in order, in pages, of a list, past and chunk, several side by side
//   what multiplies      the arithmetic that it packs for (panel_arithmetic.hpp)
//   what becomes of it   fold(panel, keys, block): softmax and values (attention/attend_panels.hpp), softmax mass
//                        (select/float_mass.hpp), scores of blocks (methods/block_scores.hpp)
//
// Rows of the next block are prefetched meanwhile, a share of them beside each panel. Two loops over keys do not go
// through here. Memory bounds them, and they read each row once, unpacked or a tile at a time: the best of a few
// queries (select/score.hpp) and one token's attention (attention/attend_decode.hpp).
#pragma once

#include <quoka/kernels/panel_arithmetic.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class KeyBlocks {
 public:
  // These keys, packed: good until the next call.
  virtual const PackedBlock& pack(const KeyRange& keys) = 0;
  // The memory that packing these keys, the next ones, will read: a share of it for each of `panels`.
  virtual BlockPrefetch prefetch(const KeyRange& keys, Index panels) = 0;

  // fold(p, keys of the block, block) for panels p < panels and each block of `range`, which may be part of the keys.
  template <class Fold>
  void walk(const KeyRange& range, Index panels, BlockPrefetch& next, Fold&& fold) {
    walk(
        range, panels, next, [](const KeyRange&) { return true; }, fold);
  }
  // The same over the blocks for which `wanted(keys of the block)` is true; others are not packed.
  template <class Wanted, class Fold>
  void walk(const KeyRange& range, Index panels, BlockPrefetch& next, Wanted&& wanted,
            Fold&& fold) {
    for (KeyRange keys{range.begin, range.begin}; keys.begin < range.end; keys.begin = keys.end) {
      keys.end = std::min(keys.begin + step_, range.end);
      if (!wanted(keys)) continue;
      const PackedBlock& block = pack(keys);
      next = prefetch({keys.end, std::min(keys.end + step_, count_)}, panels);
      for (Index p = 0; p < panels; ++p) {
        next.begin_panel();
        fold(p, keys, block);
        next.end_panel();
      }
    }
  }

 protected:
  // All keys are [0, count); a block has `step` of them.
  KeyBlocks(Index count, Index step) : count_(count), step_(step) {}
  ~KeyBlocks() = default;

 private:
  Index count_, step_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
