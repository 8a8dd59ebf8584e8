// Reads from an engine's mask which queries of a batch belong together. A segment is the chunk of
// one sequence, or rows that share a mask.
//
// An engine adds its mask to the logits. Minus infinity, and all at or below Mask::hides_from,
// hides a cell. A row is compared with the one before by the cells that they see:
//
//   one cell more than the row before       the next token of a sequence's chunk
//   one more and one less                   a sliding window, or copies of a sequence
//   the same cells                          tokens that see each other
//   anything else                           another sequence
//
// Single rows with many cells in common are joined to one sparse segment. Models that choose their
// keys write such rows (join_sparse_segments).
//
// A causal segment lists its cells, in the order of the tokens, and needs no mask. Other numbers of
// a mask are biases, which are noted row by row. A biased row stays a token of its chunk, but
// attends by itself, with its part of the mask. Segments of other kinds are attended to with their
// part of the mask. Every kind gives each row exactly the attention that the mask asks for; a wrong
// guess here only costs time.
//
// 2 bytes per query and cell are read once, and compared with the row before while that is in
// cache. Rows that are attended to with their part of the mask read it again. In a sparse segment
// every thread does so, once for all KV heads (attention/key_sets.hpp). For 128 queries with 2,048
// of 8,192 cells each and four query heads a KV head, that is 0.7 % of one thread's time with four
// KV heads, 2.4 % with one (Zen 4). More threads share the other work, but not this.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// How the cells that the queries of a segment see differ from query to query.
enum class MaskKind {
  causal,         // one sequence's tokens, each of which sees one cell more than the one before
  sliding,        // tokens that gain a cell and lose an old one: a sliding window
  bidirectional,  // nearly the same cells: tokens that see each other, copies of a sequence
  sparse,         // cells of each query's own, many seen by others: a model that chooses its keys
};

// Some queries of a segment, counted from its first.
struct MaskStretch {
  Index begin = 0;  // the first
  Index count = 0;  // how many

  bool operator==(const MaskStretch&) const = default;
};

// Queries [begin, begin + count) of a mask.
struct MaskSegment {
  Index begin = 0;                   // the first query
  Index count = 0;                   // queries
  MaskKind kind = MaskKind::causal;  // what they see
  // If causal: the cells that the first query sees, then one for each other query.
  std::vector<Position> cells = {};
  // If causal, ascending: each begins and ends with a query whose row holds a bias, with at most
  // `gap` others between two such.
  std::vector<MaskStretch> biased = {};

  // Queries without a bias that may lie between two of a stretch.
  static constexpr Index gap = 7;

  // Does each see one cell more than the one before?
  bool causal() const { return kind == MaskKind::causal; }
  // How many cells the first query of a chunk sees.
  Index first_sees() const { return static_cast<Index>(cells.size()) - count + 1; }
  // Are a chunk's cells side by side, in order?
  bool in_order() const {
    for (std::size_t i = 1; i < cells.size(); ++i)
      if (cells[i] != cells[i - 1] + 1) return false;
    return true;
  }
};

namespace detail {

// x: the bits of a half. Other numbers are 0 or biases; NaN is a bias and makes its row NaN.
constexpr bool mask_hides(std::uint16_t x) {
  constexpr std::uint16_t hides_from = 0xfb53, minus_infinity = 0xfc00;
  return x >= hides_from && x <= minus_infinity;
}
static_assert(Mask::hides_from == -60000.0f);  // 0xfb53 as half
constexpr bool mask_biases(std::uint16_t x) { return !mask_hides(x) && (x & 0x7fff) != 0; }

// How a row of a mask differs from the one before.
struct MaskStep {
  Index added = 0, removed = 0;  // cells
  Position last_added = 0, last_removed = 0;
  Index biases = 0;  // more than the row before has; of a step

