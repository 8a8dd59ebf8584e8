// Split-KV: how the keys of a head are cut into parts, and the memory for the results of parts.
//
// Attention to a part begins with an empty softmax. Its result is the softmax state and the
// unnormalised sum of weighted values of each row. join_parts() joins them in the order of the
// parts by join() (row_sums.hpp). write_rows() is the last step of panels, of decode and of lists.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/kernels/row_sums.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- parts of the keys --------------------------------------------------------------------------

// How the keys of a head are cut into parts: by their number alone, so that neither threads nor
// batch change a bit. Parts begin at multiples of `size`, wherever the range of visible keys
// begins. Part 0 begins at key 0 and has the sinks, even if a window hides all of its keys. Parts 1
// to count - 1 are the other ones with visible keys.
struct KeyParts {
  // The most parts of a token, or of few panels: visible keys may begin and end within a part.
  static constexpr Index most_small = tuning::max_parts + 2;

  KeyRange all;  // that some query sees
  // Keys per part; how many whole parts, hidden by a window, are skipped after part 0; number of
  // parts.
  Index size, skipped, count;

  // For panels of query rows: parts of whole blocks. Few panels get more and smaller parts, so that
  // more workers share them.
  static KeyParts of_panels(const KeySequence& keys, Index panels) {
    const Index block = keys.call().block_keys();
    const KeyRange all = keys.range();
    if (panels < tuning::min_panels_per_task)
      return cut(all, std::max(tuning::part_blocks * block,
                               round_up(ceil_div(all.count(), tuning::max_parts), block)));
    Index size = round_up(tuning::long_part_keys, block);
    while (ceil_div(all.count(), size) > tuning::most_long_parts) size *= 2;
    return cut(all, size);
  }
  // For decode. The number of parts is limited for all KV heads of a sequence together, so that
  // many heads do not have many small parts.
  static KeyParts of_decode(const KeySequence& keys) {
    const KeyRange all = keys.range();
    const Index of_all_heads = all.count() * keys.call().kv_heads;
    return cut(all, std::max({tuning::token_part_keys, ceil_div(of_all_heads, tuning::token_parts),
                              ceil_div(all.count(), tuning::max_parts)}));
  }
  KeyRange part(Index i) const {
    const Index begin = (i == 0 ? 0 : skipped + i) * size;
    return {std::clamp(begin, all.begin, all.end), std::clamp(begin + size, all.begin, all.end)};
  }

 private:
  static KeyParts cut(const KeyRange& all, Index size) {
    const Index skipped = std::max<Index>(all.begin / size - 1, 0);
    return {all, size, skipped, std::max<Index>(ceil_div(all.end, size) - skipped, 1)};
  }
};

// ---- partial results ----------------------------------------------------------------------------

// The last step: sums, which are divided in place, become the call's output.
inline void write_rows(const AttentionCall& call, const HeadQueries& rows, const RowSums& seen) {
  for (Index i = 0; i < rows.count; ++i) {
    const auto [q_head, query] = rows[i];
    const SoftmaxState<float>& state = seen.states[i];
    float* const sums = seen.row(i);
    normalise(state, call.v_dim, sums);
    call.out.format().narrow(sums, call.out.shape(q_head), call.out.row(rows.b, q_head, query));
    if (!call.lse.absent()) call.lse.at(rows.b, q_head, query) = lse_nat(state.max, state.sum);
  }
}

// Partial results of all rows of a call's heads, part by part of their keys.
struct Partials {
  Partials() = default;
  Partials(Arena& arena, const AttentionCall& call, Index part_count)
      : parts(part_count), rows(call.rows()), all(arena, call.heads() * parts * rows, call.v_dim) {}

  RowSums part(Index head, Index part) const { return all.from((head * parts + part) * rows); }

  Index parts = 1, rows = 0;
  RowSums all;  // [heads, parts, rows], of calls with several parts
};

// The parts of a panel's rows, in the order of the keys, become the call's output.
inline void join_parts(const AttentionCall& call, const Partials& partials, Index head,
                       Index panel) {
  const Index width = kernel_sizes().panel_rows, first = panel * width;
  const HeadQueries rows = call.rows_of(head, first, width);
  const RowSums seen = partials.part(head, 0).from(first);
  for (Index i = 1; i < partials.parts; ++i)
    join(seen, partials.part(head, i).from(first), rows.count, call.v_dim);
  write_rows(call, rows, seen);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
