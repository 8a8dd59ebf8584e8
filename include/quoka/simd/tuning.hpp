// Every block size and threshold, each with its reason. Change one, run bench/quoka_bench.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/simd/simd.hpp>

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

// Channels per slab of a packed key tile: one cache line of each key, so that a tile is read as one
// forward stream and the distance between its keys is a constant in the instruction.
inline constexpr int slab_channels = 16;

// Keys per block: a multiple of tile_rows. One block of weights (block_keys x panel_rows floats,
// 14 KiB with AVX-512) stays in L1 between softmax and the value product; packed K and V of a block
// (112 KiB at head_dim 128) stay in L2 for all panels. Fewer: the accumulators are read and written
// more often. More: the weights leave L1. Changes the order of sums. most_block_keys: room for them.
inline constexpr int usual_block_keys = tile_rows * (simd::registers >= 32 ? 8 : 16);
inline constexpr int block_keys = usual_block_keys;
inline constexpr int most_block_keys = block_keys > 128 ? block_keys : 128;

// Panels of one task, which share a packed block of keys. To pack it takes as long as a panel in float, 75 of its rows
// in 8 bits, this many panels pay, though their queries and sums (1.5 MiB of 32 panels of AVX-512 at head_dim 128)
// leave L2: against 16 panels, 32 took 0.92 of the time in 8 bits, 0.97 in 16, 0.98 in float, and 64 no less (Zen 5,
// 512 queries). With 16 registers L2 may be as small as 512 KiB. Below 4 panels packing costs over 2 %.
inline constexpr Index max_panels_per_task = simd::registers >= 32 ? 32 : 16;
inline constexpr Index min_panels_per_task = 4;

// Query rows of a KV head from which int8 packs keys and values that are not packed already. Fewer are computed as
// bfloat16, which packs them sooner. Rows at which both take the same time, over a cache of float and one of bfloat16:
//   head_dim     64          128         256
//   Zen 4        49 and 68   35 and 52   28 and 33   (8,192 keys)
//   Zen 5        - and 115   - and 80    - and 59    (from bench/results/data/side_by_side.json)
// One number for all, between the two processors: with 48 rows int8 would take 0.89 to 1.12 of bfloat16's time on a Zen
// 4; with 64 rows of 128 or 256 channels it takes 0.98 to 1.09 of it on a Zen 5, with 96 rows of 64 channels 1.07.
inline constexpr Index int8_rows = 64;
// The same against float, where nothing multiplies bfloat16 faster: one packet of rows takes float 0.78 to 1.03 of
// int8's time, a panel 1.11 to 1.41 (Zen 4's VNNI, 64 to 256 channels).
inline constexpr Index int8_rows_beside_float = simd::lanes + 1;

// A head of fewer panels than min_panels_per_task is cut over its keys: parts of at least
// part_blocks blocks, at most max_parts of them (their results wait in memory to be merged).
inline constexpr Index part_blocks = 4;
inline constexpr Index max_parts = 16;

// Keys of more panels are walked in parts of long_part_keys, or twice, four times, ... as many, so that
// there are most_long_parts at most: each worker takes one, and packs its keys for itself. To begin a part
// again and to merge it takes a panel 1.4 us, attending to its keys 72 us by tiles of bfloat16, 174 us in
// float. Change the order of sums.
inline constexpr Index long_part_keys = 2048;
inline constexpr Index most_long_parts = 20;

// One token's attention.
//   token_part_keys       the fewest keys of a part: 12 us of work for four query rows
//   token_parts           parts of all KV heads of a sequence, about, where a head's have more keys than that: enough
//                         for 64 workers. To begin a part, to end it and to read on elsewhere takes 0.9 us (Zen 4): 32
//                         heads of 64 to 128 channels over 2,048 keys took 1.4 to 1.6 times as long in 16 parts each as
//                         in 4
//   token_rows            query rows of a KV head up to which it is used; for more a panel is faster
//   token_block_keys      keys per softmax step. Each change from keys to values leaves memory idle
//                         for a while: 128 reached 0.63 of the bandwidth, 1,024 reach 0.85. More
//                         weights than L1 holds cost again. Changes the order of sums
//   token_together_keys   keys of a turn where several heads lie side by side: 8 heads of 128 channels are
//                         0.4 MiB of L2. 16 keys were 5 % slower, 128 keys 7 %
//   token_stretch_keys    keys handled together; they stay in L1 for all query rows. Fewer: more calls
//   token_value_keys      values handled together; they stay in L1 for all query rows. Fewer: sums are
//                         read and written more often
//   token_prefetch_keys   how far ahead keys are asked for. Against one query row asking costs more
//                         than it brings. Near: memory is waited for. Far: lines leave L1 unused
//   token_value_packets   packets of channels held in registers, for two query rows
inline constexpr Index token_rows = panel_rows / 2;
inline constexpr Index token_part_keys = 128;
inline constexpr Index token_parts = 128;
inline constexpr Index token_block_keys = 1024;
inline constexpr Index token_together_keys = 48;
inline constexpr Index token_stretch_keys = 16;
inline constexpr Index token_value_keys = 16;
inline constexpr Index token_prefetch_keys = 48;
inline constexpr int token_value_packets = simd::registers >= 32 ? 8 : 4;

