// The arithmetic that multiplies a block of keys by a panel of queries: float, bfloat16 or 8 bits.
//
//   enter, leave     around all that follows of one task
//   pack             one block of keys and values, once for all panels of a task; or each by itself
//   pack_queries     one panel of queries, once for all blocks
//   multiply_block   logits, softmax and values of one block and one panel
//
// attention/attend_panels.hpp goes over blocks and panels and depends on neither what is packed nor
// in which numbers. An arithmetic has no state: what a task needs lies in its scratch.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/logit_kernels.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/simd/isa/tiles.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/softmax_state.hpp>
#include <limits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Channels of values and of their sums are padded to this: one tile of AMX.
inline constexpr Index channel_step = simd::tile_height;
constexpr Index padded_channels(Index v_dim) { return round_up(v_dim, channel_step); }

// Softmax states of a panel's rows, one per lane: a plain struct for drivers, packets of it for
// kernels.
struct PanelState {
  alignas(64) float max[most_panel_rows];
  alignas(64) float sum[most_panel_rows];
};

// The state of rows that have seen nothing but their sinks; -infinity: none.
QUOKA_FUNC void begin_rows(const float* sinks, PanelState& state);

// Rows of a block, of its keys or of its values: addresses, and the format of all of them.
struct BlockRows {
  ConstRow at[tuning::most_block_keys];
  const Format* format;
  RowShape shape;
  Index count;

  RowPrefetch prefetch() const { return {at, count, bytes_together(*format, shape)}; }
  void widen(Index i, float* to) const { format->widen(at[i], shape, to); }
};

// A block of keys and values as an arithmetic packs them, and the rows that it packs.
struct PackedBlock {
  const BlockRows *k, *v;
  std::byte *keys, *values;
  bool finite_values;  // float: no NaN and no infinity among them
  bool masked;         // attention's mask hides or biases some key for some row

  // Numbers that the arithmetic cannot hold are computed in float (fallback_logits()). Factors of
  // the keys: NaN for a key that does not fit. [padded channels] of the values: 1 for a channel in
  // which some value does not fit. Do all keys, all values fit? Room for key_factors in whole tiles
  // of packets, of the widest.
  alignas(64) float key_factors[most_tile_rows * most_lanes];
  float* unfit_channels;
  bool keys_fit, values_fit;

  Index dim() const { return k->shape.dim; }
  Index v_dim() const { return v->shape.dim; }
};

// The queries of a panel as floats, for rows whose packed form does not serve: fills the panel's
// rows. fallback_logits() alone calls it.
struct PanelRows {
  const void* owner;
  Index panel;
  void (*find)(const void* owner, Index panel, const float** rows);
};

// Bits of Panel::seen: it has seen a key; it has seen a number that is not added to `out`.
inline constexpr std::uint8_t seen_keys = 1, seen_unrotated = 2;

// A panel of queries and its accumulator.
struct Panel {
  void* queries;
  float* row_factors;  // [panel_rows], NaN for a row that does not fit
  PanelState& state;
  float* out;          // [PanelArithmetic::sum_rows][panel_rows]
  float* unrotated;    // of sum_rows, those from first_unrotated on
  std::uint8_t& seen;  // seen_keys, seen_unrotated
  Index rows;          // at most panel_rows
  PanelRows source;
};

// The keys of a block that a panel sees, and how its products become logits.
struct VisibleKeys {
  Index count;               // the first ones of the block; some row sees the last of them
  const LaneRanges* ranges;  // null: every row sees all of them
  const float* bias;         // [keys][panel_rows] to logits, -inf hides; null: none
  LogitRule rule;            // scale and what changes logits by themselves

  bool changes_products() const { return ranges != nullptr || bias != nullptr || rule.changes(); }
};

// Prefetches the rows of the next block while panels are multiplied by this one: a share of their
// cache lines beside each panel. An arithmetic may spread them over its work, since a core has only
// one or two dozen reads in flight.
class BlockPrefetch {
 public:
  BlockPrefetch() = default;
  BlockPrefetch(const RowPrefetch& k, const RowPrefetch& v, Index panels)
      : rows_{k, v}, share_(ceil_div(k.lines() + v.lines(), panels)) {}

