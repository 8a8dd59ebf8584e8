// One block of keys against one panel of query rows: logits, softmax, values.
//
//   logits    x[key][row]   = sum over channels of k[key][c] * q[c][row]
//   softmax   state.raise(max over keys of x); w = e^(x - max); state.sum += w
//   values    out[c][row]   = factor[row] * out[c][row] + sum over keys of v[key][c] * w[key][row]
//
// Query rows lie across the lanes, so the softmax runs down the keys without a horizontal step. A
// head's channels are broadcast one by one (any head_dim, no padding), and only the queries are
// transposed. Sums run over a block, then over the blocks: their rounding error grows with the
// number of blocks, not of keys. Per block and panel: 2 * keys * panel_rows * (dim + v_dim) FLOPs,
// and about 17 vector operations for each packet of weights. Reads keys * (dim + v_dim) packed
// floats from L2; reads and writes panel_rows * v_dim accumulators.
//
// `packets` is the number of packets that are computed. If the last panel of a head has rows in its
// first packet only, that is 1 and takes half the time. Numbers lie where they would in a whole
// panel, except float's queries.
#pragma once

#include <quoka/kernels/kernels.hpp>

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/logit_kernels.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/register_tile.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <algorithm>
#include <cassert>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Softmax states of a panel's rows, one per lane: a plain struct for drivers, packets of it for
// kernels.
struct PanelState {
  alignas(64) float max[most_panel_rows];
  alignas(64) float sum[most_panel_rows];
};

// The state of rows that have seen nothing but their sinks; -infinity: none.
QUOKA_FUNC void begin_rows(const float* sinks, PanelState& state);

#if QUOKA_DEFINES_KERNELS

// Packet j of the rows.
QUOKA_INLINE PacketState packet_of(const PanelState& state, int j) {
  return {simd::load(state.max + j * simd::lanes), simd::load(state.sum + j * simd::lanes)};
}

QUOKA_INLINE void set_packet(PanelState& state, int j, const PacketState& x) {
  simd::store(state.max + j * simd::lanes, x.max), simd::store(state.sum + j * simd::lanes, x.sum);
}

using PanelPackets = simd::Packet[tuning::tile_packets];

// SoftmaxState::raise() of packet j.
QUOKA_INLINE simd::Packet raise(PanelState& state, int j, const simd::Packet& logit_max) {
  PacketState x = packet_of(state, j);
  const simd::Packet factor = x.raise(logit_max);
  set_packet(state, j, x);
  return factor;
}
QUOKA_INLINE void add_to_sum(PanelState& state, int j, const simd::Packet& weights) {
  float* const sum = state.sum + j * simd::lanes;
  simd::store(sum, simd::add(simd::load(sum), weights));
}

QUOKA_FUNC void begin_rows(const float* sinks, PanelState& state) {
  for (int j = 0; j < tuning::tile_packets; ++j) {
    PacketState x = PacketState::identity();
    x.update(simd::load(sinks + j * simd::lanes));
    set_packet(state, j, x);
  }
}

// f(packets), a constant: the packets that hold `rows` rows of a panel.
template <class F>
QUOKA_INLINE void with_packets(Index rows, F&& f) {
  if (rows <= simd::lanes)
    f(simd::Constant<1>{});
  else
    f(simd::Constant<tuning::tile_packets>{});
}

// The products of a tile, its first key `key` of a block's `keys`, to x; `top` is raised to their
// maximum. A last, partial tile is left out of it: its zero keys must not raise a maximum, and the
// caller looks again in that case.
template <int packets>
QUOKA_INLINE void store_logits(const simd::Packet (&acc)[tuning::tile_rows][packets], Index key,
                               Index keys, float* x, PanelPackets& top) {
  const bool whole = key + tuning::tile_rows <= keys;
  simd::unroll<tuning::tile_rows, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
    simd::store(x + (key + i) * tuning::panel_rows + j * simd::lanes, acc[i][j]);
    if (whole) top[j] = simd::max(top[j], acc[i][j]);
  });
}

// x for `keys` keys, and their maximum, as store_logits() has it. add(acc, key) adds the product of
// the tile that begins at `key`.
template <int packets = tuning::tile_packets, class Add>
QUOKA_INLINE void block_logits(Index keys, float* x, PanelPackets& top, Add&& add) {
  for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
  for (Index key = 0; key < keys; key += tuning::tile_rows) {
    simd::Packet acc[tuning::tile_rows][packets];
    clear(acc);
    add(acc, key);
    store_logits<packets>(acc, key, keys, x, top);
  }
}

// The same in float. queries [dim][packets * lanes].
template <int packets = tuning::tile_packets>
void block_logits(const float* tiles, const float* queries, Index dim, Index keys, float* x,
                  PanelPackets& top) {
  for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
  for (Index key = 0; key < keys; key += tuning::tile_rows, tiles += key_tile_size(dim)) {
    simd::Packet acc[tuning::tile_rows][packets];
    clear(acc);
    add_key_tile(acc, tiles, queries, dim, [] {});
    store_logits<packets>(acc, key, keys, x, top);
  }
}

template <int packets = tuning::tile_packets>
void block_maximum(const float* x, Index keys, PanelPackets& top) {
  simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
    top[j] = simd::broadcast(-simd::infinity);
    for (Index key = 0; key < keys; ++key)
      top[j] = simd::max(top[j], simd::load(x + key * tuning::panel_rows + j * simd::lanes));
  });
}

// Logits to weights; their sum over the block, in the order of the keys, goes to state.
template <int packets = tuning::tile_packets>
void block_weights(const float* x, Index keys, PanelState& state, float* weights) {
  simd::Packet reference[packets], sum[packets];
  simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
    reference[j] = packet_of(state, j).reference();
    sum[j] = simd::zero();
  });
  for (Index at = 0; at < keys * tuning::panel_rows; at += tuning::panel_rows) {
    simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
      const Index i = at + j * simd::lanes;
      const simd::Packet w = simd::exp(simd::sub(simd::load(x + i), reference[j]));
      sum[j] = simd::add(sum[j], w);
      simd::store(weights + i, w);
    });
  }
  simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA { add_to_sum(state, j, sum[j]); });
}

// `Channels` rows of the accumulator panel.
template <std::size_t Channels, int packets>
[[gnu::noinline]] void value_tile(const float* values, Index stride, const float* weights,
                                  Index keys, const PanelPackets& factor, float* out) {
  simd::Packet acc[Channels][packets];
  clear(acc);
  rank1_updates<Channels, packets, 1, tuning::tile_packets>(acc, values, stride, weights, keys);
  simd::unroll<Channels, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
    float* at = out + i * tuning::panel_rows + j * simd::lanes;
    simd::store(at, simd::fma(factor[j], simd::load(at), acc[i][j]));
  });
}

template <int packets>
void block_values(const float* values, Index dim, const float* weights, Index keys,
                  const PanelPackets& factor, float* out) {
  assert(0 < dim && 0 <= keys && keys <= tuning::block_keys);
  for_value_tiles(dim, [&](auto rows, Index c) QUOKA_INLINE_LAMBDA {
    value_tile<rows, packets>(values + c, value_stride(dim), weights, keys, factor,
                              out + c * tuning::panel_rows);
  });
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
