// Kernels for the keys and values of one query's own list, by the addresses of their rows
// (attend_lists.hpp). Channels lie across the lanes, as in token_kernels.hpp, but rows are not a
// stream that the hardware prefetches: several keys are multiplied at a time, and each row is
// prefetched by its address.
//
// Those of float, half and bfloat16 are compiled where lists are, since nearly all units have such
// rows and few have lists. A format of other rows brings its own (Format::gather_logits).
#pragma once

#include <quoka/kernels/kernels.hpp>
#include <quoka/rows/format.hpp>

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/rows/element_rows.hpp>
#include <algorithm>
#include <type_traits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Logits of `count` keys against a tile of queries, channels in whole packets: x[key][row]. Every
// logit is that of token_logits() to the last bit. rows[count, count + gather_row_padding) are
// prefetched and not read: what is read next stands there. prefetches: false for tiles of the same
// keys that follow.
QUOKA_FUNC void gather_logits(const Format& format, Index tile_rows, const ConstRow* rows,
                              Index count, const RowShape& shape, const float* queries, float* x,
                              bool prefetches);
// out[r] = factors[r] out[r] + the sum of weighted values, rows of out shape.dim apart. Rows behind
// the last are prefetched, too.
QUOKA_FUNC void gather_values(const Format& format, const ConstRow* rows, Index count,
                              const RowShape& shape, const TileWeights& weights,
                              const float* factors, float* out);

#if QUOKA_DEFINES_KERNELS

// gather_logits() of a tile's height, of as many keys at a time as fill a Square: each packet of
// queries is loaded once for all of them.
template <class Row, int Height>
void gather_logits_of_height(const ConstRow* rows, Index count, const RowShape& shape,
                             const float* queries, float* x, bool prefetches) {
  const Index width = shape.dim;
  const Index bytes = prefetches && shape.channel_step == 0 ? Row::bytes(shape) : 0;
  constexpr int lanes = simd::lanes, together = lanes / Height;
  for (Index i = 0; i < count; i += together, x += lanes) {
    simd::Square acc;
    ConstRow key[together];
    simd::unroll<together>([&](auto j) QUOKA_INLINE_LAMBDA {
      key[j] = rows[std::min<Index>(i + j, count - 1)];
      const ConstRow ahead = rows[i + j + tuning::gather_prefetch_keys];
      if (bytes > 0) prefetch_bytes(ahead, 0, bytes);
      simd::unroll<Height>([&](auto r)
                               QUOKA_INLINE_LAMBDA { acc.packet[j * Height + r] = simd::zero(); });
    });
    const auto add = [&](auto j, const simd::Packet& channels, auto&& query) QUOKA_INLINE_LAMBDA {
      simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
        simd::Packet& sum = acc.packet[j * Height + r];
        sum = simd::fma(channels, query(r), sum);
      });
    };
    Index c = 0;
    if constexpr (formats::Grouped<Row>) {
      constexpr Index size = Row::Group::channels;
      for (; c + size <= width; c += size)
        simd::unroll<together>([&](auto j) QUOKA_INLINE_LAMBDA {
          const typename Row::Group group(key[j], c);
          simd::unroll<static_cast<int>(size / lanes)>([&](auto p) QUOKA_INLINE_LAMBDA {
            add(j, group.load(p * lanes), [&](auto r) QUOKA_INLINE_LAMBDA {
              return simd::load(queries + r * width + c + p * lanes);
            });
          });
        });
    }
    for (; c < width; c += lanes) {
      // In registers: a multiply-add that loads takes as long as its load.
      simd::Packet query[Height];
      simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
        query[r] = simd::opaque(simd::load(queries + r * width + c));
      });
      simd::unroll<together>([&](auto j) QUOKA_INLINE_LAMBDA {
        add(j, Row::load(key[j], c, shape), [&](auto r) QUOKA_INLINE_LAMBDA { return query[r]; });
      });
    }
    simd::store(x, simd::sums(acc));
  }
}

template <class Row>
void gather_logits_of(Index tile_rows, const ConstRow* rows, Index count, const RowShape& shape,
                      const float* queries, float* x, bool prefetches) {
  with_tile_rows(tile_rows, [&](auto height) {
    gather_logits_of_height<Row, height>(rows, count, shape, queries, x, prefetches);
  });
}

// Bytes [begin, end) of rows that are prefetched before they are used.
struct PrefetchBytes {
  Index begin = 0, end = 0;
};

// Query rows whose values are summed together: weight[i * step + r] of row i, factors[r], out
// `width` apart.
struct ValueRows {
  const float* weight;
  Index step;
  const float* factors;
  float* out;
};

