// A block of keys against a panel of queries in 16-bit fixed point: twice the products of float.
//
//   logits    x[key][row] = (k~ . q~) |k| |q| scale / (key_norm query_norm)
//   weights   w~ = round(2^weight_bits e^(x - block's maximum))
//   values    out[c][row] = before[row] out[c][row] + block[row] unit[c] sum of v~[key][c] w~[key][row]
//
// Keys and queries are integers relative to their own norms, weights to the row's maximum in the
// block, values to the norm of their channel in the block (fixed_packing.hpp): one huge channel, key
// or query costs the others nothing, one huge value the precision of its channel in its block. The
// sum of weights is that of the integers, so an output stays a mean of values. Sums are exact, so
// integers are the same on every ISA; the error is that of rounding the operands (bench/README.md).
// What integers cannot hold is computed in float: logits of a key or query whose factor is NaN, and
// channels of a block likewise.
//
// Per packet of 2 * lanes products: one instruction. Per packet of logits: 5 to scale them, 16 for
// the softmax, 5 per block and channel to widen. Packing costs twice what it costs in float.
#pragma once

#include <quoka/packing/fixed_packing.hpp>
#include <quoka/kernels/left_to_float.hpp>

#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Sums: simd::PairSums, or simd::PlainPairSums on any machine.
template <class Sums>
class FixedPanels final : public PanelArithmetic {
  using Pair = simd::Int16Pair;
  static constexpr int packets = tuning::tile_packets, width = tuning::panel_rows;
  static constexpr int weight_bits = tuning::fixed_weight_bits;

 public:
  Index key_bytes(Index dim) const override {
    return (tile_pairs(dim) + fixed_key_memory(dim)) * 4;
  }
  // Pairs of rows, then the units of the channels and which of them are left to float. After both,
  // keys and values have memory to widen rows to.
  Index value_bytes(Index v_dim) const override {
    return ((value_rows + 2) * value_stride(v_dim) + fixed_value_memory(v_dim)) * 4;
  }
  Index kept_key_bytes(Index dim) const override { return tile_pairs(dim) * 4; }
  Index kept_value_bytes(Index v_dim) const override {
    return (value_rows + 2) * value_stride(v_dim) * 4;
  }
  Index query_bytes(Index dim) const override { return pair_steps(dim) * width * 4; }
  void reserve(PanelScratch& s, Index, bool) const override {
    const Index block = round_up(tuning::block_keys, tuning::tile_rows) * width;
    s.logits.reserve(block);
    s.weights.reserve(block * 4);
  }
  bool packs_whole_blocks() const override { return true; }

  void pack_keys(PackedBlock& block) const override {
    Pair* const keys = static_cast<Pair*>(block.keys);
    block.all_keys =
        pack_fixed_keys(*block.k_format, block.k, block.count, block.k_shape, keys,
                        block.key_factors, reinterpret_cast<float*>(keys + tile_pairs(block.dim)));
  }
  void pack_values(PackedBlock& block) const override {
    Pair* const values = static_cast<Pair*>(block.values);
    block.units = reinterpret_cast<float*>(values + value_rows * value_stride(block.v_dim));
    block.apart = block.units + value_stride(block.v_dim);
    block.all_values =
        pack_fixed_values(*block.v_format, block.v, block.count, block.v_shape, values, block.units,
                          block.apart, block.apart + value_stride(block.v_dim));
  }

