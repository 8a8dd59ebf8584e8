// Sizes of register tiles, panels and blocks, which depend on the instructions. For kernels alone:
// drivers read them by kernel_sizes() (kernels/kernels.hpp). Each with its reason, as in
// tuning.hpp.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/simd/simd.hpp>
#include <quoka/simd/tuning.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace tuning {

// Register tile: tile_rows broadcast elements times tile_packets packets of query rows. With 32
// registers 14 x 2 leaves room for the two operands and one broadcast (28 + 2 + 1 of 32); with 16
// registers 6 x 2 does (12 + 2 + 1). Both keep enough independent multiply-adds in flight to hide
// their latency (4 cycles times 2 units).
inline constexpr int tile_rows = simd::registers >= 32 ? 14 : 6;
inline constexpr int tile_packets = 2;

// Query rows per panel: the width of the register tile.
inline constexpr int panel_rows = tile_packets * simd::lanes;

// Keys per block: a multiple of tile_rows. One block of weights (block_keys x panel_rows floats, 14
// KiB with AVX-512) stays in L1 between softmax and the value product. Packed K and V of a block
// (112 KiB at head_dim 128) stay in L2 for all panels. Fewer: the accumulators are read and written
// more often. More: the weights leave L1. Changes the order of sums.
inline constexpr int block_keys = tile_rows * (simd::registers >= 32 ? 8 : 16);
static_assert(block_keys <= most_block_keys);

// Panels of one task, which share a packed block of keys. So many pay (packing_panels), although
// their queries and sums (1.5 MiB for 32 panels of AVX-512 at head_dim 128) leave L2. Against 16
// panels 32 took 0.92 of the time in 8 bits, 0.97 in 16 bits and 0.98 in float; 64 were no faster
// (Zen 5, 512 queries). With 16 registers L2 may be as small as 512 KiB.
inline constexpr Index max_panels_per_task = simd::registers >= 32 ? 32 : 16;

// Query rows of a KV head from which on int8 is used (int8_rows) if no instruction multiplies
// bfloat16 faster than float. For one packet of rows float takes 0.78 to 1.03 of int8's time, for a
// panel 1.11 to 1.41 (Zen 4's VNNI, 64 to 256 channels).
inline constexpr Index int8_rows_beside_float = simd::lanes + 1;

// Decode's kernels.
//   token_rows            query rows of a KV head up to which they are used; for more a panel is
//                         faster
//   token_value_packets   packets of channels held in registers, for two query rows
inline constexpr Index token_rows = panel_rows / 2;
inline constexpr int token_value_packets = simd::registers >= 32 ? 8 : 4;

}  // namespace tuning
}  // namespace QUOKA_ABI
}  // namespace quoka
