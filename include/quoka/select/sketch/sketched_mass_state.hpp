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

// Scratch of one worker.
struct SketchedMassScratch {
  Buffer<float> rows;               // [rows][dim]
  Buffer<std::int32_t> codes;       // [steps][rows]
  Buffer<std::int32_t> offsets;     // [rows]
  Buffer<float> row_units;          // [rows]
  Buffer<float> bounds, shifts;     // [rows] of logits; minus the reference of the weights
  Buffer<float> factors;            // [rows] from weight to share of the mass
  Buffer<std::int16_t> rough_sums;  // [rows] likewise, of a first look in 16 bits
  Buffer<std::byte> packed;         // rows as matrix/code_units.hpp wants them
  Buffer<float> sums;               // [rows][lanes]
  Buffer<float> products;           // [rows of a tile][two blocks of keys]
  Buffer<float> units;              // [keys] scale * length; -1: no key, or none with a weight
  Buffer<std::uint8_t> partial;     // [pairs of blocks] is a unit of these keys -1?
  Buffer<std::uint8_t> gathered;    // two blocks of codes
  Buffer<std::uint32_t> weights;    // [pair of blocks][pair of rows][keys of the blocks]
  Buffer<Position> candidates;      // of a first look: positions, then rows of the sketch
  Buffer<float> candidate_mass;     // [candidates]
  TopKScratch top_k;                // that chooses them
  FloatRow reader;

  // packed_bytes: of `packed`.
  void reserve(Index row_count, Index keys, Index most_candidates, const Rows& k,
               Index packed_bytes);
  Index bytes() const {
    return rows.bytes() + codes.bytes() + offsets.bytes() + row_units.bytes() + bounds.bytes() +
           shifts.bytes() + factors.bytes() + rough_sums.bytes() + packed.bytes() + sums.bytes() +
           products.bytes() + units.bytes() + partial.bytes() + gathered.bytes() + weights.bytes() +
           candidates.bytes() + candidate_mass.bytes() + top_k.bytes() + reader.bytes();
  }
};

struct SketchedMassState {
  WorkerScratch<SketchedMassScratch> scratch;
  WorkerScratch<MassScratch> in_float;  // empty until a head is done in float
  Buffer<float> errors;  // [batch, kv_heads] eps in nats; infinity: the head was done in float

  Index bytes() const { return scratch.bytes() + in_float.bytes() + errors.bytes(); }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
