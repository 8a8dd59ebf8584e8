// Decode: attention of one token, the few query heads that share a KV head, over a part of its
// keys.
//
// A few rows use each key for a handful of multiply-adds, so a decode step is bound by memory. The
// panels of attend_panels.hpp would leave most lanes idle. Here channels lie across the lanes.
// Logits are dot products, `lanes` at a time, which end in one tree of shuffles. Weighted values
// add up row by row. Keys and values are read once, from where they lie and in their order, so that
// the hardware's prefetcher keeps memory busy under the arithmetic. 2 * group * keys * (head_dim +
// v_dim) FLOPs, group / 2 per byte of float K and V. Equal to attend_panels.hpp up to the order of
// sums.
//
// Where the heads' rows lie side by side, [len, heads, dim] or in pages, one head alone would read
// 512 bytes out of 4 KiB, at a third of the bandwidth. There the heads of a token are read
// together: a few keys of each head, then a few values. The next rows are prefetched in the order
// of memory. The arithmetic is the same.
//
// Each part of the keys is an item of its own.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/logits.hpp>
#include <quoka/attention/parts.hpp>
#include <quoka/attention/plan.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/row_sums.hpp>
#include <quoka/kernels/token_codes.hpp>
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/rows/row_walk.hpp>

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <new>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A token's rows of one KV head over a part of the keys, with the memory that this takes.
class DecodeAttention {
 public:
  // head: b * kv_heads + kv_head.
  DecodeAttention(Arena& arena, const AttentionCall& call, Index head)
      : call_(call),
        keys_(call, head),
        all_(call.rows_of(head, 0, call.group)),
        tile_rows_(token_tile_rows(call.group)),
        rows_(round_up(call.group, tile_rows_)),
        k_width_(whole_packets(call.q.dim())),
        v_width_(whole_packets(call.v_dim)),
        queries_(arena.take<float>(rows_ * k_width_)),
        weights_(arena.take<float>(rows_ * tuning::token_block_keys)),
        sums_(arena, rows_, v_width_),
        block_out_(arena.take<float>(rows_ * v_width_)),
        factors_(arena.take<float>(rows_)),
        padded_(arena.take<float>(std::max(tuning::token_stretch_keys, tuning::token_value_keys) *
                                  std::max(k_width_, v_width_))),
        mask_row_(arena.take<float>(call.logits.mask != nullptr ? tuning::token_block_keys : 0)),
        coded_(multiplies_codes()),
        codes_(arena.take<std::byte>(coded_ ? rows_ / token_code_rows * token_code_bytes(k_width_)
                                            : 0)) {
    assert(call_.q.len() == 1);
  }

  const KeySequence& keys() const { return keys_; }

  // The first step: reads the queries. Rows beyond the group are zero queries; their results are
  // not used.
  [[gnu::noinline]] void start(bool with_sinks) {
    call_.read_queries(all_, queries_);
    clear_rows(sums_, rows_);
    for (Index r = 0; r < call_.group && with_sinks; ++r)
      add_sink(call_.logits.sink(all_[r].q_head), sums_.states[r]);
    for (Index tile = 0; coded_ && tile < rows_ / tile_rows_; ++tile)
      coded_ = code_token_queries(queries(tile), k_width_, codes(tile));
  }
  // The logits of a block's keys [first, first + count), whose rows are those of k from `first` on.
  [[gnu::noinline]] void multiply_keys(const HeadRows& k, Index first, Index count,
                                       RowWalk* upcoming) {
    for_each_stretch<tuning::token_stretch_keys>(
        k, first, count, upcoming,
        [&](const Stretch& keys, Index i, Index n, const RowsAhead* ahead) {
          for (Index row = 0; row < rows_; row += tile_rows_) {
            const Index tile = row / tile_rows_;
            float* const x = weights(tile) + i * tile_rows_;
            const RowsAhead* const prefetched = row == 0 ? ahead : nullptr;
            if (coded_ && keys.format->token_code_logits != nullptr)
              keys.format->token_code_logits(keys.rows, n, keys.shape, codes(tile), x, prefetched);
            else
              keys.format->token_logits(tile_rows_, keys.rows, n, keys.shape, queries(tile), x,
                                        prefetched);
          }
        });
  }
  // Turns all logits of the block into weights, raises the states, and empties the block's sums for
  // add_values(). keys: of the sequence, of the past or of the chunk alone.
  [[gnu::noinline]] void softmax(const KeyRange& keys) {
    const Index padded = whole_packets(keys.count() * tile_rows_);
    MaskRow mask_row{mask_row_};
    for (Index row = 0; row < rows_; row += tile_rows_) {
      float* const x = weights(row / tile_rows_);
      HeadQueries rows = all_;
      rows.first = row, rows.count = std::min(tile_rows_, call_.group - row);
      call_.logits.rule.apply(x, padded);
      if (call_.biased())
        keys_.for_columns(keys, [&](const Columns& columns, Index) {
          call_.logits.add_biases(rows, columns, x, tile_rows_, mask_row);
        });
      softmax_tile(x, keys.count(), tile_rows_, rows.count, sums_.states + row, factors_ + row);
    }
    std::fill_n(block_out_, rows_ * v_width_, 0.0f);
  }
  // Adds the values of the block's keys [first, first + count) to the block's sums.
  [[gnu::noinline]] void add_values(const HeadRows& v, Index first, Index count,
                                    RowWalk* upcoming) {
    for_each_stretch<tuning::token_value_keys>(
        v, first, count, upcoming,
        [&](const Stretch& values, Index i, Index n, const RowsAhead* ahead) {
          for (Index row = 0; row < call_.group; row += values.format->value_rows)
            add_stretch(values, n, i, row, row == 0 ? ahead : nullptr);
        });
  }
  // The block's sums join those of the blocks before it.
  [[gnu::noinline]] void end_block() {
    add_to_rows(factors_, block_out_, call_.group, v_width_, sums_.sums);
  }
  const HeadQueries& queries() const { return all_; }
  const RowSums& sums() const { return sums_; }  // of these queries

