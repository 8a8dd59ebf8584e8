// A block of keys against a panel of queries in 16-bit fixed point: twice the products of float.
//
//   logits    x[key][row] = (k~ . q~) |k| |q| scale / (key_norm query_norm)
//   weights   w~ = round(2^weight_bits 2^(x - block's maximum))
//   values    out[c][row] = before[row] out[c][row] + block[row] unit[c] sum of v~[key][c] w~[key][row]
//
// Keys and queries are integers relative to their own norms, weights to the row's maximum in the
// block, values to the norm of their channel in the block: one huge channel, key or query costs the
// others nothing, one huge value the precision of its channel in its block. The sum of weights is
// that of the integers, so an output stays a mean of values.
//
// No sum overflows, because |a . b| <= |a| |b|: norms are scaled so that 2^31 is out of reach even
// when every vector is parallel to every other and every weight is the largest. Sums are exact, so
// integers are the same on every ISA; the error is that of rounding the operands (bench/README.md).
//
// What integers cannot hold has a factor of NaN and is computed in float: logits of a key or query
// that is not finite, or whose norm is not in (1e-15, 1e14); channels of a block likewise.
//
// Pairs are channels c and c + lanes of keys and queries, and two keys of weights and values. Per
// packet of 2 * lanes products: one instruction. Per packet of logits: 5 to scale them, 16 for the
// softmax, 5 per block and channel to widen. Packing costs twice what it costs in float.
#pragma once

#include <quoka/core/panel_kernels.hpp>

#include <cmath>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// Channels [0, n) as two packets, n <= 2 * lanes: c in the first and c + lanes in the second where
// there are all, c and c + ceil(n / 2) where there are fewer; the rest is zero.
template <class T>
QUOKA_INLINE void load_channel_pairs(const T* from, Index n, simd::Packet& low,
                                     simd::Packet& high) {
  if (n == 2 * simd::lanes) {
    low = simd::load_as_float(from), high = simd::load_as_float(from + simd::lanes);
    return;
  }
  alignas(64) float x[2 * simd::lanes] = {};
  const Index half = ceil_div(n, 2);
  for (Index c = 0; c < half; ++c) x[c] = static_cast<float>(from[c]);
  for (Index c = half; c < n; ++c) x[simd::lanes + c - half] = static_cast<float>(from[c]);
  low = simd::load(x), high = simd::load(x + simd::lanes);
}

// f(first channel, channels) for `dim` channels, 2 * lanes at a time.
template <class F>
QUOKA_INLINE void for_channel_pairs(Index dim, F&& f) {
  Index c = 0;
  for (; c + 2 * simd::lanes <= dim; c += 2 * simd::lanes) f(c, Index{2 * simd::lanes});
  if (c < dim) f(c, dim - c);
}

// Steps of a product over `dim` channels.
constexpr Index pair_steps(Index dim) { return ceil_div(dim, 2); }

// Squares of the norms of rows[0, count), count <= lanes, and their largest |x|; zero for the lanes
// beyond.
struct RowNorms {
  simd::Packet square, largest;
};
template <class T>
RowNorms norms_of(const T* const* rows, Index count, Index dim) {
  simd::Square squares, sizes;
  for (int i = 0; i < simd::lanes; ++i) {
    simd::Packet sum[2] = {simd::zero(), simd::zero()}, least = simd::zero(), most = simd::zero();
    if (i < count)
      for_channel_pairs(dim, [&](Index c, Index n) QUOKA_INLINE_LAMBDA {
        simd::Packet low, high;
        load_channel_pairs(rows[i] + c, n, low, high);
        sum[0] = simd::fma(low, low, sum[0]), sum[1] = simd::fma(high, high, sum[1]);
        most = simd::max(most, simd::max(low, high));
        least = simd::min(least, simd::min(low, high));
      });
    squares.packet[i] = simd::add(sum[0], sum[1]);
    sizes.packet[i] = simd::max(most, simd::sub(simd::zero(), least));
  }
  return {simd::sums(squares), simd::maxima(sizes)};
}

// NaN where a square of a norm is not in (1e-30, 1e28): integers cannot hold what it is the norm
// of, unless it is all zeros, which is for the caller to find out.
QUOKA_INLINE simd::Packet norm_or_nan(const simd::Packet& square) {
  const simd::Packet nan = simd::broadcast(std::numeric_limits<float>::quiet_NaN());
  const simd::Packet root = simd::sqrt(square);
  return simd::select_less(simd::broadcast(1e-30f), square,
                           simd::select_less(square, simd::broadcast(1e28f), root, nan), nan);
}

