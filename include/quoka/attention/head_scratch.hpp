// What attention of one KV head works in (head_attention.hpp): a worker's scratch memory, and what several workers
// share of a head.
#pragma once

#include <quoka/attention/sequence_blocks.hpp>
#include <quoka/views/float_rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What panels of queries have seen so far: unnormalised outputs, softmax states, and what of seen_keys and
// seen_apart holds.
struct PanelSums {
  Buffer<float> out;
  Buffer<PacketState> states;
  Buffer<std::uint8_t> seen;

  void reserve(const AttentionCall& call, Index panels) {
    out.reserve(panels * call.arithmetic->sum_rows(call.v_dim) * tuning::panel_rows);
    states.reserve(panels * tuning::tile_packets);
    seen.reserve(panels);
  }
  Index bytes() const { return bytes_of(out, states, seen); }
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

// Scratch of one worker.
struct HeadScratch {
  SequenceMemory blocks;
  PackedQueries queries;
  PanelSums sums;
  PanelSums part_sums;  // of the keys after the first part, where there are several
  Buffer<float> out_rows;
  PanelScratch panel;
  FloatRows query_rows;
  Buffer<float> bias;      // [block_keys][panel_rows] to logits
  Buffer<float> mask_row;  // of one query and a block

  [[gnu::cold]] void reserve(const AttentionCall& call, Index panels, bool in_parts) {
    constexpr Index width = tuning::panel_rows;
    const PanelArithmetic& arithmetic = *call.arithmetic;
    blocks.reserve(call);
    queries.reserve(call, panels);
    sums.reserve(call, panels);
    if (in_parts) part_sums.reserve(call, panels);
    arithmetic.reserve(panel, call.v_dim, call.biased());
    if (call.biased()) {
      bias.reserve(call.block_keys() * width);
      mask_row.reserve(call.block_keys());
    }
    panel.row.reserve(std::max(call.q.dim(), call.v_dim));
    query_rows.reserve(call.q.format(), width, call.q.dim());
    if (!call.out.format().is_float) out_rows.reserve(width * call.v_dim);
  }
  Index bytes() const {
    return bytes_of(blocks, queries, sums, part_sums, out_rows, panel, query_rows, bias, mask_row);
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
