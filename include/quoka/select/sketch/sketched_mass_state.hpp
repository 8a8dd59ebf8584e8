// What softmax mass by a sketch (sketched_mass.hpp) promises, and the memory that it reuses.
#pragma once

#include <quoka/views/float_rows.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/steps/mass_scratch.hpp>
#include <quoka/select/steps/top_k.hpp>

#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The largest eps, in nats, with which a head is done by the sketch. Measured with logits made up to
// 10 times as large: heads below it lose 0.01 points of mass on average, and 0.12 at most.
inline constexpr float most_logit_error = 4.0f;

// Weights: their exponential, the 16 bits that are kept of them, and sums in float.
inline constexpr float weight_error = 0.01f;

// Some rows of a head's queries over some of its keys: what its ranges of keys share.
struct MassLook {
  struct Range {
    float longest, missed;
    bool coded;  // do codes stand for all finite keys?
  };
  enum class By { sketch, floats, nothing };

  Buffer<float> rows;               // [rows][dim]
  Buffer<std::int32_t> codes;       // [steps][rows]
  Buffer<std::int32_t> offsets;     // [rows]
  Buffer<std::byte> packed;         // rows of each pass as matrix/code_units.hpp wants them
  Buffer<float> row_units;          // [rows]
  Buffer<float> lengths, missed;    // [rows]; of the row, and of what its codes miss
  Buffer<float> bounds, shifts;     // [rows] of logits; minus the reference of the weights
  Buffer<float> factors;            // [rows] from weight to share of the mass
  Buffer<std::int16_t> rough_sums;  // [rows] likewise, of a first look in 16 bits
  Buffer<float> units;              // [keys] scale * length; -1: no key, or none with a weight
  Buffer<std::uint8_t> partial;     // [pairs of blocks] is a unit of these keys -1?
  Buffer<std::uint32_t> weights;    // [pair of blocks][pair of rows][keys of the blocks]
  Buffer<float> range_rows;         // [ranges][rows]: the largest logit, then the sum of weights
  Buffer<Range> ranges;
  Index count = 0;  // rows that are finite
  By by = By::nothing;
  bool whole = false;  // no row of a first look is finite: it is that of all rows
  bool rough = false;  // mass is in the order of the largest shares alone
  bool far = false;    // may a row's largest logit be too far below its bound?
  float error = 0.0f;  // of the logits, in units of log2

  // packed_bytes: of the rows of a pass.
  void reserve(Index row_count, Index keys, Index dim, Index packed_bytes);
  Index bytes() const {
    return rows.bytes() + codes.bytes() + offsets.bytes() + packed.bytes() + row_units.bytes() +
           lengths.bytes() + missed.bytes() + bounds.bytes() + shifts.bytes() + factors.bytes() +
           rough_sums.bytes() + units.bytes() + partial.bytes() + weights.bytes() +
           range_rows.bytes() + ranges.bytes();
  }
};

// Scratch of one worker.
struct SketchedMassScratch {
  Buffer<float> sums;             // [rows][lanes]
  Buffer<float> products;         // [rows of a tile][two blocks of keys]
  Buffer<std::uint8_t> gathered;  // two blocks of codes
  FloatRow reader;
  TopKScratch top_k;  // that chooses candidates

  void reserve(Index row_count, Index keys, Index most_candidates, const Format* format, Index dim);
  Index bytes() const {
    return sums.bytes() + products.bytes() + gathered.bytes() + reader.bytes() + top_k.bytes();
  }
};

// What the workers of one head share: of one slot of chains.
struct SketchedMassSlot {
  MassLook looks[2];             // the only one, or the first and that at its candidates
  Buffer<Position> candidates;   // positions, then rows of the sketch
  Buffer<float> candidate_mass;  // [candidates]
  TopKLists lists;               // of those who choose them

  // packed_bytes: of the rows of a pass.
  void reserve(Index row_count, Index keys, Index most_candidates, Index dim, Index packed_bytes);
  Index bytes() const {
    return looks[0].bytes() + looks[1].bytes() + candidates.bytes() + candidate_mass.bytes() +
           lists.bytes();
  }
};

struct SketchedMassState {
  WorkerScratch<SketchedMassScratch> scratch;
  WorkerScratch<SketchedMassSlot> slots;
  WorkerScratch<MassScratch>
      in_float;               // empty until the worker does a head in float, or after any did
  bool any_in_float = false;  // in a call before
  std::uint64_t turn = 0;     // of looking keys up
  Buffer<float> errors;       // [batch, kv_heads] eps in nats; infinity: the head was done in float

  Index bytes() const {
    return scratch.bytes() + slots.bytes() + in_float.bytes() + errors.bytes();
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
