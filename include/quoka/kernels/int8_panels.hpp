// A block of keys against a panel of queries by products of 8-bit integers, four times as many an
// instruction as in float.
//
//   logits    x[key][row] = scale_k[key] scale_q[row] sum over channels of code_k[key][c]
//             code_q[c][row]
//   weights   w[key][row] = round(255 e^(x - reference[row]) g[key])
//   values    out[c][row] = before[row] out[c][row] + unit[row] sum over keys of code_v[key][c]
//             w[key][row]
//
// Every row of queries, keys and values has a scale of its own (int8_packing.hpp). That of a value
// goes into the weight: g[key] is the value's scale, and the reference the logarithm of the row's
// largest e^x g. So a weight's 255 steps measure what the key adds to the output. An attention
// sink, with nearly all of the weight and values near zero, does not use them up. The sum of
// weights is taken in float, before they are rounded.
//
// Values are rotated, too, so that out are sums of rotated ones until finish() turns them back,
// once a row. A number of a value that codes cannot hold has sums of its own beside them
// (Panel::unrotated).
//
// Sums are exact, so integers are the same on every ISA. Per packet of logits: 3 operations to
// scale them, 2 for the reference, 16 for the softmax.
#pragma once

#include <quoka/kernels/int8_packing.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/register_tile.hpp>

#include <algorithm>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// Sums: simd::QuadSums. A parameter, so that an ISA without them does not compile it.
template <class Sums>
class Int8Panels final : public PanelArithmetic {
  using Quad = simd::Quad;
  static constexpr int tall = tuning::tile_rows;
  static constexpr Index width = tuning::panel_rows;
  // Room for the numbers of a block: whole tiles, whole quads, whole lines.
  static constexpr Index most_keys =
      round_up(round_up(Index{tuning::most_block_keys}, Index{tall}), Index{16});

 public:
  PanelCost cost() const override { return {0.3f, 1.4f}; }
  // Tiles of quads, what sums begin as, and memory for a batch of rows in float.
  Index key_bytes(Index dim) const override {
    return (tile_quads(dim) + most_keys + batch_rows * int8_channels(dim)) * 4;
  }
  // Quads, then what `Values` has, and memory for a batch of rows in float.
  Index value_bytes(Index v_dim) const override {
    return (value_quads(v_dim) + 2 * most_keys + (1 + batch_rows) * value_stride(v_dim)) * 4;
  }
  Index query_bytes(Index dim) const override { return int8_query_bytes(dim); }
  // Sums of rotated values, then those of the values that are not.
  Index sum_rows(Index v_dim) const override { return 2 * value_stride(v_dim); }
  Index first_unrotated(Index v_dim) const override { return value_stride(v_dim); }
  void take(Arena& arena, PanelScratch& s, Index, bool) const override {
    s.logits = arena.take<float>(most_keys * width);
    // Bytes, then floats of from_maximum().
    s.weights = arena.take<std::byte>(most_keys * width * 5);
  }

