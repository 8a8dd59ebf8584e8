// Rows to 8-bit integers with a scale a row (kernels/int8_panels.hpp): x = scale * code, |code| <= 127.
//
// Keys and queries are rotated first: channels c, c + 16, c + 32, ... of 2, 4, 8, ... slabs of 16 are replaced by their
// Hadamard transform. Products stay what they are, and an outlier channel, which every real model has, no longer takes
// the steps of all others: measured on recorded layers, logits are off by 0.6 to 0.9 as much (bench/README.md).
//
// What codes cannot hold is computed in float (kernels/float_fallback.hpp): a key or query of which some channel is not
// finite, or 2^50 or more, has a factor of NaN and codes of 0; so is each single number of the values that is such.
#pragma once

#include <quoka/packing/panel_packing.hpp>
#include <quoka/simd/quad_sums.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Channels are padded to whole slabs of 16: quads, and packets of any ISA.
constexpr Index int8_channels(Index dim) { return round_up(dim, Index{slab}); }
constexpr Index quads_of(Index count) { return ceil_div(count, 4); }

inline constexpr float most_code = 127.0f;
inline constexpr float int8_most =
    0x1p50f;  // what a coded number stays below: most_length of bfloat16, too

// `group` slabs of `from`, any address, to `to`: orthonormal.
template <int group>
inline void rotate_slabs(const float* from, float* to) {
  const float norm = group == 8   ? 0.353553391f
                     : group == 4 ? 0.5f
                     : group == 2 ? 0.707106781f
                                  : 1.0f;
  for (Index at = 0; at < slab; at += simd::lanes) {
    simd::Packet x[group];
    simd::unroll<group>(
        [&](auto i) QUOKA_INLINE_LAMBDA { x[i] = simd::load_unaligned(from + i * slab + at); });
    constexpr int levels = group == 8 ? 3 : group == 4 ? 2 : group == 2 ? 1 : 0;
    simd::unroll<levels, group / 2>([&](auto level, auto i) QUOKA_INLINE_LAMBDA {
      const int span = 1 << level, low = i / span * 2 * span + i % span;
      const simd::Packet a = x[low], b = x[low + span];
      x[low] = simd::add(a, b), x[low + span] = simd::sub(a, b);
    });
    simd::unroll<group>([&](auto i) QUOKA_INLINE_LAMBDA {
      simd::store(to + i * slab + at, simd::mul(x[i], simd::broadcast(norm)));
    });
  }
}
// from [padded], any address, to `to`, which may be `from`: slabs in groups of at most 8.
inline void rotate_channels(const float* from, Index padded, float* to) {
  Index left = padded / slab;
  for (; left >= 8; left -= 8, from += 8 * slab, to += 8 * slab) rotate_slabs<8>(from, to);
  if (left >= 4) rotate_slabs<4>(from, to), left -= 4, from += 4 * slab, to += 4 * slab;
  if (left >= 2) rotate_slabs<2>(from, to), left -= 2, from += 2 * slab, to += 2 * slab;
  if (left >= 1) rotate_slabs<1>(from, to);
}

// max |x| of x [padded]; NaN or infinity where one is not finite.
inline float largest_channel(const float* x, Index padded) {
  simd::Packet most = simd::zero(), poison = simd::zero();  // x * 0 is NaN for NaN and infinity
  for (Index c = 0; c < padded; c += simd::lanes) {
    const simd::Packet at = simd::load_unaligned(x + c);
    most = simd::max(most, simd::max(at, simd::sub(simd::zero(), at)));
    poison = simd::fma(at, simd::zero(), poison);
  }
  return simd::reduce_max(most) + simd::reduce_add(poison);
}

