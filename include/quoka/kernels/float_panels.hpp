// A block of keys against a panel of query rows in float throughout: logits, softmax, values.
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

#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/register_tile.hpp>

#include <algorithm>
#include <cassert>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// x for `keys` keys, and their maximum in whole tiles: zero keys of a last, partial tile must not
// raise a maximum, and the caller looks again in that case. queries [dim][packets * lanes].
template <int packets = tuning::tile_packets>
void block_logits(const float* tiles, const float* queries, Index dim, Index keys, float* x,
                  PanelPackets& top) {
  for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
  for (Index key = 0; key < keys; key += tuning::tile_rows, tiles += key_tile_size(dim)) {
    simd::Packet acc[tuning::tile_rows][packets];
    clear(acc);
    add_key_tile(acc, tiles, queries, dim, [] {});
    const bool whole = key + tuning::tile_rows <= keys;
    simd::unroll<tuning::tile_rows, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      simd::store(x + (key + i) * tuning::panel_rows + j * simd::lanes, acc[i][j]);
      if (whole) top[j] = simd::max(top[j], acc[i][j]);
    });
  }
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

class FloatPanels final : public PanelArithmetic {
  static constexpr Index width = tuning::panel_rows;

 public:
  PanelCost cost() const override { return {1.0f, 0.25f}; }
  Index key_bytes(Index dim) const override {
    return ceil_div(tuning::block_keys, tuning::tile_rows) * key_tile_size(dim) * 4;
  }
  Index value_bytes(Index v_dim) const override {
    return tuning::block_keys * value_stride(v_dim) * 4;
  }
  Index query_bytes(Index dim) const override { return dim * width * 4; }
  void take(Arena& arena, PanelScratch& s, Index v_dim, bool biased) const override {
    s.logits = arena.take<float>(round_up(tuning::block_keys, tuning::tile_rows) * width);
    s.lane_out = arena.take<float>(2 * v_dim * width);
    if (biased) s.lane_values = arena.take<float>(tuning::block_keys * value_stride(v_dim));
  }

  void pack_keys(PackedBlock& block) const override {
    detail::pack_keys(*block.k->format, block.k->at, block.k->count, block.k->shape,
                      reinterpret_cast<float*>(block.keys));
  }
  void pack_values(PackedBlock& block) const override {
    const BlockRows& v = *block.v;
    block.finite_values =
        v.format->pack_values(v.at, v.count, v.shape, reinterpret_cast<float*>(block.values));
  }
  void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                    const Panel& panel) const override {
    with_packets(count, [&](auto packets) {
      detail::pack_queries(rows, count, dim, scale, packets * simd::lanes,
                           static_cast<float*>(panel.queries));
    });
  }

  void multiply_block(const PackedBlock& block, const Panel& panel, const VisibleKeys& visible,
                      PanelScratch& s) const override {
    if (panel.rows <= simd::lanes)
      attend_packets<1>(block, panel, visible, s);
    else
      attend_packets<tuning::tile_packets>(block, panel, visible, s);
  }

 private:
  template <int packets>
  static void attend_packets(const PackedBlock& block, const Panel& panel,
                             const VisibleKeys& visible, PanelScratch& s) {
    float* const x = s.logits;
    const float* const values = reinterpret_cast<const float*>(block.values);
    const Index keys = visible.count, v_dim = block.v_dim();
    PanelPackets top, factors;
    block_logits<packets>(reinterpret_cast<const float*>(block.keys),
                          static_cast<const float*>(panel.queries), block.dim(), keys, x, top);
    finish_logits<packets>(visible, x, top);
    for (int j = 0; j < packets; ++j) factors[j] = raise(panel.state, j, top[j]);
    block_weights<packets>(x, keys, panel.state, x);
    if (!block.finite_values && (visible.ranges != nullptr || visible.bias != nullptr))
      values_lane_by_lane<packets>(values, v_dim, x, visible, factors, panel, s);
    else
      block_values<packets>(values, v_dim, x, keys, factors, panel.out);
  }

  // A masked weight is an exact zero, but zero times NaN is NaN. If a block holds a NaN or infinite
  // value, each lane takes only the keys that it sees. Same tiles, same order, same bits.
  template <int packets>
  static void values_lane_by_lane(const float* values, Index v_dim, const float* weights,
                                  const VisibleKeys& visible, const PanelPackets& factors,
                                  const Panel& panel, PanelScratch& s) {
    const Index size = v_dim * width;
    float *result = s.lane_out, *trial = result + size;
    for (Index lane = 0; lane < panel.rows; ++lane) {
      const LaneRanges* const ranges = visible.ranges;
      const Index first = ranges != nullptr ? static_cast<Index>(ranges->first[lane]) : 0;
      const Index end = ranges != nullptr ? std::max(first, static_cast<Index>(ranges->end[lane]))
                                          : visible.count;
      std::copy_n(panel.out, size, trial);
      const float* const lane_values =
          visible.bias != nullptr ? seen_values(values, v_dim, lane, visible, s) : values;
      block_values<packets>(lane_values + first * value_stride(v_dim), v_dim,
                            weights + first * width, end - first, factors, trial);
      for (Index c = 0; c < v_dim; ++c) result[c * width + lane] = trial[c * width + lane];
    }
    for (Index c = 0; c < v_dim; ++c)
      std::copy_n(result + c * width, panel.rows, panel.out + c * width);
  }
  // The values, zero where `lane` does not see them.
  static const float* seen_values(const float* values, Index v_dim, Index lane,
                                  const VisibleKeys& visible, PanelScratch& s) {
    const Index stride = value_stride(v_dim);
    float* const seen = s.lane_values;
    for (Index key = 0; key < visible.count; ++key) {
      if (sees(visible, lane, key))
        std::copy_n(values + key * stride, v_dim, seen + key * stride);
      else
        std::fill_n(seen + key * stride, v_dim, 0.0f);
    }
    return seen;
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
