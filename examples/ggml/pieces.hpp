// Which queries of a node belong together, read from the mask: a piece is the chunk of one sequence,
// or rows that share a mask.
//
// An engine's mask holds 0 (seen) and minus infinity (hidden). Row by row:
//
//   one cell more than the row before                 the next token of a sequence's chunk
//   one more and one less, or the same cells          no chunk, but nearly the same cells: a window,
//                                                     tokens seen both ways, copies of a sequence
//   anything else                                     another sequence
//
// A chunk is causal: it knows its cells, in the order of the tokens, and needs no mask. Rows of the
// second kind are attended to by their part of the mask, and so is everything where the mask holds
// other numbers. Both ways give every row exactly what the mask says; what is guessed wrong here
// costs time alone.
//
// 2 bytes per query and cell are read once, and compared with the row before while that is in cache.
#pragma once

#include <quoka/runtime/executor.hpp>
#include <quoka/base/index.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace quoka_ggml {

using quoka::Index, quoka::Position;

struct Piece {
  Index begin = 0, count = 0;  // queries
  bool causal = false;
  std::vector<Position> cells =
      {};  // if causal: what the first query sees, then one for each other

  Index first_sees() const { return static_cast<Index>(cells.size()) - count + 1; }
};

// row(query) is the mask's row of n_cells halves.
std::vector<Piece> read_pieces(const std::function<const std::uint16_t*(Index)>& row, Index n_q,
                               Index n_cells, quoka::ExecutorRef executor);

// Are they side by side, in order?
inline bool in_order(const std::vector<Position>& cells) {
  for (std::size_t i = 1; i < cells.size(); ++i)
    if (cells[i] != cells[i - 1] + 1) return false;
  return true;
}

}  // namespace quoka_ggml