  void begin_panel() { left_ = share_; }
  Index left() const { return left_; }  // lines of this panel's share
  QUOKA_INLINE void prefetch(Index lines) {
    lines = std::min(lines, left_);
    left_ -= lines;
    rows_[1].prefetch(rows_[0].prefetch(lines));
  }
  void end_panel() { prefetch(left_); }

 private:
  RowPrefetch rows_[2];
  Index share_ = 0, left_ = 0;
};

// Scratch of one worker. PanelArithmetic::take() takes what its kernels use.
struct PanelScratch {
  float* logits = nullptr;       // [block_keys, rounded up to tiles][panel_rows]
  std::byte* weights = nullptr;  // the same in the arithmetic's own elements
  float* row = nullptr;          // one key or value, widened
  float* lane_out = nullptr;     // two accumulators
  float* lane_values = nullptr;  // a block's values as one row sees them, where there is a mask
  simd::TileShapes tiles;        // of another library, while an arithmetic uses this thread's
  BlockPrefetch prefetch;
};

// Costs of a panel relative to float: its products with a key and its value, and the packing of
// both.
struct PanelCost {
  float products, packing;
};

class PanelArithmetic {
 public:
  virtual PanelCost cost() const = 0;
  // Keys of a block, at most tuning::most_block_keys.
  virtual Index block_keys() const { return kernel_sizes().block_keys; }
  // Bytes of a packed block's keys, of its values, and of a panel of queries.
  virtual Index key_bytes(Index dim) const = 0;
  virtual Index value_bytes(Index v_dim) const = 0;
  virtual Index query_bytes(Index dim) const = 0;
  // Memory for multiply_block().
  virtual void take(Arena& arena, PanelScratch& s, Index v_dim, bool biased) const = 0;
  // Rows of a panel's accumulator, and the first of them that is not rotated. A kernel whose sums
  // are of rotated values adds there what belongs to one channel alone (Panel::unrotated, used if
  // seen_unrotated is set). 0: no sums are rotated.
  virtual Index sum_rows(Index v_dim) const { return padded_channels(v_dim); }
  virtual Index first_unrotated(Index) const { return 0; }

  virtual void enter(PanelScratch&) const {}
  virtual void leave(PanelScratch&) const {}
  void pack(PackedBlock& block) const { pack_keys(block), pack_values(block); }
  // Each of them reads and writes its own part of a block.
  virtual void pack_keys(PackedBlock& block) const = 0;
  virtual void pack_values(PackedBlock& block) const = 0;
  // rows[0, count) times `scale` to panel.queries.
  virtual void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                            const Panel& panel) const = 0;
  virtual void multiply_block(const PackedBlock& block, const Panel& panel,
                              const VisibleKeys& visible, PanelScratch& s) const = 0;
  // After the last block: panel.out becomes sums of values.
  virtual void finish(const Panel&, Index) const {}
  // The accumulator to which values are added as they are. Rows without such values keep their
  // bits.
  float* unrotated_sums(const Panel& panel, Index v_dim) const {
    const Index first = first_unrotated(v_dim);
    if (first == 0) return panel.out;
    if ((panel.seen & seen_unrotated) == 0)
      std::fill_n(panel.unrotated, (sum_rows(v_dim) - first) * kernel_sizes().panel_rows, 0.0f);
    panel.seen |= seen_unrotated;
    return panel.unrotated;
  }

 protected:
  ~PanelArithmetic() = default;
};

// Calls enter() and leave() around a scope, also if it throws.
class ArithmeticScope {
 public:
  ArithmeticScope(const PanelArithmetic& arithmetic, PanelScratch& scratch)
      : arithmetic_(arithmetic), scratch_(scratch) {
    arithmetic_.enter(scratch_);
  }
  ~ArithmeticScope() { arithmetic_.leave(scratch_); }
  ArithmeticScope(const ArithmeticScope&) = delete;
  ArithmeticScope& operator=(const ArithmeticScope&) = delete;

 private:
  const PanelArithmetic& arithmetic_;
  PanelScratch& scratch_;
};

