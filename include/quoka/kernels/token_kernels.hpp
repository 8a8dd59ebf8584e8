// Few query rows against keys and values: kernels with channels across the lanes, for work that is
// bound by memory. Many rows are the business of register_tile.hpp.
#pragma once

#include <quoka/kernels/tuning.hpp>
#include <quoka/views/row_finder.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

static_assert(simd::lanes == 1 || simd::lanes % 4 == 0, "a tile of 4 rows fills whole packets");

// Query rows side by side in a tile: 1, 2 or 4, so that whole keys fill the lanes.
inline Index token_tile_rows(Index group) {
  const Index enough = group > 2 ? 4 : group;
  return std::min<Index>(enough, simd::lanes);
}

// Asks for every line of the next row of a walk.
QUOKA_INLINE void ask_next(RowWalk& walk) {
  const ConstRow row = walk.next();
  if (row == nullptr) return;
  for (Index at = 0; at < walk.row_bytes(); at += 64) simd::prefetch(row + at);
}

// Logits of `count` keys of `width` channels, whole packets, against a tile of Height queries:
// x[key][row], count rounded up to whole packets. Keys are read one after the other; two in turns
// would halve the loads of queries, but lose the hardware's prefetcher and half of the bandwidth.
// One row of `ask`, if given, is asked for per key, before the key is used.
template <class Row, int Height>
void token_logits_of_height(const RowFinder& keys, Index count, Index width, const float* queries,
                            float* x, RowWalk* ask) {
  constexpr int lanes = simd::lanes, together = lanes / Height;
  for (Index i = 0; i < count; i += together, x += lanes) {
    simd::Square acc;
    simd::unroll<together>([&](auto j) QUOKA_INLINE_LAMBDA {
      simd::unroll<Height>([&](auto r)
                               QUOKA_INLINE_LAMBDA { acc.packet[j * Height + r] = simd::zero(); });
      const ConstRow key = keys[std::min(i + j, count - 1)];
      if (ask != nullptr) ask_next(*ask);
      for (Index c = 0; c < width; c += lanes) {
        const simd::Packet channels = Row::load(key, c);
        simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
          simd::Packet& sum = acc.packet[j * Height + r];
          sum = simd::fma(channels, simd::load(queries + r * width + c), sum);
        });
      }
    });
    simd::store(x, simd::sums(acc));
  }
}

// The same for a height known at run time: a Format's token_logits.
template <class Row>
void token_logits(Index tile_rows, const RowFinder& keys, Index count, Index width,
                  const float* queries, float* x, RowWalk* ask) {
  if (tile_rows == 1) return token_logits_of_height<Row, 1>(keys, count, width, queries, x, ask);
  if constexpr (simd::lanes >= 4) {
    if (tile_rows == 2) return token_logits_of_height<Row, 2>(keys, count, width, queries, x, ask);
    token_logits_of_height<Row, 4>(keys, count, width, queries, x, ask);
  }
}

// out[r][c...] += sum over keys of weight[r][key * step] * v[key][c...], for Height rows of out,
// `width` apart, and Packets packets of channels.
template <class Row, std::size_t Height, std::size_t Packets>
QUOKA_INLINE void token_value_packets(const RowFinder& v, Index c, Index count,
                                      const float* const (&weight)[2], Index step, float* out,
                                      Index width) {
  constexpr int lanes = simd::lanes;
  simd::Packet acc[Height][Packets];
  simd::unroll<Height, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    acc[r][p] = simd::load(out + r * width + c + p * lanes);
  });
  for (Index i = 0; i < count; ++i) {
    const ConstRow value = v[i];
    simd::Packet channels[Packets];
    simd::unroll<Packets>(
        [&](auto p) QUOKA_INLINE_LAMBDA { channels[p] = Row::load(value, c + p * lanes); });
    simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
      const simd::Packet w = simd::broadcast(weight[r][i * step]);
      simd::unroll<Packets>(
          [&](auto p) QUOKA_INLINE_LAMBDA { acc[r][p] = simd::fma(w, channels[p], acc[r][p]); });
    });
  }
  simd::unroll<Height, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    simd::store(out + r * width + c + p * lanes, acc[r][p]);
  });
}

template <class Row, int Height>
void token_values_of_height(const RowFinder& v, Index count, Index width,
                            const float* const (&weight)[2], Index step, float* out) {
  constexpr int wide = tuning::token_value_packets;
  Index c = 0;
  for (; c + wide * simd::lanes <= width; c += wide * simd::lanes)
    token_value_packets<Row, Height, wide>(v, c, count, weight, step, out, width);
  for (; c + wide / 2 * simd::lanes <= width; c += wide / 2 * simd::lanes)
    token_value_packets<Row, Height, wide / 2>(v, c, count, weight, step, out, width);
  for (; c < width; c += simd::lanes)
    token_value_packets<Row, Height, 1>(v, c, count, weight, step, out, width);
}

// All `width` channels, for one row of out or two: a Format's token_values.
template <class Row>
void token_values(const RowFinder& v, Index count, Index width, const float* const (&weight)[2],
                  Index step, bool two_rows, float* out) {
  if (two_rows)
    token_values_of_height<Row, 2>(v, count, width, weight, step, out);
  else
    token_values_of_height<Row, 1>(v, count, width, weight, step, out);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
