// The interface of the kernels for drivers (select/, attention/, methods/, layer/, engine/). Kernels are plain
// functions of this room: pointers, counts and small plain structs go in, and no packet of floats crosses the border.
// Drivers decide what is read when, and who calls what.
//
// The sizes of packed panels, tiles and blocks depend on the instructions in use. Drivers read them here and size
// arrays of their own by the most_ constants, which hold for all instructions.
#pragma once

#include <quoka/simd/tile_sizes.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

struct KernelSizes {
  Index lanes;            // floats of a packet
  Index tile_rows;        // keys of a register tile
  Index panel_rows;       // query rows of a panel, which lie across the lanes of some packets
  Index block_keys;       // keys of a block in float
  Index panels_per_task;  // at most: tuning::max_panels_per_task
  Index token_rows;       // query rows of a KV head up to which one token's kernels serve
};

// Constants, since header-only use and each level of the compiled library have one set of instructions.
constexpr KernelSizes kernel_sizes() {
  return {.lanes = simd::lanes,
          .tile_rows = tuning::tile_rows,
          .panel_rows = tuning::panel_rows,
          .block_keys = tuning::block_keys,
          .panels_per_task = tuning::max_panels_per_task,
          .token_rows = tuning::token_rows};
}

// n floats, rounded up to whole packets.
constexpr Index whole_packets(Index n) { return round_up(n, kernel_sizes().lanes); }

using simd::infinity;
using simd::log2_e;
using simd::prefetch;

// Widest of all instructions.
inline constexpr Index most_lanes = 16, most_panel_rows = 32, most_tile_rows = 14,
                       most_panels_per_task = 32;
static_assert(simd::lanes <= most_lanes && tuning::panel_rows <= most_panel_rows &&
              tuning::tile_rows <= most_tile_rows &&
              tuning::max_panels_per_task <= most_panels_per_task);
// An output of compaction (compact.hpp) has room for this many elements beyond the last.
inline constexpr Index compact_slack = most_lanes;

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
