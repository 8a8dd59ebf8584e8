// One block of keys against one panel of query rows: logits, softmax, values.
//
//   logits    x[key][row]   = sum over channels of k[key][c] * q[c][row]
//   softmax   state.raise(max over keys of x); w = 2^(x - max); state.sum += w
//   values    out[c][row]   = factor[row] * out[c][row] + sum over keys of v[key][c] * w[key][row]
//
// Query rows lie across the lanes, so the softmax runs down the keys without a horizontal step, a
// head's channels are broadcast one by one (any head_dim, no padding), and nothing is transposed
// but the queries. Sums run over a block, then over the blocks: their rounding error grows with the
// number of blocks, not of keys. Per block and panel: 2 * keys * panel_rows * (dim + v_dim) FLOPs,
// and about 17 vector operations for each packet of weights; reads keys * (dim + v_dim) packed
// floats from L2 and reads and writes panel_rows * v_dim accumulators.
#pragma once

#include <quoka/core/packing.hpp>
#include <quoka/core/register_tile.hpp>
#include <quoka/core/softmax_state.hpp>

#include <cassert>

namespace quoka::inline QUOKA_ABI {
namespace detail {

using PanelState = PacketState[tuning::tile_packets];
using PanelPackets = simd::Packet[tuning::tile_packets];

// Which keys [first, end) of the block each lane sees, as small exact floats.
struct PanelMask {
  alignas(64) float first[tuning::panel_rows];
  alignas(64) float end[tuning::panel_rows];
};

// x for `keys` keys; returns in `top` the maximum over whole tiles. A last, partial tile is left
// out of it: its zero keys must not raise a maximum, and the caller looks again in that case.
// multiply(acc, key) is the product of the tile that begins at `key`.
template <class Multiply>
QUOKA_INLINE void block_logits(Index keys, float* x, PanelPackets& top, Multiply&& multiply) {
  constexpr int rows = tuning::tile_rows, packets = tuning::tile_packets;
  for (Index key = 0; key < keys; key += rows) {
    simd::Packet acc[rows][packets];
    multiply(acc, key);
    const bool whole = key + rows <= keys;
    simd::unroll<rows, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      simd::store(x + (key + i) * tuning::panel_rows + j * simd::lanes, acc[i][j]);
      if (whole) top[j] = simd::max(top[j], acc[i][j]);
    });
  }
}

inline void block_logits(const float* tiles, const float* queries, Index dim, Index keys, float* x,
                         PanelPackets& top) {
  block_logits(keys, x, top, [&](auto& acc, Index) QUOKA_INLINE_LAMBDA {
    multiply_key_tile(acc, tiles, queries, dim, [] {});
    tiles += key_tile_size(dim);
  });
}

// x = cap * tanh(x / cap) in log2 units, for `count` logits, whole packets: the queries were scaled
// by 1 / cap, `cap_log2` brings it back.
inline void cap_logits(float* x, Index count, float cap_log2) {
  for (Index i = 0; i < count; i += simd::lanes)
    simd::store(x + i, simd::mul(simd::tanh(simd::load(x + i)), simd::broadcast(cap_log2)));
}

// Logits outside a lane's keys become -inf.
inline void mask_logits(float* x, Index keys, const PanelMask& mask) {
  const simd::Packet hidden = simd::broadcast(-simd::infinity);
  for (Index key = 0; key < keys; ++key) {
    const simd::Packet here = simd::broadcast(static_cast<float>(key));
    for (Index lane = 0; lane < tuning::panel_rows; lane += simd::lanes) {
      float* at = x + key * tuning::panel_rows + lane;
      const simd::Packet before_end =
          simd::select_less(here, simd::load(mask.end + lane), simd::load(at), hidden);
      simd::store(at, simd::select_less(here, simd::load(mask.first + lane), hidden, before_end));
    }
  }
}

inline void block_maximum(const float* x, Index keys, PanelPackets& top) {
  simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
    top[j] = simd::broadcast(-simd::infinity);
    for (Index key = 0; key < keys; ++key)
      top[j] = simd::max(top[j], simd::load(x + key * tuning::panel_rows + j * simd::lanes));
  });
}

