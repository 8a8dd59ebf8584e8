// Rows to 8-bit integers with a scale a row (kernels/int8_panels.hpp): x = scale * code, |code| <=
// 127.
//
// Rows are rotated first, by a Hadamard transform over groups of 2, 4, ... 32 quads of channels.
// The first group is the largest power of two that fits the row, the next one the largest that fits
// the rest: 80 channels are 64 and 16. Products of queries and keys do not change by it, and sums
// of values are turned back once (turn_back). An outlier channel, which every real model has, then
// no longer coarsens the steps of all other channels. On recorded layers errors of outputs are 0.64
// to 0.92 of those without rotation. Rotating all channels together would need shuffles within
// quads, for 0.015 less.
//
// Numbers that codes cannot hold are computed in float (panel_arithmetic.hpp). A key or query
// with a channel that is not finite, or 2^50 or more, has a factor of NaN and codes of 0. If the
// scale of logits is above 1, a query that is too short for codes has them, too. Values that codes
// cannot hold are left out one by one, and have sums of their own.
#pragma once

#include <quoka/kernels/error_bounds.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/simd/simd.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

constexpr Index quads_of(Index count) { return ceil_div(count, 4); }

inline constexpr float most_code = 127.0f;

// The factor with which two rotations give the same row again: sums and differences themselves are
// not scaled.
inline float rotation_unit(Index padded) {
  const int group = slabs_together(padded / slab);
  return group == 8 ? 0.176776695f : group == 4 ? 0.25f : group == 2 ? 0.353553391f : 0.5f;
}
// The factor of a group of slabs relative to the first group of a row, which is larger.
inline float beside_first(int first, int group) {
  const int ratio = first / group;
  return ratio == 8 ? 2.82842712f : ratio == 4 ? 2.0f : ratio == 2 ? 1.41421356f : 1.0f;
}

// x[i] and x[i + span] to their sum and their difference.
template <int span, std::size_t count>
QUOKA_INLINE void rotate_packets(simd::Packet (&x)[count]) {
  simd::unroll<int{count} / 2>([&](auto i) QUOKA_INLINE_LAMBDA {
    const int low = i / span * 2 * span + i % span;
    const simd::Packet a = x[low], b = x[low + span];
    x[low] = simd::add(a, b), x[low + span] = simd::sub(a, b);
  });
}
// All of them with each other.
template <std::size_t count>
QUOKA_INLINE void rotate_group(simd::Packet (&x)[count]) {
  if constexpr (count > 1) rotate_packets<1>(x);
  if constexpr (count > 2) rotate_packets<2>(x);
  if constexpr (count > 4) rotate_packets<4>(x);
}
// The same of lanes of a slab.
template <int span, std::size_t count>
QUOKA_INLINE void rotate_lanes(simd::Packet (&x)[count]) {
  if constexpr (span >= simd::lanes)
    rotate_packets<span / simd::lanes>(x);
  else
    for (simd::Packet& one : x) one = simd::sums_and_differences<span>(one);
}

// The largest and the smallest number in the lanes of packets; NaN where one is not finite.
struct LaneRange {
  simd::Packet most, least, poison;

  simd::Packet magnitude() const {
    const simd::Packet endless = simd::broadcast(simd::infinity);
    const simd::Packet largest = simd::max(most, simd::sub(simd::zero(), least));
    return simd::select_less(simd::add(largest, poison), endless, largest, endless);
  }
};

