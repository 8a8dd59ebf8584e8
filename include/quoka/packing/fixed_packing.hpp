// Rows to 16-bit fixed point: pairs of integers relative to their own norms (fixed_panels.hpp).
//
// Pairs are channels c and c + lanes of keys and queries, and two keys of values. What integers
// cannot hold has a factor of NaN: a key or query that is not finite, or whose norm is not in
// (1e-15, 1e14); channels of a block of values likewise. Rows are floats here: those of another format
// are widened first, so that a format has no code for fixed point.
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
QUOKA_INLINE void load_channel_pairs(const float* row, Index first, Index n, simd::Packet& low,
                                     simd::Packet& high) {
  row += first;
  if (n == 2 * simd::lanes) {
    low = simd::load_unaligned(row), high = simd::load_unaligned(row + simd::lanes);
    return;
  }
  alignas(64) float x[2 * simd::lanes] = {};
  const Index half = ceil_div(n, 2);
  for (Index c = 0; c < half; ++c) x[c] = row[c];
  for (Index c = half; c < n; ++c) x[simd::lanes + c - half] = row[c];
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
inline RowNorms norms_of(const float* const* rows, Index count, Index dim) {
  simd::Square squares, sizes;
  for (int i = 0; i < simd::lanes; ++i) {
    simd::Packet sum[2] = {simd::zero(), simd::zero()}, least = simd::zero(), most = simd::zero();
    if (i < count)
      for_channel_pairs(dim, [&](Index c, Index n) QUOKA_INLINE_LAMBDA {
        simd::Packet low, high;
        load_channel_pairs(rows[i], c, n, low, high);
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
inline bool leave_to_float(const float* const* rows, Index count, Index dim, float* scales,
                           float* factors, float most_factor = simd::infinity) {
  bool all = true;
  for (Index i = 0; i < simd::lanes; ++i) {
    if (std::abs(factors[i]) < most_factor) continue;
    bool nothing = true;
    for (Index c = 0; i < count && c < dim; ++c) nothing &= rows[i][c] == 0.0f;
    scales[i] = 0.0f;
    factors[i] = nothing ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    all &= nothing;
  }
  return all;
}

// Floats between widened rows: an odd number of packets, so that channel c of many rows does not
// fall into a few sets of the cache.
constexpr Index widened_stride(Index dim) { return value_stride(dim) + simd::lanes; }

// rows[0, count) as floats: in place, or widened to `memory`.
inline void read_floats(const Format& format, const ConstRow* rows, Index count,
                        const RowShape& shape, float* memory, const float** floats) {
  for (Index i = 0; i < count; ++i, memory += widened_stride(shape.dim)) {
    floats[i] = format.is_float ? reinterpret_cast<const float*>(rows[i]) : memory;
    if (!format.is_float) format.widen(rows[i], shape, memory);
  }
}

// Values that are widened together, an even number: sums of squares stay in registers for so long.
inline constexpr Index fixed_value_rows = 16;

// Floats of memory that pack_fixed_keys takes: rows; and pack_fixed_values: sums of both parities,
// scales, rows.
constexpr Index fixed_key_memory(Index dim) { return simd::lanes * widened_stride(dim); }
constexpr Index fixed_value_memory(Index dim) {
  return (3 + fixed_value_rows) * widened_stride(dim);
}

// Tiles of keys; factors [count, rounded up to tiles and lanes] take products back. Returns false if
// a key is left to float.
inline bool pack_fixed_keys(const Format& format, const ConstRow* rows, Index count,
                            const RowShape& shape, simd::Int16Pair* tiles, float* factors,
                            float* memory) {
  const Index dim = shape.dim, places = round_up(count, tuning::tile_rows);
  const Index tile_size = key_tile_size(pair_steps(dim));
  bool all = true;
  alignas(64) float scales[simd::lanes];
  const float* floats[simd::lanes];
  for (Index first = 0; first < places; first += simd::lanes) {
    const Index n = std::clamp<Index>(count - first, 0, simd::lanes);
    read_floats(format, rows + first, n, shape, memory, floats);
    const simd::Packet norm = norm_or_nan(norms_of(floats, n, dim).square);
    simd::store(factors + first, simd::mul(norm, simd::broadcast(1.0f / fixed_key_norm)));
    simd::store(scales, simd::div(simd::broadcast(fixed_key_norm), norm));
    all &= leave_to_float(floats, n, dim, scales, factors + first);
    for (Index i = first; i < std::min(places, first + simd::lanes); ++i) {
      simd::Int16Pair* const to =
          tiles + i / tuning::tile_rows * tile_size + i % tuning::tile_rows * slab;
      const bool key = i < count;
      const simd::Packet scale = simd::broadcast(scales[i - first]);
      for_channel_pairs(dim, [&](Index c, Index channels) QUOKA_INLINE_LAMBDA {
        simd::Packet low = simd::zero(), high = simd::zero();
        if (key) load_channel_pairs(floats[i - first], c, channels, low, high);
        const Index step = c / 2;
        simd::store_pairs(to + step / slab * slab * tuning::tile_rows + step % slab,
                          simd::mul(low, scale), simd::mul(high, scale));
      });
    }
  }
  return all;
}

// Channels of a row from `row` on, n of them: a packet, the rest of it zero.
QUOKA_INLINE simd::Packet load_channels(const float* row, Index n) {
  if (n >= simd::lanes) return simd::load_unaligned(row);
  alignas(64) float x[simd::lanes] = {};
  for (Index c = 0; c < n; ++c) x[c] = row[c];
  return simd::load(x);
}

// Which channels of rows[0, count) are not all zeros: present[c] is not 0. Reads them into `memory`.
[[gnu::cold, gnu::noinline]] inline void find_present(const Format& format, const ConstRow* rows,
                                                      Index count, const RowShape& shape,
                                                      float* memory, float* present) {
  std::fill_n(present, shape.dim, 0.0f);
  for (Index i = 0; i < count; ++i) {
    const float* row;
    read_floats(format, rows + i, 1, shape, memory, &row);
    for (Index c = 0; c < shape.dim; ++c)
      if (row[c] != 0.0f) present[c] = 1.0f;
  }
}

// Two keys at a time; units[c] takes sums of channel c back. apart[c] is 1 for a channel that is
// left to float, and then false is returned. Rows are widened twice: all of them at once would not
// stay in L1.
inline bool pack_fixed_values(const Format& format, const ConstRow* rows, Index count,
                              const RowShape& shape, simd::Int16Pair* values, float* units,
                              float* apart, float* memory) {
  const Index dim = shape.dim, stride = value_stride(dim), step = widened_stride(dim);
  float *const sums = memory, *const scales = sums + 2 * step;
  memory = scales + step;
  std::fill_n(sums, 2 * step, 0.0f);
  const float* row[fixed_value_rows];
  for (Index i = 0; i < count; i += fixed_value_rows) {
    const Index n = std::min(fixed_value_rows, count - i);
    read_floats(format, rows + i, n, shape, memory, row);
    for (Index c = 0; c < dim; c += simd::lanes) {
      simd::Packet even = simd::load(sums + c), odd = simd::load(sums + step + c);
      for (Index r = 0; r < n; r += 2) {
        const simd::Packet x = load_channels(row[r] + c, dim - c);
        even = simd::fma(x, x, even);
        if (r + 1 == n) break;
        const simd::Packet y = load_channels(row[r + 1] + c, dim - c);
        odd = simd::fma(y, y, odd);
      }
      simd::store(sums + c, even), simd::store(sums + step + c, odd);
    }
  }
  const float norm = fixed_value_norm();
  const simd::Packet unit = simd::broadcast(std::ldexp(1.0f / norm, -tuning::fixed_weight_bits));
  bool all_held = true;
  for (Index c = 0; c < dim; c += simd::lanes) {
    const simd::Packet channel =
        norm_or_nan(simd::add(simd::load(sums + c), simd::load(sums + step + c)));
    simd::store(units + c, simd::mul(channel, unit));
    simd::store(scales + c, simd::div(simd::broadcast(norm), channel));
    for (Index l = c; l < std::min(dim, c + simd::lanes); ++l) all_held &= units[l] == units[l];
  }
  std::fill_n(apart, dim, 0.0f);
  bool all = true;
  if (!all_held) {
    find_present(format, rows, count, shape, memory, sums);
    for (Index c = 0; c < dim; ++c) {
      if (units[c] == units[c]) continue;
      scales[c] = units[c] = 0.0f;
      if (sums[c] != 0.0f) apart[c] = 1.0f, all = false;
    }
  }
  for (Index i = 0; i < count; i += fixed_value_rows) {
    const Index n = std::min(fixed_value_rows, count - i);
    read_floats(format, rows + i, n, shape, memory, row);
    for (Index r = 0; r < n; r += 2, values += stride)
      for (Index c = 0; c < dim; c += simd::lanes) {
        const simd::Packet scale = simd::load(scales + c);
        const simd::Packet high = r + 1 < n ? load_channels(row[r + 1] + c, dim - c) : simd::zero();
        simd::store_pairs(values + c, simd::mul(load_channels(row[r] + c, dim - c), scale),
                          simd::mul(high, scale));
      }
  }
  return all;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
