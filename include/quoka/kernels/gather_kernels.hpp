// One query's rows against keys and values that lie anywhere, by their addresses: as token_kernels.hpp, several keys at
// a time.
#pragma once

#include <quoka/kernels/token_kernels.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Logits of keys as many at a time as fill a Square: each packet of queries is loaded once for all of them. Every logit
// is that of token_logits() to the last bit. rows[count, count + gather_row_padding) are asked for and not read: what
// is read next stands there.
template <class Row, int Height>
void gather_logits_of_height(const ConstRow* rows, Index count, const RowShape& shape,
                             const float* queries, float* x, bool asks) {
  const Index width = shape.dim;
  const Index bytes = asks && shape.channel_step == 0 ? Row::bytes(shape) : 0;
  constexpr int lanes = simd::lanes, together = lanes / Height;
  for (Index i = 0; i < count; i += together, x += lanes) {
    simd::Square acc;
    ConstRow key[together];
    simd::unroll<together>([&](auto j) QUOKA_INLINE_LAMBDA {
      key[j] = rows[std::min<Index>(i + j, count - 1)];
      const ConstRow ahead = rows[i + j + tuning::gather_prefetch_keys];
      if (bytes > 0) ask_for(ahead, 0, bytes);
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
    if constexpr (Grouped<Row>) {
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

// A Format's gather_logits.
template <class Row>
void gather_logits(Index tile_rows, const ConstRow* rows, Index count, const RowShape& shape,
                   const float* queries, float* x, bool asks) {
  if (tile_rows == 1) return gather_logits_of_height<Row, 1>(rows, count, shape, queries, x, asks);
  if constexpr (simd::lanes >= 4) {
    if (tile_rows == 2)
      return gather_logits_of_height<Row, 2>(rows, count, shape, queries, x, asks);
    gather_logits_of_height<Row, 4>(rows, count, shape, queries, x, asks);
  }
}

// Bytes [begin, end) of rows that are asked for before they are used.
struct AskedBytes {
  Index begin = 0, end = 0;
};

// Query rows whose values are summed together: weight[i * step + r] of row i, factors[r], out `width` apart.
struct ValueRows {
  const float* weight;
  Index step;
  const float* factors;
  float* out;
};

// out[r][c...] = factor[r] * out[r][c...] + sum over rows i of weight[i * step + r] * v[i][c...], for Height rows of
// out and Packets packets of channels.
template <class Row, std::size_t Height, std::size_t Packets>
QUOKA_INLINE void gather_value_packets(const ConstRow* rows, Index count, Index c,
                                       const RowShape& shape, const ValueRows& to,
                                       const AskedBytes& asked) {
  constexpr int lanes = simd::lanes;
  const float* weight = to.weight;
  simd::Packet acc[Height][Packets];
  simd::unroll<Height, Packets>([&](auto r, auto p)
                                    QUOKA_INLINE_LAMBDA { acc[r][p] = simd::zero(); });
  for (Index i = 0; i < count; ++i, weight += to.step) {
    const ConstRow ahead = rows[i + tuning::gather_prefetch_keys];
    if (asked.begin < asked.end) ask_for(ahead, asked.begin, asked.end);
    simd::Packet channels[Packets];
    load_packets<Row>(rows[i], c, shape, channels);
    simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
      const simd::Packet w = simd::broadcast(weight[r]);
      simd::unroll<Packets>(
          [&](auto p) QUOKA_INLINE_LAMBDA { acc[r][p] = simd::fma(w, channels[p], acc[r][p]); });
    });
  }
  simd::unroll<Height, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    float* const out = to.out + r * shape.dim + c + p * lanes;
    simd::store(out, simd::fma(simd::broadcast(to.factors[r]), simd::load(out), acc[r][p]));
  });
}

// Some packets of channels, for all rows of out: what they are made of stays in L1 for all of them.
template <class Row, std::size_t Packets, int Height>
void gather_value_columns(const ConstRow* rows, Index count, Index c, const RowShape& shape,
                          const TileWeights& weights, const float* factors, float* out) {
  AskedBytes asked;
  if constexpr (element_bytes_of<Row>() > 0)
    asked = {c * Row::element_bytes, (c + Index{Packets} * simd::lanes) * Row::element_bytes};
  else if (c == 0 && shape.channel_step == 0)
    asked.end = Row::bytes(shape);
  for (Index row = 0; row < weights.rows; row += Height) {
    const ValueRows to{weights.first + row / Height * weights.tile_step, Height, factors + row,
                       out + row * shape.dim};
    const Index left = weights.rows - row;
    if (left >= Height)
      gather_value_packets<Row, Height, Packets>(rows, count, c, shape, to, asked);
    else if (Height > 2 && left == 3)
      gather_value_packets<Row, Height == 4 ? 3 : 1, Packets>(rows, count, c, shape, to, asked);
    else if (Height > 2 && left == 2)
      gather_value_packets<Row, Height == 4 ? 2 : 1, Packets>(rows, count, c, shape, to, asked);
    else
      gather_value_packets<Row, 1, Packets>(rows, count, c, shape, to, asked);
    asked = {};
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

// A Format's gather_values.
template <class Row>
void gather_values(const ConstRow* rows, Index count, const RowShape& shape,
                   const TileWeights& weights, const float* factors, float* out) {
  if (weights.tile_rows == 1)
    return gather_values_of_height<Row, 1>(rows, count, shape, weights, factors, out);
  if constexpr (simd::lanes >= 4) {
    if (weights.tile_rows == 2)
      return gather_values_of_height<Row, 2>(rows, count, shape, weights, factors, out);
    gather_values_of_height<Row, 4>(rows, count, shape, weights, factors, out);
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
