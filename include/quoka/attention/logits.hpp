// From the product of a query and a key to its logit: attention's variant, in the order of
//
//   x = scale * q . k                                           where queries are packed or read
//   x = softcap * tanh(x / softcap)                             LogitRule
//                                                               (kernels/logit_kernels.hpp)
//   x = x + slope[q_head] * (key's position - query's)          ALiBi
//   x = x + factor[q_head] * mask[q_head][query][key]           -infinity where x or the mask's
//                                                               number is -infinity
//   x = -infinity where causality or the window hides the key   begin_column(), end_column()
//
// A row's softmax begins with its head's sink. Panels, decode and lists all use this. Keys are
// columns: the past's rows, selected or not, then the chunk's.
#pragma once

#include <quoka/kernels/logit_kernels.hpp>
#include <quoka/rows/mask.hpp>

#include <algorithm>
#include <limits>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A row of a KV head: a query of one of its heads.
struct QueryRow {
  Index q_head, query;

  bool operator==(const QueryRow&) const = default;
};

// Rows [first, first + count) of a KV head: query by query, the `group` heads that share its keys
// side by side.
struct HeadQueries {
  Index b, kv_head, group, first, count;

  QueryRow operator[](Index i) const {
    return {kv_head * group + (first + i) % group, (first + i) / group};
  }
};

// A buffer for one query's mask biases, and the row they belong to.
struct MaskRow {
  float* added;  // null: the mask adds nothing to these keys
  QueryRow row{-1, -1};
};

struct Logits {
  LogitRule rule;        // scale and soft-cap
  const Mask* mask;      // null: none
  Index past_len;        // columns of the past
  Index chunk_len;       // columns after them
  Index first_position;  // of column 0
  Index q_offset;        // position of query 0, and of the chunk's first key
  Index window;          // no window: the largest Index
  bool causal;
  std::span<const float> sinks, mask_factors, alibi_slopes;  // of each query head, or empty

  // The first column that a query sees through the window, and one past the last one that it sees.
  Index begin_column(Index query) const {
    if (window == std::numeric_limits<Index>::max()) return 0;
    const Index hidden = q_offset + query - window;  // last position out of sight
    if (hidden >= q_offset) return past_len + hidden - q_offset + 1;
    return std::clamp<Index>(hidden - first_position + 1, 0, past_len);
  }
  Index end_column(Index query) const {
    return past_len + (causal ? std::min(query + 1, chunk_len) : chunk_len);
  }
  Index position(Index column) const {
    return column < past_len ? first_position + column : q_offset + column - past_len;
  }
  // -infinity without one.
  float sink(Index q_head) const { return of_head(sinks, q_head, -infinity); }

  // Does ALiBi add to every logit?
  bool has_distances() const { return !alibi_slopes.empty(); }
  // Adds ALiBi's and the mask's biases for these columns to rows side by side in
  // x[columns.count][step]. x has room for whole packets of rows where step is a multiple of them.
  [[gnu::noinline]] void add_biases(const HeadQueries& rows, const Columns& columns, float* x,
                                    Index step, MaskRow& mask_row) const {
    if (has_distances()) add_distances(rows, columns, x, step);
    if (mask == nullptr || mask_row.added == nullptr) return;
    for (Index i = 0; i < rows.count; ++i)
      add_mask(rows.b, rows[i], columns, x + i, step, mask_row);
  }

 private:
  static float of_head(std::span<const float> numbers, Index q_head, float without) {
    return numbers.empty() ? without : numbers[static_cast<std::size_t>(q_head)];
  }

  void add_distances(const HeadQueries& rows, const Columns& columns, float* x, Index step) const {
    alignas(64) float slope[most_panel_rows] = {}, query[most_panel_rows] = {};
    for (Index i = 0; i < rows.count; ++i) {
      slope[i] = of_head(alibi_slopes, rows[i].q_head, 0.0f);
      query[i] = static_cast<float>(rows[i].query);
    }
    constexpr Index together = 128;
    for (Index first = 0; first < columns.count; first += together) {
      const Index count = std::min(together, columns.count - first);
      float positions[together];
      for (Index i = 0; i < count; ++i)
        positions[i] = static_cast<float>(position(columns[first + i]) - q_offset);
      detail::add_distances(slope, query, rows.count, positions, count, x + first * step, step);
    }
  }

  void add_mask(Index b, const QueryRow& row, const Columns& columns, float* x, Index step,
                MaskRow& mask_row) const {
    const QueryRow read{mask->heads() > 1 ? row.q_head : 0, row.query};
    if (read != mask_row.row) mask->read(b, read.q_head, read.query, columns, mask_row.added);
    mask_row.row = read;
    const float factor = of_head(mask_factors, row.q_head, 1.0f);
    detail::add_mask(mask_row.added, factor, columns.count, x, step);
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
