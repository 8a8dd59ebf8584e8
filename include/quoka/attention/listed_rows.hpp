// Attention of one query's rows to keys of its own, rows of keys and values read one by one.
//
// As one token's attention (token_attention.hpp), with the differences that many queries make: keys that several of
// them name were brought into the cache before, contiguous and in whole packets, and are read from there without being
// asked for. Rows of a step are added up from zero, and then join what the query has seen before.
#pragma once

#include <quoka/attention/list_plan.hpp>
#include <quoka/kernels/token_weights.hpp>
#include <quoka/packing/token_kernels.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What a query's rows have seen so far, and keep.
struct RowSums {
  SoftmaxState<float>* states;  // [rows]
  float* out;                   // [rows][v_dim, rounded up to whole packets]
};

// Rows of keys or values: of whole packets in the cache, or where they lie.
struct ReadRows {
  HeadRows rows;
  bool in_cache;
};

// Scratch of one worker.
struct ListedRowsScratch {
  Buffer<float> weights;    // [tiles][keys of a range][rows of a tile]
  Buffer<float> block_out;  // [rows, rounded up][v_dim, rounded up]
  Buffer<float> factors;    // [rows, rounded up]
  Buffer<float> mask_row;   // [keys of a range]
  Buffer<Position> columns;

  void reserve(const AttentionCall& call, Index keys) {
    const Index rows = std::min<Index>(call.group, tuning::panel_rows) + 3;
    const Index v_width = round_up(call.v_dim, simd::lanes);
    weights.reserve(ceil_div(rows, Index{4}) * (4 * keys + simd::lanes));
    block_out.reserve(rows * v_width);
    factors.reserve(rows);
    mask_row.reserve(keys), columns.reserve(keys);
  }
  Index bytes() const {
    return weights.bytes() + block_out.bytes() + factors.bytes() + mask_row.bytes() +
           columns.bytes();
  }
};

class ListedRows {
 public:
  // Of all runs of a panel, each rounded up to whole tiles: groups of 5 leave most room, 8 rows for 5.
  static constexpr Index most_padded_rows = 2 * tuning::panel_rows;

