// A block of keys against a panel of queries in float throughout: see panel_kernels.hpp.
#pragma once

#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/panel_kernels.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class FloatPanels final : public PanelArithmetic {
  static constexpr Index width = tuning::panel_rows;

 public:
  PanelCost cost() const override { return {1.0f, 0.25f}; }
  Index key_bytes(Index dim) const override {
    return ceil_div(tuning::block_keys, tuning::tile_rows) * key_tile_size(dim) * 4;
  }
  Index value_bytes(Index v_dim) const override {
    return tuning::block_keys * value_stride(v_dim) * 4;
  }
  Index query_bytes(Index dim) const override { return dim * width * 4; }
  void take(Arena& arena, PanelScratch& s, Index v_dim, bool biased) const override {
    s.logits = arena.take<float>(round_up(tuning::block_keys, tuning::tile_rows) * width);
    s.lane_out = arena.take<float>(2 * v_dim * width);
    if (biased) s.lane_values = arena.take<float>(tuning::block_keys * value_stride(v_dim));
  }
  // Packing copies rows: with kept blocks a chunk is 0.88 to 0.98 times as fast.

  void pack_keys(PackedBlock& block) const override {
    detail::pack_keys(*block.k->format, block.k->at, block.k->count, block.k->shape,
                      reinterpret_cast<float*>(block.keys));
  }
  void pack_values(PackedBlock& block) const override {
    const BlockRows& v = *block.v;
    block.finite_values =
        v.format->pack_values(v.at, v.count, v.shape, reinterpret_cast<float*>(block.values));
  }
  void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                    const Panel& panel) const override {
    with_packets(count, [&](auto packets) {
      detail::pack_queries(rows, count, dim, scale, packets * simd::lanes,
                           static_cast<float*>(panel.queries));
    });
  }

  void attend(const PackedBlock& block, const Panel& panel, const VisibleKeys& visible,
              PanelScratch& s) const override {
    if (panel.rows <= simd::lanes)
      attend_packets<1>(block, panel, visible, s);
    else
      attend_packets<tuning::tile_packets>(block, panel, visible, s);
  }

 private:
  template <int packets>
  static void attend_packets(const PackedBlock& block, const Panel& panel,
                             const VisibleKeys& visible, PanelScratch& s) {
    float* const x = s.logits;
    const float* const values = reinterpret_cast<const float*>(block.values);
    const Index keys = visible.count, v_dim = block.v_dim();
    PanelPackets top, factors;
    block_logits<packets>(reinterpret_cast<const float*>(block.keys),
                          static_cast<const float*>(panel.queries), block.dim(), keys, x, top);
    finish_logits<packets>(visible, x, top);
    for (int j = 0; j < packets; ++j) factors[j] = raise(panel.state, j, top[j]);
    block_weights<packets>(x, keys, panel.state, x);
    if (!block.finite_values && (visible.ranges != nullptr || visible.bias != nullptr))
      values_lane_by_lane<packets>(values, v_dim, x, visible, factors, panel, s);
    else
      block_values<packets>(values, v_dim, x, keys, factors, panel.out);
  }

  // A masked weight is an exact zero, but zero times NaN is NaN. If a block holds a NaN or infinite
  // value, each lane takes only the keys that it sees. Same tiles, same order, same bits.
  template <int packets>
  static void values_lane_by_lane(const float* values, Index v_dim, const float* weights,
                                  const VisibleKeys& visible, const PanelPackets& factors,
                                  const Panel& panel, PanelScratch& s) {
    const Index size = v_dim * width;
    float *result = s.lane_out, *trial = result + size;
    for (Index lane = 0; lane < panel.rows; ++lane) {
      const LaneRanges* const ranges = visible.ranges;
      const Index first = ranges != nullptr ? static_cast<Index>(ranges->first[lane]) : 0;
      const Index end = ranges != nullptr ? std::max(first, static_cast<Index>(ranges->end[lane]))
                                          : visible.count;
      std::copy_n(panel.out, size, trial);
      const float* const lane_values =
          visible.bias != nullptr ? seen_values(values, v_dim, lane, visible, s) : values;
      block_values<packets>(lane_values + first * value_stride(v_dim), v_dim,
                            weights + first * width, end - first, factors, trial);
      for (Index c = 0; c < v_dim; ++c) result[c * width + lane] = trial[c * width + lane];
    }
    for (Index c = 0; c < v_dim; ++c)
      std::copy_n(result + c * width, panel.rows, panel.out + c * width);
  }
  // The values, zero where `lane` does not see them.
  static const float* seen_values(const float* values, Index v_dim, Index lane,
                                  const VisibleKeys& visible, PanelScratch& s) {
    const Index stride = value_stride(v_dim);
    float* const seen = s.lane_values;
    for (Index key = 0; key < visible.count; ++key) {
      if (sees(visible, lane, key))
        std::copy_n(values + key * stride, v_dim, seen + key * stride);
      else
        std::fill_n(seen + key * stride, v_dim, 0.0f);
    }
    return seen;
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
