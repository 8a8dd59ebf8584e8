// The register tile: the one inner loop of the library.
//
// acc[i][j] += sum over s of a[i, s] * b[s, j], for i < Rows broadcast elements and j < Packets
// packets: a chain of rank-1 updates held in registers. Both products of attention and the scoring
// of keys are this loop; they differ only in where `a` lies:
//   logits  [keys x query rows]:      a = packed keys,   s = channels, b = transposed queries
//   outputs [channels x query rows]:  a = value rows,    s = keys,     b = softmax weights
// Per step: Rows + Packets loads, Rows * Packets multiply-adds. Each acc element is one chain in
// the order of s, so its bits do not depend on Rows, Packets or how work was cut. Elements are
// float, or pairs of bfloat16 whose products add up in floats (bfloat16_units.hpp).
#pragma once

#include <quoka/simd/simd.hpp>
#include <quoka/simd/tuning.hpp>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// From nothing.
template <std::size_t Rows, std::size_t Packets, class P>
QUOKA_INLINE void clear(P (&acc)[Rows][Packets]) {
  simd::unroll<Rows, Packets>([&](auto i, auto j)
                                  QUOKA_INLINE_LAMBDA { acc[i][j] = simd::zero(); });
}

// `a_row` elements lie between a[i] and a[i + 1], `a_step` between steps; b is packet-aligned, and
// a step of it b_packets wide, of which the first ones are multiplied.
template <std::size_t Rows, std::size_t Packets, int a_row, int b_packets = int{Packets}, class P,
          class A, class B>
QUOKA_INLINE void rank1_updates(P (&acc)[Rows][Packets], const A* a, Index a_step, const B* b,
                                Index steps) {
  using simd::fma;  // and that of sums which are declared later
  for (Index s = 0; s < steps; ++s) {
    P column[Packets];
    simd::unroll<Packets>(
        [&](auto j) QUOKA_INLINE_LAMBDA { column[j] = simd::load<P>(b + j * simd::lanes); });
    simd::unroll<Rows>([&](auto i) QUOKA_INLINE_LAMBDA {
      const P x = simd::broadcast<P>(a[i * a_row]);
      simd::unroll<Packets>([&](auto j)
                                QUOKA_INLINE_LAMBDA { acc[i][j] = fma(x, column[j], acc[i][j]); });
    });
    a += a_step;
    b += b_packets * simd::lanes;
  }
}

// One packed tile of keys, [slab][tile_rows][slab_channels], times a panel of transposed queries,
// [channel][Packets * lanes]: acc[key][packet of rows] += it. between() is called once per slab.
template <std::size_t Packets, class Between>
QUOKA_INLINE void add_key_tile(simd::Packet (&acc)[tuning::tile_rows][Packets], const float* tile,
                               const float* panel, Index dim, Between&& between) {
  constexpr int rows = tuning::tile_rows, channels = tuning::slab_channels;
  Index left = dim;
  for (; left >= channels; left -= channels) {
    between();
    rank1_updates<rows, Packets, channels>(acc, tile, 1, panel, channels);
    tile += channels * rows;
    panel += channels * int{Packets} * simd::lanes;
  }
  if (left > 0) rank1_updates<rows, Packets, channels>(acc, tile, 1, panel, left);
}

// tile(height, c) for all channels, in tiles of a few heights, each of which is compiled once.
// Tiles of tile_rows come first, as many as leave a multiple of the next height: 128 = 8 x 14 + 2 x
// 8, not 9 x 14 + 2.
template <class Tile>
QUOKA_INLINE void for_value_tiles(Index dim, Tile&& tile) {
  constexpr int tall = tuning::tile_rows, next = tall > 8 ? 8 : 4;
  Index most = dim / tall, c = 0;
  for (Index fewer = 1; fewer < next && fewer <= most && (dim - most * tall) % next != 0; ++fewer)
    if ((dim - (dim / tall - fewer) * tall) % next == 0) most = dim / tall - fewer;
  for (Index t = 0; t < most; ++t, c += tall) tile(std::integral_constant<int, tall>{}, c);
  for (; dim - c >= next; c += next) tile(std::integral_constant<int, next>{}, c);
  if constexpr (next > 4)
    if (dim - c >= 4) tile(std::integral_constant<int, 4>{}, c), c += 4;
  if (dim - c >= 2) tile(std::integral_constant<int, 2>{}, c), c += 2;
  if (dim - c >= 1) tile(std::integral_constant<int, 1>{}, c);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_PACKET_ARGUMENTS_END
