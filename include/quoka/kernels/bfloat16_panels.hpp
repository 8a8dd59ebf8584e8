// A block of keys against a panel of queries by products of bfloat16: an instruction has 2 to 16
// times as many as in float. Written once over the unit that multiplies (bfloat16_units.hpp).
//
//   1 product     q, k, weights and v rounded
//   2 products    q and weights as high + low: a cache of bfloat16 is read exactly as it is
//   3 products    k and v as well: high high + high low + low high, low low is left out
//
// Keys are taken tile by tile, and three things go on at once:
//
//   logits of tile t + 1     the unit's own work
//   softmax of tile t        vector work, a few keys after each slab of that product
//   values                   once per block: the sums are read and written once
//
// A row's reference is not its maximum. If a logit exceeds it, it rises to `headroom` above that
// logit, and stays until a logit exceeds it again. If some row's rises, the values up to there are
// added and the sums rescaled; that is rare. A sum of values is one chain over all keys, so its
// bits do not depend on when other rows of the panel rise. Sums and softmax are in float. With one
// product the sum of weights is that of the rounded weights: an output stays a mean of values.
//
// Rows of 8 bits are rounded to bfloat16 as all others are. Products of their codes as integers
// would not pay. q8_0 has a scale for each 32 channels, half of what one TDPBUSD adds up. So an
// instruction would multiply no more than TDPBF16PS does, and its sums would have to be scaled.
//
// Numbers that bfloat16 cannot hold are computed in float: panel_arithmetic.hpp.
#pragma once

#include <quoka/kernels/bfloat16_packing.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

template <class Unit, int Products>
class Bfloat16Panels final : public PanelArithmetic {
  static_assert(1 <= Products && Products <= 3 && MatrixUnit<Unit>);
  static constexpr Index width = tuning::panel_rows, rows = Unit::tile_rows;
  static constexpr bool splits_queries = Products > 1, splits_cache = Products > 2;
  static constexpr Index most_keys = Unit::block_keys;
  static_assert(most_keys <= tuning::most_block_keys && rows % Unit::value_depth == 0 &&
                Unit::value_depth % Unit::interleave == 0);
  // The reference lies this far above the maximum that raised it: weights are e^-headroom and less.
  static constexpr float headroom = 5.5f;

 public:
  PanelCost cost() const override { return {Products * Unit::product_cost, 0.6f}; }
  Index block_keys() const override { return most_keys; }
  // Parts, then a row in float.
  Index key_bytes(Index dim) const override {
    return (1 + splits_cache) * key_part(dim) * 2 + padded_depth<Unit>(dim) * 4;
  }
  // Parts, then which channels do not fit, then rows in float.
  Index value_bytes(Index v_dim) const override {
    return (1 + splits_cache) * value_part(v_dim) * 2 +
           (padded_channels(v_dim) + unit_value_room(v_dim)) * 4;
  }
  Index query_bytes(Index dim) const override { return (1 + splits_queries) * query_part(dim) * 2; }
  void take(Arena& arena, PanelScratch& s, Index, bool) const override {
    s.logits = arena.take<float>(round_up(most_keys, rows) * width);
    s.weights = arena.take<std::byte>((1 + splits_queries) * weight_part * 2);
  }

  void enter(PanelScratch& s) const override { Unit::enter(s.tiles); }
  void leave(PanelScratch& s) const override { Unit::leave(s.tiles); }

  void pack_keys(PackedBlock& block) const override {
    const Bfloat16Parts parts = key_parts(block);
    const Index size = (1 + splits_cache) * key_part(block.dim());
    const BlockRows& k = *block.k;
    block.keys_fit =
        pack_unit_keys<Unit>(*k.format, k.at, k.count, k.shape, parts, block.key_factors,
                             reinterpret_cast<float*>(parts.high + size));
  }
  void pack_values(PackedBlock& block) const override {
    const Bfloat16Parts parts = value_parts(block);
    const Index size = (1 + splits_cache) * value_part(block.v_dim());
    const BlockRows& v = *block.v;
    block.unfit_channels = reinterpret_cast<float*>(parts.high + size);
    block.values_fit =
        pack_unit_values<Unit>(*v.format, v.at, v.count, v.shape, parts, block.unfit_channels,
                               block.unfit_channels + padded_channels(v.shape.dim));
  }
  void pack_queries(const float* const* floats, Index count, Index dim, float scale,
                    const Panel& panel) const override {
    pack_unit_queries<Unit>(floats, count, dim, scale, query_parts(panel, dim), panel.row_factors);
  }

  void multiply_block(const PackedBlock& block, const Panel& panel, const VisibleKeys& visible,
                      PanelScratch& s) const override {
    with_packets(panel.rows, [&](auto packets) {
      attend_packets<decltype(packets)::value>(block, panel, visible, s);
    });
  }

