// Rows to the bfloat16 operands of a unit (unit.hpp): high parts, and what rounding left of them as low
// parts.
//
//   x = high + low + error,   |high - x| <= 2^-8 |x|,   |error| <= 2^-16 |x|
//
// Rows are widened by their format, one at a time, and rounded here: formats know nothing of units.
// What cannot be held by such products is left to float, as in fixed_packing.hpp: a key or query of
// which some channel is not finite or whose length is 2^50 or more has a factor of NaN and is packed
// as zeros; so is each single number of the values that is not finite or is 2^50 or more.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/formats/format.hpp>
#include <quoka/matrix/unit.hpp>
#include <quoka/simd/isa/bfloat16.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Length from which on a row, or a number of the values, is left to float: products of two stay far
// from overflow.
inline constexpr float most_length = 0x1p50f, most_square = most_length * most_length;

// Where parts go: `low` is null where one part is enough.
struct Bfloat16Parts {
  Bfloat16 *high, *low;
};

// A row's channels as floats, zeros up to `padded`: in place where they lie so, else in `room` [padded].
inline const float* padded_row(const Format& format, ConstRow row, const RowShape& shape,
                               Index padded, float* room) {
  if (format.is_float && shape.channel_step == 0 && padded == shape.dim)
    return reinterpret_cast<const float*>(row);
  format.widen(row, shape, room);
  std::fill(room + shape.dim, room + padded, 0.0f);
  return room;
}

inline float squared_length(const float* x, Index padded) {
  simd::Packet sum = simd::zero();
  for (Index c = 0; c < padded; c += simd::lanes) {
    const simd::Packet at = simd::load_unaligned(x + c);
    sum = simd::fma(at, at, sum);
  }
  return simd::reduce_add(sum);
}

// x[0, count), whole packets, times `scale`.
QUOKA_INLINE void split(const float* x, Index count, const simd::Packet& scale, Bfloat16* high,
                        Bfloat16* low) {
  for (Index i = 0; i < count; i += simd::lanes) {
    const simd::Packet at = simd::mul(simd::load_unaligned(x + i), scale);
    const simd::Packet rounded = simd::round_bfloat16(at);
    simd::store_upper_half(high + i, rounded);
    if (low != nullptr)
      simd::store_upper_half(low + i, simd::round_bfloat16(simd::sub(at, rounded)));
  }
}

// Channels of keys and queries are padded to whole slabs, and to whole packets.
template <class Unit>
constexpr Index padded_depth(Index dim) {
  return round_up(dim, std::max<Index>(Unit::depth, simd::lanes));
}

// Keys to tiles [slab][tile_rows][depth]; room [padded depth]. False if one is left to float.
template <class Unit>
bool pack_unit_keys(const Format& format, const ConstRow* rows, Index count, const RowShape& shape,
                    const Bfloat16Parts& to, float* factors, float* room) {
  constexpr Index depth = Unit::depth, height = Unit::tile_rows;
  constexpr Index run = std::max<Index>(depth, simd::lanes);  // that split() takes
  const Index padded = padded_depth<Unit>(shape.dim);
  alignas(64) Bfloat16 parts[2][run];
  const simd::Packet one = simd::broadcast(1.0f);
  bool all = true;
  for (Index key = 0; key < round_up(count, height); ++key) {
    const Index tile = key / height * height * padded + key % height * depth;
    const auto at = [&](Index c) { return tile + c / depth * height * depth; };
    const float* x = nullptr;
    if (key < count) {
      x = padded_row(format, rows[key], shape, padded, room);
      factors[key] = 1.0f;
      if (!(squared_length(x, padded) < most_square)) {
        factors[key] = std::numeric_limits<float>::quiet_NaN();
        all = false, x = nullptr;
      }
    }
    for (Index c = 0; c < padded; c += run) {
      if (x != nullptr)
        split(x + c, run, one, parts[0], to.low != nullptr ? parts[1] : nullptr);
      else
        std::memset(parts, 0, sizeof parts);
      for (Index i = 0; i < run; i += depth) {
        std::memcpy(to.high + at(c + i), parts[0] + i, depth * sizeof(Bfloat16));
        if (to.low != nullptr)
          std::memcpy(to.low + at(c + i), parts[1] + i, depth * sizeof(Bfloat16));
      }
    }
  }
  return all;
}

