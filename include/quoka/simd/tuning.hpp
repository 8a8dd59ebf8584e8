// Every block size and threshold, each with its reason. Change one, run bench/quoka_bench.
//
// First those that hold for all instructions; last those of a register tile, which depend on them
// and are for kernels alone: drivers read them by kernel_sizes() (kernels/kernels.hpp).
#pragma once

#include <quoka/base/index.hpp>

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/simd.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace tuning {

// Channels per slab of a packed key tile: one cache line of each key. So a tile is read as one
// forward stream, and the distance between its keys is a constant in the instruction.
inline constexpr int slab_channels = 16;

// Room for the keys of a block, whatever the arithmetic.
inline constexpr int most_block_keys = 128;

// Packing a block of keys and values takes as long as attending to it with this many panels in
// float (with 75 rows in 8 bits). It waits for memory: it has a fifth of the instructions of one
// panel (AVX2, 128 channels).
inline constexpr float packing_panels = 1.3f;

// The fewest panels for which one item packs a block for itself alone, unless workers would stand
// idle. With 4 panels packing is a quarter of the time (packing_panels).
inline constexpr Index min_panels_per_task = 4;

// Query rows of a KV head from which on int8 is used. Fewer are computed as bfloat16, which packs
// keys and values faster. Rows at which both take the same time, over a cache of float and one of
// bfloat16:
//   head_dim     64          128         256
//   Zen 4        49 and 68   35 and 52   28 and 33   (8,192 keys)
//   Zen 5        - and 115   - and 80    - and 59    (from bench/results/data/side_by_side.json)
// One number serves all, between the two processors. With 48 rows int8 would take 0.89 to 1.12 of
// bfloat16's time on a Zen 4. On a Zen 5 it takes 0.98 to 1.09 of it with 64 rows of 128 or 256
// channels, 1.07 with 96 rows of 64 channels.
inline constexpr Index int8_rows = 64;

// The keys of a head with fewer panels than min_panels_per_task are cut into parts. A part has at
// least part_blocks blocks. There are at most max_parts, because their results wait in memory to be
// joined.
inline constexpr Index part_blocks = 4;
inline constexpr Index max_parts = 16;

// The keys of a head with more panels are attended to in parts of long_part_keys keys, or of 2, 4,
// ... times as many: at most most_long_parts. Each worker takes one and packs its keys itself.
// Beginning and joining a part takes 1.4 us for a panel; attending to its keys takes 72 us by tiles
// of bfloat16, 174 us in float. Both change the order of sums.
inline constexpr Index long_part_keys = 2048;
inline constexpr Index most_long_parts = 20;

// Decode.
//   token_part_keys       the fewest keys of a part: 12 us of work for four query rows
//   token_parts           parts of all KV heads of a sequence together, at most about: enough for
//                         64 workers. Beginning and ending a part, and reading on elsewhere, takes
//                         0.9 us (Zen 4): 32 heads of 64 to 128 channels over 2,048 keys took 1.4
//                         to 1.6 times as long in 16 parts each as in 4
//   token_block_keys      keys per softmax step. Each change from keys to values leaves memory idle
//                         for a while: 128 keys reached 0.63 of the bandwidth, 1,024 reach 0.85.
//                         With more, the weights leave L1.
//                         Changes the order of sums
//   token_together_keys   keys of one head's turn, if several heads lie side by side: 8 heads of
//                         128 channels take 0.4 MiB of L2. 16 keys were 5 % slower, 128 keys 7 %
//   token_stretch_keys    keys handled together; they stay in L1 for all query rows. Fewer: more
//                         calls
//   token_value_keys      values handled together; they stay in L1 for all query rows, and add up
//                         by themselves. Fewer: sums are read and written more often
//   softmax_packets       packets of weights that add up by themselves before they join the sum:
//                         its error grows with their number. For lists, too
//   token_prefetch_keys   how many keys ahead is prefetched. With one query row prefetching costs
//                         more than it gains.
//                         Nearer: the core waits for memory. Farther: lines leave L1 before they
//                         are used
inline constexpr Index token_part_keys = 128;
inline constexpr Index token_parts = 128;
inline constexpr Index token_block_keys = 1024;
inline constexpr Index token_together_keys = 48;
inline constexpr Index token_stretch_keys = 16;
inline constexpr Index token_value_keys = 16;
inline constexpr Index token_prefetch_keys = 48;
inline constexpr int softmax_packets = 32;

// Attention with a separate key list per query (attention/attend_lists.hpp).
//   gather_range_bytes    keys and values of a range, as halves: they stay in L2 beside the
//                         queries' sums
//   gather_query_keys     a panel attends once its queries have this many keys on average, or after
//                         four ranges: beginning and ending costs a query as much as some 20 keys
//   gather_prefetch_keys  this many gathered rows ahead is prefetched into L2. With 8 the core
//                         waits for memory, 32 are as fast
//   gather_row_padding    addresses beyond the last row, which kernels may prefetch: as many as are
//                         prefetched ahead, and the lanes of the widest packet
//   gather_uses           from this many reads of a row on average, rows are first copied
//   gather_place_rows     from this many query rows of a KV head on they are read in place, if they
//                         have 16 bits or more. With 4 rows copying gained nothing in chunks of 128
//                         and cost a fifth in chunks of 8; with 1 row reading in place took 1.6 of
//                         the time
//   gather_tile           the cost of a panel's products if some keys are hidden, relative to those
//                         without
//   gather_rows           the cost of one, two, three and four query rows by rows, relative to a
//                         panel's row. A Zen 4 took 1.05, 1.9 and, with 128 and 576 channels, 4.3
//                         and 4.8; a Zen 5, when all rows were copied, 1.8, 2.3 and 4.6. Three rows
//                         were not timed again
//   gather_sum_keys       values that add up by themselves before they join the sum: its error
//                         grows with their number. Fewer: sums are read and written more often
//   gather_key            the further cost of a query's key, in multiply-adds
//   gather_sharing        panels that are assumed to share a packed block, if all queries of a
//                         panel see the same keys
inline constexpr Index gather_range_bytes = Index{512} << 10;
inline constexpr Index gather_query_keys = 128;
inline constexpr Index gather_prefetch_keys = 16;
inline constexpr Index gather_row_padding = gather_prefetch_keys + 16;
inline constexpr Index gather_uses = 2;
inline constexpr Index gather_place_rows = 4;
inline constexpr Index gather_sum_keys = 128;
inline constexpr float gather_tile = 1.15f;
inline constexpr float gather_rows[4] = {1.3f, 2.0f, 4.2f, 4.5f};
inline constexpr float gather_key = 160.0f;
inline constexpr float gather_sharing = 16.0f;

// An indexer's scores (methods/indexer.hpp).
//   indexer_rows          rows of queries that share a transposed block of keys: 168 KiB at 128
//                         channels, in L2 beside the block. Whole tiles
//   indexer_score_bytes   scores that wait for their top-k; they stay in the last-level cache
inline constexpr Index indexer_rows = 336;
inline constexpr Index indexer_score_bytes = Index{16} << 20;

// Tasks per worker that a call aims for, so that uneven ones (and an uneven machine) balance.
inline constexpr Index tasks_per_worker = 4;

// Keys per scoring task: 2 MiB of float keys at head_dim 128.
inline constexpr Index score_task_keys = 4096;

// Memory of one pass of exact softmax scoring, per worker, for weights of panels of queries over
// all keys: four panels at 32,768 keys, which stay in the last-level cache. A quarter of the bytes
// took a third longer, and all weights at once would leave the cache. The fewest rows that a pass
// takes may need more. Changes the order of sums.
inline constexpr Index mass_weight_bytes = Index{16} << 20;

// Rows of a pass of softmax scoring by 8-bit codes, if lists have fewer. Their weights take 1 MiB
// at 8,192 keys and stay in L2. With 256 rows selecting took 1.1 times as long (VNNI), 1.05 times
// (AVX2); half as many rows gain nothing more.
inline constexpr Index mass_pass_rows = 64;

// Keys per task of the sketched scan: 512 KiB of codes at head_dim 128; a multiple of 16. With many
// workers a task has fewer, but at least range_keys: some 5 us of scores in decode, 13 us for 16
// queries.
inline constexpr Index sketch_task_keys = 4096;
inline constexpr Index range_keys = 1024;

// Pairs of code blocks (4 KiB at head_dim 128) between the one that is used and the one that is
// prefetched. Nearer: the core waits for memory. Farther: lines leave L1 or L2 before they are
// used.
inline constexpr Index sketch_prefetch_pairs = 8;

// When codes are gathered key by key (gather_block() of kernels/codes.hpp), this many keys ahead is
// prefetched: some 7 blocks if each holds two of the keys. 12 and 32 were as fast, 64 was 3 %
// slower.
inline constexpr Index gathered_prefetch_keys = 16;

// Query rows of a KV head up to which one list serves it, instead of one for each of its query
// heads. Selecting and attending, ms, of 8,192 keys and 32/8 heads of 128; float, a Xeon's AVX-512
// (bench/results/data/selecting.json):
//   rows of a KV head                        16    32    48    64    128   256
//   one list, an eighth of the keys          2.8   3.9   5.8   7.2   12.1  23.2
//   one list, a quarter                      4.3   5.9   8.1   10.0  18.2  31.7
//   a list for each query head, an eighth    6.5   7.6   9.0   10.0  14.8  26.3
// So one list with twice the keys is faster up to 64 rows. Its loss at these keys was not measured,
// so the border is well below that.
inline constexpr Index one_list_rows = 32;

// Costs that MassScorer::pays adds up, for each key of the past. The unit is the time of one query
// row of exact attention in float.
//   row          exact attention of a query row
//   pack         packing the key and its value for a list
//   voter        the score of a voter by 8-bit codes
//   float_voter, float_pack    the same in float
// Selecting is faster up to this share of the keys: measured, and by these costs (8,192 keys, 32/8
// heads of 128, 256 voters):
//   queries                      12          16          32          64          128
//   float, AVX-512               .36, .40    .42, .43    .52, .51    .59, .59    .76, .76
//   float, AVX2                              .48, .43    .51, .51                .73, .76
//   int8, VNNI                   .22, .24    .23, .24    .21, .23    .21, .22    .41, .42
//   float, AVX-512, no codes     .08, .12    .15, .15    .21, .22    .25, .28    .57, .58
// Products of bfloat16 count as float: they were not measured.
struct SelectingCosts {
  float row, pack, voter = 0.27f, float_voter = 0.6f, float_pack = 27.0f;
};
constexpr SelectingCosts selecting_costs(bool in_int8) {
  return in_int8 ? SelectingCosts{.row = 0.32f, .pack = 37.0f}
                 : SelectingCosts{.row = 1.0f, .pack = 27.0f};
}
// Query rows of a KV head below which selecting without codes takes longer than attention to all
// keys.
inline constexpr Index fewest_rows_without_codes = 24;

// Scores that top_k looks at to guess a threshold. With 1,024 of 32,768 it keeps about 1.6 k of
// them; 512 keep 2 k, and 4,096 cost more than they save. A histogram over the leading bits of all
// scores took twice the time of all of top_k: its counters wait for each other.
inline constexpr Index top_k_samples = 1024;

// Key tiles between the one that is scored and the one whose rows are prefetched, for the same
// reasons.
inline constexpr Index score_prefetch_tiles = 2;

#if QUOKA_DEFINES_KERNELS

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

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace tuning
}  // namespace QUOKA_ABI
}  // namespace quoka