 private:
  template <int packets>
  static void attend_packets(const PackedBlock& block, const Panel& panel,
                             const VisibleKeys& visible, PanelScratch& s) {
    const bool fit = block.keys_fit && rows_fit(panel.row_factors);
    float* const x = s.logits;
    const Bfloat16Parts weights = parts(s.weights, splits_queries, weight_part);
    Index added = 0;  // keys whose values are in the sums
    // Lines of the next block's rows to be prefetched beside each tile but the first.
    const Index wanted =
        ceil_div(s.prefetch.left(), std::max<Index>(1, ceil_div(visible.count, rows) - 1));
    multiply<packets>(block, panel, 0, x, [] {});
    for (Index key = 0; key < visible.count; key += rows) {
      const KeyRange keys{key, std::min(key + rows, visible.count)};
      if (!fit) fallback_logits(block, panel, visible, keys, s.row, x);
      PanelPackets top;
      finish_tile<packets>(x + key * width, keys, visible, top);
      if (rises<packets>(top, panel.state)) {
        add_values<packets>(block, weights, added, key, panel.out);
        added = key;
        rescale<packets>(top, panel, block.v_dim());
      }
      Weights<packets> softmax(x + key * width, weights, key, panel.state);
      if (keys.end < visible.count) {
        const Index slabs = padded_depth<Unit>(block.dim()) / Unit::depth;
        const Index times = Products * slabs * Unit::between_calls, share = ceil_div(rows, times);
        const Index lines = ceil_div(wanted, times);
        multiply<packets>(block, panel, keys.end, x + keys.end * width, [&]() QUOKA_INLINE_LAMBDA {
          softmax.take(share);
          s.prefetch.prefetch(lines);
        });
      }
      softmax.take(rows);
      softmax.finish(panel.state);
    }
    add_values<packets>(block, weights, added, visible.count, panel.out);
    if (!fit) update_not_finite<packets>(x, visible.count, panel.state);
    if (!block.values_fit) fallback_values(block, panel, visible, x, s.row, panel.out);
  }

  static constexpr Index key_part(Index dim) {
    return round_up(most_keys, rows) * padded_depth<Unit>(dim);
  }
  static constexpr Index value_part(Index v_dim) { return unit_value_size<Unit>(v_dim, most_keys); }
  static constexpr Index query_part(Index dim) { return width * padded_depth<Unit>(dim); }
  static constexpr Index weight_part = round_up(round_up(most_keys, rows), 32) * width;

  static Bfloat16Parts parts(void* at, bool two, Index size) {
    Bfloat16* const high = static_cast<Bfloat16*>(at);
    return {high, two ? high + size : nullptr};
  }
  static Bfloat16Parts key_parts(const PackedBlock& block) {
    return parts(block.keys, splits_cache, key_part(block.dim()));
  }
  static Bfloat16Parts value_parts(const PackedBlock& block) {
    return parts(block.values, splits_cache, value_part(block.v_dim()));
  }
  static Bfloat16Parts query_parts(const Panel& panel, Index dim) {
    return parts(panel.queries, splits_queries, query_part(dim));
  }

  // f(a, b) with the parts that are multiplied, the smaller ones first.
  template <class F>
  QUOKA_INLINE static void with_products(const Bfloat16Parts& a, Index at, const Bfloat16Parts& b,
                                         Index b_at, F&& f) {
    const Bfloat16 *const high = a.high + at, *const low = splits_cache ? a.low + at : nullptr;
    const Bfloat16* const b_high = b.high + b_at;
    const Bfloat16* const b_low = splits_queries ? b.low + b_at : nullptr;
    if constexpr (Products == 1) {
      const Bfloat16* const left[1] = {high};
      const Bfloat16* const right[1] = {b_high};
      f(left, right);
    } else if constexpr (Products == 2) {
      const Bfloat16* const left[2] = {high, high};
      const Bfloat16* const right[2] = {b_low, b_high};
      f(left, right);
    } else {
      const Bfloat16* const left[3] = {low, high, high};
      const Bfloat16* const right[3] = {b_high, b_low, b_high};
      f(left, right);
    }
  }

  // Logits of the tile of keys that begins at `key`.
  template <int packets, class Between>
  static void multiply(const PackedBlock& block, const Panel& panel, Index key, float* x,
                       Between&& between) {
    const Index depth = padded_depth<Unit>(block.dim());
    with_products(key_parts(block), key * depth, query_parts(panel, block.dim()), 0,
                  [&](const auto& a, const auto& b) {
                    Unit::template logits<Products, packets>(a, b, depth / Unit::depth, x, between);
                  });
  }

  // Sums of values += those of keys [begin, end), begin at a tile.
  template <int packets>
  static void add_values(const PackedBlock& block, const Bfloat16Parts& weights, Index begin,
                         Index end, float* out) {
    if (begin >= end) return;
    const Index channels = padded_channels(block.v_dim());
    const Index slabs = ceil_div(end - begin, Unit::value_depth);
    with_products(value_parts(block), begin * channels, weights, begin * width,
                  [&](const auto& a, const auto& b) {
                    Unit::template values<Products, packets>(a, b, slabs, channels, out);
                  });
  }