// `group` slabs of `from`, any address, to `to`; times `times` if scaled. A number that is not
// finite ends up in four lanes of each slab.
template <int group, bool scaled>
QUOKA_INLINE void rotate_slabs(const float* from, [[maybe_unused]] float times, float* to,
                               LaneRange& all) {
  constexpr int parts = slab / simd::lanes;  // packets of a slab
  LaneRange range = all;                     // in registers
  const auto finish = [&](simd::Packet(&x)[parts], Index at) QUOKA_INLINE_LAMBDA {
    rotate_lanes<8>(x), rotate_lanes<4>(x);
    simd::unroll<parts>([&](auto i) QUOKA_INLINE_LAMBDA {
      if constexpr (scaled) x[i] = simd::mul(x[i], simd::broadcast(times));
      range.most = simd::max(range.most, x[i]), range.least = simd::min(range.least, x[i]);
      simd::store(to + at + i * simd::lanes, x[i]);
    });
    if (at == 0)
      for (const simd::Packet& one : x) range.poison = simd::fma(one, simd::zero(), range.poison);
  };
  simd::unroll<parts>([&](auto part) QUOKA_INLINE_LAMBDA {
    const Index at = part * simd::lanes;
    simd::Packet x[group];
    simd::unroll<group>(
        [&](auto i) QUOKA_INLINE_LAMBDA { x[i] = simd::load_unaligned(from + i * slab + at); });
    rotate_group(x);
    simd::unroll<group>([&](auto i) QUOKA_INLINE_LAMBDA {
      if constexpr (parts == 1) {
        simd::Packet one[1] = {x[i]};
        finish(one, i * slab);
      } else {
        simd::store(to + i * slab + at, x[i]);
      }
    });
  });
  if constexpr (parts > 1)
    for (int i = 0; i < group; ++i) {
      simd::Packet x[parts];
      simd::unroll<parts>(
          [&](auto j) QUOKA_INLINE_LAMBDA { x[j] = simd::load(to + i * slab + j * simd::lanes); });
      finish(x, i * slab);
    }
  all = range;
}
// f(group, first slab, times) for the groups of slabs that are rotated together.
template <class F>
QUOKA_INLINE void for_groups(Index padded, F&& f) {
  const int first = slabs_together(padded / slab);
  for (Index at = 0, left = padded / slab; left > 0;) {
    const int group = slabs_together(left);
    const float times = beside_first(first, group);
    switch (group) {
      case 8:
        f(simd::Constant<8>{}, at, times);
        break;
      case 4:
        f(simd::Constant<4>{}, at, times);
        break;
      case 2:
        f(simd::Constant<2>{}, at, times);
        break;
      default:
        f(simd::Constant<1>{}, at, times);
    }
    at += group, left -= group;
  }
}
// from [padded], any address, to `to`, which may be `from`: a rotation, except for the factor
// rotation_unit(). Returns the largest |x| of each lane, infinity where some channel is not finite.
QUOKA_INLINE simd::Packet rotate_channels(const float* from, Index padded, float* to) {
  LaneRange range{simd::zero(), simd::zero(), simd::zero()};
  for_groups(padded, [&](auto group, Index at, float times) QUOKA_INLINE_LAMBDA {
    if (at == 0)
      rotate_slabs<group, false>(from, times, to, range);
    else
      rotate_slabs<group, true>(from + at * slab, times, to + at * slab, range);
  });
  return range.magnitude();
}

// In place; returns the largest |x|.
[[gnu::noinline]] inline float rotate_row(float* x, Index padded) {
  return simd::reduce_max(rotate_channels(x, padded, x));
}

