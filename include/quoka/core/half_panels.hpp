// A block of keys against a panel of queries in half arithmetic: twice the lanes of float.
//
// Both products run in half over chains of `Chain` multiply-adds; the sums of up to `Chains` chains
// add up in half, and are then widened and added up in float. The softmax is in float. With u =
// 2^-11 and independent terms a chain of n adds about u sqrt(n / 2) / 2.4 to the relative error of
// its sum, and the rounding of each operand as much as a chain of 2: bench/README.md has what that
// comes to, and what each choice costs.
//
// Nothing overflows: powers of two take a block's largest key and value, and each row's largest
// query, so far below 65,504 that no partial sum reaches it, and are taken back in float. They
// change no digit of what is above 2^-18 of the largest; what is below 2^-29 of it becomes zero,
// also in rows that do not see the largest. Infinity and NaN stay what they are; an infinite value
// whose weight half cannot hold gives NaN.
//
// Packed keys and values are pairs of equal halves, so that layouts and bytes are those of float.
// Per packet of 2 * lanes sums: 1 multiply-add per step, 1 addition per chain, and 4 operations per
// Chain * Chains steps to widen them.
#pragma once

#include <quoka/core/panel_kernels.hpp>

#include <bit>
#include <cmath>
#include <cstddef>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// The largest finite |x| of rows[0, count), and whether there is anything else.
struct Magnitude {
  float largest;
  bool finite;
};
template <class T>
Magnitude magnitude_of(const T* const* rows, Index count, Index dim) {
  const auto finite_part = [](const auto& x) QUOKA_INLINE_LAMBDA {
    using P = std::decay_t<decltype(x)>;
    const P size = simd::max(x, simd::sub(simd::zero<P>(), x));
    return simd::select_less(size, simd::broadcast<P>(simd::infinity), size, simd::zero<P>());
  };
  simd::Packet largest = simd::zero(), poison = simd::zero();
  float largest_tail = 0.0f, poison_tail = 0.0f;
  for (Index i = 0; i < count; ++i) {
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes) {
      const simd::Packet x = simd::load_as_float(rows[i] + c);
      largest = simd::max(largest, finite_part(x));
      poison = simd::fma(x, simd::zero(), poison);
    }
    for (; c < dim; ++c) {
      const float x = static_cast<float>(rows[i][c]);
      largest_tail = std::max(largest_tail, finite_part(x));
      poison_tail += x * 0.0f;
    }
  }
  return {std::max(simd::reduce_max(largest), largest_tail),
          simd::reduce_add(poison) + poison_tail == 0.0f};
}

// The power of two that takes `largest` to at most 2^exponent; one that float can hold, as its
// inverse.
inline int exponent_for(float largest, int exponent) {
  int own = 0;
  std::frexp(largest, &own);
  return largest > 0.0f ? std::clamp(exponent - own, -126, 126) : 0;
}

// `dim` channels times `scale`, as pairs; what lies beyond them in the last packet's place is left
// unwritten.
template <class T>
QUOKA_INLINE void pair_up(const T* from, Index dim, float scale, simd::HalfPair* to) {
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes)
    simd::store_pairs(to + c, simd::mul(simd::load_as_float(from + c), simd::broadcast(scale)));
  for (; c < dim; ++c)
    to[c] = simd::pair_of(static_cast<Eigen::half>(static_cast<float>(from[c]) * scale));
}

// As SinglePanels. H: simd::HalfPacket, or simd::EmulatedHalf on any machine.
template <class H, int Chain = tuning::half_chain, int Chains = tuning::half_chains>
struct HalfPanels {
  static constexpr int packets = 2 * tuning::tile_packets;
  static constexpr int width = packets * simd::lanes;
  using Packed = simd::HalfPair;
  using Lane = Eigen::half;
  static constexpr bool weights_in_place = false, has_row_factors = true, leaves_to_float = false;
  using Factors = simd::Packet[packets];
  static constexpr Index steps(Index dim) { return dim; }