  MaskStep() = default;
  MaskStep(const std::uint16_t* before, const std::uint16_t* row, Index n) {
    constexpr Index block = 256;
    // Two cells gained, or lost, are not a step. The next segment counts the rest, and its biases,
    // by itself.
    for (Index begin = 0; begin < n && !(added > 1 || removed > 1); begin += block) {
      const Index count = std::min(block, n - begin);
      if (std::memcmp(before + begin, row + begin, static_cast<std::size_t>(count) * 2) != 0)
        add(before + begin, row + begin, begin, count);
    }
  }
  bool next_token() const { return added == 1 && removed == 0; }
  bool nearly_same() const { return added <= 1 && removed <= 1; }
  // Gained a cell and lost an old one: not that which the row before had gained, as copies of a
  // sequence do.
  bool slides_after(const MaskStep& before) const {
    return added == 1 && removed == 1 && before.added == 1 && last_removed != before.last_added;
  }

 private:
  void add(const std::uint16_t* before, const std::uint16_t* row, Index first, Index count) {
    std::uint16_t gained = 0, lost = 0, biased = 0, was_biased = 0;  // of a block at most
    for (Index i = 0; i < count; ++i) {
      const bool hid = mask_hides(before[i]), hides = mask_hides(row[i]);
      gained = static_cast<std::uint16_t>(gained + (hid && !hides));
      lost = static_cast<std::uint16_t>(lost + (!hid && hides));
      biased = static_cast<std::uint16_t>(biased + mask_biases(row[i]));
      was_biased = static_cast<std::uint16_t>(was_biased + mask_biases(before[i]));
    }
    added += gained, removed += lost, biases += Index{biased} - Index{was_biased};
    for (Index i = count; gained + lost > 0 && i-- > 0;) {
      const bool hid = mask_hides(before[i]), hides = mask_hides(row[i]);
      if (gained > 0 && hid && !hides) last_added = static_cast<Position>(first + i), gained = 0;
      if (lost > 0 && !hid && hides) last_removed = static_cast<Position>(first + i), lost = 0;
    }
  }
};

// The cells that a row sees. Read without a branch for each cell, which would often be
// mispredicted.
struct RowCells {
  std::vector<Position> cells = {};
  Index biases = -1;  // not read

  RowCells() = default;
  RowCells(const std::uint16_t* row, Index n) : biases(0) {
    constexpr Index block = 256;
    Position seen[block];
    for (Index begin = 0; begin < n; begin += block) {
      const Index count = std::min(block, n - begin);
      Position* to = seen;
      std::uint16_t biased = 0;
      for (Index i = 0; i < count; ++i) {
        *to = static_cast<Position>(begin + i);
        to += mask_hides(row[begin + i]) ? 0 : 1;
      }
      for (Index i = 0; i < count; ++i)
        biased = static_cast<std::uint16_t>(biased + mask_biases(row[begin + i]));
      cells.insert(cells.end(), seen, to);
      biases += biased;
    }
  }
};

}  // namespace detail

