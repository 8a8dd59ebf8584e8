// Scores of keys by panels of float queries: what selection computes in place of attention.
//
//   score_tile     the best, or the mean, of the products of each key of a tile with some rows
//   weigh_block    logits and softmax weights of a block of keys and a panel, against the block's
//                  own maximum
//   row_sum        the sum of a row's weights over blocks, each against its own maximum
//   add_weights    the weights of some panels times a factor of each row, or the largest such
//                  product, for each key
//   key_products, add_heads    products with keys across the lanes, and an indexer's score of them
//
// Layouts of keys and panels are those of panel_packing.hpp. Each function is a loop over what its
// caller has read; who reads what and when is decided in select/key_scores.hpp,
// select/float_mass.hpp and methods/indexer.hpp.
#pragma once

#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/softmax_state.hpp>

#include <cstdint>

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/float_panels.hpp>
#include <quoka/kernels/register_tile.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- products of a tile of keys with some rows --------------------------------------------------

// Some rows [rows, dim], packed for score_tile(): panels of panel_rows rows, then of single
// packets.
struct ScoreRows {
  const float* panels;
  Index rows, dim;
  bool mean;  // of a key's products; else their maximum
};

// Floats of the panels.
inline Index score_panels_size(Index rows, Index dim) { return whole_packets(rows) * dim; }

// q [rows, dim] to panels. Lanes beyond the last row repeat the first one: a maximum does not
// notice. For a mean they are 0.
QUOKA_FUNC void pack_score_rows(const float* q, Index rows, Index dim, bool mean, float* panels);

// The scores of the first `count` keys of a packed tile. Rows of `next` are prefetched on the way.
QUOKA_FUNC void score_tile(const ScoreRows& x, const float* tile, Index count, RowPrefetch& next,
                           float* scores);

// ---- softmax weights of a panel over blocks of keys ---------------------------------------------

// Are keys [first, last) of a packed block finite?
QUOKA_FUNC bool packed_keys_finite(const float* tiles, Index first, Index last, Index dim);

// A block's keys, packed in float, and a packed panel of rows.
struct BlockAndPanel {
  const float *tiles, *panel;
  Index dim;
  const float* key_factors;  // NaN for a key that has no weight; null: all have one
};

// For the keys that `visible` counts: weights [key][panel_rows] against the largest logit of each
// row, and for each row that logit and the sum of its weights, max and sum [panel_rows].
// hidden[key] = 1 for a key without a weight, if it is not null. logits: memory for as many as
// weights, in whole tiles.
QUOKA_FUNC void weigh_block(const BlockAndPanel& x, const VisibleKeys& visible, float* logits,
                            float* weights, float* max, float* sum, std::uint8_t* hidden);

// The states of `rows` rows take in such maxima and sums.
QUOKA_FUNC void merge_rows(const float* max, const float* sum, Index rows,
                           SoftmaxState<float>* states);

// The sum of a row's weights, in a state and in `blocks` blocks whose maxima and sums lie `step`
// apart, against the largest of their maxima: `reference`, 0 where there is none.
struct RowSum {
  float reference;
  double of_state, sum;  // sum: the state's and the blocks'
};
QUOKA_FUNC RowSum row_sum(const SoftmaxState<float>& state, const float* block_max,
                          const float* block_sum, Index blocks, Index step);

// to[i] = factors[i] for weights against reference[i], made a factor for weights against max[i],
// for rows i in [first, last] of a panel whose factor is above 0; 0 for its others.
QUOKA_FUNC void panel_factors(const float* max, const float* reference, const float* factors,
                              Index first, Index last, float* to);

// Weights [panels][key][panel_rows], the panels `step` floats apart, times factors
// [panels][panel_rows]: to[key] += the sum of all of them for a key, or to[key] = the largest, if
// that is more.
QUOKA_FUNC void add_weights(const float* weights, Index panels, Index step, const float* factors,
                            Index keys, bool largest, float* to);

// ---- an indexer's scores: keys across the lanes -------------------------------------------------

// products[row][panel_rows] of packed tiles of `rows` rows and a panel of keys. Beside each tile a
// share of `next` is prefetched.
QUOKA_FUNC void key_products(const float* tiles, Index rows, const float* keys, Index dim,
                             RowPrefetch& next, float* products);

// scores[key] of `keys` keys, whole packets: the sum over heads of weights[head] * max(0,
// products[head][keys]), or the largest product where weights is null. NaN for a key with a product
// that is not finite.
QUOKA_FUNC void add_heads(const float* products, Index heads, Index keys, const float* weights,
                          float* scores);

