// One block of keys against one panel of query rows: logits, softmax, values.
//
//   logits    x[key][row]   = sum over channels of k[key][c] * q[c][row]
//   softmax   state.raise(max over keys of x); w = e^(x - max); state.sum += w
//   values    out[c][row]   = factor[row] * out[c][row] + sum over keys of v[key][c] * w[key][row]
//
// Query rows lie across the lanes, so the softmax runs down the keys without a horizontal step, a
// head's channels are broadcast one by one (any head_dim, no padding), and nothing is transposed
// but the queries. Sums run over a block, then over the blocks: their rounding error grows with the
// number of blocks, not of keys. Per block and panel: 2 * keys * panel_rows * (dim + v_dim) FLOPs,
// and about 17 vector operations for each packet of weights; reads keys * (dim + v_dim) packed
// floats from L2 and reads and writes panel_rows * v_dim accumulators.
//
// If the last panel of a head has rows in its first packet alone, only that packet is computed, in half the time:
// `packets` is the number of packets that are computed. Numbers lie where they would in a whole panel, except float's
// queries.
#pragma once

#include <quoka/rows/logit_options.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/register_tile.hpp>
#include <quoka/kernels/softmax_state.hpp>

#include <algorithm>
#include <cassert>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// x = cap * tanh(x / cap) for `keys` times `count` logits, whole packets, `step` apart.
[[gnu::noinline]] inline void cap_logits(float* x, Index keys, Index count, Index step, float cap) {
  const simd::Packet inverse = simd::broadcast(1.0f / cap), most = simd::broadcast(cap);
  for (Index at = 0; at < keys * step; at += step)
    for (Index i = at; i < at + count; i += simd::lanes)
      simd::store(x + i, simd::mul(simd::tanh(simd::mul(simd::load(x + i), inverse)), most));
}

// From a product q . k to a logit, as far as it is the same for every row and key of a call:
//
//   q' = scale * q        before any product, where queries are packed
//   x  = q' . k
//   x' = softcap * tanh(x / softcap)
//
// The struct travels whole, from attention's options to the loops over packed keys: an option that
// changes a logit by itself is a member and a line of apply(), and kernels do not change. Biases of
// a row and a key are added after it (attention/logits.hpp), and then keys are hidden
// (VisibleKeys of panel_arithmetic.hpp).
struct LogitRule {
  float scale = 1.0f;    // of the queries
  float softcap = 0.0f;  // cap on |logit|; 0: none

  // The rule of attention's options, for heads of this many channels.
  static LogitRule from(const LogitOptions& options, Index head_dim) {
    return {options.scale_of(head_dim), options.softcap};
  }
  // Does apply() change anything? Then a maximum of the products is not the maximum of the logits.
  bool changes() const { return softcap != 0.0f; }
  // To `count` logits, whole packets, in place.
  void apply(float* x, Index count) const { apply(x, 1, count, count); }
  // To `count` logits of each of `keys`, `step` apart.
  void apply(float* x, Index keys, Index count, Index step) const {
    if (softcap != 0.0f) cap_logits(x, keys, count, step, softcap);
  }
};

using PanelState = PacketState[tuning::tile_packets];
using PanelPackets = simd::Packet[tuning::tile_packets];

// f(packets), a constant: the packets that hold `rows` rows of a panel.
template <class F>
QUOKA_INLINE void with_packets(Index rows, F&& f) {
  if (rows <= simd::lanes)
    f(simd::Constant<1>{});
  else
    f(simd::Constant<tuning::tile_packets>{});
}

// Keys [begin, end).
struct KeyRange {
  Index begin, end;

  Index count() const { return end - begin; }
  // The keys in both ranges; if there are none, count() is 0 or negative.
  KeyRange common(const KeyRange& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

// Which keys [first, end) of the block each lane sees, as small exact floats.
struct PanelMask {
  alignas(64) float first[tuning::panel_rows];
  alignas(64) float end[tuning::panel_rows];
};

// The products of a tile, its first key `key` of a block's `keys`, to x; `top` is raised to their maximum. A last,
// partial tile is left out of it: its zero keys must not raise a maximum, and the caller looks again in that case.
template <int packets>
QUOKA_INLINE void store_logits(const simd::Packet (&acc)[tuning::tile_rows][packets], Index key,
                               Index keys, float* x, PanelPackets& top) {
  const bool whole = key + tuning::tile_rows <= keys;
  simd::unroll<tuning::tile_rows, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
    simd::store(x + (key + i) * tuning::panel_rows + j * simd::lanes, acc[i][j]);
    if (whole) top[j] = simd::max(top[j], acc[i][j]);
  });
}

// x for `keys` keys, and their maximum, as store_logits() has it. add(acc, key) adds the product of the tile that
// begins at `key`.
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

// Logits of `keys` keys from `first` of the block on, of the panel's first `lanes` rows: those outside a row's keys
// become -inf.
[[gnu::noinline]] inline void mask_logits(float* x, Index keys, Index lanes, const PanelMask& mask,
                                          Index first) {
  const simd::Packet hidden = simd::broadcast(-simd::infinity);
  for (Index key = 0; key < keys; ++key) {
    const simd::Packet here = simd::broadcast(static_cast<float>(first + key));
    for (Index lane = 0; lane < lanes; lane += simd::lanes) {
      float* at = x + key * tuning::panel_rows + lane;
      const simd::Packet before_end =
          simd::select_less(here, simd::load(mask.end + lane), simd::load(at), hidden);
      simd::store(at, simd::select_less(here, simd::load(mask.first + lane), hidden, before_end));
    }
  }
}

// Writes which of these keys each of `rows` rows sees, if those from ends[row] on are hidden. Returns whether any is
// hidden.
inline bool mask_after(const Index* ends, Index rows, const KeyRange& keys, PanelMask& mask) {
  bool any = false;
  for (Index i = 0; i < tuning::panel_rows; ++i) {
    const Index end = ends[std::min(i, rows - 1)];
    mask.first[i] = 0.0f;
    mask.end[i] = static_cast<float>(std::clamp<Index>(end - keys.begin, 0, keys.count()));
    any = any || end < keys.end;
  }
  return any;
}

// Logits of the panel's first `lanes` rows plus their biases; -inf where a bias is -inf, whatever the logit.
[[gnu::noinline]] inline void add_biases(float* x, Index keys, Index lanes, const float* bias) {
  const simd::Packet hidden = simd::broadcast(-simd::infinity);
  const simd::Packet least = simd::broadcast(std::numeric_limits<float>::lowest());
  for (Index at = 0; at < keys * tuning::panel_rows; at += tuning::panel_rows)
    for (Index i = at; i < at + lanes; i += simd::lanes) {
      const simd::Packet more = simd::load(bias + i);
      simd::store(x + i,
                  simd::select_less(more, least, hidden, simd::add(simd::load(x + i), more)));
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
    reference[j] = state[j].reference();
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
  simd::unroll<packets>(
      [&](auto j) QUOKA_INLINE_LAMBDA { state[j].sum = simd::add(state[j].sum, sum[j]); });
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

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