// A factor of NaN says that integers cannot hold the row.
inline bool all_held(const float* row_factors) {
  bool all = true;
  for (Index i = 0; i < tuning::panel_rows; ++i) all &= row_factors[i] == row_factors[i];
  return all;
}

// Logits of the keys, and of `rows` queries, that integers cannot hold.
template <class T>
void logits_in_float(const T* const* k, const float* key_factors, Index keys, const T* const* q,
                     const float* row_factors, Index rows, Index dim, float scale, float* x) {
  for (Index key = 0; key < keys; ++key)
    for (Index row = 0; row < rows; ++row) {
      if (key_factors[key] == key_factors[key] && row_factors[row] == row_factors[row]) continue;
      float dot = 0.0f;
      for (Index c = 0; c < dim; ++c)
        dot = simd::fma(static_cast<float>(k[key][c]), static_cast<float>(q[row][c]) * scale, dot);
      x[key * tuning::panel_rows + row] = dot;
    }
}

// A logit of NaN, or of plus infinity, makes the sum of weights NaN, as it does in float.
inline void admit_not_finite(const float* x, Index keys, PanelState& state) {
  const simd::Packet least = simd::broadcast(std::numeric_limits<float>::lowest());
  for (Index at = 0; at < keys * tuning::panel_rows; at += simd::lanes) {
    simd::Packet& sum = state[at / simd::lanes % tuning::tile_packets].sum;
    sum = simd::fma(simd::max(simd::load(x + at), least), simd::zero(), sum);
  }
}

// Adds the channels that integers cannot hold, for the rows that see a key: sees(key, row).
template <class T, class Sees>
void values_in_float(const T* const* v, const float* apart, Index keys, Index dim, const float* x,
                     const PanelState& state, Sees&& sees, float* out) {
  constexpr Index width = tuning::panel_rows;
  alignas(64) float reference[width];
  for (int j = 0; j < tuning::tile_packets; ++j)
    simd::store(reference + j * simd::lanes, state[j].reference());
  for (Index key = 0; key < keys; ++key)
    for (Index row = 0; row < width; ++row) {
      if (!sees(key, row)) continue;
      const float weight = simd::exp2(x[key * width + row] - reference[row]);
      for (Index c = 0; c < dim; ++c) {
        float& to = out[c * width + row];
        if (apart[c] != 0.0f) to = simd::fma(static_cast<float>(v[key][c]), weight, to);
      }
    }
}

// As SinglePanels. Sums: simd::PairSums, or simd::PlainPairSums on any machine.
template <class Sums>
struct FixedPanels {
  static constexpr int packets = tuning::tile_packets, width = tuning::panel_rows;
  static constexpr int weight_bits = tuning::fixed_weight_bits;
  using Packed = simd::Int16Pair;
  using Lane = simd::Int16Pair;
  static constexpr bool in_float = false;
  static constexpr Index steps(Index dim) { return pair_steps(dim); }

  struct Block {
    alignas(64) float key_factors[round_up(tuning::block_keys, tuning::tile_rows* simd::lanes)];
    const float* units;         // of the values' channels; 0 for those left to float,
    const float* apart;         // which are 1 here
    bool all_keys, all_values;  // none left to float
  };

  // What takes the sums of a block to the panel's.
  struct Factors {
    PanelPackets before, block;
  };

  template <class T>
  static Block pack(const T* const* k, const T* const* v, Index count, Index dim, Index v_dim,
                    Packed* keys, Packed* values) {
    Block block;
    block.all_keys = pack_fixed_keys(k, count, dim, keys, block.key_factors);
    constexpr Index value_rows = ceil_div(tuning::block_keys, 2);
    float* const units = reinterpret_cast<float*>(values + value_rows * value_stride(v_dim));
    float* const apart = units + value_stride(v_dim);
    block.all_values = pack_fixed_values(v, count, v_dim, values, units, apart);
    block.units = units, block.apart = apart;
    return block;
  }