// Attention to keys of each query's own (attention/attend_lists.hpp).
//   gather_range_bytes    keys and values of a range, as halves: they stay in L2 beside the queries' sums
//   gather_query_keys     keys that a query waits for, on average of its panel, for four ranges at most: to begin and
//                         to end takes a query as long as some 20 keys
//   gather_prefetch_keys  how far ahead gathered rows are asked for, into L2: 8 leave memory waited for, 32 took as
//                         long
//   gather_row_padding    addresses behind the last row that kernels may ask for
//   gather_uses           reads of a row, on average, from which rows are copied side by side first where that pays
//   gather_place_rows     query rows of a KV head from which it does not pay, of 16 bits or more: 4 were as fast
//                         without in chunks of 128, a fifth faster in those of 8; 1 took 1.6 of the time
//   gather_tile           a panel's products where some keys are hidden, in those where none is
//   gather_rows           multiply-adds by rows of one, two, three and four query rows, in those of a panel's row. A
//                         Zen 4 took 1.05, 1.9 and, of 128 and 576 channels, 4.3 and 4.8; a Zen 5, when copied rows
//                         were all there was, 1.8, 2.3 and 4.6. Three were not timed again
//   gather_key            what a query's key takes besides, in multiply-adds
//   gather_sharing        panels that share a packed block, where all queries of one see the same keys
inline constexpr Index gather_range_bytes = Index{512} << 10;
inline constexpr Index gather_query_keys = 128;
inline constexpr Index gather_prefetch_keys = 16;
inline constexpr Index gather_row_padding = gather_prefetch_keys + simd::lanes;
inline constexpr Index gather_uses = 2;
inline constexpr Index gather_place_rows = 4;
inline constexpr float gather_tile = 1.15f;
inline constexpr float gather_rows[4] = {1.3f, 2.0f, 4.2f, 4.5f};
inline constexpr float gather_key = 160.0f;
inline constexpr float gather_sharing = 16.0f;

// An indexer's scores (methods/indexer.hpp).
//   indexer_rows          rows of queries that share a transposed block of keys: 168 KiB at 128 channels, in L2 beside
//                         the block. Whole tiles
//   indexer_score_bytes   scores that wait for their top-k, in a last-level cache
inline constexpr Index indexer_rows = 336;
inline constexpr Index indexer_score_bytes = Index{16} << 20;

// Tasks per worker that a call aims for, so that uneven ones (and an uneven machine) balance.
inline constexpr Index tasks_per_worker = 4;

// Keys per scoring task: 2 MiB of float keys at head_dim 128.
inline constexpr Index score_task_keys = 4096;

// Weights of panels of queries over all keys that one pass of exact softmax scoring may hold per
// worker: four panels at 32,768 keys, still in a last-level cache. A quarter of it cost a third
// more, and all of them at once would leave the cache. Changes the order of sums.
inline constexpr Index mass_weight_bytes = Index{16} << 20;

// Key tiles of a step where several keys lie side by side (block_scores.hpp): their logits (7 KiB with
// AVX-512) stay in L1 beside 128 channels of a panel of queries, 1,024 channels of them (224 KiB) in L2.
inline constexpr int strided_tiles = 4;

// Keys per task of the sketched scan: 512 KiB of codes at head_dim 128; a multiple of 16. With many workers
// fewer, range_keys at least: some 5 us of scores for one token, 13 us for 16 queries.
inline constexpr Index sketch_task_keys = 4096;
inline constexpr Index range_keys = 1024;

// Pairs of code blocks (4 KiB at head_dim 128) between the one that is used and the one asked for.
// Near: memory is waited for. Far: lines leave L1 or L2 before they are used.
inline constexpr Index sketch_prefetch_pairs = 8;

// Keys whose codes are put together (select/codes.hpp), between the one that is and the one asked for: some 7
// blocks where each holds two of them. 12 and 32 were as fast, 64 was 3 % slower.
inline constexpr Index gathered_prefetch_keys = 16;

// Voters are multiplied with half of the codes' channels, or as many more as leave logits that are off by this standard
// deviation, in nats (coded_channels.hpp). SmolLM2 by .60 to .65 of its channels: KL at an eighth of 4,096 tokens
// .0127, .0151 and .0082 where all channels have .0156, .0165 and .0105; 1.4 nats and no least half: .0163, .0256,
// .0165. TinyLlama by half: three layers drop 3 to 5 % more than they did, a flat one .05 of its attention. Rotating
// keys to their principal directions first, those of the first 512 or of all, lost 2 to 5 times as much KL: queries are
// large where keys differ little.
inline constexpr float dropped_logits = 1.0f;
// Fewer rows take all channels: choosing and copying would cost what it saves.
inline constexpr Index fewest_choosing_rows = 32;

// Scores that top_k looks at to guess a threshold. With 1,024 of 32,768 it keeps about 1.6 k of
// them; 512 keep 2 k, and 4,096 cost more than they save. A histogram over the leading bits of all
// scores took twice the time of all of top_k: its counters wait for each other.
inline constexpr Index top_k_samples = 1024;

// Key tiles between the one that is scored and the one whose rows are prefetched: the same.
inline constexpr Index score_prefetch_tiles = 2;

}  // namespace tuning
}  // namespace QUOKA_ABI
}  // namespace quoka