#if QUOKA_DEFINES_KERNELS

static_assert(round_up(tuning::most_block_keys, tuning::tile_rows* simd::lanes) <=
              most_tile_rows * most_lanes);

// ---- the softmax states of a panel -------------------------------------------------------------

// Packet j of the rows.
QUOKA_INLINE PacketState packet_of(const PanelState& state, int j) {
  return {simd::load(state.max + j * simd::lanes), simd::load(state.sum + j * simd::lanes)};
}

QUOKA_INLINE void set_packet(PanelState& state, int j, const PacketState& x) {
  simd::store(state.max + j * simd::lanes, x.max), simd::store(state.sum + j * simd::lanes, x.sum);
}

using PanelPackets = simd::Packet[tuning::tile_packets];

// SoftmaxState::raise() of packet j.
QUOKA_INLINE simd::Packet raise(PanelState& state, int j, const simd::Packet& logit_max) {
  PacketState x = packet_of(state, j);
  const simd::Packet factor = x.raise(logit_max);
  set_packet(state, j, x);
  return factor;
}
QUOKA_INLINE void add_to_sum(PanelState& state, int j, const simd::Packet& weights) {
  float* const sum = state.sum + j * simd::lanes;
  simd::store(sum, simd::add(simd::load(sum), weights));
}

QUOKA_FUNC void begin_rows(const float* sinks, PanelState& state) {
  for (int j = 0; j < tuning::tile_packets; ++j) {
    PacketState x = PacketState::identity();
    x.update(simd::load(sinks + j * simd::lanes));
    set_packet(state, j, x);
  }
}

// f(packets), a constant: the packets that hold `rows` rows of a panel.
template <class F>
QUOKA_INLINE void with_packets(Index rows, F&& f) {
  if (rows <= simd::lanes)
    f(simd::Constant<1>{});
  else
    f(simd::Constant<tuning::tile_packets>{});
}

// ---- products to logits -------------------------------------------------------------------------

template <int packets = tuning::tile_packets>
void block_maximum(const float* x, Index keys, PanelPackets& top) {
  simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
    top[j] = simd::broadcast(-simd::infinity);
    for (Index key = 0; key < keys; ++key)
      top[j] = simd::max(top[j], simd::load(x + key * tuning::panel_rows + j * simd::lanes));
  });
}

// Does `row` see `key`?
inline bool sees(const VisibleKeys& visible, Index row, Index key) {
  const LaneRanges* const ranges = visible.ranges;
  const float at = static_cast<float>(key);
  return (ranges == nullptr || (ranges->first[row] <= at && at < ranges->end[row])) &&
         (visible.bias == nullptr ||
          visible.bias[key * tuning::panel_rows + row] != -simd::infinity);
}

// All that happens to a product q . k before the softmax: x are those of `keys` and of the panel's
// first `rows` rows, whole packets, and become logits.
inline void finish_logits(const VisibleKeys& visible, float* x, const KeyRange& keys, Index rows) {
  visible.rule.apply(x, keys.count(), rows, tuning::panel_rows);
  if (visible.bias != nullptr)
    add_biases(x, keys.count(), rows, visible.bias + keys.begin * tuning::panel_rows);
  if (visible.ranges != nullptr) hide_outside(x, keys.count(), rows, *visible.ranges, keys.begin);
}

// For all of them; top: the maximum of the products in whole tiles, which becomes that of the
// logits.
template <int packets = tuning::tile_packets>
void finish_logits(const VisibleKeys& visible, float* x, PanelPackets& top) {
  const Index count = visible.count;
  finish_logits(visible, x, KeyRange{0, count}, packets * simd::lanes);
  if (visible.changes_products() || count % tuning::tile_rows != 0)
    block_maximum<packets>(x, count, top);
}

// ---- numbers that an arithmetic cannot hold -----------------------------------------------------
//
// Computed in float, which is rare, and slow: keys and queries whose factor is NaN, and values in
// the unfit channels of a block (PackedBlock).

// Length from which on a row, or a number of the values, is computed in float: products of two stay
// far from overflow.
inline constexpr float most_length = 0x1p50f;

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

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