  // Products of a tile to logits, -inf beyond the last key; top: their maximum.
  template <int packets>
  static void finish_tile(float* x, const KeyRange& keys, const VisibleKeys& visible,
                          PanelPackets& top) {
    finish_logits(visible, x, keys, packets * simd::lanes);
    std::fill(x + keys.count() * width, x + rows * width, -simd::infinity);
    block_maximum<packets>(x, keys.count(), top);
  }

  template <int packets>
  static bool rises(const PanelPackets& top, const PanelState& state) {
    simd::Packet any = simd::zero();
    for (int j = 0; j < packets; ++j)
      any = simd::select_less(packet_of(state, j).max, top[j], simd::broadcast(1.0f), any);
    return simd::reduce_max(any) > 0.0f;
  }
  template <int packets>
  [[gnu::noinline]] static void rescale(const PanelPackets& top, const Panel& panel, Index v_dim) {
    PanelPackets factor;
    for (int j = 0; j < packets; ++j) {
      const simd::Packet above = simd::add(top[j], simd::broadcast(headroom));
      const simd::Packet max = packet_of(panel.state, j).max;
      factor[j] = raise(panel.state, j, simd::select_less(max, top[j], above, max));
    }
    for (Index c = 0; c < v_dim; ++c)
      for (int j = 0; j < packets; ++j) {
        float* const at = panel.out + c * width + j * simd::lanes;
        simd::store(at, simd::mul(simd::load(at), factor[j]));
      }
  }

  // Logits of a tile to weights, some keys at a time.
  template <int packets>
  class Weights {
   public:
    Weights(const float* x, const Bfloat16Parts& to, Index key, const PanelState& state)
        : x_(x),
          high_(to.high + key * width),
          low_(splits_queries ? to.low + key * width : nullptr) {
      for (int j = 0; j < packets; ++j) {
        reference_[j] = packet_of(state, j).reference();
        sum_[j] = simd::zero();
      }
    }
    QUOKA_INLINE void take(Index keys) {
      // Copies, which stay in registers: a compiler must assume that the unit's instructions write
      // to memory.
      simd::Packet reference[packets], sum[packets];
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        reference[j] = reference_[j];
        sum[j] = sum_[j];
      });
      const float* const x = x_;
      Bfloat16 *const to_high = high_, *const to_low = low_;
      const Index end = std::min(next_ + round_up(keys, Unit::interleave), rows);
      for (Index key = next_; key < end; key += Unit::interleave) {
        simd::Packet high[packets][Unit::interleave / 2], low[packets][Unit::interleave / 2];
        simd::unroll<packets, Unit::interleave / 2>([&](auto j, auto i) QUOKA_INLINE_LAMBDA {
          const float* const at = x + (key + 2 * i) * width + j * simd::lanes;
          find_weights(at, reference[j], high[j][i], low[j][i], sum[j]);
        });
        simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
          const Index at = key * width + j * simd::lanes * Unit::interleave;
          store(to_high + at, high[j]);
          if constexpr (splits_queries) store(to_low + at, low[j]);
        });
      }
      next_ = end;
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA { sum_[j] = sum[j]; });
    }
    void finish(PanelState& state) const {
      for (int j = 0; j < packets; ++j) add_to_sum(state, j, sum_[j]);
    }

   private:
    // One row's logits of two keys.
    QUOKA_INLINE static void find_weights(const float* x, const simd::Packet& reference,
                                          simd::Packet& high, simd::Packet& low,
                                          simd::Packet& sum) {
      const simd::Packet a = weight(simd::sub(simd::load(x), reference));
      const simd::Packet b = weight(simd::sub(simd::load(x + width), reference));
      high = simd::round_pairs(a, b);
      if constexpr (splits_queries) {
        low =
            simd::round_pairs(simd::sub(a, simd::firsts(high)), simd::sub(b, simd::seconds(high)));
        sum = simd::add(sum, simd::add(a, b));
      } else {
        sum = simd::add_pairs(sum, high);
      }
    }
    QUOKA_INLINE static simd::Packet weight(const simd::Packet& x) {
      if constexpr (splits_queries)
        return simd::exp(x);
      else
        return simd::exp_short(x);
    }
    QUOKA_INLINE static void store(Bfloat16* p, const simd::Packet (&words)[1]) {
      simd::store(reinterpret_cast<float*>(p), words[0]);
    }
    QUOKA_INLINE static void store(Bfloat16* p, const simd::Packet (&words)[2]) {
      simd::store_zipped(reinterpret_cast<float*>(p), words[0], words[1]);
    }

    const float* x_;
    Bfloat16 *high_, *low_;
    Index next_ = 0;
    simd::Packet reference_[packets], sum_[packets];
  };
};

// A template, so that an ISA without the unit does not compile it.
template <class Unit, int Products>
const PanelArithmetic& bfloat16_panels() {
  static constexpr Bfloat16Panels<Unit, Products> panels;
  return panels;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