  // row_factors, [width], bring `scale`.
  template <class T>
  static void pack_rows(const T* const* rows, Index count, Index dim, float scale, Lane* panel,
                        float* row_factors) {
    alignas(64) float scales[width];
    for (Index first = 0; first < width; first += simd::lanes) {
      const Index n = std::clamp<Index>(count - first, 0, simd::lanes);
      const RowNorms norms = norms_of(rows + first, n, dim);
      const simd::Packet norm = norm_or_nan(norms.square);
      const simd::Packet factor =
          simd::max(simd::mul(norm, simd::broadcast(1.0f / query_norm(dim))),
                    simd::mul(norms.largest, simd::broadcast(1.0f / key_norm)));
      simd::store(scales + first, simd::div(simd::broadcast(1.0f), factor));
      simd::store(row_factors + first, simd::mul(factor, simd::broadcast(scale)));
      leave_to_float(rows + first, n, dim, scales + first, row_factors + first, 1e18f);
    }
    for (Index first = 0; first < width; first += simd::lanes)
      for_channel_pairs(dim, [&](Index c, Index n) {
        simd::Square low, high;
        for (int i = 0; i < simd::lanes; ++i) {
          low.packet[i] = high.packet[i] = simd::zero();
          if (first + i >= count) continue;
          const simd::Packet s = simd::broadcast(scales[first + i]);
          load_channel_pairs(rows[first + i] + c, n, low.packet[i], high.packet[i]);
          low.packet[i] = simd::mul(low.packet[i], s);
          high.packet[i] = simd::mul(high.packet[i], s);
        }
        simd::transpose(low), simd::transpose(high);
        for (Index i = 0; i < ceil_div(n, 2); ++i)
          simd::store_pairs(panel + (c / 2 + i) * width + first, low.packet[i], high.packet[i]);
      });
  }

  static void logits(const Block& block, const Packed* tiles, const Lane* panel,
                     const float* row_factors, Index dim, Index keys, float* x, PanelPackets& top) {
    const Index stride = key_tile_size(steps(dim));
    for (Index key = 0; key < keys; key += tuning::tile_rows, tiles += stride)
      logit_tile(tiles, panel, row_factors, steps(dim), block.key_factors + key, x + key * width,
                 top);
  }

