// Rows to the bfloat16 operands of a unit (bfloat16_units.hpp): high parts, and what rounding left
// of them as low parts.
//
//   x = high + low + error,   |high - x| <= 2^-8 |x|,   |error| <= 2^-16 |x|
//
// Rows are widened by their format, one at a time, and rounded here: formats do not depend on
// units. Numbers that such products cannot hold are computed in float (panel_arithmetic.hpp).
// A key or query with a channel that is not finite, or with a length of 2^50 or more, has a factor
// of NaN and is packed as zeros. Numbers of the values that are not finite or 2^50 or more are
// packed as zeros one by one.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/kernels/bfloat16_units.hpp>
#include <quoka/rows/format.hpp>
#include <quoka/simd/simd.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline constexpr float most_square = most_length * most_length;

// Where parts go: `low` is null where one part is enough.
struct Bfloat16Parts {
  Bfloat16 *high, *low;

  Bfloat16Parts from(Index i) const { return {high + i, low != nullptr ? low + i : nullptr}; }
};

// Rows of bfloat16 that can be read where they lie: whole packets of them.
inline bool in_place(const Format& format, const RowShape& shape, Index padded) {
  return format.is_bfloat16 && shape.channel_step == 0 && padded == shape.dim &&
         padded % (2 * simd::lanes) == 0;
}

QUOKA_INLINE void add_square(const simd::Packet& x, simd::Packet& sum) {
  sum = simd::fma(x, x, sum);
}
inline float squared_length(const float* x, Index padded) {
  simd::Packet sum = simd::zero();
  for (Index c = 0; c < padded; c += simd::lanes) add_square(simd::load_unaligned(x + c), sum);
  return simd::reduce_add(sum);
}
inline float squared_length(const Bfloat16* x, Index padded) {
  simd::Packet sum = simd::zero();
  for (Index c = 0; c < padded; c += 2 * simd::lanes) {
    const simd::Packet pairs = simd::load_unaligned(reinterpret_cast<const float*>(x + c));
    add_square(simd::firsts(pairs), sum), add_square(simd::seconds(pairs), sum);
  }
  return simd::reduce_add(sum);
}

// x[0, count) times `scale`, whole packets.
QUOKA_INLINE void split(const float* x, Index count, const simd::Packet& scale,
                        const Bfloat16Parts& to) {
  Index i = 0;
  for (; i + 2 * simd::lanes <= count; i += 2 * simd::lanes) {
    const simd::Packet a = simd::mul(simd::load_unaligned(x + i), scale);
    const simd::Packet b = simd::mul(simd::load_unaligned(x + i + simd::lanes), scale);
    if (to.low == nullptr) {
      simd::store_rounded(to.high + i, a, b);
      continue;
    }
    const simd::Packet high_a = simd::round_bfloat16(a), high_b = simd::round_bfloat16(b);
    simd::store_rounded(to.high + i, high_a, high_b);
    simd::store_rounded(to.low + i, simd::sub(a, high_a), simd::sub(b, high_b));
  }
  for (; i < count; i += simd::lanes) {
    const simd::Packet at = simd::mul(simd::load_unaligned(x + i), scale);
    const simd::Packet rounded = simd::round_bfloat16(at);
    simd::store_upper_half(to.high + i, rounded);
    if (to.low != nullptr)
      simd::store_upper_half(to.low + i, simd::round_bfloat16(simd::sub(at, rounded)));
  }
}
inline void fill_zeros(const Bfloat16Parts& to, Index count) {
  std::fill_n(to.high, count, Bfloat16{0});
  if (to.low != nullptr) std::fill_n(to.low, count, Bfloat16{0});
}

// Channels of keys and queries are padded to whole slabs, and to whole packets.
template <class Unit>
constexpr Index padded_depth(Index dim) {
  return round_up(dim, std::max<Index>(Unit::depth, simd::lanes));
}

// One key to its place in a tile: `to` has its first channel.
template <class Unit>
QUOKA_INLINE void place_key(const float* x, Index padded, const Bfloat16Parts& to) {
  constexpr Index depth = Unit::depth, step = depth * Unit::tile_rows;
  const simd::Packet one = simd::broadcast(1.0f);
  if constexpr (depth >= simd::lanes) {
    for (Index c = 0; c < padded; c += depth) split(x + c, depth, one, to.from(c / depth * step));
  } else {
    alignas(64) Bfloat16 parts[2][simd::lanes];
    const Bfloat16Parts lanes{parts[0], to.low != nullptr ? parts[1] : nullptr};
    for (Index c = 0; c < padded; c += simd::lanes) {
      split(x + c, simd::lanes, one, lanes);
      for (Index i = 0; i < simd::lanes; i += depth) {
        const Bfloat16Parts at = to.from((c + i) / depth * step);
        std::memcpy(at.high, parts[0] + i, depth * sizeof(Bfloat16));
        if (to.low != nullptr) std::memcpy(at.low, parts[1] + i, depth * sizeof(Bfloat16));
      }
    }
  }
}
template <class Unit>
QUOKA_INLINE void place_key(const Bfloat16* x, Index padded, const Bfloat16Parts& to) {
  constexpr Index depth = Unit::depth, step = depth * Unit::tile_rows;
  for (Index c = 0; c < padded; c += depth) {
    const Bfloat16Parts at = to.from(c / depth * step);
    std::memcpy(at.high, x + c, depth * sizeof(Bfloat16));
    if (to.low != nullptr) std::memset(at.low, 0, depth * sizeof(Bfloat16));
  }
}

