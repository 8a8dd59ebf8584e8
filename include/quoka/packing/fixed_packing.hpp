// Rows to 16-bit fixed point: pairs of integers relative to their own norms (fixed_panels.hpp).
//
// Pairs are channels c and c + lanes of keys and queries, and two keys of values. What integers
// cannot hold has a factor of NaN: a key or query that is not finite, or whose norm is not in
// (1e-15, 1e14); channels of a block of values likewise.
//
// No sum of products overflows, because |a . b| <= |a| |b|: norms are scaled so that 2^31 is out of
// reach even when every vector is parallel to every other and every weight is the largest.
#pragma once

#include <quoka/packing/panel_packing.hpp>
#include <quoka/simd/pair_sums.hpp>

#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Channels [first, first + n) as two packets, n <= 2 * lanes: c in the first and c + lanes in the second where
// there are all, c and c + ceil(n / 2) where there are fewer; the rest is zero.
template <class Row>
QUOKA_INLINE void load_channel_pairs(ConstRow row, const RowShape& shape, Index first, Index n,
                                     simd::Packet& low, simd::Packet& high) {
  if (n == 2 * simd::lanes) {
    low = Row::load(row, first, shape), high = Row::load(row, first + simd::lanes, shape);
    return;
  }
  alignas(64) float x[2 * simd::lanes] = {};
  const Index half = ceil_div(n, 2);
  for (Index c = 0; c < half; ++c) x[c] = Row::at(row, first + c, shape);
  for (Index c = half; c < n; ++c) x[simd::lanes + c - half] = Row::at(row, first + c, shape);
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
template <class Row>
RowNorms norms_of(const ConstRow* rows, Index count, const RowShape& shape) {
  simd::Square squares, sizes;
  for (int i = 0; i < simd::lanes; ++i) {
    simd::Packet sum[2] = {simd::zero(), simd::zero()}, least = simd::zero(), most = simd::zero();
    if (i < count)
      for_channel_pairs(shape.dim, [&](Index c, Index n) QUOKA_INLINE_LAMBDA {
        simd::Packet low, high;
        load_channel_pairs<Row>(rows[i], shape, c, n, low, high);
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

// Norms of packed vectors. Each element may be rounded by 1/2, so a vector of n elements by
// sqrt(n) / 2. |k~| |q~| and |v~| |w~| stay below 2^31, and what is smaller, elements, below 2^15.
inline constexpr float fixed_key_norm = 32700.0f, fixed_most = 2147e6f;
inline float fixed_query_norm(Index dim) {
  const float rounding = 0.5f * std::sqrt(static_cast<float>(dim));
  return fixed_most / (fixed_key_norm + rounding) - rounding;
}
inline float fixed_value_norm() {
  const float root = std::sqrt(static_cast<float>(tuning::block_keys));
  return std::min(fixed_key_norm,
                  fixed_most / std::ldexp(root, tuning::fixed_weight_bits) - 0.5f * root);
}

// Of `lanes` rows: an unrepresentable row gets scale 0 and factor NaN; an absent or zero row 0 and
// 0. Returns true if no row is unrepresentable.
template <class Row>
bool leave_to_float(const ConstRow* rows, Index count, const RowShape& shape, float* scales,
                    float* factors, float most_factor = simd::infinity) {
  bool all = true;
  for (Index i = 0; i < simd::lanes; ++i) {
    if (std::abs(factors[i]) < most_factor) continue;
    bool nothing = true;
    for (Index c = 0; i < count && c < shape.dim; ++c)
      nothing &= Row::at(rows[i], c, shape) == 0.0f;
    scales[i] = 0.0f;
    factors[i] = nothing ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    all &= nothing;
  }
  return all;
}

// Tiles of keys; factors [count, rounded up to tiles and lanes] take products back. Returns false if
// a key is left to float.
template <class Row>
bool pack_fixed_keys(const ConstRow* rows, Index count, const RowShape& shape,
                     simd::Int16Pair* tiles, float* factors) {
  bool all = true;
  alignas(64) float scales[round_up(tuning::most_block_keys, simd::lanes)];
  for (Index first = 0; first < count; first += simd::lanes) {
    const Index n = std::min<Index>(simd::lanes, count - first);
    const simd::Packet norm = norm_or_nan(norms_of<Row>(rows + first, n, shape).square);
    simd::store(factors + first, simd::mul(norm, simd::broadcast(1.0f / fixed_key_norm)));
    simd::store(scales + first, simd::div(simd::broadcast(fixed_key_norm), norm));
    all &= leave_to_float<Row>(rows + first, n, shape, scales + first, factors + first);
  }
  for (Index i = round_up(count, simd::lanes); i < round_up(count, tuning::tile_rows); ++i)
    factors[i] = 0.0f;
  const Index tile_size = key_tile_size(pair_steps(shape.dim));
  for (Index i = 0; i < round_up(count, tuning::tile_rows); ++i) {
    simd::Int16Pair* const to =
        tiles + i / tuning::tile_rows * tile_size + i % tuning::tile_rows * slab;
    const bool key = i < count;
    const simd::Packet scale = simd::broadcast(key ? scales[i] : 0.0f);
    for_channel_pairs(shape.dim, [&](Index c, Index n) QUOKA_INLINE_LAMBDA {
      simd::Packet low = simd::zero(), high = simd::zero();
      if (key) load_channel_pairs<Row>(rows[i], shape, c, n, low, high);
      const Index step = c / 2;
      simd::store_pairs(to + step / slab * slab * tuning::tile_rows + step % slab,
                        simd::mul(low, scale), simd::mul(high, scale));
    });
  }
  return all;
}

// Two keys at a time; units[c] takes sums of channel c back. apart[c] is 1 for a channel that is
// left to float, and then false is returned.
template <class Row>
bool pack_fixed_values(const ConstRow* rows, Index count, const RowShape& shape,
                       simd::Int16Pair* values, float* units, float* apart) {
  const Index dim = shape.dim;
  const Index stride = value_stride(dim);
  const float norm = fixed_value_norm();
  bool all = true;
  for (Index c = 0; c < dim; c += simd::lanes) {
    const Index n = std::min<Index>(simd::lanes, dim - c);
    const auto load = [&](Index i) QUOKA_INLINE_LAMBDA {
      if (n == simd::lanes) return Row::load(rows[i], c, shape);
      alignas(64) float x[simd::lanes] = {};
      for (Index l = 0; l < n; ++l) x[l] = Row::at(rows[i], c + l, shape);
      return simd::load(x);
    };
    simd::Packet sum[2] = {simd::zero(), simd::zero()};
    for (Index i = 0; i < count; ++i) {
      const simd::Packet x = load(i);
      sum[i % 2] = simd::fma(x, x, sum[i % 2]);
    }
    const simd::Packet channel = norm_or_nan(simd::add(sum[0], sum[1]));
    simd::store(
        units + c,
        simd::mul(channel, simd::broadcast(std::ldexp(1.0f / norm, -tuning::fixed_weight_bits))));
    alignas(64) float scales[simd::lanes];
    simd::store(scales, simd::div(simd::broadcast(norm), channel));
    for (Index l = 0; l < simd::lanes; ++l) {
      apart[c + l] = 0.0f;
      if (units[c + l] == units[c + l]) continue;
      scales[l] = units[c + l] = 0.0f;
      bool nothing = true;
      for (Index i = 0; l < n && i < count; ++i) nothing &= Row::at(rows[i], c + l, shape) == 0.0f;
      if (nothing) continue;
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

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
