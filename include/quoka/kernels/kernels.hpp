// The interface of the kernels for drivers (select/, attention/, methods/, layer/, engine/), and
// how they are compiled.
//
// A kernel is a plain function of this room: pointers, counts and small plain structs go in, and no
// packet of floats crosses the border. Drivers decide what is read when, and who calls what. A
// header of this room begins with what drivers may include: types, and declarations of kernels.
// Under QUOKA_DEFINES_KERNELS follow the definitions, which have the instructions that the
// compiler's flags allow. What they alone include, simd/ for instance, is under it, too.
//
//   header-only         a unit has both, and the compiler inlines kernels into drivers
//   quoka::compiled     compiled.cpp has the drivers, once, for any processor of the kind;
//                       compiled_kernels.cpp has the kernels, once for each ISA level. A level's
//                       kernels are the entries of its table, and a call of a kernel is a jump
//                       through the table of the level in use (.cmake/levels.cmake,
//                       compiled_levels.cpp). With one level compiled.cpp has both
//
// So a kernel of a new name is declared and defined in a header of this room, both with QUOKA_FUNC,
// and nothing else. A template that drivers call is instantiated in compiled_kernels.cpp, and named
// in .cmake/make_level.cmake.
//
// The sizes of packed panels, tiles and blocks depend on the instructions in use. Drivers read them
// here and size arrays of their own by the most_ constants, which hold for all instructions.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/simd/tuning.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

struct KernelSizes {
  Index lanes;            // floats of a packet
  Index tile_rows;        // keys of a register tile
  Index panel_rows;       // query rows of a panel, which lie across the lanes of some packets
  Index block_keys;       // keys of a block in float
  Index panels_per_task;  // at most: tuning::max_panels_per_task
  Index token_rows;       // query rows of a KV head up to which decode's kernels serve
};
QUOKA_FUNC const KernelSizes& kernel_sizes();

// n floats, rounded up to whole packets.
inline Index whole_packets(Index n) { return round_up(n, kernel_sizes().lanes); }

// Widest of all instructions.
inline constexpr Index most_lanes = 16, most_panel_rows = 32, most_tile_rows = 14,
                       most_panels_per_task = 32;
// An output of compaction (compact.hpp) has room for this many elements beyond the last.
inline constexpr Index compact_slack = most_lanes;

#if QUOKA_DEFINES_KERNELS

QUOKA_FUNC const KernelSizes& kernel_sizes() {
  static constexpr KernelSizes sizes{.lanes = simd::lanes,
                                     .tile_rows = tuning::tile_rows,
                                     .panel_rows = tuning::panel_rows,
                                     .block_keys = tuning::block_keys,
                                     .panels_per_task = tuning::max_panels_per_task,
                                     .token_rows = tuning::token_rows};
  return sizes;
}
static_assert(simd::lanes <= most_lanes && tuning::panel_rows <= most_panel_rows &&
              tuning::tile_rows <= most_tile_rows &&
              tuning::max_panels_per_task <= most_panels_per_task);

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
