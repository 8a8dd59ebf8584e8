#include "pieces.hpp"

#include <algorithm>
#include <cstring>

namespace quoka_ggml {
namespace {

constexpr std::uint16_t seen = 0, hidden = 0xfc00;  // as halves

// How a row differs from the one before.
struct Step {
  Index added = 0, removed = 0;
  Position last_added = 0, last_removed = 0;
  bool other = false;  // a number that is neither
};

Step compare(const std::uint16_t* before, const std::uint16_t* row, Index n) {
  constexpr Index block = 256;
  Step step;
  for (Index begin = 0; begin < n; begin += block) {
    const Index end = std::min(begin + block, n);
    if (std::memcmp(before + begin, row + begin, static_cast<std::size_t>(end - begin) * 2) == 0)
      continue;
    for (Index i = begin; i < end; ++i) {
      if (before[i] == row[i]) continue;
      if (row[i] == seen)
        ++step.added, step.last_added = static_cast<Position>(i);
      else if (row[i] == hidden)
        ++step.removed, step.last_removed = static_cast<Position>(i);
      else
        step.other = true;
    }
  }
  return step;
}

// The cells that a row sees; false where it holds other numbers.
bool list(const std::uint16_t* row, Index n, std::vector<Position>& cells) {
  for (Index i = 0; i < n; ++i) {
    if (row[i] == seen)
      cells.push_back(static_cast<Position>(i));
    else if (row[i] != hidden)
      return false;
  }
  return true;
}

}  // namespace

std::vector<Piece> read_pieces(const std::function<const std::uint16_t*(Index)>& row, Index n_q,
                               Index n_cells, quoka::ExecutorRef executor) {
  const std::vector<Piece> by_mask{{0, n_q, false, {}}};
  std::vector<Step> steps(static_cast<std::size_t>(n_q));
  constexpr Index rows = 16;
  executor.run(quoka::ceil_div(n_q, rows), [&](Index task, int) {
    for (Index i = std::max<Index>(task * rows, 1); i < std::min(task * rows + rows, n_q); ++i)
      steps[static_cast<std::size_t>(i)] = compare(row(i - 1), row(i), n_cells);
  });
  const auto moves = [&](Index i) {  // one cell more and one less
    return i < n_q && steps[static_cast<std::size_t>(i)].added == 1 &&
           steps[static_cast<std::size_t>(i)].removed == 1;
  };
  const auto by_window = [&](Index i) {  // what is lost is not the token before
    return moves(i) && steps[static_cast<std::size_t>(i)].last_removed !=
                           steps[static_cast<std::size_t>(i - 1)].last_added;
  };
  std::vector<Piece> pieces;
  for (Index i = 0; i < n_q; ++i) {
    const Step& step = steps[static_cast<std::size_t>(i)];
    if (step.other) return by_mask;
    // The first query's own cell is not known: whether the second moves by a window, the third says.
    const bool second = i > 0 && pieces.back().count == 1;
    // What follows a row that sees nothing is no chunk of it: that row has no cell.
    const bool after_nothing = i > 0 && pieces.back().causal && pieces.back().cells.empty();
    const bool same = i > 0 && step.added <= 1 && step.removed <= 1 &&
                      !(after_nothing && step.added == 1) &&
                      (!moves(i) || (second ? by_window(i + 1) : by_window(i)));
    if (!same) {
      pieces.push_back({i, 1, true, {}});
      if (!list(row(i), n_cells, pieces.back().cells)) return by_mask;
      continue;
    }
    Piece& piece = pieces.back();
    ++piece.count;
    piece.causal = piece.causal && step.added == 1 && step.removed == 0;
    if (piece.causal) piece.cells.push_back(step.last_added);
  }
  return pieces;
}

}  // namespace quoka_ggml