// The segments of mask [1, 1, queries, cells], which hold all of its queries in order. Throws
// std::invalid_argument for another format than half, for more than one sequence or head, and for
// more than max_keys queries or cells.
inline std::vector<MaskSegment> read_mask_segments(const Rows& mask, ExecutorRef executor) {
  const Index n_q = mask.len(), n_cells = mask.dim();
  std::vector<MaskSegment> segments;
  if (n_q == 0) return segments;
  detail::require_keys("the queries of a mask", n_q);
  detail::require_keys("the cells of a mask", n_cells);
  detail::require_equal("the sequences of a mask that is read in segments", mask.batch(), "one", 1);
  detail::require_equal("the heads of a mask that is read in segments", mask.heads(), "one", 1);
  if (!mask.empty() && &mask.format() != &format_of<Eigen::half>())
    detail::fail_because(std::string("a mask that is read in segments is of format ") +
                         mask.format().name + ", but must be " + format_of<Eigen::half>().name);
  const auto row = [&](Index query) {
    return reinterpret_cast<const std::uint16_t*>(mask.row(0, 0, query));
  };
  std::vector<detail::MaskStep> steps(static_cast<std::size_t>(n_q));  // the first is not used
  std::vector<detail::RowCells> begun(static_cast<std::size_t>(n_q));  // those that begin a segment
  constexpr Index rows = 16;
  executor.run(ceil_div(n_q, rows), [&](Index task, int) {
    for (Index i = task * rows; i < std::min(task * rows + rows, n_q); ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (i > 0) steps[at] = {row(i - 1), row(i), n_cells};
      if (i == 0 || !steps[at].nearly_same()) begun[at] = {row(i), n_cells};
    }
  });
  Index biases = 0;  // of the row at hand
  const auto begin_segment = [&](Index at) {
    detail::RowCells& first = begun[static_cast<std::size_t>(at)];
    if (first.biases < 0) first = {row(at), n_cells};
    segments.push_back({at, 1, MaskKind::causal, std::move(first.cells), {}});
    return std::exchange(first.biases, -1);
  };
  // Row i, the last of the last segment, is biased.
  const auto note_bias = [&](Index i) {
    MaskSegment& segment = segments.back();
    const Index at = i - segment.begin;
    if (segment.biased.empty() ||
        at - (segment.biased.back().begin + segment.biased.back().count) > MaskSegment::gap)
      segment.biased.push_back({at, 0});
    segment.biased.back().count = at + 1 - segment.biased.back().begin;
  };
  for (Index i = 0; i < n_q; ++i) {
    const detail::MaskStep& step = steps[static_cast<std::size_t>(i)];
    if (i == 0) {
      biases = begin_segment(0);
      if (biases > 0) note_bias(0);
      continue;
    }
    const detail::MaskStep& before = steps[static_cast<std::size_t>(i - 1)];
    const bool before_biased = biases > 0;
    biases += step.biases;
    MaskSegment& last = segments.back();
    // A row that sees nothing is not a token of a chunk: it has no cell.
    bool same = step.next_token() && last.causal() && !last.cells.empty();
    if (step.next_token() && !last.causal() && before.added == 1) {
      --last.count;  // the row before was this chunk's first
      begin_segment(i - 1);
      if (before_biased) note_bias(i - 1);
      same = true;
    }
    if (same) {
      segments.back().cells.push_back(step.last_added);
    } else if (!step.next_token() && step.nearly_same() && (last.count == 1 || !last.causal())) {
      if (last.causal()) last.kind = MaskKind::bidirectional;
      if (step.slides_after(before)) last.kind = MaskKind::sliding;
      last.cells.clear(), last.biased.clear();
    } else {
      biases = begin_segment(i);
      if (biases > 0) note_bias(i);
      continue;
    }
    ++segments.back().count;
    if (biases > 0 && segments.back().causal()) note_bias(i);
  }
  return segments;
}

// Adjacent single queries, each a segment of its own, become one segment if each cell that they see
// is seen by at least 1.5 of them on average. Such cells are then read once for several queries.
inline void join_sparse_segments(std::vector<MaskSegment>& segments, Index cells) {
  std::vector<MaskSegment> joined;
  std::vector<std::uint8_t> seen;
  const auto is_single = [](const MaskSegment& segment) {
    return segment.causal() && segment.count == 1;
  };
  for (auto first = segments.begin(), end = first; first != segments.end(); first = end) {
    end = std::find_if_not(first, segments.end(), is_single);
    Index in_all = 0, different = 0;
    if (end - first > 1) {
      seen.assign(static_cast<std::size_t>(cells), 0);
      for (auto segment = first; segment != end; ++segment) {
        in_all += std::ssize(segment->cells);
        for (const Position cell : segment->cells)
          different += std::exchange(seen[static_cast<std::size_t>(cell)], std::uint8_t{1}) == 0;
      }
    }
    if (end - first > 1 && 2 * in_all >= 3 * different) {
      joined.push_back({first->begin, end - first, MaskKind::sparse, {}, {}});
      continue;
    }
    if (end == first) ++end;
    std::move(first, end, std::back_inserter(joined));
  }
  segments = std::move(joined);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