// Logits to weights, in place; their sum over the block, in the order of the keys, goes to state.
inline void block_weights(float* x, Index keys, PanelState& state) {
  simd::Packet reference[tuning::tile_packets], sum[tuning::tile_packets];
  simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
    reference[j] = state[j].reference();
    sum[j] = simd::zero();
  });
  for (Index key = 0; key < keys; ++key, x += tuning::panel_rows) {
    simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet w = simd::exp2(simd::sub(simd::load(x + j * simd::lanes), reference[j]));
      sum[j] = simd::add(sum[j], w);
      simd::store(x + j * simd::lanes, w);
    });
  }
  simd::unroll<tuning::tile_packets>(
      [&](auto j) QUOKA_INLINE_LAMBDA { state[j].sum = simd::add(state[j].sum, sum[j]); });
}

// `Channels` rows of the accumulator panel.
template <int Channels>
void value_tile(const float* values, Index stride, const float* weights, Index keys,
                const PanelPackets& factor, float* out) {
  constexpr int packets = tuning::tile_packets;
  simd::Packet acc[Channels][packets];
  simd::unroll<Channels, packets>([&](auto i, auto j)
                                      QUOKA_INLINE_LAMBDA { acc[i][j] = simd::zero(); });
  rank1_updates<Channels, packets, 1>(acc, values, stride, weights, keys);
  simd::unroll<Channels, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
    float* at = out + i * tuning::panel_rows + j * simd::lanes;
    simd::store(at, simd::fma(factor[j], simd::load(at), acc[i][j]));
  });
}

// f(std::integral_constant<int, channels>), for a count known at run time, 1 <= channels <=
// tile_rows.
template <int Channels = tuning::tile_rows, class F>
QUOKA_INLINE void with_height(Index channels, F&& f) {
  if (channels == Channels) return f(std::integral_constant<int, Channels>{});
  if constexpr (Channels > 1) with_height<Channels - 1>(channels, f);
}

// tile(height, c) for all channels, in tiles of nearly equal height: 128 = 8 x 13 + 2 x 12 rather
// than 9 x 14 + 2.
template <class Tile>
QUOKA_INLINE void for_value_tiles(Index dim, Tile&& tile) {
  const Index tiles = ceil_div(dim, tuning::tile_rows);
  const Index height = dim / tiles, taller = dim % tiles;
  for (Index t = 0, c = 0; t < tiles; ++t) {
    const Index channels = height + (t < taller ? 1 : 0);
    with_height(channels, [&](auto rows) QUOKA_INLINE_LAMBDA { tile(rows, c); });
    c += channels;
  }
}

inline void block_values(const float* values, Index dim, const float* weights, Index keys,
                         const PanelPackets& factor, float* out) {
  assert(0 < dim && 0 <= keys && keys <= tuning::block_keys);
  for_value_tiles(dim, [&](auto rows, Index c) QUOKA_INLINE_LAMBDA {
    value_tile<rows>(values + c, value_stride(dim), weights, keys, factor,
                     out + c * tuning::panel_rows);
  });
}

// What head_attention.hpp does with a panel and a block, in float throughout. fixed_panels.hpp has
// the same in 16-bit fixed point.
struct SinglePanels {
  static constexpr bool in_float = true;
  using Packed = float;          // an element of packed keys and values
  using Lane = float;            // an element of queries and weights
  using Factors = PanelPackets;  // take the rows of the panel to their new maximum
  static constexpr Index steps(Index dim) { return dim; }  // of a product over channels

  // What packing a block of keys and values found out.
  struct Block {
    bool finite_values;
  };

  template <class T>
  static Block pack(const T* const* k, const T* const* v, Index count, Index dim, Index v_dim,
                    float* keys, float* values) {
    pack_keys(k, count, dim, keys);
    return {pack_values(v, count, v_dim, values)};
  }
  template <class T>
  static void pack_rows(const T* const* rows, Index count, Index dim, float scale, float* panel,
                        float*) {
    pack_queries<T, tuning::tile_packets>(rows, count, dim, scale, panel);
  }
  static void logits(const Block&, const float* tiles, const float* panel, const float*, Index dim,
                     Index keys, float* x, PanelPackets& top) {
    block_logits(tiles, panel, dim, keys, x, top);
  }
  static const float* softmax(float* x, Index keys, const PanelPackets& top, PanelState& state,
                              Factors& factors, float*) {
    for (int j = 0; j < tuning::tile_packets; ++j) factors[j] = state[j].raise(top[j]);
    block_weights(x, keys, state);
    return x;
  }
  static void values(const Block&, const float* values, Index dim, const float* weights, Index keys,
                     const Factors& factor, float* out) {
    block_values(values, dim, weights, keys, factor, out);
  }
};

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