 private:
  static constexpr Index most_value_rows = 4;

  // Are some keys multiplied as 8-bit codes? Then queries are rounded, too.
  bool multiplies_codes() const {
    const auto has = [](const Rows& k) {
      return !k.empty() && k.format().token_code_logits != nullptr;
    };
    return call_.codes_queries && tile_rows_ == token_code_rows &&
           (has(call_.past_k) || has(call_.chunk_k));
  }

  float* weights(Index tile) const {
    return weights_ + tile * tile_rows_ * tuning::token_block_keys;
  }
  const float* queries(Index tile) const { return queries_ + tile * tile_rows_ * k_width_; }
  std::byte* codes(Index tile) const { return codes_ + tile * token_code_bytes(k_width_); }

  // Rows of one format, each of whole packets.
  struct Stretch {
    RowRun rows;
    const Format* format;
    RowShape shape;
  };
  // Rows [first, first + count), each of whole packets: in place, or widened and filled up with
  // zeros.
  Stretch stretch_of(const HeadRows& x, Index first, Index count, ConstRow* memory) {
    const Index dim = x.shape.dim, width = whole_packets(dim);
    if (width == dim) return {x.run(first, count, memory), x.format, x.shape};
    for (Index i = 0; i < count; ++i)
      widen_padded(*x.format, x[first + i], x.shape, width, padded_ + i * width);
    return {{reinterpret_cast<ConstRow>(padded_), width * 4}, &float_format(), {width}};
  }

  // use(rows, i, n, ahead) for each stretch [i, i + n) of x's rows [first, first + count); ahead:
  // rows of `upcoming` to prefetch meanwhile, null without any.
  template <Index stretch, class Use>
  void for_each_stretch(const HeadRows& x, Index first, Index count, RowWalk* upcoming, Use&& use) {
    static_assert(stretch <= RowsAhead::most);
    ConstRow memory[RowsAhead::most];
    for (Index i = first; i < first + count; i += stretch) {
      const Index n = std::min(stretch, first + count - i);
      const Stretch rows = stretch_of(x, i, n, memory);
      RowsAhead ahead;
      if (upcoming != nullptr) ahead = upcoming->take(n);
      use(rows, i, n, upcoming != nullptr ? &ahead : nullptr);
    }
  }
  // Keys [first, first + count) of the block to rows from `row` on, as many as are computed
  // together.
  void add_stretch(const Stretch& v, Index count, Index first, Index row,
                   const RowsAhead* upcoming) {
    const Index rows = std::min(v.format->value_rows, call_.group - row);
    const float* weight[most_value_rows];
    for (Index r = 0; r < rows; ++r)
      weight[r] = weights((row + r) / tile_rows_) + first * tile_rows_ + (row + r) % tile_rows_;
    v.format->token_values(v.rows, count, v.shape, weight, tile_rows_, rows,
                           block_out_ + row * v_width_, upcoming);
  }