  struct Block {
    float key_factor, value_factor;  // take back the powers of two
    bool finite_values;
  };

  template <class T>
  static Block pack(const T* const* k, const T* const* v, Index count, Index dim, Index v_dim,
                    Packed* keys, Packed* values) {
    const int key_exponent = exponent_for(magnitude_of(k, count, dim).largest, key_range);
    const Magnitude value = magnitude_of(v, count, v_dim);
    const int value_exponent = exponent_for(value.largest, key_range);
    const float key_scale = std::ldexp(1.0f, key_exponent);
    const float value_scale = std::ldexp(1.0f, value_exponent);
    pack_keys(k, count, dim, keys, [=](const T* from, Index n, Packed* to) QUOKA_INLINE_LAMBDA {
      pair_up(from, n, key_scale, to);
    });
    for (Index i = 0; i < count; ++i)
      pair_up(v[i], v_dim, value_scale, values + i * value_stride(v_dim));
    return {std::ldexp(1.0f, -key_exponent), std::ldexp(1.0f, -value_exponent - row_range),
            value.finite};
  }

  // Each row by a power of two of its own; row_factors, [width], take it back and bring `scale`.
  template <class T>
  static void pack_rows(const T* const* rows, Index count, Index dim, float scale, Lane* panel,
                        float* row_factors) {
    float scales[width];
    for (Index i = 0; i < width; ++i) {
      const int exponent =
          i < count ? exponent_for(magnitude_of(rows + i, 1, dim).largest, row_range) : 0;
      scales[i] = std::ldexp(1.0f, exponent);
      row_factors[i] = bounded(scale * std::ldexp(1.0f, -exponent));
    }
    pack_panel<T, packets>(
        rows, count, dim, [&](Index i) { return scales[i]; }, panel);
  }

