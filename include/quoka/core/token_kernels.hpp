// Few query rows against keys and values: kernels with channels across the lanes, for work that is
// bound by memory. Many rows are the business of register_tile.hpp.
#pragma once

#include <quoka/core/simd.hpp>
#include <quoka/core/tuning.hpp>

#include <algorithm>

namespace quoka::inline QUOKA_ABI {
namespace detail {

static_assert(simd::lanes == 1 || simd::lanes % 4 == 0, "a tile of 4 rows fills whole packets");

// Query rows side by side in a tile: 1, 2 or 4, so that whole keys fill the lanes.
inline Index token_tile_rows(Index group) {
  const Index enough = group > 2 ? 4 : group;
  return std::min<Index>(enough, simd::lanes);
}

// Rows that lie `stride` apart, all of them or the kept ones. Addresses are computed where they are
// used: an array of row pointers, written before each block, kept the processor from reading ahead.
template <class T>
struct CacheRows {
  const T* base;
  Index stride;
  const Position* keep = nullptr;

  QUOKA_INLINE const T* operator[](Index i) const {
    return base + (keep != nullptr ? keep[i] : i) * stride;
  }
  CacheRows from(Index first) const {
    return keep != nullptr ? CacheRows{base, stride, keep + first}
                           : CacheRows{base + first * stride, stride};
  }
  // Asks for every line of row i.
  QUOKA_INLINE void prefetch(Index i, Index dim) const {
    const T* const row = (*this)[i];
    for (Index c = 0; c < dim; c += 64 / static_cast<Index>(sizeof(T))) simd::prefetch(row + c);
  }
};

// Logits of `count` keys of `width` channels, whole packets, against a tile of Rows queries:
// x[key][row], count rounded up to whole packets. Keys are read one after the other; two in turns
// would halve the loads of queries, but lose the hardware's prefetcher and half of the bandwidth.
// ask(i) is called once per key, before it is used.
template <int Rows, class Keys, class Ask>
void token_logits(const Keys& k, Index count, Index width, const float* queries, float* x,
                  Ask&& ask) {
  constexpr int lanes = simd::lanes, keys = lanes / Rows;
  for (Index i = 0; i < count; i += keys, x += lanes) {
    simd::Square acc;
    simd::unroll<keys>([&](auto j) QUOKA_INLINE_LAMBDA {
      simd::unroll<Rows>([&](auto r)
                             QUOKA_INLINE_LAMBDA { acc.packet[j * Rows + r] = simd::zero(); });
      const auto* const key = k[std::min(i + j, count - 1)];
      ask(i + j);
      for (Index c = 0; c < width; c += lanes) {
        const simd::Packet channels = simd::load_as_float(key + c);
        simd::unroll<Rows>([&](auto r) QUOKA_INLINE_LAMBDA {
          simd::Packet& sum = acc.packet[j * Rows + r];
          sum = simd::fma(channels, simd::load(queries + r * width + c), sum);
        });
      }
    });
    simd::store(x, simd::sums(acc));
  }
}

// out[r][c...] += sum over keys of weight[r][key * step] * v[key][c...], for Rows rows of out,
// `width` apart, and Packets packets of channels.
template <int Rows, int Packets, class T>
void token_values(const CacheRows<T>& v, Index c, Index count, const float* const (&weight)[2],
                  Index step, float* out, Index width) {
  constexpr int lanes = simd::lanes;
  simd::Packet acc[Rows][Packets];
  simd::unroll<Rows, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    acc[r][p] = simd::load(out + r * width + c + p * lanes);
  });
  for (Index i = 0; i < count; ++i) {
    const T* const value = v[i] + c;
    simd::Packet channels[Packets];
    simd::unroll<Packets>(
        [&](auto p) QUOKA_INLINE_LAMBDA { channels[p] = simd::load_as_float(value + p * lanes); });
    simd::unroll<Rows>([&](auto r) QUOKA_INLINE_LAMBDA {
      const simd::Packet w = simd::broadcast(weight[r][i * step]);
      simd::unroll<Packets>(
          [&](auto p) QUOKA_INLINE_LAMBDA { acc[r][p] = simd::fma(w, channels[p], acc[r][p]); });
    });
  }
  simd::unroll<Rows, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    simd::store(out + r * width + c + p * lanes, acc[r][p]);
  });
}

// As token_logits<tile_rows>, for a height known at run time.
template <class Keys, class Ask>
void token_logits(Index tile_rows, const Keys& k, Index count, Index width, const float* queries,
                  float* x, Ask&& ask) {
  if (tile_rows == 1) return token_logits<1>(k, count, width, queries, x, ask);
  if constexpr (simd::lanes >= 4) {
    if (tile_rows == 2) return token_logits<2>(k, count, width, queries, x, ask);
    token_logits<4>(k, count, width, queries, x, ask);
  }
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