// Keys to tiles [slab][tile_rows][depth]; room [padded depth]. False if one does not fit.
template <class Unit>
bool pack_unit_keys(const Format& format, const ConstRow* rows, Index count, const RowShape& shape,
                    const Bfloat16Parts& to, float* factors, float* room) {
  constexpr Index depth = Unit::depth, height = Unit::tile_rows;
  const Index padded = padded_depth<Unit>(shape.dim);
  const auto place = [&](Index key) {
    return to.from(key / height * height * padded + key % height * depth);
  };
  const auto left_out = [&](Index key) {
    for (Index c = 0; c < padded; c += depth) fill_zeros(place(key).from(c * height), depth);
  };
  bool all = true;
  const auto pack = [&](auto&& row) {
    for (Index key = 0; key < count; ++key) {
      const auto* const x = row(key);
      if (squared_length(x, padded) < most_square) {
        factors[key] = 1.0f;
        place_key<Unit>(x, padded, place(key));
      } else {
        factors[key] = std::numeric_limits<float>::quiet_NaN();
        all = false;
        left_out(key);
      }
    }
  };
  if (in_place(format, shape, padded))
    pack([&](Index key) { return reinterpret_cast<const Bfloat16*>(rows[key]); });
  else
    pack([&](Index key) { return padded_row(format, rows[key], shape, padded, room); });
  for (Index key = count; key < round_up(count, height); ++key) left_out(key);
  return all;
}

// `lanes` rows of 2 lanes floats, times scale, to words of two channels: word j of all rows side by
// side in packet j.
QUOKA_INLINE void turn_queries(const float* const* rows, const simd::Packet& scale,
                               simd::Square& high, simd::Square* low) {
  for (int i = 0; i < simd::lanes; ++i) {
    const simd::Packet a = simd::mul(simd::load_unaligned(rows[i]), scale);
    const simd::Packet b = simd::mul(simd::load_unaligned(rows[i] + simd::lanes), scale);
    if (low == nullptr) {
      high.packet[i] = simd::round_neighbours(a, b);
      continue;
    }
    const simd::Packet high_a = simd::round_bfloat16(a), high_b = simd::round_bfloat16(b);
    high.packet[i] = simd::round_neighbours(high_a, high_b);
    low->packet[i] = simd::round_neighbours(simd::sub(a, high_a), simd::sub(b, high_b));
  }
  simd::transpose(high);
  if (low != nullptr) simd::transpose(*low);
}