// rows[0, count) times scale to [padded depth / interleave][panel_rows][interleave]. False if one is
// left to float: its factor is NaN, those of the others are 1.
template <class Unit>
bool pack_unit_queries(const float* const* rows, Index count, Index dim, float scale,
                       const Bfloat16Parts& to, float* factors) {
  constexpr Index width = tuning::panel_rows, together = Unit::interleave;
  constexpr Index run = std::max<Index>(Unit::depth, simd::lanes);
  static_assert(run % together == 0);
  const Index padded = padded_depth<Unit>(dim);
  const simd::Packet factor = simd::broadcast(scale);
  alignas(64) float x[run];
  alignas(64) Bfloat16 parts[2][run];
  bool all = true;
  for (Index row = 0; row < width; ++row) {
    bool held = row < count;
    factors[row] = 1.0f;
    if (held) {
      float square = 0.0f;
      for (Index c = 0; c < dim; ++c) {
        const float scaled = rows[row][c] * scale;
        square = simd::fma(scaled, scaled, square);
      }
      held = square < most_square;
      if (!held) factors[row] = std::numeric_limits<float>::quiet_NaN();
      all &= held;
    }
    for (Index c = 0; c < padded; c += run) {
      const Index here = held ? std::clamp<Index>(dim - c, 0, run) : 0;
      std::copy_n(held ? rows[row] + std::min(c, dim) : x, here, x);
      std::fill(x + here, x + run, 0.0f);
      split(x, run, factor, parts[0], to.low != nullptr ? parts[1] : nullptr);
      for (Index i = 0; i < run; i += together) {
        const Index at = ((c + i) / together * width + row) * together;
        std::memcpy(to.high + at, parts[0] + i, together * sizeof(Bfloat16));
        if (to.low != nullptr) std::memcpy(to.low + at, parts[1] + i, together * sizeof(Bfloat16));
      }
    }
  }
  return all;
}

// Keys of a block of values are padded to whole slabs and to whole turns of pack_unit_values.
inline constexpr Index value_turn = 2 * simd::lanes;
template <class Unit>
constexpr Index padded_values(Index keys) {
  return round_up(keys, std::max<Index>(Unit::value_depth, value_turn));
}
// Elements of `keys` packed values, and floats of pack_unit_values' room.
template <class Unit>
constexpr Index unit_value_size(Index v_dim, Index keys) {
  return padded_values<Unit>(keys) * padded_channels(v_dim);
}
constexpr Index unit_value_room(Index v_dim) {
  return value_turn * round_up(padded_channels(v_dim), simd::lanes);
}

// `lanes` channels of value_turn values to [slab][channels][value_depth]: words of two keys, turned so
// that the keys of a channel lie side by side where a slab holds more than two.
template <class Unit>
QUOKA_INLINE void store_value_turn(simd::Square& words, Index key, Index c, Index channels,
                                   Bfloat16* to) {
  constexpr Index depth = Unit::value_depth;
  if constexpr (depth == 2) {
    for (int j = 0; j < simd::lanes; ++j)
      simd::store_unaligned(reinterpret_cast<float*>(to + ((key / 2 + j) * channels + c) * depth),
                            words.packet[j]);
  } else {
    constexpr Index run = std::min(depth, value_turn);
    simd::transpose(words);
    for (int i = 0; i < simd::lanes; ++i) {
      alignas(64) float keys[simd::lanes];
      simd::store(keys, words.packet[i]);
      for (Index k = 0; k < value_turn; k += run)
        std::memcpy(to + ((key + k) / depth * channels + c + i) * depth + (key + k) % depth,
                    reinterpret_cast<const char*>(keys) + 2 * k, 2 * run);
    }
  }
}

// Values to [slab of keys][padded channels][value_depth]. apart [padded channels], floats: 1 for a
// channel of which a number is left to float, else 0. room: unit_value_room(). False if there is one.
template <class Unit>
bool pack_unit_values(const Format& format, const ConstRow* rows, Index count,
                      const RowShape& shape, const Bfloat16Parts& to, float* apart, float* room) {
  const Index channels = padded_channels(shape.dim), row_size = round_up(channels, simd::lanes);
  std::fill_n(apart, channels, 0.0f);
  simd::Packet squares = simd::zero();
  // Row `key`, and where it is to hold held numbers alone, without the others, which are noted.
  const auto row = [&](Index key, float* own, bool held_alone) -> const float* {
    if (key >= count) {
      std::fill_n(own, row_size, 0.0f);
      return own;
    }
    const float* const x = padded_row(format, rows[key], shape, row_size, own);
    if (!held_alone) return x;
    for (Index c = 0; c < row_size; ++c) {
      const bool held = simd::max(x[c], -x[c]) < most_length;
      if (!held) apart[c] = 1.0f;
      own[c] = held ? x[c] : 0.0f;
    }
    return own;
  };
  const auto pack = [&](bool held_alone) {
    for (Index key = 0; key < padded_values<Unit>(count); key += value_turn) {
      const float* x[value_turn];
      for (Index i = 0; i < value_turn; ++i) x[i] = row(key + i, room + i * row_size, held_alone);
      for (Index c = 0; c < channels; c += simd::lanes) {
        simd::Square high, low;
        for (int j = 0; j < simd::lanes; ++j) {
          const simd::Packet a = simd::load_unaligned(x[2 * j] + c);
          const simd::Packet b = simd::load_unaligned(x[2 * j + 1] + c);
          squares = simd::fma(a, a, simd::fma(b, b, squares));
          const simd::Packet pairs = simd::round_pairs(a, b);
          high.packet[j] = pairs;
          if (to.low != nullptr)
            low.packet[j] = simd::round_pairs(simd::sub(a, simd::firsts(pairs)),
                                              simd::sub(b, simd::seconds(pairs)));
        }
        store_value_turn<Unit>(high, key, c, channels, to.high);
        if (to.low != nullptr) store_value_turn<Unit>(low, key, c, channels, to.low);
      }
    }
  };
  pack(false);
  if (simd::reduce_add(squares) < most_square) return true;
  pack(true);
  return std::find(apart, apart + channels, 1.0f) == apart + channels;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