  const AttentionCall& call_;
  KeySequence keys_;
  HeadQueries all_;          // the group
  Index tile_rows_, rows_;   // of a tile; of all tiles
  Index k_width_, v_width_;  // channels, rounded up to whole packets
  float* queries_;           // [rows][k_width]
  float* weights_;           // [tiles][keys of a block][rows of a tile]
  RowSums sums_;             // [rows][v_width], of all blocks
  float* block_out_;         // [rows][v_width], of one
  float* factors_;           // [rows]
  float* padded_;            // [keys of a stretch][k_width or v_width]
  float* mask_row_;          // [keys of a block]
  bool coded_;               // are queries codes, too (kernels/token_codes.hpp)?
  std::byte* codes_;         // [tiles]
};

// Heads [first, first + count) of a call, which a worker takes in turns.
inline DecodeAttention* token_heads(Arena& arena, const AttentionCall& call, Index first,
                                    Index count) {
  DecodeAttention* const heads = arena.take<DecodeAttention>(count);
  for (Index i = 0; i < count; ++i) {
    const DecodeAttention head(arena, call, first + i);
    if (heads != nullptr) new (heads + i) DecodeAttention(head);
  }
  return heads;
}

// Keys of the past, or of the chunk, by `count` heads of one sequence. Heads whose rows lie side by
// side take turns, others come here alone. rows_of(head, x): its rows of x, row i being key i.
template <class RowsOf>
void attend_keys(DecodeAttention* heads, Index count, bool in_turns, const Rows& k, const Rows& v,
                 const KeyRange& keys, RowsOf&& rows_of) {
  const auto each = [&](auto&& f) {
    for (DecodeAttention* head = heads; head < heads + count; ++head) f(*head);
  };
  const Index step = in_turns ? tuning::token_together_keys : tuning::token_block_keys;
  // One row is prefetched per row that is used, this many rows ahead. With one query row
  // prefetching costs more than it gains (tuning.hpp), but the hardware reads ahead in one page
  // alone.
  const Index ahead_by = in_turns ? step : tuning::token_prefetch_keys;
  const bool few = !in_turns && heads->queries().count == 1;
  for (Index block = keys.begin; block < keys.end; block += tuning::token_block_keys) {
    const Index size = std::min(tuning::token_block_keys, keys.end - block);
    const auto in_steps = [&](const Rows& x, bool prefetches, auto&& use) {
      RowWalk ahead(rows_of(*heads, x), block + std::min(ahead_by, size), block + size, count,
                    x.strides()[1]);
      for (Index at = 0; at < size; at += step)
        each([&](DecodeAttention& head) {
          use(head, rows_of(head, x).from(block), at, std::min(step, size - at),
              prefetches ? &ahead : nullptr);
        });
    };
    in_steps(k, !few,
             [](DecodeAttention& head, const auto&... rows) { head.multiply_keys(rows...); });
    each([&](DecodeAttention& head) { head.softmax({block, block + size}); });
    in_steps(v, !few || v.mapped(),
             [](DecodeAttention& head, const auto&... rows) { head.add_values(rows...); });
    each([](DecodeAttention& head) { head.end_block(); });
  }
}

// A part of the keys of some heads of one sequence.
inline void attend_decode(const AttendItem& item, Arena& arena) {
  const AttentionCall& call = *item.plan->call;
  DecodeAttention* const heads = token_heads(arena, call, item.head, item.heads);
  if (arena.is_empty()) return;
  const KeySequence keys(call, item.head);
  // KeyParts begins at a whole block of the panels' arithmetic, whose first keys a window may hide.
  // Logits are not hidden by position here, so decode begins at the first key that the token sees.
  const KeyRange part = KeyParts::of_decode(keys).part(item.part);
  const Index past = keys.past_count(),
              begin = std::clamp(keys.range_of(0).begin, part.begin, part.end);
  for (Index i = 0; i < item.heads; ++i) heads[i].start(item.part == 0);
  const auto attend_past = [&](DecodeAttention* some, Index count, bool in_turns) {
    attend_keys(some, count, in_turns, call.past_k, call.past_v, {begin, std::min(past, part.end)},
                [](const DecodeAttention& x, const Rows& rows) { return x.keys().past(rows); });
  };
  if (call.heads_interleaved()) attend_past(heads, item.heads, true);
  for (Index i = 0; i < item.heads; ++i) {
    if (!call.heads_interleaved()) attend_past(heads + i, 1, false);
    attend_keys(heads + i, 1, false, call.chunk_k, call.chunk_v, {std::max(begin, past), part.end},
                [&](const DecodeAttention& x, const Rows& rows) {
                  return x.keys().chunk(rows).from(-past);
                });
    write_item(item, heads[i].queries(), heads[i].sums());
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
