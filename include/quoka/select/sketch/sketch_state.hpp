// What selection by a sketch keeps and reuses: the keys' sketch, the queries' codes, scratch memory.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/formats/format.hpp>
#include <quoka/select/steps/top_k.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The kept queries of all KV heads as codes; those of one head share a scale.
struct SketchedQueries {
  Buffer<std::int32_t> codes;         // [batch * kv_heads][steps][rows]: 4 channels of one row
  Buffer<std::int32_t> offset;        // [batch * kv_heads][rows] -128 * sum of codes
  Buffer<std::int32_t> group_offset;  // [batch * kv_heads][groups][rows], for code_rows.hpp
  Buffer<std::byte> packed;           // [batch * kv_heads][packed_bytes] for matrix/code_units.hpp
  Buffer<float> scale;                // [batch * kv_heads]
  Buffer<float> error, length;  // [batch * kv_heads] the largest; infinity where codes cannot stand
                                // for a query

  void reserve(Index tasks, Index rows, Index dim) {
    codes.reserve(tasks * steps(dim) * rows);
    offset.reserve(tasks * rows);
    group_offset.reserve(tasks * ceil_div(dim, code_group) * rows);
    scale.reserve(tasks);
    error.reserve(tasks);
    length.reserve(tasks);
  }
  Index bytes() const {
    return codes.bytes() + offset.bytes() + group_offset.bytes() + scale.bytes() + error.bytes() +
           length.bytes() + packed.bytes();
  }

  // Of a head's codes: whole groups.
  static Index steps(Index dim) { return ceil_div(dim, code_group) * (code_group / 4); }

  // q_bar [rows, dim] of one KV head.
  void encode_head(const float* q_bar, Index task, Index rows, Index dim);
};

// Scratch of one worker.
struct SketchScratch {
  Buffer<Position> sure, members, ties;  // [kv_len] at most, as the next ones
  Buffer<float> exact, ordered;
  Buffer<float> norms;  // inverse norms of candidates

  void reserve(Index kv_len) {
    norms.reserve_amortised(kv_len);
    for (auto* positions : {&sure, &members, &ties})
      positions->reserve_amortised(kv_len + compact_slack);
    for (auto* scores : {&exact, &ordered}) scores->reserve_amortised(kv_len + compact_slack);
  }
  Index bytes() const {
    return sure.bytes() + members.bytes() + ties.bytes() + exact.bytes() + ordered.bytes() +
           norms.bytes();
  }
};

struct SketchState {
  KeySketch keys;
  SketchedQueries queries;
  Buffer<float> scores;  // [batch, kv_heads, kv_len], by the sketch
  Buffer<float> errors;  // likewise, of keys that do not lie in the sketch's order
  WorkerScratch<SketchScratch> scratch;
  WorkerScratch<TopKScratch> top_k;

  Index bytes() const {
    return keys.bytes() + queries.bytes() + scores.bytes() + errors.bytes() + scratch.bytes() +
           top_k.bytes();
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
