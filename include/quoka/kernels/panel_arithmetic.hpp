// In what arithmetic a block of keys meets a panel of queries: float or bfloat16.
//
//   enter, leave   around all that follows of one task
//   pack           one block of keys and values, once for all panels of a task; or each by itself
//   pack_queries   one panel of queries, once for all blocks
//   attend         logits, softmax and values of one block and one panel
//
// head_attention.hpp walks blocks and panels and knows neither what is packed nor in which numbers.
// An arithmetic has no state: what a task needs lies in its scratch.
#pragma once

#include <quoka/kernels/panel_kernels.hpp>
#include <quoka/matrix/unit.hpp>
#include <quoka/packing/panel_packing.hpp>

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A block of keys and values, as rows and as packed.
struct PackedBlock {
  const ConstRow *k, *v;  // [count]
  const Format *k_format, *v_format;
  RowShape k_shape, v_shape;
  Index count, dim, v_dim;
  void *keys, *values;
  bool finite_values;  // float: no NaN and no infinity among them

  // Where not all is float (left_to_float.hpp). Factors of the keys, NaN for one that is left to
  // float; channels of the values that are, 1 in `apart`; is none left?
  alignas(64) float key_factors[round_up(tuning::most_block_keys, tuning::tile_rows* simd::lanes)];
  float* apart;
  bool all_keys, all_values;

  // What packing keys has written elsewhere.
  void take_keys(const PackedBlock& from) {
    keys = from.keys, all_keys = from.all_keys;
    std::copy(std::begin(from.key_factors), std::end(from.key_factors), key_factors);
  }
  // What packing values has written elsewhere.
  void take_values(const PackedBlock& from) {
    values = from.values, finite_values = from.finite_values;
    apart = from.apart, all_values = from.all_values;
  }
};

// Queries of a panel, found again where packed ones do not serve: fills the panel's rows.
struct PanelRows {
  const void* owner;
  Index panel;
  void (*find)(const void* owner, Index panel, const float** rows);
};

// A panel of queries and its accumulator.
struct Panel {
  void* queries;
  float* row_factors;  // [panel_rows], NaN for a row that is left to float
  PanelState& state;
  float* out;  // [padded_channels(v_dim)][panel_rows]
  Index rows;  // at most panel_rows
  PanelRows source;
};

// What of a block a panel sees.
struct Sight {
  Index keys;             // the first ones of the block; some row sees the last of them
  const PanelMask* mask;  // null: every row sees all of them
  const float* added;     // [keys][panel_rows] to logits, -inf hides; null: nothing
  LogitRule logits;       // scale and what changes logits by themselves

  bool sees(Index row, Index key) const {
    const float at = static_cast<float>(key);
    return (mask == nullptr || (mask->first[row] <= at && at < mask->end[row])) &&
           (added == nullptr || added[key * tuning::panel_rows + row] > -simd::infinity);
  }
};

// The rows of the next block, asked for while this one meets its panels: a share of their lines for each
// panel, which an arithmetic may spread over its work, since a core waits for no more than a dozen or
// two at once.
class NextRows {
 public:
  NextRows() = default;
  NextRows(const RowPrefetch& k, const RowPrefetch& v, Index panels)
      : rows_{k, v}, share_(ceil_div(k.lines() + v.lines(), panels)) {}

  void begin_panel() { left_ = share_; }
  Index left() const { return left_; }  // of this panel's share
  QUOKA_INLINE void ask(Index lines) {
    lines = std::min(lines, left_);
    left_ -= lines;
    rows_[1].next(rows_[0].next(lines));
  }
  void end_panel() { ask(left_); }

 private:
  RowPrefetch rows_[2];
  Index share_ = 0, left_ = 0;
};

struct PanelScratch {
  Buffer<float> logits;       // [block_keys, rounded up to tiles][panel_rows]
  Buffer<std::byte> weights;  // the same in the arithmetic's own elements
  Buffer<float> row;          // one key or value, widened
  Buffer<float> lane_out;     // two accumulators
  Buffer<float> lane_values;  // a block's values as one row sees them, where there is a mask
  UnitSession session;
  NextRows next;
};

class PanelArithmetic {
 public:
  // Keys of a block, at most tuning::most_block_keys.
  virtual Index block_keys() const { return tuning::block_keys; }
  // Bytes of a packed block's keys, of its values, and of a panel of queries.
  virtual Index key_bytes(Index dim) const = 0;
  virtual Index value_bytes(Index v_dim) const = 0;
  virtual Index query_bytes(Index dim) const = 0;
  // Those that are still needed once it is packed: the first ones. Of keys 0: to keep blocks is more work than to pack
  // them again.
  virtual Index kept_key_bytes(Index dim) const = 0;
  virtual Index kept_value_bytes(Index v_dim) const = 0;
  virtual void reserve(PanelScratch& s, Index v_dim, bool biased) const = 0;

  virtual void enter(PanelScratch&) const {}
  virtual void leave(PanelScratch&) const {}
  void pack(PackedBlock& block) const { pack_keys(block), pack_values(block); }
  // What they read and write of a block is its own, but for `count`.
  virtual void pack_keys(PackedBlock& block) const = 0;
  virtual void pack_values(PackedBlock& block) const = 0;
  // rows[0, count) times `scale` to panel.queries.
  virtual void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                            const Panel& panel) const = 0;
  virtual void attend(const PackedBlock& block, const Panel& panel, const Sight& sight,
                      PanelScratch& s) const = 0;

 protected:
  ~PanelArithmetic() = default;
};

// Between enter() and leave(), whatever is thrown.
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

// Logits as products left them to logits for the softmax; `again`: top must be looked for again.
inline void finish_logits(float* x, const Sight& sight, bool again, PanelPackets& top) {
  sight.logits.apply(x, sight.keys * tuning::panel_rows);
  if (sight.added != nullptr) add_to_logits(x, sight.keys, sight.added);
  if (sight.mask != nullptr) mask_logits(x, sight.keys, *sight.mask);
  if (again || sight.added != nullptr || sight.mask != nullptr || sight.logits.changes() ||
      sight.keys % tuning::tile_rows != 0)
    block_maximum(x, sight.keys, top);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