  void pack_keys(PackedBlock& block) const override {
    Quad* const tiles = reinterpret_cast<Quad*>(block.keys);
    auto* const starts = reinterpret_cast<std::int32_t*>(tiles + tile_quads(block.dim()));
    block.keys_fit = pack_int8_keys<Sums>(*block.k->format, block.k->at, block.k->count,
                                          block.k->shape, tiles, starts, block.key_factors,
                                          reinterpret_cast<float*>(starts + most_keys));
  }
  void pack_values(PackedBlock& block) const override {
    const Values v = values_of(block);
    const Index count = block.v->count;
    block.values_fit = pack_int8_values(*block.v->format, block.v->at, count, block.v->shape,
                                        v.quads, v.weights, v.any + value_stride(block.v_dim()));
    block.unfit_channels = v.any;
    std::fill_n(v.any, value_stride(block.v_dim()), 1.0f);
    for (Index i = 0; i < count; ++i) {
      // -inf where there is nothing to add: log(0) would raise FE_DIVBYZERO.
      v.logs[i] = v.weights[i] == 0.0f ? -simd::infinity : std::log(v.weights[i]);
      v.weights[i] *= most_weight;
    }
  }
  void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                    const Panel& panel) const override {
    pack_int8_queries(rows, count, dim, scale, static_cast<Quad*>(panel.queries),
                      panel.row_factors);
  }

  void multiply_block(const PackedBlock& block, const Panel& panel, const VisibleKeys& visible,
                      PanelScratch& s) const override {
    with_packets(panel.rows, [&](auto packets) {
      attend_packets<decltype(packets)::value>(block, panel, visible, s);
    });
  }

  void finish(const Panel& panel, Index v_dim) const override {
    turn_back(value_stride(v_dim), panel.out);
    if ((panel.seen & seen_unrotated) == 0) return;
    for (Index i = 0; i < value_stride(v_dim) * width; i += simd::lanes)
      simd::store(panel.out + i,
                  simd::add(simd::load(panel.out + i), simd::load(panel.unrotated + i)));
  }

 private:
  static constexpr float most_weight = 255.0f;
  // How far below a row's largest logit the reference may lie.
  static constexpr float most_below = 60.0f;

  // The factors that take the panel's sums, and those of a block, to the new maximum.
  struct Factors {
    PanelPackets before, block;
  };

  template <int packets>
  void attend_packets(const PackedBlock& block, const Panel& panel, const VisibleKeys& visible,
                      PanelScratch& s) const {
    float* const x = s.logits;
    Quad* const weights = reinterpret_cast<Quad*>(s.weights);
    const Index keys = visible.count;
    const Values v = values_of(block);
    Maxima top;
    logits<packets>(block, panel, v.logs, keys, x, top, s.prefetch);
    const bool exceptions = !block.keys_fit || !rows_fit(panel.row_factors);
    if (exceptions) fallback_logits(block, panel, visible, {0, keys}, s.row, x);
    finish_logits(visible, x, KeyRange{0, keys}, packets * simd::lanes);
    if (exceptions || visible.changes_products() || keys % tall != 0)
      find_maxima<packets>(x, v.logs, keys, top);
    const float* logits_of_softmax = x;
    PanelPackets base;
    for (int j = 0; j < tuning::tile_packets; ++j) base[j] = simd::zero();
    if (are_large<packets>(top)) {
      auto* const room = reinterpret_cast<float*>(s.weights + most_keys * width);
      from_maximum<packets>(x, v.logs, keys, top, base, room);
      logits_of_softmax = room;
    }
    const Factors factors =
        softmax<packets>(logits_of_softmax, keys, top, base, v, panel.state, weights);
    values<packets>(v.quads, value_stride(block.v_dim()), weights, keys, factors, panel.out);
    if (exceptions) update_not_finite<packets>(x, keys, panel.state);
    if ((panel.seen & seen_unrotated) != 0)
      scale_unrotated<packets>(block.v_dim(), factors, panel.unrotated);
    if (!block.values_fit)
      fallback_values(block, panel, visible, x, s.row, unrotated_sums(panel, block.v_dim()));
  }
  // Takes earlier sums to the new maximum.
  template <int packets>
  [[gnu::cold, gnu::noinline]] static void scale_unrotated(Index v_dim, const Factors& factors,
                                                           float* unrotated) {
    for (Index i = 0; i < value_stride(v_dim) * width; i += width)
      for (int j = 0; j < packets; ++j) {
        float* const at = unrotated + i + j * simd::lanes;
        simd::store(at, simd::mul(factors.before[j], simd::load(at)));
      }
  }

  static Index tile_quads(Index dim) {
    return ceil_div(Index{tuning::most_block_keys}, Index{tall}) *
           key_tile_size(quads_of(int8_channels(dim)));
  }
  static Index value_quads(Index v_dim) {
    return quads_of(Index{tuning::most_block_keys}) * value_stride(v_dim);
  }

  // A block's values: codes; the scale of each row, times 255 for the weights, as its logarithm for
  // their reference; ones for all channels.
  struct Values {
    Quad* quads;
    float *weights, *logs, *any;
  };
  static Values values_of(const PackedBlock& block) {
    Quad* const quads = reinterpret_cast<Quad*>(block.values);
    float* const weights = reinterpret_cast<float*>(quads + value_quads(block.v_dim()));
    return {quads, weights, weights + most_keys, weights + 2 * most_keys};
  }

  // Scales of the logits, and of their keys' part of the output.
  struct Maxima {
    PanelPackets logit, added;
  };
  static void clear(Maxima& top) {
    for (int j = 0; j < tuning::tile_packets; ++j)
      top.logit[j] = top.added[j] = simd::broadcast(-simd::infinity);
  }
  template <int packets>
  static void find_maxima(const float* x, const float* logs, Index keys, Maxima& top) {
    clear(top);
    for (Index key = 0; key < keys; ++key)
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        const simd::Packet logit = simd::load(x + key * width + j * simd::lanes);
        top.logit[j] = simd::max(top.logit[j], logit);
        top.added[j] = simd::max(top.added[j], simd::add(logit, simd::broadcast(logs[key])));
      });
  }

  // Beside logits of 2^12 a float holds the logarithm of a value's scale to 2^-12 at best. A little
  // more, and a weight would be above 255, which a byte takes for nearly 0.
  static constexpr float large_logit = 0x1p12f;
  // The largest logit of rows that see nothing is 0 here.
  static simd::Packet largest_logit(const Maxima& top, int j) {
    return PacketState{top.logit[j], simd::zero()}.reference();
  }
  template <int packets>
  static bool are_large(const Maxima& top) {
    simd::Packet most = simd::zero();
    for (int j = 0; j < packets; ++j) most = simd::max(most, magnitude(largest_logit(top, j)));
    return !(simd::reduce_max(most) < large_logit);
  }
  static simd::Packet magnitude(const simd::Packet& x) {
    return simd::max(x, simd::sub(simd::zero(), x));
  }
  // For rows whose logits are large: logits minus their largest, which becomes `base`. Rows do not
  // depend on each other.
  template <int packets>
  [[gnu::noinline]] static void from_maximum(const float* x, const float* logs, Index keys,
                                             Maxima& top, PanelPackets& base, float* to) {
    for (int j = 0; j < packets; ++j) {
      const simd::Packet largest = largest_logit(top, j);
      base[j] = simd::select_less(magnitude(largest), simd::broadcast(large_logit), simd::zero(),
                                  largest);
    }
    for (Index key = 0; key < keys; ++key)
      for (int j = 0; j < packets; ++j) {
        const Index at = key * width + j * simd::lanes;
        simd::store(to + at, simd::sub(simd::load(x + at), base[j]));
      }
    find_maxima<packets>(to, logs, keys, top);
  }

  template <int packets>
  static void logits(const PackedBlock& block, const Panel& panel, const float* logs, Index keys,
                     float* x, Maxima& top, BlockPrefetch& next) {
    const Index quads = quads_of(int8_channels(block.dim()));
    const Quad* tile = reinterpret_cast<const Quad*>(block.keys);
    const auto* const starts =
        reinterpret_cast<const std::int32_t*>(tile + tile_quads(block.dim()));
    const Index lines = ceil_div(next.left(), ceil_div(keys, Index{tall}));
    clear(top);
    for (Index key = 0; key < keys; key += tall, tile += key_tile_size(quads)) {
      next.prefetch(lines);
      logit_tile<packets>(tile, static_cast<const Quad*>(panel.queries), panel.row_factors, quads,
                          {starts + key, block.key_factors + key, logs + key}, x + key * width,
                          top);
    }
  }

  struct KeyNumbers {
    const std::int32_t* starts;
    const float *factors, *logs;
  };
  // One tile of keys times the panel; the maxima are of use where the tile is whole.
  template <int packets>
  [[gnu::noinline]] static void logit_tile(const Quad* tile, const Quad* panel,
                                           const float* row_factors, Index quads,
                                           const KeyNumbers& numbers, float* x, Maxima& top) {
    Sums acc[tall][packets];
    simd::unroll<tall>([&](auto i) QUOKA_INLINE_LAMBDA {
      const Sums start = Sums::from(numbers.starts[i]);
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA { acc[i][j] = start; });
    });
    for (Index left = quads; left > 0; left -= slab) {
      rank1_updates<tall, packets, slab, tuning::tile_packets>(acc, tile, 1, panel,
                                                               std::min<Index>(slab, left));
      tile += Index{slab} * tall, panel += Index{slab} * width;
    }
    simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet row = simd::load(row_factors + j * simd::lanes);
      simd::Packet logit_top = top.logit[j], added_top = top.added[j];
      simd::unroll<tall>([&](auto i) QUOKA_INLINE_LAMBDA {
        const simd::Packet logit =
            simd::mul(acc[i][j].to_float(), simd::mul(row, simd::broadcast(numbers.factors[i])));
        simd::store(x + i * width + j * simd::lanes, logit);
        logit_top = simd::max(logit_top, logit);
        added_top = simd::max(added_top, simd::add(logit, simd::broadcast(numbers.logs[i])));
      });
      top.logit[j] = logit_top, top.added[j] = added_top;
    });
  }

  template <int packets>
  static Factors softmax(const float* x, Index keys, const Maxima& top, const PanelPackets& base,
                         const Values& v, PanelState& state, Quad* weights) {
    Factors factors;
    simd::Packet reference[packets], sum[packets];
    for (int j = 0; j < packets; ++j) {
      const simd::Packet least = simd::sub(top.logit[j], simd::broadcast(most_below));
      reference[j] = PacketState{simd::max(least, top.added[j]), simd::zero()}.reference();
      sum[j] = simd::zero();
      factors.before[j] = raise(state, j, simd::add(base[j], top.logit[j]));
      // Rows that see nothing here add nothing: their factor is finite, however far below 0 their
      // state lies.
      const simd::Packet from_state =
          simd::add(reference[j], simd::sub(base[j], packet_of(state, j).reference()));
      factors.block[j] =
          simd::exp(simd::select_less(simd::broadcast(-simd::infinity), top.logit[j], from_state,
                                      simd::min(from_state, simd::zero())));
    }
    // Lanes that see nothing are all 0.
    const auto weight = [&](Index key, auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet w =
          simd::exp_short(simd::sub(simd::load(x + key * width + j * simd::lanes), reference[j]));
      sum[j] = simd::add(sum[j], w);
      return simd::round_to(simd::mul(w, simd::broadcast(v.weights[key])));
    };
    Index key = 0;
    for (; key + 4 <= keys; key += 4)
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        const simd::Packet four[4] = {weight(key, j), weight(key + 1, j), weight(key + 2, j),
                                      weight(key + 3, j)};
        simd::store_quads(weights + key / 4 * width + j * simd::lanes, four);
      });
    if (key < keys)
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        simd::Packet four[4];
        for (int i = 0; i < 4; ++i) four[i] = key + i < keys ? weight(key + i, j) : simd::zero();
        simd::store_quads(weights + key / 4 * width + j * simd::lanes, four);
      });
    const simd::Packet unit = simd::broadcast(1.0f / most_weight);
    for (int j = 0; j < packets; ++j) {
      PacketState seen = packet_of(state, j);
      seen.sum = simd::fma(sum[j], factors.block[j], seen.sum);
      set_packet(state, j, seen);
      factors.block[j] = simd::mul(factors.block[j], unit);
    }
    return factors;
  }

  template <int packets>
  static void values(const Quad* values, Index channels, const Quad* weights, Index keys,
                     const Factors& factors, float* out) {
    for_value_tiles(channels, [&](auto rows, Index c) QUOKA_INLINE_LAMBDA {
      value_tile<rows, packets>(values + c, channels, weights, quads_of(keys), factors,
                                out + c * width);
    });
  }
  template <std::size_t Channels, int packets>
  [[gnu::noinline]] static void value_tile(const Quad* values, Index stride, const Quad* weights,
                                           Index quads, const Factors& factors, float* out) {
    Sums acc[Channels][packets];
    simd::unroll<Channels, packets>([&](auto i, auto j)
                                        QUOKA_INLINE_LAMBDA { acc[i][j] = Sums::from(0); });
    rank1_updates<Channels, packets, 1, tuning::tile_packets>(acc, values, stride, weights, quads);
    simd::unroll<Channels, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      float* const at = out + i * width + j * simd::lanes;
      simd::store(at, simd::fma(acc[i][j].to_float(), factors.block[j],
                                simd::mul(factors.before[j], simd::load(at))));
    });
  }
};

// A template, so that an ISA without the sums does not compile it.
template <class Sums>
const PanelArithmetic& int8_panels() {
  static constexpr Int8Panels<Sums> panels;
  return panels;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