#if QUOKA_DEFINES_KERNELS

// ---- products of a tile of keys with some rows --------------------------------------------------

QUOKA_FUNC void pack_score_rows(const float* q, Index rows, Index dim, bool mean, float* panels) {
  const auto pack = [&](Index first, Index width, float* panel) {
    const float* from[tuning::panel_rows];
    Index count = width;
    for (Index i = 0; i < count; ++i) from[i] = q + (first + i < rows ? first + i : 0) * dim;
    if (mean) count = std::min(count, rows - first);
    pack_queries(from, count, dim, 1.0f, width, panel);
  };
  Index first = 0;
  for (Index left = ceil_div(rows, simd::lanes); left > 0;
       left -= tuning::tile_packets, first += tuning::panel_rows) {
    float* panel = panels + first * dim;
    if (left >= tuning::tile_packets)
      pack(first, tuning::panel_rows, panel);
    else
      for (Index one = 0; one < left; ++one)
        pack(first + one * simd::lanes, simd::lanes, panel + one * simd::lanes * dim);
  }
}

using TileScores = simd::Packet[tuning::tile_rows];

template <std::size_t Packets>
void score_panel(const float* panel, const ScoreRows& x, const float* tile, TileScores& best,
                 RowPrefetch& next) {
  constexpr int rows = tuning::tile_rows;
  simd::Packet acc[rows][Packets];
  const Index lines = ceil_div(next.lines(), ceil_div(x.dim, slab));
  clear(acc);
  add_key_tile(acc, tile, panel, x.dim, [&] { next.prefetch(lines); });
  simd::unroll<rows, Packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
    best[i] = x.mean ? simd::add(best[i], acc[i][j]) : simd::max(best[i], acc[i][j]);
  });
}

QUOKA_FUNC void score_tile(const ScoreRows& x, const float* tile, Index count, RowPrefetch& next,
                           float* scores) {
  TileScores best;
  for (auto& lane : best) lane = simd::broadcast(x.mean ? 0.0f : -simd::infinity);
  const float* panel = x.panels;
  Index left = ceil_div(x.rows, simd::lanes);
  for (; left >= tuning::tile_packets;
       left -= tuning::tile_packets, panel += tuning::panel_rows * x.dim)
    score_panel<tuning::tile_packets>(panel, x, tile, best, next);
  for (; left > 0; --left, panel += simd::lanes * x.dim) score_panel<1>(panel, x, tile, best, next);
  const float share = 1.0f / static_cast<float>(x.rows);
  alignas(64) float key_scores[round_up(tuning::tile_rows, simd::lanes)];
  for (int i = 0; i < tuning::tile_rows; i += simd::lanes) {
    simd::Square square;
    simd::unroll<simd::lanes>([&](auto j) QUOKA_INLINE_LAMBDA {
      square.packet[j] = best[std::min<int>(i + j, tuning::tile_rows - 1)];
    });
    simd::store(key_scores + i, x.mean ? simd::mul(simd::sums(square), simd::broadcast(share))
                                       : simd::maxima(square));
  }
  std::copy_n(key_scores, count, scores);
}

// ---- softmax weights of a panel over blocks of keys ---------------------------------------------

QUOKA_FUNC bool packed_keys_finite(const float* tiles, Index first, Index last, Index dim) {
  simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
  float tail = 0.0f;
  const Index tile_size = key_tile_size(dim);
  for (Index i = first; i < last; ++i) {
    const float* x = tiles + i / tuning::tile_rows * tile_size + i % tuning::tile_rows * slab;
    for (Index c = 0; c < dim; c += slab, x += Index{slab} * tuning::tile_rows) {
      const Index n = std::min<Index>(slab, dim - c);
      Index j = 0;
      for (; j + simd::lanes <= n; j += simd::lanes)
        poison = simd::fma(simd::load(x + j), simd::zero(), poison);
      for (; j < n; ++j) tail += x[j] * 0.0f;
    }
  }
  return simd::reduce_add(poison) + tail == 0.0f;
}

QUOKA_FUNC void weigh_block(const BlockAndPanel& x, const VisibleKeys& visible, float* logits,
                            float* weights, float* max, float* sum, std::uint8_t* hidden) {
  constexpr Index width = tuning::panel_rows;
  PanelPackets top;
  block_logits(x.tiles, x.panel, x.dim, visible.count, logits, top);
  finish_logits(visible, logits, top);
  if (x.key_factors != nullptr) {
    for (Index i = 0; i < visible.count; ++i) {
      if (x.key_factors[i] == x.key_factors[i]) continue;
      std::fill_n(logits + i * width, width, -simd::infinity);
      if (hidden != nullptr) hidden[i] = 1;
    }
    block_maximum(logits, visible.count, top);
  }
  PanelState state;
  for (int j = 0; j < tuning::tile_packets; ++j) set_packet(state, j, {top[j], simd::zero()});
  block_weights(logits, visible.count, state, weights);
  std::copy_n(state.max, width, max);
  std::copy_n(state.sum, width, sum);
}

