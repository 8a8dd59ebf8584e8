#include "pieces.hpp"

#include <algorithm>
#include <cstring>

namespace quoka_ggml {
namespace {

constexpr std::uint16_t seen = 0, hidden = 0xfc00;  // as halves

// How a row differs from the one before.
struct Step {
  Index added = 0, removed = 0;
  Position last_added = 0;
  bool other = false;  // a number that is neither

  bool next_token() const { return added == 1 && removed == 0; }
  bool nearly_same() const { return added <= 1 && removed <= 1; }
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
        ++step.removed;
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
  std::vector<Piece> pieces;
  const auto begin_piece = [&](Index at) {
    pieces.push_back({at, 1, true, {}});
    return list(row(at), n_cells, pieces.back().cells);
  };
  for (Index i = 0; i < n_q; ++i) {
    const Step& step = steps[static_cast<std::size_t>(i)];
    if (step.other || (i == 0 && !begin_piece(0))) return by_mask;
    if (i == 0) continue;
    Piece& last = pieces.back();
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
      if (!begin_piece(i)) return by_mask;
      continue;
    }
    ++pieces.back().count;
  }
  return pieces;
}

}  // namespace quoka_ggml