  static void logits(const Block& block, const Packed* tiles, const Lane* panel,
                     const float* row_factors, Index dim, Index keys, float* x,
                     simd::Packet (&top)[packets]) {
    constexpr int rows = tuning::tile_rows;
    simd::Packet factor[packets];
    for (int j = 0; j < packets; ++j)
      factor[j] = bounded(
          simd::mul(simd::load(row_factors + j * simd::lanes), simd::broadcast(block.key_factor)));
    for (Index key = 0; key < keys; key += rows, tiles += key_tile_size(dim)) {
      float* const to = x + key * width;
      const auto multiply = [&](auto& acc, Index first, Index count) QUOKA_INLINE_LAMBDA {
        for (Index c = first; c < first + count;) {
          const Index n = std::min(first + count, round_up(c + 1, slab)) - c;
          rank1_updates<rows, tuning::tile_packets, slab>(
              acc, tiles + (c - c % slab) * rows + c % slab, 1, panel + c * width, n);
          c += n;
        }
      };
      sum_in_chains<rows>(dim, multiply, [&](const Lane* sums, bool first) QUOKA_INLINE_LAMBDA {
        for (Index i = 0; i < rows; ++i)
          simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
            const Index at = i * width + j * simd::lanes;
            const simd::Packet sum = simd::load_as_float(sums + at);
            simd::store(to + at, first ? simd::mul(sum, factor[j])
                                       : simd::fma(sum, factor[j], simd::load(to + at)));
          });
      });
    }
    block_maximum(x, keys, top);
  }

  static const Lane* softmax(const float* x, Index keys, const simd::Packet (&top)[packets],
                             PacketState (&state)[packets], Factors& factors, Lane* weights) {
    for (int j = 0; j < packets; ++j) factors[j] = state[j].raise(top[j]);
    const simd::Packet scale = simd::broadcast(std::ldexp(1.0f, row_range));
    block_weights(x, keys, state, [&](Index at, const simd::Packet& w) QUOKA_INLINE_LAMBDA {
      simd::store_from_float(weights + at, simd::mul(w, scale));
    });
    return weights;
  }

  static void values(const Block& block, const Packed* values, Index dim, const Lane* weights,
                     Index keys, const simd::Packet (&factor)[packets], float* out) {
    assert(0 < dim && 0 <= keys && keys <= tuning::block_keys);
    const Index stride = value_stride(dim);
    const simd::Packet unit = simd::broadcast(block.value_factor);
    for_value_tiles(dim, [&](auto rows, Index channel) QUOKA_INLINE_LAMBDA {
      float* const to = out + channel * width;
      const auto multiply = [&](auto& acc, Index first, Index count) QUOKA_INLINE_LAMBDA {
        rank1_updates<rows, tuning::tile_packets, 1>(acc, values + channel + first * stride, stride,
                                                     weights + first * width, count);
      };
      sum_in_chains<rows>(keys, multiply, [&](const Lane* sums, bool first) QUOKA_INLINE_LAMBDA {
        for (Index i = 0; i < rows; ++i)
          simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
            const Index at = i * width + j * simd::lanes;
            const simd::Packet before = simd::load(to + at);
            simd::store(to + at, simd::fma(simd::load_as_float(sums + at), unit,
                                           first ? simd::mul(before, factor[j]) : before));
          });
      });
    });
  }

 private:
  // Keys and values are taken to at most 2^key_range, queries and weights to 2^row_range: a sum of
  // Chain * Chains of their products is at most 2^15.
  static constexpr int range = 15 - std::bit_width(unsigned{Chain * Chains} - 1);
  static constexpr int row_range = range / 2, key_range = range - row_range;
  static_assert(row_range >= 0, "a chain is too long for the range of half");

  // A factor that overflows times a product of zero must be zero.
  template <class P>
  static P bounded(const P& x) {
    const P most = simd::broadcast<P>(std::numeric_limits<float>::max());
    return simd::max(simd::sub(simd::zero<P>(), most), simd::select_less(most, x, most, x));
  }

  // multiply(acc, first, count) adds steps [first, first + count), a chain, to a tile of `Rows`
  // rows; widen(sums [Rows][width], first) takes the sums in half: once per Chain * Chains steps,
  // and once where there are none. The sums wait in memory, because to widen halves from there
  // takes one operation and from a register two or three.
  template <int Rows, class Multiply, class Widen>
  QUOKA_INLINE static void sum_in_chains(Index steps, const Multiply& multiply, Widen&& widen) {
    alignas(64) std::byte memory[Rows * width * sizeof(Lane)];
    Lane* const sums = reinterpret_cast<Lane*>(memory);
    Index at = 0;
    do {
      const Index end = std::min<Index>(at + Chain * Chains, steps);
      add_chains<Rows>(at, end, multiply, sums);
      widen(sums, at == 0);
      at = end;
    } while (at < steps);
  }

  // Steps [at, end) in chains, to sums. Not inlined: GCC 12 would keep the sums in registers, of
  // which there are none left, and copy them to the stack and back.
  template <int Rows, class Multiply>
  [[gnu::noinline]] static void add_chains(Index at, Index end, const Multiply& multiply,
                                           Lane* sums) {
    constexpr int columns = tuning::tile_packets;
    bool fresh = true;
    do {
      H acc[Rows][columns];
      simd::unroll<Rows, columns>([&](auto i, auto j)
                                      QUOKA_INLINE_LAMBDA { acc[i][j] = H::zero(); });
      const Index count = std::min<Index>(Chain, end - at);
      multiply(acc, at, count);
      const auto leave = [&](auto&& sum_of) QUOKA_INLINE_LAMBDA {
        simd::unroll<Rows, columns>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
          Lane* const to = sums + i * width + j * simd::half_lanes;
          sum_of(acc[i][j], to).store(to);
        });
      };
      if (fresh)
        leave([](const H& sum, const Lane*) QUOKA_INLINE_LAMBDA { return sum; });
      else
        leave([](const H& sum, const Lane* to)
                  QUOKA_INLINE_LAMBDA { return simd::add(H::load(to), sum); });
      fresh = false;
      at += count;
    } while (at < end);
  }
};

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