// The scale of a row with that largest channel: 0 for a row of zeros, or one so short that codes could not be scaled
// back, NaN for one that codes cannot hold.
inline float int8_scale(float largest) {
  if (!(largest < int8_most)) return std::numeric_limits<float>::quiet_NaN();
  return largest < 0x1p-100f ? 0.0f : largest * (1.0f / most_code);
}
// What takes the row to its codes.
inline float inverse_of_scale(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// A row as floats [padded], any address: in place, or in `room` [padded] with zeros behind its channels.
inline const float* padded_floats(const Format& format, ConstRow row, const RowShape& shape,
                                  float* room) {
  if (format.is_float && shape.channel_step == 0 && shape.dim % slab == 0)
    return reinterpret_cast<const float*>(row);
  format.widen(row, shape, room);
  std::fill(room + shape.dim, room + int8_channels(shape.dim), 0.0f);
  return room;
}

// Codes of x [padded] times `inverse`, plus `bias`: codes [padded] bytes. Returns the sum of the codes without it.
inline float write_codes(const float* x, Index padded, float inverse, float bias,
                         std::uint8_t* codes) {
  simd::Packet sum = simd::zero();
  for (Index c = 0; c < padded; c += simd::lanes) {
    const simd::Packet rounded =
        simd::round_to(simd::mul(simd::load(x + c), simd::broadcast(inverse)), bias);
    sum = simd::add(sum, simd::integer_of(rounded));
    simd::store_bytes(codes + c, rounded);
  }
  return simd::reduce_add(sum) - bias * static_cast<float>(padded);
}

// Queries are stored unsigned: code + 128. What a key's product with them begins as takes that back.
inline constexpr float query_bias = 128.0f;

// Keys to tiles of quads, [slab of 16 quads][tile_rows][16 quads]; starts [count, rounded up to tiles]; room [padded].
// Returns false if one does not fit. factors: scales.
inline bool pack_int8_keys(const Format& format, const ConstRow* rows, Index count,
                           const RowShape& shape, simd::Quad* tiles, std::int32_t* starts,
                           float* factors, float* room) {
  constexpr Index height = tuning::tile_rows;
  const Index padded = int8_channels(shape.dim), quads = quads_of(padded);
  alignas(64) std::uint8_t codes[64 * 16];
  bool all = true;
  for (Index i = 0; i < round_up(count, height); ++i) {
    float scale = 0.0f;
    if (i < count) {
      rotate_channels(padded_floats(format, rows[i], shape, room), padded, room);
      scale = int8_scale(largest_channel(room, padded));
      all &= scale == scale;
    }
    factors[i] = scale;
    const float inverse = inverse_of_scale(scale);
    starts[i] = 0;
    simd::Quad* to = tiles + i / height * key_tile_size(quads) + i % height * slab;
    for (Index c = 0; c < padded; c += 4 * slab, to += Index{slab} * height) {
      const Index n = std::min<Index>(4 * slab, padded - c);
      if (inverse > 0.0f) {
        const float sum = write_codes(room + c, n, inverse, 0.0f, codes);
        starts[i] -= static_cast<std::int32_t>(query_bias * sum);
        std::memcpy(to, codes, static_cast<std::size_t>(n));
      } else {
        std::memset(to, 0, static_cast<std::size_t>(n));
      }
    }
  }
  return all;
}

// Values to quads [4 keys][value_stride]; factors [count, rounded up to 4]: what codes are times. False where a number
// does not fit, which counts as 0 here. room [4][padded].
inline bool pack_int8_values(const Format& format, const ConstRow* rows, Index count,
                             const RowShape& shape, simd::Quad* values, float* factors,
                             float* room) {
  const Index padded = value_stride(shape.dim);
  bool all = true;
  for (Index first = 0; first < count; first += 4, values += padded) {
    float inverse[4];
    const float* x[4];
    for (Index i = 0; i < 4; ++i) {
      float scale = 0.0f;
      if (first + i < count) {
        x[i] = padded_floats(format, rows[first + i], shape, room + i * padded);
        scale = int8_scale(largest_channel(x[i], padded));
        if (!(scale == scale)) {
          float* const fit = room + i * padded;
          std::transform(x[i], x[i] + padded, fit,
                         [](float one) { return std::abs(one) < int8_most ? one : 0.0f; });
          x[i] = fit, all = false;
          scale = int8_scale(largest_channel(fit, padded));
        }
      }
      factors[first + i] = scale;
      inverse[i] = inverse_of_scale(scale);
      if (scale == 0.0f) x[i] = std::fill_n(room + i * padded, padded, 0.0f) - padded;
    }
    for (Index c = 0; c < padded; c += simd::lanes) {
      simd::Packet codes[4];
      for (Index i = 0; i < 4; ++i)
        codes[i] =
            simd::round_to(simd::mul(simd::load_unaligned(x[i] + c), simd::broadcast(inverse[i])));
      simd::store_quads(values + c, codes);
    }
  }
  return all;
}

// Queries rows[0, count) to a panel [quad][panel_rows]; factors [panel_rows]: scales times `scale`. False if one does
// not fit. Lanes beyond count are rows of zeros.
inline bool pack_int8_queries(const float* const* rows, Index count, Index dim, float scale,
                              simd::Quad* panel, float* factors) {
  constexpr Index width = tuning::panel_rows, most = 4 * 16 * 16;  // channels at once
  const Index padded = int8_channels(dim);
  alignas(64) float x[most];
  bool all = true;
  for (Index i = 0; i < width; ++i) {
    factors[i] = 0.0f;
    auto* to = reinterpret_cast<std::uint8_t*>(panel + i);
    float inverse = 0.0f;
    if (i < count) {
      std::copy_n(rows[i], dim, x);
      std::fill(x + dim, x + padded, 0.0f);
      rotate_channels(x, padded, x);
      const float row_scale = int8_scale(largest_channel(x, padded));
      all &= std::abs(row_scale * scale) < 0x1p60f;
      // A logit must not overflow on its way, nor be infinity times 0.
      factors[i] = std::abs(row_scale * scale) < 0x1p60f ? row_scale * scale
                                                         : std::numeric_limits<float>::quiet_NaN();
      inverse = inverse_of_scale(row_scale);
    }
    if (inverse == 0.0f) std::fill_n(x, padded, 0.0f);
    alignas(64) std::uint8_t codes[most];
    write_codes(x, padded, inverse, query_bias, codes);
    for (Index c = 0; c < padded; c += 4, to += width * Index{sizeof(simd::Quad)})
      std::memcpy(to, codes + c, 4);
  }
  return all;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
