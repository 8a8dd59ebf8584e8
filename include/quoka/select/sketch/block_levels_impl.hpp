// Definitions of block_levels.hpp.
#pragma once

#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/sketch/block_levels.hpp>

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// mean [dim] of the rows read(0) ... read(count - 1) that are finite; zeros where none is. Shares are
// added up, not rows: no sum is beyond its terms.
template <class Read>
void mean_of_rows(Index count, Index dim, const Read& read, float* mean) {
  std::fill_n(mean, dim, 0.0f);
  const float share = 1.0f / static_cast<float>(count);
  Index finite = 0;
  for (Index i = 0; i < count; ++i) {
    const float* const row = read(i);
    if (!all_finite(row, dim)) continue;
    ++finite;
    for (Index c = 0; c < dim; ++c) mean[c] += row[c] * share;
  }
  if (finite == count || finite == 0) return;
  const float rest = static_cast<float>(count) / static_cast<float>(finite);
  for (Index c = 0; c < dim; ++c) mean[c] *= rest;
}

QUOKA_FUNC void BlockLevels::append(const Rows& k, Index block, Index capacity,
                                    ExecutorRef executor) {
  block_ = block;
  floats_.reserve(executor.workers(), k);
  Rows below = k;
  Index room = std::max(capacity, k.len());
  for (std::size_t j = 0; room >= block; ++j) {  // levels that have no row yet have room for theirs
    if (j == levels_.size()) levels_.emplace_back();
    RowStore<float>& means = levels_[j].means;
    KeySketch& sketch = levels_[j].sketch;
    means.reshape(k.batch(), k.heads(), k.dim());
    means.reserve(room /= block);
    sketch.truncate(means.len());
    const Index begin = sketch.len(),
                end = below.len() / block;  // means without codes are made again
    means.resize(end);
    executor.run(k.batch() * k.heads(), [&](Index task, int worker) {
      const Index b = task / k.heads(), head = task % k.heads();
      for (Index i = begin; i < end; ++i)
        mean_of_rows(
            block, k.dim(),
            [&](Index row) { return floats_[worker].read(below, b, head, i * block + row); },
            means.row(b, head, i));
    });
    below = means.view();
    sketch.append(below, room, executor);
  }
}

QUOKA_FUNC void BlockLevels::truncate(Index kv_len) {
  for (Level& level : levels_) {
    kv_len /= block_;
    level.means.truncate(kv_len);
    level.sketch.truncate(kv_len);
  }
}

QUOKA_FUNC Index BlockLevels::bytes() const {
  Index sum = 0;
  for (const Level& level : levels_) sum += level.means.bytes() + level.sketch.bytes();
  return sum;
}

QUOKA_FUNC LevelPlan::LevelPlan(Index kv_len, Index budget, Index block, Index times,
                                const TopKOptions& forced) {
  const Index first = std::min(forced.keep_first, budget);
  level[count++] = {kv_len, budget, first, std::min(forced.keep_last, budget - first)};
  while (block > 0 && count < most_levels) {
    const Level& below = level[count - 1];
    if (times > below.rows / below.wanted) break;
    Level above;
    above.rows = below.rows / block;
    above.keep_first = ceil_div(std::max<Index>(below.keep_first, 1), block);
    above.keep_last = ceil_div(std::max<Index>(below.keep_last - below.rows % block, 0), block);
    above.wanted =
        std::max(ceil_div(times * below.wanted, block), above.keep_first + above.keep_last);
    if (above.wanted >= above.rows) break;
    level[count++] = above;
  }
}

QUOKA_FUNC Index LevelPlan::most_candidates(Index block) const {
  Index most = 0;
  for (Index j = 1; j < count; ++j) most = std::max(most, (level[j].wanted + 1) * block);
  return most;
}

QUOKA_FUNC void expand_blocks(const Selection& picked, Index block, Index rows,
                              Candidates& candidates, ExecutorRef executor) {
  const Index heads = picked.kv_heads(), tasks = picked.batch() * heads, tail = rows % block;
  candidates.count = picked.max_count() * block + tail;
  Position* const cells = candidates.cells.reserve(tasks * candidates.count);
  executor.run(tasks, [&](Index task, int) {
    Position* to = cells + task * candidates.count;
    const auto put = [&](Index first, Index n) {
      std::iota(to, to + n, static_cast<Position>(first));
      to += n;
    };
    for (const Position i : picked.row(task / heads, task % heads)) put(i * block, block);
    put(rows - tail, tail);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