// out[r][c...] = factor[r] * out[r][c...] + sum over rows i of weight[i * step + r] * v[i][c...],
// for Height rows of out and Packets packets of channels. Each gather_sum_keys rows add up by
// themselves first.
template <class Row, std::size_t Height, std::size_t Packets>
QUOKA_INLINE void gather_value_packets(const ConstRow* rows, Index count, Index c,
                                       const RowShape& shape, const ValueRows& to,
                                       const PrefetchBytes& ahead_bytes) {
  constexpr int lanes = simd::lanes;
  const float* weight = to.weight;
  for (Index i = 0, end; i < count; i = end) {
    const bool is_first = i == 0;
    end = std::min(i + tuning::gather_sum_keys, count);
    simd::Packet acc[Height][Packets];
    const auto take = [&](auto begins) QUOKA_INLINE_LAMBDA {
      const ConstRow ahead = rows[i + tuning::gather_prefetch_keys];
      if (ahead_bytes.begin < ahead_bytes.end)
        prefetch_bytes(ahead, ahead_bytes.begin, ahead_bytes.end);
      simd::Packet channels[Packets];
      load_packets<Row>(rows[i], c, shape, channels);
      simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
        const simd::Packet w = simd::broadcast(weight[r]);
        simd::unroll<Packets>([&](auto p) QUOKA_INLINE_LAMBDA {
          acc[r][p] = begins ? simd::mul(w, channels[p]) : simd::fma(w, channels[p], acc[r][p]);
        });
      });
      ++i, weight += to.step;
    };
    take(std::true_type{});
    while (i < end) take(std::false_type{});
    simd::unroll<Height, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
      float* const out = to.out + r * shape.dim + c + p * lanes;
      const simd::Packet factor = simd::broadcast(is_first ? to.factors[r] : 1.0f);
      simd::store(out, simd::fma(factor, simd::load(out), acc[r][p]));
    });
  }
}

// Some packets of channels, for all rows of out: the values that they are made of stay in L1.
template <class Row, std::size_t Packets, int Height>
void gather_value_columns(const ConstRow* rows, Index count, Index c, const RowShape& shape,
                          const TileWeights& weights, const float* factors, float* out) {
  PrefetchBytes ahead_bytes;
  if constexpr (Row::element_bytes > 0)
    ahead_bytes = {c * Row::element_bytes, (c + Index{Packets} * simd::lanes) * Row::element_bytes};
  else if (c == 0 && shape.channel_step == 0)
    ahead_bytes.end = Row::bytes(shape);
  for (Index row = 0; row < weights.rows; row += Height) {
    const ValueRows to{weights.first + row / Height * weights.tile_step, Height, factors + row,
                       out + row * shape.dim};
    const Index left = weights.rows - row;
    if (left >= Height)
      gather_value_packets<Row, Height, Packets>(rows, count, c, shape, to, ahead_bytes);
    else if (Height > 2 && left == 3)
      gather_value_packets<Row, Height == 4 ? 3 : 1, Packets>(rows, count, c, shape, to,
                                                              ahead_bytes);
    else if (Height > 2 && left == 2)
      gather_value_packets<Row, Height == 4 ? 2 : 1, Packets>(rows, count, c, shape, to,
                                                              ahead_bytes);
    else
      gather_value_packets<Row, 1, Packets>(rows, count, c, shape, to, ahead_bytes);
    ahead_bytes = {};
  }
}

template <class Row, int Height>
void gather_values_of_height(const ConstRow* rows, Index count, const RowShape& shape,
                             const TileWeights& weights, const float* factors, float* out) {
  constexpr int wide = tuning::token_value_packets / (Height > 2 ? 2 : 1), lanes = simd::lanes;
  Index c = 0;
  for (; c + wide * lanes <= shape.dim; c += wide * lanes)
    gather_value_columns<Row, wide, Height>(rows, count, c, shape, weights, factors, out);
  for (; c + wide / 2 * lanes <= shape.dim; c += wide / 2 * lanes)
    gather_value_columns<Row, wide / 2, Height>(rows, count, c, shape, weights, factors, out);
  for (; c < shape.dim; c += lanes)
    gather_value_columns<Row, 1, Height>(rows, count, c, shape, weights, factors, out);
}

template <class Row>
void gather_values_of(const ConstRow* rows, Index count, const RowShape& shape,
                      const TileWeights& weights, const float* factors, float* out) {
  with_tile_rows(weights.tile_rows, [&](auto height) {
    gather_values_of_height<Row, height>(rows, count, shape, weights, factors, out);
  });
}

// f(row type) of a format that does not bring its own.
template <class F>
void with_row_type(const Format& format, F&& f) {
  if (format.is_float)
    f(formats::FloatRow());
  else if (format.is_half)
    f(formats::ShortRow<formats::AsHalf>());
  else
    f(formats::ShortRow<formats::AsBfloat16>());
}

QUOKA_FUNC void gather_logits(const Format& format, Index tile_rows, const ConstRow* rows,
                              Index count, const RowShape& shape, const float* queries, float* x,
                              bool prefetches) {
  if (format.gather_logits != nullptr)
    return format.gather_logits(tile_rows, rows, count, shape, queries, x, prefetches);
  with_row_type(format, [&]<class Row>(Row) {
    gather_logits_of<Row>(tile_rows, rows, count, shape, queries, x, prefetches);
  });
}

QUOKA_FUNC void gather_values(const Format& format, const ConstRow* rows, Index count,
                              const RowShape& shape, const TileWeights& weights,
                              const float* factors, float* out) {
  if (format.gather_values != nullptr)
    return format.gather_values(rows, count, shape, weights, factors, out);
  with_row_type(format, [&]<class Row>(Row) {
    gather_values_of<Row>(rows, count, shape, weights, factors, out);
  });
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
