// What attention of one KV head works in (head_attention.hpp): a worker's scratch memory, and what several workers
// share of a head.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/views/float_rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What panels of queries have seen so far: unnormalised outputs, softmax states, and whether they have seen
// any key at all.
struct PanelSums {
  Buffer<float> out;
  Buffer<PacketState> states;
  Buffer<std::uint8_t> seen;

  void reserve(const AttentionCall& call, Index panels) {
    out.reserve(panels * padded_channels(call.v_dim) * tuning::panel_rows);
    states.reserve(panels * tuning::tile_packets);
    seen.reserve(panels);
  }
  Index bytes() const { return out.bytes() + states.bytes() + seen.bytes(); }
};

// Panels of queries as the arithmetic packs them.
struct PackedQueries {
  Buffer<std::byte> panels;
  Buffer<float> row_factors;

  void reserve(const AttentionCall& call, Index count) {
    panels.reserve(count * call.arithmetic->query_bytes(call.q.dim()));
    row_factors.reserve(count * tuning::panel_rows);
  }
  Index bytes() const { return panels.bytes() + row_factors.bytes(); }
};

// A block that is packed once for the tasks of several workers.
struct KeptBlock {
  Buffer<std::byte> keys, values;
  BlockRows rows;
  MixedRows mixed;
  PackedBlock packed;
  bool masks = false;  // the mask is of consequence for some row and key

  void reserve(const AttentionCall& call) {
    keys.reserve(call.arithmetic->key_bytes(call.q.dim()));
    values.reserve(call.arithmetic->value_bytes(call.v_dim));
    mixed.reserve(call);
  }
  Index bytes() const { return keys.bytes() + values.bytes() + mixed.bytes(); }
};

// Scratch of one worker.
struct HeadScratch {
  Buffer<std::byte> keys, values;  // as the arithmetic packs them
  PackedQueries queries;
  PanelSums sums;
  PanelSums of_part;  // of the keys after the first part, where there are several
  Buffer<float> out_rows;
  PanelScratch panel;
  FloatRows query_rows;
  MixedRows mixed;
  BlockRows rows[2];       // of this block and the next
  ConstRow packed[2];      // keys and values of the next block, where they are packed already
  Buffer<float> added;     // [block_keys][panel_rows] to logits
  Buffer<float> mask_row;  // of one query and a block

  void reserve(const AttentionCall& call, Index panels, bool in_parts) {
    constexpr Index width = tuning::panel_rows;
    const PanelArithmetic& arithmetic = *call.arithmetic;
    keys.reserve(arithmetic.key_bytes(call.q.dim()));
    values.reserve(arithmetic.value_bytes(call.v_dim));
    queries.reserve(call, panels);
    sums.reserve(call, panels);
    if (in_parts) of_part.reserve(call, panels);
    arithmetic.reserve(panel, call.v_dim, call.biased());
    if (call.biased()) {
      added.reserve(call.block_keys() * width);
      mask_row.reserve(call.block_keys());
    }
    panel.row.reserve(std::max(call.q.dim(), call.v_dim));
    query_rows.reserve(call.q.format(), width, call.q.dim());
    if (!call.out.format().is_float) out_rows.reserve(width * call.v_dim);
    mixed.reserve(call);
  }
  Index bytes() const {
    return keys.bytes() + values.bytes() + queries.bytes() + sums.bytes() + of_part.bytes() +
           out_rows.bytes() + panel.logits.bytes() + panel.weights.bytes() +
           panel.lane_out.bytes() + panel.lane_values.bytes() + added.bytes() + mask_row.bytes() +
           panel.row.bytes() + query_rows.bytes() + mixed.bytes();
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