// rows[0, count) times scale to [padded depth / interleave][panel_rows][interleave]. False if one
// does not fit: its factor is NaN, those of the others are 1.
template <class Unit>
bool pack_unit_queries(const float* const* rows, Index count, Index dim, float scale,
                       const Bfloat16Parts& to, float* factors) {
  constexpr Index width = tuning::panel_rows, together = Unit::interleave, run = 2 * simd::lanes;
  const Index padded = padded_depth<Unit>(dim);
  const simd::Packet factor = simd::broadcast(scale);
  alignas(64) float room[simd::lanes][run];
  // `run` channels of a row, from c on.
  const auto channels = [&](Index row, Index c) -> const float* {
    const bool held = row < count && factors[row] == 1.0f;
    if (held && c + run <= dim) return rows[row] + c;
    float* const own = room[row % simd::lanes];
    const Index here = held ? std::clamp<Index>(dim - c, 0, run) : 0;
    if (here > 0) std::copy_n(rows[row] + c, here, own);
    std::fill(own + here, own + run, 0.0f);
    return own;
  };
  bool all = true;
  for (Index row = 0; row < width; ++row) {
    factors[row] = 1.0f;
    if (row >= count) continue;
    simd::Packet square = simd::zero();
    for (Index c = 0; c < dim; c += run) {
      const float* const x = channels(row, c);
      add_square(simd::mul(simd::load_unaligned(x), factor), square);
      add_square(simd::mul(simd::load_unaligned(x + simd::lanes), factor), square);
    }
    if (!(simd::reduce_add(square) < most_square))
      factors[row] = std::numeric_limits<float>::quiet_NaN(), all = false;
  }
  for (Index first = 0; first < width; first += simd::lanes)
    for (Index c = 0; c < padded; c += run) {
      const float* x[simd::lanes];
      for (Index i = 0; i < simd::lanes; ++i) x[i] = channels(first + i, c);
      simd::Square high, low;
      turn_queries(x, factor, high, to.low != nullptr ? &low : nullptr);
      const auto put = [&](const simd::Square& words, Bfloat16* parts) {
        for (Index j = 0; j < simd::lanes && c + 2 * j < padded; ++j) {
          const Index channel = c + 2 * j, at = channel / together * width * together;
          if constexpr (together == 2) {
            simd::store(reinterpret_cast<float*>(parts + at + first * 2), words.packet[j]);
          } else {
            alignas(64) float word[simd::lanes];
            simd::store(word, words.packet[j]);
            for (Index i = 0; i < simd::lanes; ++i)
              std::memcpy(parts + at + (first + i) * together + channel % together, word + i, 4);
          }
        }
      };
      put(high, to.high);
      if (to.low != nullptr) put(low, to.low);
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

// `lanes` channels of value_turn values to [slab][channels][value_depth]: words of two keys, turned
// so that the keys of a channel lie side by side where a slab holds more than two.
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

// A pair of rows at `lanes` channels as words of two keys; adds their squares.
QUOKA_INLINE void pair_values(const float* x, const float* y, simd::Packet& high, simd::Packet* low,
                              simd::Packet& squares) {
  const simd::Packet a = simd::load_unaligned(x), b = simd::load_unaligned(y);
  add_square(a, squares), add_square(b, squares);
  high = simd::round_pairs(a, b);
  if (low != nullptr)
    *low = simd::round_pairs(simd::sub(a, simd::firsts(high)), simd::sub(b, simd::seconds(high)));
}
QUOKA_INLINE void pair_values(const Bfloat16* x, const Bfloat16* y, simd::Packet& high,
                              simd::Packet* low, simd::Packet& squares) {
  high = simd::load_pairs(x, y);
  add_square(simd::firsts(high), squares), add_square(simd::seconds(high), squares);
  if (low != nullptr) *low = simd::zero();
}

// row(key, i): row `key`, which may use room for turn i. Returns whether all numbers are held.
template <class Unit, class Row>
bool pack_value_rows(Index keys, Index channels, const Bfloat16Parts& to, Row&& row) {
  simd::Packet squares[2] = {simd::zero(), simd::zero()};
  for (Index key = 0; key < padded_values<Unit>(keys); key += value_turn) {
    decltype(row(Index{}, Index{})) x[value_turn];
    for (Index i = 0; i < value_turn; ++i) x[i] = row(key + i, i);
    for (Index c = 0; c < channels; c += simd::lanes) {
      simd::Square high, low;
      for (int j = 0; j < simd::lanes; ++j)
        pair_values(x[2 * j] + c, x[2 * j + 1] + c, high.packet[j],
                    to.low != nullptr ? &low.packet[j] : nullptr, squares[j % 2]);
      store_value_turn<Unit>(high, key, c, channels, to.high);
      if (to.low != nullptr) store_value_turn<Unit>(low, key, c, channels, to.low);
    }
  }
  return simd::reduce_add(simd::add(squares[0], squares[1])) < most_square;
}

// Values to [slab of keys][padded channels][value_depth]. unfit [padded channels], floats: 1 for a
// channel of which a number does not fit, else 0. room: unit_value_room(). False if there is one.
template <class Unit>
bool pack_unit_values(const Format& format, const ConstRow* rows, Index count,
                      const RowShape& shape, const Bfloat16Parts& to, float* unfit, float* room) {
  const Index channels = padded_channels(shape.dim), row_size = round_up(channels, simd::lanes);
  std::fill_n(unfit, channels, 0.0f);
  // Row `key` as floats, zeros after the last.
  const auto floats = [&](Index key, float* own) -> const float* {
    if (key < count) return padded_row(format, rows[key], shape, row_size, own);
    std::fill_n(own, row_size, 0.0f);
    return own;
  };
  const auto own = [&](Index i) { return room + i * row_size; };
  bool held = false;
  if (in_place(format, shape, row_size)) {
    const auto* const zeros = reinterpret_cast<const Bfloat16*>(room);
    std::fill_n(room, row_size, 0.0f);
    held = pack_value_rows<Unit>(count, channels, to, [&](Index key, Index) {
      return key < count ? reinterpret_cast<const Bfloat16*>(rows[key]) : zeros;
    });
  } else {
    held = pack_value_rows<Unit>(count, channels, to,
                                 [&](Index key, Index i) { return floats(key, own(i)); });
  }
  if (held) return true;
  // Without those that do not fit, which are noted.
  pack_value_rows<Unit>(count, channels, to, [&](Index key, Index i) -> const float* {
    const float* const x = floats(key, own(i));
    for (Index c = 0; c < row_size; ++c) {
      const bool is_held = simd::max(x[c], -x[c]) < most_length;
      if (!is_held) unfit[c] = 1.0f;
      own(i)[c] = is_held ? x[c] : 0.0f;
    }
    return own(i);
  });
  return std::find(unfit, unfit + channels, 1.0f) == unfit + channels;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