  // `heads` query heads from q_head on, of one query. queries: [padded_rows()][head_dim, rounded up], see
  // read_queries().
  ListedRows(const AttentionCall& call, Index b, Index q_head, Index heads, Index query,
             Index most_keys, float* queries, ListedRowsScratch& scratch)
      : call_(call),
        b_(b),
        q_head_(q_head),
        heads_(heads),
        query_(query),
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
      const Index head = q_head_ + row;
      call_.q.format().widen(call_.q.row(b_, head, query_), call_.q.shape(head), to);
      for (Index c = 0; c < call_.q.dim(); ++c) to[c] *= call_.logits.scale;
    }
  }

  // Keys list[0, count) of k, values of v. first_column: of the sequence that k's row 0 is; biased: a mask or ALiBi
  // adds something.
  void attend(const ReadRows& k, const ReadRows& v, const Position* list, Index count,
              Index first_column, bool biased, const RowSums& to) {
    multiply_keys(k, list, count);
    if (call_.logits.changes())
      for (Index tile = 0; tile < tiles_; ++tile)
        call_.logits.apply(weights(tile), round_up(count * tile_rows_, simd::lanes));
    if (biased) add_biases(list, count, first_column);
    SoftmaxState<float> states[4];
    for (Index tile = 0; tile < tiles_; ++tile) {
      const Index row = tile * tile_rows_, rows = std::min(tile_rows_, heads_ - row);
      std::copy_n(to.states + row, rows, states);
      std::fill_n(states + rows, tile_rows_ - rows, SoftmaxState<float>::identity());
      weigh_token_tile(weights(tile), count, tile_rows_, states, s_.factors.data() + row);
      std::copy_n(states, rows, to.states + row);
    }
    add_values(v, list, count);
    add_to_rows(s_.factors.data(), s_.block_out.data(), heads_, v_width_, to.out);
  }

 private:
  float* weights(Index tile) const { return s_.weights.data() + tile * tile_size_; }

  // f(rows, count, first, ask) for rows of the list, some at a time.
  template <class F>
  static void for_stretches(const ReadRows& x, const Position* list, Index count, Index stretch,
                            F&& f) {
    const HeadRows listed = x.rows.listed(list);
    ConstRow memory[RowsAhead::most];
    if (x.in_cache) return f(listed.at.run(0, count, memory), count, 0, nullptr);
    RowWalk ahead(listed.at, listed.row_bytes(), tuning::token_prefetch_keys, count);
    for (Index i = 0; i < count; i += stretch) {
      const Index n = std::min(stretch, count - i);
      RowsAhead ask;
      ask.take(ahead, n);
      f(listed.at.run(i, n, memory), n, i, &ask);
    }
  }

  void multiply_keys(const ReadRows& k, const Position* list, Index count) {
    for_stretches(k, list, count, tuning::token_stretch_keys,
                  [&](const RowRun& rows, Index n, Index first, const RowsAhead* ask) {
                    for (Index tile = 0; tile < tiles_; ++tile) {
                      const float* const queries = queries_ + tile * tile_rows_ * k_width_;
                      float* const x = weights(tile) + first * tile_rows_;
                      const Format& format = *k.rows.format;
                      if (k.in_cache)
                        format.cached_logits(tile_rows_, rows, n, k.rows.shape, queries, x);
                      else
                        format.token_logits(tile_rows_, rows, n, k.rows.shape, queries, x,
                                            tile == 0 ? ask : nullptr);
                    }
                  });
  }

  void add_values(const ReadRows& v, const Position* list, Index count) {
    std::fill_n(s_.block_out.data(), heads_ * v_width_, 0.0f);
    for_stretches(
        v, list, count, tuning::token_value_keys,
        [&](const RowRun& rows, Index n, Index first, const RowsAhead* ask) {
          const Format& format = *v.rows.format;
          const Index most = v.in_cache ? 4 : format.value_rows;
          for (Index row = 0; row < heads_;) {
            const Index left = std::min(most, heads_ - row);
            const Index together = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            const float* weight[4];
            for (Index r = 0; r < together; ++r)
              weight[r] =
                  weights((row + r) / tile_rows_) + first * tile_rows_ + (row + r) % tile_rows_;
            float* const to = s_.block_out.data() + row * v_width_;
            if (v.in_cache)
              format.cached_values(rows, n, v.rows.shape, weight, tile_rows_, together, to);
            else
              format.token_values(rows, n, v.rows.shape, weight, tile_rows_, together, to,
                                  row == 0 ? ask : nullptr);
            row += together;
          }
        });
  }

  // What the mask and ALiBi add.
  [[gnu::noinline]] void add_biases(const Position* list, Index count, Index first_column) {
    float* const bias = s_.mask_row.data();
    Position* const columns = s_.columns.data();
    for (Index i = 0; i < count; ++i) columns[i] = static_cast<Position>(first_column + list[i]);
    for (Index row = 0; row < heads_; ++row) {
      const Index head = q_head_ + row;
      const float factor = call_.mask_factor(head), slope = call_.alibi_slope(head);
      if (call_.mask != nullptr && (row == 0 || call_.mask->heads() > 1))
        call_.mask->read(b_, call_.mask->heads() > 1 ? head : 0, query_, columns, 0, count, bias);
      float* const x = weights(row / tile_rows_) + row % tile_rows_;
      for (Index i = 0; i < count; ++i) {
        float& logit = x[i * tile_rows_];
        if (slope != 0.0f)
          logit += slope * static_cast<float>(call_.position_of_column(columns[i]) -
                                              call_.query_position - query_);
        if (call_.mask != nullptr && bias[i] != 0.0f) logit += bias[i] * factor;
      }
    }
  }

  const AttentionCall& call_;
  Index b_, q_head_, heads_, query_;
  Index tile_rows_, tiles_, tile_size_;
  Index k_width_, v_width_;
  float* queries_;
  ListedRowsScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
