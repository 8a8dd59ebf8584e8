// Computes numbers in float that bfloat16 or codes cannot hold: keys and queries whose factor is
// NaN, and values in the unfit channels of a block (PackedBlock). This is rare, and slow.
#pragma once

#include <quoka/kernels/bfloat16_packing.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Do all rows of a panel fit?
inline bool rows_fit(const float* row_factors) {
  bool all = true;
  for (Index i = 0; i < tuning::panel_rows; ++i) all &= row_factors[i] == row_factors[i];
  return all;
}

// Logits of those keys of a block, and of the panel's queries, that do not fit, to x, the logits of
// the block. k [dim] is scratch.
[[gnu::cold, gnu::noinline]] inline void fallback_logits(const PackedBlock& block,
                                                         const Panel& panel,
                                                         const VisibleKeys& visible,
                                                         const KeyRange& keys, float* k, float* x) {
  const float* q[tuning::panel_rows];
  panel.source.find(panel.source.owner, panel.source.panel, q);
  for (Index key = keys.begin; key < keys.end; ++key) {
    block.k->widen(key, k);
    for (Index row = 0; row < panel.rows; ++row) {
      if (block.key_factors[key] == block.key_factors[key] &&
          panel.row_factors[row] == panel.row_factors[row])
        continue;
      float dot = 0.0f;
      for (Index c = 0; c < block.dim(); ++c)
        dot = simd::fma(k[c], q[row][c] * visible.rule.scale, dot);
      x[key * tuning::panel_rows + row] = dot;
    }
  }
}

// A logit of NaN or plus infinity makes the sum of weights NaN, as in float.
template <int packets>
void update_not_finite(const float* x, Index keys, PanelState& state) {
  const simd::Packet least = simd::broadcast(std::numeric_limits<float>::lowest());
  for (Index key = 0; key < keys; ++key)
    for (int j = 0; j < packets; ++j) {
      const simd::Packet at = simd::load(x + key * tuning::panel_rows + j * simd::lanes);
      float* const sum = state.sum + j * simd::lanes;
      simd::store(sum, simd::fma(simd::max(at, least), simd::zero(), simd::load(sum)));
    }
}

// Adds the values that do not fit to `out`, for the rows that see them. v [v_dim] is scratch.
[[gnu::cold, gnu::noinline]] inline void fallback_values(const PackedBlock& block,
                                                         const Panel& panel,
                                                         const VisibleKeys& visible, const float* x,
                                                         float* v, float* out) {
  constexpr Index width = tuning::panel_rows;
  alignas(64) float reference[width];
  for (int j = 0; j < tuning::tile_packets; ++j)
    simd::store(reference + j * simd::lanes, packet_of(panel.state, j).reference());
  for (Index key = 0; key < visible.count; ++key) {
    block.v->widen(key, v);
    for (Index row = 0; row < panel.rows; ++row) {
      if (!sees(visible, row, key)) continue;
      const float weight = simd::exp(x[key * width + row] - reference[row]);
      for (Index c = 0; c < block.v_dim(); ++c) {
        float& to = out[c * width + row];
        if (block.unfit_channels[c] != 0.0f && !(simd::max(v[c], -v[c]) < most_length))
          to = simd::fma(v[c], weight, to);
      }
    }
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