  // row_factors bring `scale`.
  void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                    const Panel& panel) const override {
    Pair* const to = static_cast<Pair*>(panel.queries);
    alignas(64) float scales[width];
    for (Index first = 0; first < width; first += simd::lanes) {
      const Index n = std::clamp<Index>(count - first, 0, simd::lanes);
      const RowNorms norms = norms_of(rows + first, n, dim);
      const simd::Packet norm = norm_or_nan(norms.square);
      const simd::Packet factor =
          simd::max(simd::mul(norm, simd::broadcast(1.0f / fixed_query_norm(dim))),
                    simd::mul(norms.largest, simd::broadcast(1.0f / fixed_key_norm)));
      simd::store(scales + first, simd::div(simd::broadcast(1.0f), factor));
      simd::store(panel.row_factors + first, simd::mul(factor, simd::broadcast(scale)));
      leave_to_float(rows + first, n, dim, scales + first, panel.row_factors + first, 1e18f);
    }
    for (Index first = 0; first < width; first += simd::lanes)
      for_channel_pairs(dim, [&](Index c, Index n) {
        simd::Square low, high;
        for (int i = 0; i < simd::lanes; ++i) {
          low.packet[i] = high.packet[i] = simd::zero();
          if (first + i >= count) continue;
          const simd::Packet s = simd::broadcast(scales[first + i]);
          load_channel_pairs(rows[first + i], c, n, low.packet[i], high.packet[i]);
          low.packet[i] = simd::mul(low.packet[i], s);
          high.packet[i] = simd::mul(high.packet[i], s);
        }
        simd::transpose(low), simd::transpose(high);
        for (Index i = 0; i < ceil_div(n, 2); ++i)
          simd::store_pairs(to + (c / 2 + i) * width + first, low.packet[i], high.packet[i]);
      });
  }

  void attend(const PackedBlock& block, const Panel& panel, const Sight& sight,
              PanelScratch& s) const override {
    float* const x = s.logits.data();
    Pair* const weights = reinterpret_cast<Pair*>(s.weights.data());
    PanelPackets top;
    for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
    logits(block, static_cast<const Pair*>(panel.queries), panel.row_factors, sight.keys, x, top);
    const bool exceptions = !block.all_keys || !all_held(panel.row_factors);
    if (exceptions) logits_in_float(block, panel, sight, {0, sight.keys}, s.row.data(), x);
    finish_logits(x, sight, exceptions, top);
    const Factors factors = softmax(x, sight.keys, top, panel.state, weights);
    values(block, weights, sight.keys, factors, panel.out);
    if (exceptions) admit_not_finite(x, sight.keys, panel.state);
    if (!block.all_values) values_in_float(block, panel, sight, x, 0.0f, s.row.data());
  }

 private:
  static constexpr Index value_rows = ceil_div(tuning::most_block_keys, 2);
  static Index tile_pairs(Index dim) {
    return ceil_div(tuning::block_keys, tuning::tile_rows) * key_tile_size(pair_steps(dim));
  }

  // What takes the panel's sums, and those of a block, to the new maximum.
  struct Factors {
    PanelPackets before, block;
  };

  static void logits(const PackedBlock& block, const Pair* panel, const float* row_factors,
                     Index keys, float* x, PanelPackets& top) {
    const Index steps = pair_steps(block.dim), stride = key_tile_size(steps);
    const Pair* tiles = static_cast<const Pair*>(block.keys);
    for (Index key = 0; key < keys; key += tuning::tile_rows, tiles += stride)
      logit_tile(tiles, panel, row_factors, steps, block.key_factors + key, x + key * width, top);
  }

  static Factors softmax(float* x, Index keys, const PanelPackets& top, PanelState& state,
                         Pair* weights) {
    Factors factors;
    simd::Packet reference[packets];
    Sums sum[packets];
    for (int j = 0; j < packets; ++j) {
      reference[j] = PacketState{top[j], top[j]}.reference();
      sum[j] = Sums::zero();
      factors.before[j] = state[j].raise(top[j]);
      factors.block[j] = simd::exp(simd::sub(top[j], state[j].reference()));
    }
    const Sums ones = Sums::broadcast(simd::pair_of(1, 1));
    const auto weight = [&](Index key, auto j) QUOKA_INLINE_LAMBDA {
      return simd::exp_scaled<weight_bits>(
          simd::sub(simd::load(x + key * width + j * simd::lanes), reference[j]));
    };
    const auto leave = [&](Index pair, auto j, const simd::Packet& low, const simd::Packet& high)
                           QUOKA_INLINE_LAMBDA {
                             Pair* const to = weights + pair * width + j * simd::lanes;
                             simd::store_pairs(to, low, high);
                             sum[j] = fma(Sums::load(to), ones, sum[j]);
                           };
    Index key = 0;
    for (; key + 2 <= keys; key += 2)
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        leave(key / 2, j, weight(key, j), weight(key + 1, j));
      });
    if (key < keys)
      simd::unroll<packets>(
          [&](auto j) QUOKA_INLINE_LAMBDA { leave(key / 2, j, weight(key, j), simd::zero()); });
    const simd::Packet one = simd::broadcast(std::ldexp(1.0f, -weight_bits));
    for (int j = 0; j < packets; ++j)
      state[j].sum = simd::fma(simd::mul(sum[j].to_float(), one), factors.block[j], state[j].sum);
    return factors;
  }

  static void values(const PackedBlock& block, const Pair* weights, Index keys,
                     const Factors& factors, float* out) {
    assert(0 < block.v_dim && 0 <= keys && keys <= tuning::block_keys);
    const Pair* const values = static_cast<const Pair*>(block.values);
    for_value_tiles(block.v_dim, [&](auto rows, Index c) QUOKA_INLINE_LAMBDA {
      value_tile<rows>(values + c, value_stride(block.v_dim), weights, ceil_div(keys, 2), factors,
                       block.units + c, out + c * width);
    });
  }

  // One tile of keys times the panel; the maximum goes to top, of use where the tile is whole.
  static void logit_tile(const Pair* tile, const Pair* panel, const float* row_factors, Index steps,
                         const float* key_factors, float* x, PanelPackets& top) {
    constexpr int rows = tuning::tile_rows;
    Sums acc[rows][packets];
    simd::unroll<rows, packets>([&](auto i, auto j)
                                    QUOKA_INLINE_LAMBDA { acc[i][j] = Sums::zero(); });
    for (Index left = steps; left > 0; left -= slab) {
      rank1_updates<rows, packets, slab>(acc, tile, 1, panel, std::min<Index>(slab, left));
      tile += Index{slab} * rows, panel += Index{slab} * width;
    }
    simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet row = simd::load(row_factors + j * simd::lanes);
      simd::unroll<rows>([&](auto i) QUOKA_INLINE_LAMBDA {
        const simd::Packet logit =
            simd::mul(acc[i][j].to_float(), simd::mul(row, simd::broadcast(key_factors[i])));
        simd::store(x + i * width + j * simd::lanes, logit);
        top[j] = simd::max(top[j], logit);
      });
    });
  }

  template <std::size_t Channels>
  [[gnu::noinline]] static void value_tile(const Pair* values, Index stride, const Pair* weights,
                                           Index pairs, const Factors& factors, const float* units,
                                           float* out) {
    Sums acc[Channels][packets];
    simd::unroll<Channels, packets>([&](auto i, auto j)
                                        QUOKA_INLINE_LAMBDA { acc[i][j] = Sums::zero(); });
    rank1_updates<Channels, packets, 1>(acc, values, stride, weights, pairs);
    simd::unroll<Channels, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      float* const at = out + i * width + j * simd::lanes;
      const simd::Packet sum = simd::mul(acc[i][j].to_float(), simd::broadcast(units[i]));
      simd::store(at,
                  simd::fma(sum, factors.block[j], simd::mul(factors.before[j], simd::load(at))));
    });
  }
};

// A template, so that an ISA without the sums does not compile it.
template <class Sums>
const PanelArithmetic& fixed_panels() {
  static constexpr FixedPanels<Sums> panels;
  return panels;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