// The scale of a row with that largest channel: 0 for a row of zeros, or one so short that codes
// could not be scaled back.
inline float scale_of_largest(float largest) {
  return largest < 0x1p-100f ? 0.0f : largest * (1.0f / most_code);
}
// The same, NaN for a row that codes cannot hold.
inline float int8_scale(float largest) {
  return largest < most_length ? scale_of_largest(largest)
                               : std::numeric_limits<float>::quiet_NaN();
}
// The factor that takes the row to its codes.
inline float inverse_of_scale(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// Rows that are packed side by side: their sums and maxima are one.
inline constexpr Index batch_rows = simd::lanes < 4 ? 4 : simd::lanes;

// Reduces x[i], the packet of row i, by op into to[i].
template <class Op>
QUOKA_INLINE void reduce_batch(const simd::Packet (&x)[batch_rows], Op&& op, float* to) {
  for (Index first = 0; first < batch_rows; first += simd::lanes) {
    simd::Square square;
    for (Index i = 0; i < simd::lanes; ++i) square.packet[i] = x[first + i];
    simd::store(to + first, simd::reduce_each(square, op));
  }
}

// A batch of rows, rotated, in room [batch_rows][padded], zeros behind the last; their largest |x|.
inline void rotate_batch(const Format& format, const ConstRow* rows, Index count,
                         const RowShape& shape, float* room, float* largest) {
  const Index padded = int8_channels(shape.dim);
  simd::Packet most[batch_rows];
  for (Index i = 0; i < batch_rows; ++i) {
    float* const to = room + i * padded;
    if (i < count) {
      most[i] = rotate_channels(padded_row(format, rows[i], shape, padded, to), padded, to);
    } else {
      most[i] = simd::zero();
      std::fill_n(to, padded, 0.0f);
    }
  }
  const auto larger = [](const simd::Packet& a, const simd::Packet& b)
                          QUOKA_INLINE_LAMBDA { return simd::max(a, b); };
  reduce_batch(most, larger, largest);
}

// Codes of x [padded] times `inverse`, plus `bias`, to `to`: channels c, c + 16, c + 32, c + 48 of
// each 64 make a quad, those of what is left lie in their order. `step`: bytes from the codes of 64
// channels to those of the next.
QUOKA_INLINE void write_codes(const float* x, Index padded, float inverse, float bias,
                              std::byte* to, Index step) {
  const simd::Packet factor = simd::broadcast(inverse);
  const auto codes = [&](Index c) QUOKA_INLINE_LAMBDA {
    return simd::round_to(simd::mul(simd::load(x + c), factor), bias);
  };
  Index c = 0;
  for (; c + 4 * slab <= padded; c += 4 * slab, to += step)
    for (Index at = 0; at < slab; at += simd::lanes) {
      const simd::Packet four[4] = {codes(c + at), codes(c + slab + at), codes(c + 2 * slab + at),
                                    codes(c + 3 * slab + at)};
      simd::store_quads(reinterpret_cast<simd::Quad*>(to) + at, four);
    }
  for (; c < padded; c += simd::lanes, to += simd::lanes)
    simd::store_bytes(reinterpret_cast<std::uint8_t*>(to), codes(c));
}
// Sums of those codes, without a bias, by lane.
template <class Sums>
QUOKA_INLINE simd::Packet sum_codes(const std::byte* codes, Index padded, Index step) {
  Sums sum = Sums::from(0);
  const Sums ones = Sums::broadcast({0x01010101u});
  const auto add = [&](const std::byte* of) QUOKA_INLINE_LAMBDA {
    const auto* const quads = reinterpret_cast<const simd::Quad*>(of);
    for (Index at = 0; at < slab; at += simd::lanes) sum = fma(Sums::load(quads + at), ones, sum);
  };
  Index left = padded;
  for (; left >= 4 * slab; left -= 4 * slab, codes += step) add(codes);
  if (left > 0) {
    alignas(64) std::byte last[4 * slab] = {};
    std::memcpy(last, codes, static_cast<std::size_t>(left));
    add(last);
  }
  return sum.to_float();
}

// Queries are stored unsigned: code + 128. The start value of a key's product with them takes that
// back.
inline constexpr float query_bias = 128.0f;

// Keys to tiles of quads, [slab of 16 quads][tile_rows][16 quads]; starts and factors [count,
// rounded up to tiles and batches]; room [batch_rows][padded]. Returns false if one does not fit.
// factors: scales.
template <class Sums>
bool pack_int8_keys(const Format& format, const ConstRow* rows, Index count, const RowShape& shape,
                    simd::Quad* tiles, std::int32_t* starts, float* factors, float* room) {
  constexpr Index height = tuning::tile_rows;
  const Index padded = int8_channels(shape.dim), quads = quads_of(padded);
  const float unit = rotation_unit(padded);
  bool all = true;
  const Index end = round_up(count, height), step = Index{4} * slab * height;
  for (Index first = 0; first < end; first += batch_rows) {
    alignas(64) float largest[batch_rows], sums[batch_rows];
    simd::Packet sum[batch_rows];
    rotate_batch(format, rows + first, count - first, shape, room, largest);
    const auto codes_of = [&](Index row) QUOKA_INLINE_LAMBDA {
      return reinterpret_cast<std::byte*>(tiles + row / height * key_tile_size(quads) +
                                          row % height * slab);
    };
    for (Index i = 0; i < batch_rows; ++i) {
      float* const x = room + i * padded;
      const float scale = int8_scale(largest[i] * unit);
      if (!(scale == scale)) std::fill_n(x, padded, 0.0f), all = false;
      factors[first + i] = scale;
      if (first + i < end)
        write_codes(x, padded, unit * inverse_of_scale(scale), 0.0f, codes_of(first + i), step);
    }
    for (Index i = 0; i < batch_rows; ++i)
      sum[i] = first + i < end ? sum_codes<Sums>(codes_of(first + i), padded, step) : simd::zero();
    const auto added = [](const simd::Packet& a, const simd::Packet& b)
                           QUOKA_INLINE_LAMBDA { return simd::add(a, b); };
    reduce_batch(sum, added, sums);
    for (Index i = 0; i < batch_rows; ++i)
      starts[first + i] = static_cast<std::int32_t>(-query_bias * sums[i]);
  }
  return all;
}

// A value of which some number does not fit, rotated without those: x [padded]. Returns its largest
// |x|.
[[gnu::cold, gnu::noinline]] inline float rotate_what_fits(const Format& format, ConstRow row,
                                                           const RowShape& shape, float* x,
                                                           bool& all) {
  const Index padded = int8_channels(shape.dim);
  widen_padded(format, row, shape, padded, x);
  for (Index c = 0; c < shape.dim; ++c)
    if (!(std::abs(x[c]) < most_length)) x[c] = 0.0f, all = false;
  return rotate_row(x, padded);
}

// Values to quads [4 keys][value_stride]; factors [count, rounded up to batches]: what a code is
// multiplied by, as sums are turned back. False where a number does not fit, which counts as 0
// here. room [batch_rows][padded].
inline bool pack_int8_values(const Format& format, const ConstRow* rows, Index count,
                             const RowShape& shape, simd::Quad* values, float* factors,
                             float* room) {
  const Index padded = value_stride(shape.dim);
  const float unit = rotation_unit(padded);
  bool all = true;
  for (Index first = 0; first < count; first += batch_rows) {
    alignas(64) float largest[batch_rows], inverse[batch_rows];
    rotate_batch(format, rows + first, count - first, shape, room, largest);
    for (Index i = 0; i < batch_rows; ++i) {
      // A channel is at most sqrt(32) times as large as the largest rotated one.
      if (!(largest[i] * unit < most_length / 8))
        largest[i] = rotate_what_fits(format, rows[first + i], shape, room + i * padded, all);
      const float scale = scale_of_largest(largest[i] * unit);
      factors[first + i] = scale * unit;
      inverse[i] = unit * inverse_of_scale(scale);
    }
    for (Index i = 0; i < batch_rows && first + i < count; i += 4, values += padded)
      for (Index c = 0; c < padded; c += simd::lanes) {
        simd::Packet codes[4];
        for (Index of = 0; of < 4; ++of)
          codes[of] = simd::round_to(simd::mul(simd::load(room + (i + of) * padded + c),
                                               simd::broadcast(inverse[i + of])));
        simd::store_quads(values + c, codes);
      }
  }
  return all;
}

// Sums of rotated values out [padded][panel_rows], turned back; factors of pack_int8_values() do
// the rest.
inline void turn_back(Index padded, float* out) {
  constexpr Index width = tuning::panel_rows;
  for_groups(padded, [&](auto group, Index first, float times) QUOKA_INLINE_LAMBDA {
    const simd::Packet factor = simd::broadcast(times);
    float* const slabs = out + first * slab * width;
    for (Index at = 0; at < slab * width; at += simd::lanes) {
      simd::Packet x[group];
      simd::unroll<group>(
          [&](auto i) QUOKA_INLINE_LAMBDA { x[i] = simd::load(slabs + i * slab * width + at); });
      rotate_group(x);
      simd::unroll<group>([&](auto i) QUOKA_INLINE_LAMBDA {
        simd::store(slabs + i * slab * width + at, simd::mul(x[i], factor));
      });
    }
    for (Index i = 0; i < group; ++i)
      for (Index at = i * slab * width; at < (i * slab + 4) * width; at += simd::lanes) {
        simd::Packet x[4];
        simd::unroll<4>([&](auto j)
                            QUOKA_INLINE_LAMBDA { x[j] = simd::load(slabs + j * 4 * width + at); });
        rotate_packets<2>(x), rotate_packets<1>(x);
        simd::unroll<4>([&](auto j)
                            QUOKA_INLINE_LAMBDA { simd::store(slabs + j * 4 * width + at, x[j]); });
      }
  });
}

// Queries of more channels are packed in memory that follows their panel.
inline constexpr Index most_stack_channels = 1024;
// Bytes of a panel of queries, with that memory.
inline Index int8_query_bytes(Index dim) {
  const Index padded = int8_channels(dim);
  return padded * tuning::panel_rows +
         (padded > most_stack_channels ? padded * 2 * Index{sizeof(float)} : 0);
}

// Queries rows[0, count) to a panel [quad][panel_rows] of int8_query_bytes(dim); factors
// [panel_rows]: scales times `scale`, NaN for a row that does not fit. Lanes beyond count are rows
// of zeros.
inline void pack_int8_queries(const float* const* rows, Index count, Index dim, float scale,
                              simd::Quad* panel, float* factors) {
  constexpr Index width = tuning::panel_rows;
  const Index padded = int8_channels(dim);
  alignas(64) float stack_x[most_stack_channels];
  alignas(64) std::byte stack_codes[most_stack_channels];
  float* x = stack_x;
  std::byte* codes = stack_codes;
  if (padded > most_stack_channels) {
    x = reinterpret_cast<float*>(panel + quads_of(padded) * width);
    codes = reinterpret_cast<std::byte*>(x + padded);
  }
  const float unit = rotation_unit(padded);
  for (Index i = 0; i < width; ++i) {
    factors[i] = 0.0f;
    auto* to = reinterpret_cast<std::uint8_t*>(panel + i);
    float inverse = 0.0f;
    if (i < count) {
      std::copy_n(rows[i], dim, x);
      std::fill(x + dim, x + padded, 0.0f);
      const float largest = rotate_row(x, padded);
      const float row_scale = int8_scale(largest * unit);
      // A logit must not overflow on its way, nor be infinity times 0. With a huge scale a row that
      // codes round to zero would have a logit; a key that they round to zero has less than 2^-20
      // beside rows of less than 2^60.
      const bool fits = std::abs(row_scale * scale) < 0x1p60f &&
                        !(row_scale == 0.0f && largest > 0.0f && std::abs(scale) > 1.0f);
      factors[i] = fits ? row_scale * scale : std::numeric_limits<float>::quiet_NaN();
      inverse = unit * inverse_of_scale(row_scale);
    }
    if (inverse == 0.0f) std::fill_n(x, padded, 0.0f);
    write_codes(x, padded, inverse, query_bias, codes, 4 * slab);
    for (Index c = 0; c < padded; c += 4, to += width * Index{sizeof(simd::Quad)})
      std::memcpy(to, codes + c, 4);
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
