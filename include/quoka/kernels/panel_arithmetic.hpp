// The arithmetic that multiplies a block of keys by a panel of queries: float, bfloat16 or 8 bits.
//
//   enter, leave   around all that follows of one task
//   pack           one block of keys and values, once for all panels of a task; or each by itself
//   pack_queries   one panel of queries, once for all blocks
//   attend         logits, softmax and values of one block and one panel
//
// attention/attend_panels.hpp goes over blocks and panels and depends on neither what is packed nor
// in which numbers. An arithmetic has no state: what a task needs lies in its scratch.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/logit_kernels.hpp>
#include <quoka/kernels/panel_kernels.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/unit.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/tile_sizes.hpp>
#include <iterator>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

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

  // Numbers that the arithmetic cannot hold are computed in float (float_fallback.hpp). Factors of
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
// rows.
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
  UnitSession session;
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
  // Memory for attend().
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
  virtual void attend(const PackedBlock& block, const Panel& panel, const VisibleKeys& visible,
                      PanelScratch& s) const = 0;
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

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