  static const Lane* softmax(float* x, Index keys, const PanelPackets& top, PanelState& state,
                             Factors& factors, Lane* weights) {
    simd::Packet reference[packets];
    Sums sum[packets];
    for (int j = 0; j < packets; ++j) {
      reference[j] = PacketState{top[j], top[j]}.reference();
      sum[j] = Sums::zero();
      factors.before[j] = state[j].raise(top[j]);
      factors.block[j] = simd::exp2(simd::sub(top[j], state[j].reference()));
    }
    const Sums ones = Sums::broadcast(simd::pair_of(1, 1));
    const auto weight = [&](Index key, auto j) QUOKA_INLINE_LAMBDA {
      return simd::exp2_scaled<weight_bits>(
          simd::sub(simd::load(x + key * width + j * simd::lanes), reference[j]));
    };
    const auto leave = [&](Index pair, auto j, const simd::Packet& low, const simd::Packet& high)
                           QUOKA_INLINE_LAMBDA {
                             Lane* const to = weights + pair * width + j * simd::lanes;
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
    return weights;
  }

  static void values(const Block& block, const Packed* values, Index dim, const Lane* weights,
                     Index keys, const Factors& factors, float* out) {
    assert(0 < dim && 0 <= keys && keys <= tuning::block_keys);
    for_value_tiles(dim, [&](auto rows, Index c) QUOKA_INLINE_LAMBDA {
      value_tile<rows>(values + c, value_stride(dim), weights, ceil_div(keys, 2), factors,
                       block.units + c, out + c * width);
    });
  }

 private:
  // Norms of packed vectors. Each element may be rounded by 1/2, so a vector of n elements by
  // sqrt(n) / 2. |k~| |q~| and |v~| |w~| stay below 2^31, and what is smaller, elements, below 2^15.
  static constexpr float key_norm = 32700.0f, most = 2147e6f;
  static float query_norm(Index dim) {
    const float rounding = 0.5f * std::sqrt(static_cast<float>(dim));
    return most / (key_norm + rounding) - rounding;
  }
  static float value_norm() {
    const float root = std::sqrt(static_cast<float>(tuning::block_keys));
    return std::min(key_norm, most / (std::ldexp(root, weight_bits)) - 0.5f * root);
  }

  // Returns false if a key is left to float.
  template <class T>
  static bool pack_fixed_keys(const T* const* rows, Index count, Index dim, Packed* tiles,
                              float* factors) {
    bool all = true;
    alignas(64) float scales[round_up(tuning::block_keys, simd::lanes)];
    for (Index first = 0; first < count; first += simd::lanes) {
      const Index n = std::min<Index>(simd::lanes, count - first);
      const simd::Packet norm = norm_or_nan(norms_of(rows + first, n, dim).square);
      simd::store(factors + first, simd::mul(norm, simd::broadcast(1.0f / key_norm)));
      simd::store(scales + first, simd::div(simd::broadcast(key_norm), norm));
      all &= leave_to_float(rows + first, n, dim, scales + first, factors + first);
    }
    for (Index i = round_up(count, simd::lanes); i < round_up(count, tuning::tile_rows); ++i)
      factors[i] = 0.0f;
    const Index tile_size = key_tile_size(steps(dim));
    for (Index i = 0; i < round_up(count, tuning::tile_rows); ++i) {
      Packed* const to = tiles + i / tuning::tile_rows * tile_size + i % tuning::tile_rows * slab;
      const bool key = i < count;
      const simd::Packet scale = simd::broadcast(key ? scales[i] : 0.0f);
      for_channel_pairs(dim, [&](Index c, Index n) QUOKA_INLINE_LAMBDA {
        simd::Packet low = simd::zero(), high = simd::zero();
        if (key) load_channel_pairs(rows[i] + c, n, low, high);
        const Index step = c / 2;
        simd::store_pairs(to + step / slab * slab * tuning::tile_rows + step % slab,
                          simd::mul(low, scale), simd::mul(high, scale));
      });
    }
    return all;
  }

  // Of `lanes` rows: the scale of those that integers cannot hold becomes zero, and the factor, too,
  // of those that are absent or all zeros. Returns whether that is all of them.
  template <class T>
  static bool leave_to_float(const T* const* rows, Index count, Index dim, float* scales,
                             float* factors, float most_factor = simd::infinity) {
    bool all = true;
    for (Index i = 0; i < simd::lanes; ++i) {
      if (std::abs(factors[i]) < most_factor) continue;
      const auto zero = [](T x) { return static_cast<float>(x) == 0.0f; };
      const bool nothing = i >= count || std::all_of(rows[i], rows[i] + dim, zero);
      scales[i] = 0.0f;
      factors[i] = nothing ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      all &= nothing;
    }
    return all;
  }

  // Two keys at a time; units[c] takes sums of channel c back. Returns false if a channel is left
  // to float.
  template <class T>
  static bool pack_fixed_values(const T* const* rows, Index count, Index dim, Packed* values,
                                float* units, float* apart) {
    const Index stride = value_stride(dim);
    const float norm = value_norm();
    bool all = true;
    for (Index c = 0; c < dim; c += simd::lanes) {
      const Index n = std::min<Index>(simd::lanes, dim - c);
      const auto load = [&](Index i) QUOKA_INLINE_LAMBDA {
        if (n == simd::lanes) return simd::load_as_float(rows[i] + c);
        alignas(64) float x[simd::lanes] = {};
        for (Index l = 0; l < n; ++l) x[l] = static_cast<float>(rows[i][c + l]);
        return simd::load(x);
      };
      simd::Packet sum[2] = {simd::zero(), simd::zero()};
      for (Index i = 0; i < count; ++i) {
        const simd::Packet x = load(i);
        sum[i % 2] = simd::fma(x, x, sum[i % 2]);
      }
      const simd::Packet channel = norm_or_nan(simd::add(sum[0], sum[1]));
      simd::store(units + c,
                  simd::mul(channel, simd::broadcast(std::ldexp(1.0f / norm, -weight_bits))));
      alignas(64) float scales[simd::lanes];
      simd::store(scales, simd::div(simd::broadcast(norm), channel));
      for (Index l = 0; l < simd::lanes; ++l) {
        apart[c + l] = 0.0f;
        if (units[c + l] == units[c + l]) continue;
        scales[l] = units[c + l] = 0.0f;
        const auto zero = [&](const T* row) { return static_cast<float>(row[c + l]) == 0.0f; };
        if (l >= n || std::all_of(rows, rows + count, zero)) continue;
        apart[c + l] = 1.0f;
        all = false;
      }
      const simd::Packet scale = simd::load(scales);
      for (Index i = 0; i < count; i += 2)
        simd::store_pairs(values + i / 2 * stride + c, simd::mul(load(i), scale),
                          i + 1 < count ? simd::mul(load(i + 1), scale) : simd::zero());
    }
    return all;
  }

  // One tile of keys times the panel; the maximum goes to top, of use where the tile is whole.
  static void logit_tile(const Packed* tile, const Lane* panel, const float* row_factors,
                         Index steps, const float* key_factors, float* x, PanelPackets& top) {
    constexpr int rows = tuning::tile_rows;
    Sums acc[rows][packets];
    simd::unroll<rows, packets>([&](auto i, auto j)
                                    QUOKA_INLINE_LAMBDA { acc[i][j] = Sums::zero(); });
    Index left = steps;
    for (; left >= slab; left -= slab) {
      rank1_updates<rows, packets, slab>(acc, tile, 1, panel, slab);
      tile += Index{slab} * rows, panel += Index{slab} * width;
    }
    if (left > 0) rank1_updates<rows, packets, slab>(acc, tile, 1, panel, left);
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

  template <int Channels>
  static void value_tile(const Packed* values, Index stride, const Lane* weights, Index pairs,
                         const Factors& factors, const float* units, float* out) {
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

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
