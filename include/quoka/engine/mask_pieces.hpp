// Which queries of an engine's batch belong together, read from its mask: a piece is the chunk of one
// sequence, or rows that share a mask.
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

#include <quoka/base/index.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/views/rows.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Queries [begin, begin + count) of a mask.
struct MaskPiece {
  Index begin = 0;      // the first query
  Index count = 0;      // queries
  bool causal = false;  // one sequence's chunk
  std::vector<Position> cells =
      {};  // if causal: what the first query sees, then one for each other

  // How many cells the first query of a causal piece sees.
  Index first_sees() const { return static_cast<Index>(cells.size()) - count + 1; }
  // Are a causal piece's cells side by side, in order?
  bool in_order() const {
    for (std::size_t i = 1; i < cells.size(); ++i)
      if (cells[i] != cells[i - 1] + 1) return false;
    return true;
  }
};

namespace detail {

constexpr std::uint16_t mask_seen = 0, mask_hidden = 0xfc00;  // as halves

// How a row of a mask differs from the one before.
struct MaskStep {
  Index added = 0, removed = 0;
  Position last_added = 0;
  bool other = false;  // a number that is neither

  MaskStep() = default;
  MaskStep(const std::uint16_t* before, const std::uint16_t* row, Index n) {
    constexpr Index block = 256;
    for (Index begin = 0; begin < n; begin += block) {
      const Index end = std::min(begin + block, n);
      const auto bytes = static_cast<std::size_t>(end - begin) * sizeof *row;
      if (std::memcmp(before + begin, row + begin, bytes) == 0) continue;
      for (Index i = begin; i < end; ++i) {
        if (before[i] == row[i]) continue;
        if (row[i] == mask_seen)
          ++added, last_added = static_cast<Position>(i);
        else if (row[i] == mask_hidden)
          ++removed;
        else
          other = true;
      }
    }
  }
  bool next_token() const { return added == 1 && removed == 0; }
  bool nearly_same() const { return added <= 1 && removed <= 1; }
};

// The cells that a row sees; false where it holds other numbers.
inline bool list_seen(const std::uint16_t* row, Index n, std::vector<Position>& cells) {
  for (Index i = 0; i < n; ++i) {
    if (row[i] == mask_seen)
      cells.push_back(static_cast<Position>(i));
    else if (row[i] != mask_hidden)
      return false;
  }
  return true;
}

}  // namespace detail

// The pieces of mask [1, 1, queries, cells], which hold all of its queries in order. Throws
// std::invalid_argument for another format than half, and for more than one sequence or head.
inline std::vector<MaskPiece> read_mask_pieces(const Rows& mask, ExecutorRef executor) {
  const Index n_q = mask.len(), n_cells = mask.dim();
  std::vector<MaskPiece> pieces;
  if (n_q == 0) return pieces;
  detail::require_equal("the sequences of a mask that is read in pieces", mask.batch(), "one", 1);
  detail::require_equal("the heads of a mask that is read in pieces", mask.heads(), "one", 1);
  if (!mask.empty() && &mask.format() != &format_of<Eigen::half>())
    detail::fail_because(std::string("a mask that is read in pieces is of format ") +
                         mask.format().name + ", but must be " + format_of<Eigen::half>().name);
  const std::vector<MaskPiece> by_mask{{0, n_q, false, {}}};
  const auto row = [&](Index query) {
    return reinterpret_cast<const std::uint16_t*>(mask.row(0, 0, query));
  };
  std::vector<detail::MaskStep> steps(static_cast<std::size_t>(n_q));
  constexpr Index rows = 16;
  executor.run(ceil_div(n_q, rows), [&](Index task, int) {
    for (Index i = std::max<Index>(task * rows, 1); i < std::min(task * rows + rows, n_q); ++i)
      steps[static_cast<std::size_t>(i)] = {row(i - 1), row(i), n_cells};
  });
  const auto begin_piece = [&](Index at) {
    pieces.push_back({at, 1, true, {}});
    return detail::list_seen(row(at), n_cells, pieces.back().cells);
  };
  for (Index i = 0; i < n_q; ++i) {
    const detail::MaskStep& step = steps[static_cast<std::size_t>(i)];
    if (step.other || (i == 0 && !begin_piece(0))) return by_mask;
    if (i == 0) continue;
    MaskPiece& last = pieces.back();
    // A row that sees nothing is no token of a chunk: it has no cell.
    bool same = step.next_token() && last.causal && !last.cells.empty();
    if (step.next_token() && !last.causal && steps[static_cast<std::size_t>(i - 1)].added == 1) {
      --last.count;  // the row before was this chunk's first
      same = begin_piece(i - 1);
    }
    if (same) {
      pieces.back().cells.push_back(step.last_added);
    } else if (!step.next_token() && step.nearly_same() && (last.count == 1 || !last.causal)) {
      last.causal = false, last.cells.clear();
    } else {
      begin_piece(i);  // holds no other number: it would have been one of a step
      continue;
    }
    ++pieces.back().count;
  }
  return pieces;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
