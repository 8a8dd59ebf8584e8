// The softmax of few query rows that lie side by side: a tile of token_kernels.hpp, logits [key][row].
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/simd/simd.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Logits x of `keys` keys to weights, against states[tile_rows], which are raised; factors[tile_rows] are those of what
// was accumulated before. x has room for whole packets. Lane l of a packet belongs to row l % tile_rows.
[[gnu::noinline]] inline void softmax_tile(float* x, Index keys, Index tile_rows,
                                           SoftmaxState<float>* states, float* factors) {
  constexpr int lanes = simd::lanes;
  const Index size = keys * tile_rows, padded = round_up(size, lanes);
  std::fill(x + size, x + padded, -simd::infinity);
  alignas(64) float lane[lanes];
  simd::Packet top = simd::broadcast(-simd::infinity), sum = simd::zero();
  for (Index i = 0; i < padded; i += lanes) top = simd::max(top, simd::load(x + i));
  simd::store(lane, top);
  for (Index r = 0; r < tile_rows; ++r) {
    for (Index l = r + tile_rows; l < lanes; l += tile_rows) lane[r] = std::max(lane[r], lane[l]);
    factors[r] = states[r].raise(lane[r]);
  }
  for (Index l = 0; l < lanes; ++l) lane[l] = states[l % tile_rows].reference();
  const simd::Packet reference = simd::load(lane);
  for (Index i = 0; i < padded; i += lanes) {
    const simd::Packet w = simd::exp(simd::sub(simd::load(x + i), reference));
    sum = simd::add(sum, w);
    simd::store(x + i, w);
  }
  simd::store(lane, sum);
  for (Index l = 0; l < lanes; ++l) states[l % tile_rows].sum += lane[l];
}

// out = factors[row] out + added, rows of `width` channels, whole packets: what was accumulated before, and a step's.
inline void add_to_rows(const float* factors, const float* added, Index rows, Index width,
                        float* out) {
  for (Index row = 0; row < rows; ++row) {
    const simd::Packet factor = simd::broadcast(factors[row]);
    for (Index c = row * width; c < (row + 1) * width; c += simd::lanes)
      simd::store(out + c, simd::fma(factor, simd::load(out + c), simd::load(added + c)));
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
