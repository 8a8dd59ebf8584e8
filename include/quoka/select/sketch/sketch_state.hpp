// What selection by a sketch keeps and reuses: the keys' sketch, the queries' codes, scratch memory.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/formats/format.hpp>
#include <quoka/runtime/worker_scratch.hpp>
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

// Of a range of a head's keys.
struct RangeCounts {
  Index proposed = 0, sure = 0, members = 0, far = 0;  // members: the near ones, then the far ones
  float least = 0.0f;                                  // score of a near one
  Index ties = 0;                                      // kept of those with the least kept score
  bool all_ties = false;                               // all that there are?
  Index before = 0;                                    // kept keys of the ranges before
};

// What the stages of one head (sketched_head.hpp) leave for each other. Lists are of ranges of keys.
struct SketchedChoice {
  Buffer<Position> proposed, sure, members, ties;
  Buffer<float> values, exact;  // sketched scores of the proposed, scores of the members
  Buffer<float> sample;         // of the sketched scores
  Buffer<std::uint64_t> kept;   // a bit for each key
  Buffer<RangeCounts> ranges;
  float pivot, nth, level, least;

  void reserve(Index kv_len, Index range_count) {
    const Index room = kv_len + range_count * compact_slack;
    for (auto* positions : {&proposed, &sure, &members, &ties}) positions->reserve_amortised(room);
    for (auto* scores : {&values, &exact}) scores->reserve_amortised(room);
    sample.reserve(tuning::top_k_samples);
    kept.reserve_amortised(ceil_div(kv_len, 64));
    ranges.reserve(range_count);
  }
  Index bytes() const {
    return proposed.bytes() + sure.bytes() + members.bytes() + ties.bytes() + values.bytes() +
           exact.bytes() + sample.bytes() + kept.bytes() + ranges.bytes();
  }
};

struct SketchState {
  KeySketch keys;
  SketchedQueries queries;
  Buffer<float> scores;           // [batch, kv_heads, kv_len], by the sketch
  Buffer<float> errors;           // likewise, of keys that do not lie in the sketch's order
  Parts<SketchedChoice> choices;  // of each slot of chains
  WorkerScratch<TopKScratch> top_k;

  Index bytes() const {
    return keys.bytes() + queries.bytes() + scores.bytes() + errors.bytes() + choices.bytes() +
           top_k.bytes();
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
