// Attention of one query's rows to keys of its own, rows of keys and values read one by one.
//
// As one token's attention (attend_token.hpp), with the differences that many queries make: rows lie anywhere, so
// their addresses are found first, keys' and then values', and the next ones are asked for in that order while one is
// multiplied; several keys share a load of the query. Rows of a step are added up from zero, and then join what the
// query has seen before.
#pragma once

#include <quoka/attention/list_plan.hpp>
#include <quoka/attention/logit_bias.hpp>
#include <quoka/formats/element_rows.hpp>
#include <quoka/kernels/token_weights.hpp>
#include <quoka/packing/listed_kernels.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Keys of a list, for LogitBias; `columns` has room for them.
class ListedKeys {
 public:
  // Rows list[0, count) of the past or the chunk, whose row 0 is column `first` of the sequence.
  ListedKeys(const AttentionCall& call, Index b, const Position* list, Index count, Index first,
             Buffer<Position>& columns)
      : call_(call), b_(b), columns_(columns.data()), count_(count) {
    for (Index i = 0; i < count; ++i) columns.data()[i] = static_cast<Position>(first + list[i]);
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

// What a query's rows have seen so far, and keep.
struct RowSums {
  SoftmaxState<float>* states;  // [rows]
  float* out;                   // [rows][v_dim, rounded up to whole packets]
};

// Scratch of one worker.
struct ListedRowsScratch {
  Buffer<float> weights;   // [tiles][keys of a range][rows of a tile]
  Buffer<float> factors;   // [rows, rounded up]
  Buffer<float> mask_row;  // [keys of a range]
  Buffer<Position> columns;
  Buffer<ConstRow> rows;  // [keys of a range and those behind the last]

  void reserve(const AttentionCall& call, Index keys) {
    const Index most_rows = std::min<Index>(call.group, tuning::panel_rows) + 3;
    weights.reserve(ceil_div(most_rows, Index{4}) * (4 * keys + simd::lanes));
    factors.reserve(most_rows);
    mask_row.reserve(keys), columns.reserve(keys);
    rows.reserve(2 * keys + tuning::listed_row_padding);
  }
  Index bytes() const { return bytes_of(weights, factors, mask_row, columns, rows); }
};

class ListedRows {
 public:
  // Of all runs of a panel, each rounded up to whole tiles: groups of 5 leave most room, 8 rows for 5.
  static constexpr Index most_padded_rows = 2 * tuning::panel_rows;

  // Rows [first, first + heads) of a KV head of sequence b, all of one query.
  // queries: [padded_rows()][head_dim, rounded up], see read_queries().
  ListedRows(const AttentionCall& call, Index b, Index kv_head, Index first, Index heads,
             Index most_keys, float* queries, ListedRowsScratch& scratch)
      : call_(call),
        b_(b),
        kv_head_(kv_head),
        first_(first),
        heads_(heads),
        tile_rows_(token_tile_rows(heads)),
        tiles_(ceil_div(heads, tile_rows_)),
        tile_size_(round_up(most_keys * tile_rows_, simd::lanes)),
        k_width_(round_up(call.q.dim(), simd::lanes)),
        v_width_(round_up(call.v_dim, simd::lanes)),
        queries_(queries),
        s_(scratch) {}

  Index padded_rows() const { return tiles_ * tile_rows_; }
  // First, once for all ranges: scaled, and zero where there is no row and no channel.
  void read_queries() {
    for (Index row = 0; row < padded_rows(); ++row) {
      float* const to = queries_ + row * k_width_;
      std::fill_n(to, k_width_, 0.0f);
      if (row >= heads_) continue;
      call_.read_query(b_, call_.query_row(kv_head_, first_ + row), to);
    }
  }

  // Keys list[0, count) of k, values of v. first_column: of the sequence that k's row 0 is; biased: a mask or ALiBi
  // adds something.
  void attend(const HeadRows& k, const HeadRows& v, const Position* list, Index count,
              Index first_column, bool biased, const RowSums& to) {
    find(k, v, list, count);
    multiply_keys(k, count);
    for (Index tile = 0; tile < tiles_; ++tile)
      call_.logits.apply(weights(tile), round_up(count * tile_rows_, simd::lanes));
    if (biased) add_biases(list, count, first_column);
    SoftmaxState<float> states[4];
    for (Index tile = 0; tile < tiles_; ++tile) {
      const Index row = tile * tile_rows_, rows = std::min(tile_rows_, heads_ - row);
      std::copy_n(to.states + row, rows, states);
      std::fill_n(states + rows, tile_rows_ - rows, SoftmaxState<float>::identity());
      softmax_tile(weights(tile), count, tile_rows_, states, s_.factors.data() + row);
      std::copy_n(states, rows, to.states + row);
    }
    add_values(v, count, to.out);
  }

 private:
  float* weights(Index tile) const { return s_.weights.data() + tile * tile_size_; }

  // Where rows list[0, count) of both lie: behind the last keys the first values are asked for.
  void find(const HeadRows& k, const HeadRows& v, const Position* list, Index count) {
    ConstRow* const rows = s_.rows.data();
    k.listed(list).at.find(0, count, rows);
    v.listed(list).at.find(0, count, rows + count);
    std::fill_n(rows + 2 * count, tuning::listed_row_padding, rows[2 * count - 1]);
  }

  void multiply_keys(const HeadRows& k, Index count) {
    const auto multiply =
        k.format->is_float ? listed_logits<formats::FloatRow> : k.format->listed_logits;
    const ConstRow* const rows = s_.rows.data();
    // Where there are several tiles rows stay in L1 for all of them.
    const Index stretch = tiles_ > 1 ? tuning::token_stretch_keys : count;
    for (Index i = 0; i < count; i += stretch)
      for (Index tile = 0; tile < tiles_; ++tile)
        multiply(tile_rows_, rows + i, std::min(stretch, count - i), k.shape,
                 queries_ + tile * tile_rows_ * k_width_, weights(tile) + i * tile_rows_,
                 tile == 0);
  }

  void add_values(const HeadRows& v, Index count, float* out) {
    const auto add =
        v.format->is_float ? listed_values<formats::FloatRow> : v.format->listed_values;
    add(s_.rows.data() + count, count, v.shape, {weights(0), tile_rows_, tile_size_, heads_},
        s_.factors.data(), out);
  }

  void add_biases(const Position* list, Index count, Index first_column) {
    LogitBias bias(call_, ListedKeys(call_, b_, list, count, first_column, s_.columns),
                   call_.mask != nullptr ? s_.mask_row.data() : nullptr);
    for (Index row = 0; row < heads_; row += tile_rows_)
      bias.add(kv_head_, first_ + row, std::min(tile_rows_, heads_ - row),
               weights(row / tile_rows_), tile_rows_);
  }

  const AttentionCall& call_;
  Index b_, kv_head_, first_, heads_;
  Index tile_rows_, tiles_, tile_size_;
  Index k_width_, v_width_;
  float* queries_;
  ListedRowsScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
