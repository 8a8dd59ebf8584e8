// Some positions of each KV head, the same number for all: what is left to score after a look at
// blocks (block_levels.hpp).
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/formats/format.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/views/rows.hpp>

#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

struct Candidates {
  // [batch * kv_heads, count], each head's ascending. Any 16 of them that begin at a multiple of 16 are
  // the keys of one block of codes, in order; the last ones may be fewer.
  Buffer<Position> cells;
  Index count = 0;

  const Position* of(Index task) const { return cells.data() + task * count; }
  KeySketch::Places places(Index task) const {
    KeySketch::Places places{{}, 0, true};
    places.map.cells = of(task);
    return places;
  }
  // The rows of head `task` of k, which is not of a list.
  HeadRows rows(const Rows& k, Index task) const {
    HeadRows of_head = k.head(task / k.heads(), task % k.heads());
    of_head.at.map.cells = of(task);
    of_head.at.map.first_cell = std::exchange(of_head.at.begin, 0);
    return of_head;
  }
  Index bytes() const { return cells.bytes(); }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