QUOKA_FUNC void merge_rows(const float* max, const float* sum, Index rows,
                           SoftmaxState<float>* states) {
  for (Index i = 0; i < rows; ++i) states[i].merge({max[i], sum[i]});
}

QUOKA_FUNC RowSum row_sum(const SoftmaxState<float>& state, const float* block_max,
                          const float* block_sum, Index blocks, Index step) {
  float most = state.max;
  for (Index block = 0; block < blocks; ++block) most = std::max(most, block_max[block * step]);
  const float reference = std::isfinite(most) ? most : 0.0f;
  const auto against_reference = [&](float max, float of_sum) {
    return static_cast<double>(simd::exp(max - reference)) * static_cast<double>(of_sum);
  };
  double sum = 0.0;
  for (Index block = 0; block < blocks; ++block)
    sum += against_reference(block_max[block * step], block_sum[block * step]);
  const double of_state = against_reference(state.max, state.sum);
  return {reference, of_state, sum + of_state};
}

QUOKA_FUNC void panel_factors(const float* max, const float* reference, const float* factors,
                              Index first, Index last, float* to) {
  for (Index i = 0; i < tuning::panel_rows; ++i) {
    const bool own = first <= i && i <= last && factors[i] > 0.0f;
    to[i] = own ? simd::exp(max[i] - reference[i]) * factors[i] : 0.0f;
  }
}

QUOKA_FUNC void add_weights(const float* weights, Index panels, Index step, const float* factors,
                            Index keys, bool largest, float* to) {
  constexpr Index width = tuning::panel_rows;
  for (Index key = 0; key < keys; ++key) {
    simd::Packet sum = simd::zero();
    for (Index p = 0; p < panels; ++p)
      simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        const Index lane = j * simd::lanes;
        const simd::Packet weight = simd::load(weights + p * step + key * width + lane),
                           factor = simd::load(factors + p * width + lane);
        sum = largest ? simd::max(sum, simd::mul(weight, factor)) : simd::fma(weight, factor, sum);
      });
    if (largest)
      to[key] = std::max(to[key], simd::reduce_max(sum));
    else
      to[key] += simd::reduce_add(sum);
  }
}

// ---- an indexer's scores: keys across the lanes -------------------------------------------------

QUOKA_FUNC void key_products(const float* tiles, Index rows, const float* keys, Index dim,
                             RowPrefetch& next, float* products) {
  constexpr int height = tuning::tile_rows, packets = tuning::tile_packets;
  const Index lines = ceil_div(next.lines(), ceil_div(rows, Index{height}));
  for (Index row = 0; row < rows; row += height, tiles += key_tile_size(dim)) {
    next.prefetch(lines);
    simd::Packet acc[height][packets];
    clear(acc);
    add_key_tile(acc, tiles, keys, dim, [] {});
    simd::unroll<height, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      simd::store(products + (row + i) * tuning::panel_rows + j * simd::lanes, acc[i][j]);
    });
  }
}

QUOKA_FUNC void add_heads(const float* products, Index heads, Index keys, const float* weights,
                          float* scores) {
  const simd::Packet zero = simd::zero(),
                     least = simd::broadcast(std::numeric_limits<float>::lowest());
  for (Index first = 0; first < keys; first += tuning::panel_rows) {
    with_packets(std::min<Index>(tuning::panel_rows, keys - first), [&](auto packets) {
      simd::Packet score[packets], poison[packets];  // x * 0 is NaN for NaN and infinity
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        score[j] = weights != nullptr ? zero : least;
        poison[j] = zero;
      });
      for (Index head = 0; head < heads; ++head) {
        const simd::Packet weight = simd::broadcast(weights != nullptr ? weights[head] : 0.0f);
        simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
          const simd::Packet x = simd::load(products + head * keys + first + j * simd::lanes);
          poison[j] = simd::fma(x, zero, poison[j]);
          score[j] = weights != nullptr ? simd::fma(weight, simd::max(x, zero), score[j])
                                        : simd::max(x, score[j]);
        });
      }
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        simd::store(scores + first + j * simd::lanes, simd::add(score[j], poison[j]));
      });
    });
  }
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
