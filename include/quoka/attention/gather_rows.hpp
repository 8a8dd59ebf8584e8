// Attention of one query's rows to keys of its own, rows of keys and values read one by one.
//
// As one token's attention (attend_decode.hpp), with the differences that many queries make: rows lie anywhere, so
// their addresses are found first, keys' and then values', and the next ones are asked for in that order while one is
// multiplied; several keys share a load of the query. The weighted values of a list are added up from zero, and then
// join what the query has seen before.
#pragma once

#include <quoka/attention/logit_bias.hpp>
#include <quoka/base/arena.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/kernels/token_weights.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Rows of a panel that are one query's.
struct QueryRun {
  Index query;  // of the call
  Index lane;   // its first row in the panel
  Index rows;
  Index
      in_tiles;  // the first one, where each query of the panel has whole tiles of token_kernels.hpp
};
inline Index rows_in_tiles(Index rows) { return round_up(rows, token_tile_rows(rows)); }

// Keys of a list, for LogitBias.
class ListedKeys {
 public:
  // Columns first + list[0, count); `columns` has room for them.
  ListedKeys(const AttentionCall& call, Index b, const Position* list, Index count, Index first,
             Position* columns)
      : call_(call), b_(b), columns_(columns), count_(count) {
    for (Index i = 0; i < count; ++i) columns[i] = static_cast<Position>(first + list[i]);
  }

  Index count() const { return count_; }
  Index position(Index i) const { return call_.position_of_column(columns_[i]); }
  void read_mask(Index q_head, Index query, float* to) const {
    call_.mask->read(b_, q_head, query, columns_, 0, count_, to);
  }

 private:
  const AttentionCall& call_;
  Index b_;
  const Position* columns_;
  Index count_;
};

// Scratch of attend_rows(), for lists of at most `keys` keys.
struct ListedRowsScratch {
  ListedRowsScratch(Arena& arena, const AttentionCall& call, Index keys) {
    const Index most_rows = round_up(std::min<Index>(call.group, tuning::panel_rows), Index{4});
    weights = arena.take<float>(most_rows * (keys + simd::lanes));
    factors = arena.take<float>(most_rows);
    mask_row = arena.take<float>(call.mask != nullptr ? keys : 0);
    columns = arena.take<Position>(keys);
    rows = arena.take<ConstRow>(2 * keys + tuning::gather_row_padding);
  }

  float* weights;     // [tiles][keys][rows of a tile]
  float* factors;     // [rows, rounded up to tiles]
  float* mask_row;    // [keys]
  Position* columns;  // [keys]
  ConstRow* rows;     // [keys, then values, then those that are asked for and not read]
};

// A list as attend_rows() takes it: rows list[0, count) of k and v, whose row 0 is column `first_column`.
struct KeyList {
  HeadRows k, v;  // rows of whole packets
  const Position* list;
  Index count, first_column;
  bool biased;  // a mask or ALiBi adds something
};

// Rows [first, first + heads) of a KV head, scaled, to to[whole tiles][head_dim, rounded up to whole packets].
inline void read_queries(const AttentionCall& call, Index b, Index kv_head, Index first,
                         Index heads, float* to) {
  const Index width = round_up(call.q.dim(), simd::lanes);
  for (Index row = 0; row < rows_in_tiles(heads); ++row, to += width) {
    if (row < heads) call.read_query(b, call.query_row(kv_head, first + row), to);
    std::fill(to + (row < heads ? call.q.dim() : 0), to + width, 0.0f);
  }
}

// Rows [first, first + heads) of a KV head, all of one query and read before: states[heads] and sums out[heads][v_dim,
// rounded up to whole packets] heed the list's keys, too.
inline void attend_rows(const AttentionCall& call, Index b, Index kv_head, Index first, Index heads,
                        const float* queries, const KeyList& keys, const ListedRowsScratch& s,
                        SoftmaxState<float>* states, float* out) {
  const Index count = keys.count, k_width = round_up(call.q.dim(), simd::lanes);
  const Index tile_rows = token_tile_rows(heads), tiles = ceil_div(heads, tile_rows);
  const Index tile_size = round_up(count * tile_rows, simd::lanes);
  // Behind the last keys the first values are asked for.
  keys.k.gathered(keys.list).find(0, count, s.rows);
  keys.v.gathered(keys.list).find(0, count, s.rows + count);
  std::fill_n(s.rows + 2 * count, tuning::gather_row_padding, s.rows[2 * count - 1]);
  // Where there are several tiles rows stay in L1 for all of them.
  const Index stretch = tiles > 1 ? tuning::token_stretch_keys : count;
  for (Index i = 0; i < count; i += stretch)
    for (Index tile = 0; tile < tiles; ++tile)
      keys.k.format->gather_logits(tile_rows, s.rows + i, std::min(stretch, count - i),
                                   keys.k.shape, queries + tile * tile_rows * k_width,
                                   s.weights + tile * tile_size + i * tile_rows, tile == 0);
  LogitBias bias(
      call, ListedKeys(call, b, keys.list, keys.biased ? count : 0, keys.first_column, s.columns),
      call.mask != nullptr ? s.mask_row : nullptr);
  for (Index row = 0; row < heads; row += tile_rows) {
    float* const x = s.weights + row / tile_rows * tile_size;
    const Index rows = std::min(tile_rows, heads - row);
    call.logits.apply(x, tile_size);
    if (keys.biased) bias.add(kv_head, first + row, rows, x, tile_rows);
    SoftmaxState<float> of_tile[4];  // of whole tiles
    std::copy_n(states + row, rows, of_tile);
    std::fill_n(of_tile + rows, 4 - rows, SoftmaxState<float>::identity());
    softmax_tile(x, count, tile_rows, of_tile, s.factors + row);
    std::copy_n(of_tile, rows, states + row);
  }
  keys.v.format->gather_values(s.rows + count, count, keys.v.shape,
                               {s.weights, tile_rows, tile_size, heads}, s.factors, out);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
