// Softmax weights of one KV head's rows by its keys' sketch: from products of 8-bit codes
// (select/sketch/key_sketch.hpp).
//
//   y[m][t]      = unit[m] scale[t] length[t] (code_q[m] . code_k[t])      the sketched logit
//   weight[m][t] = 2^(y[m][t] + shift[m])                                  16 bits of it
//
// Logits are in units of log2. A row q = unit code_q + d_q with |d_q| = e and a key k = length (scale code_k + d_k)
// with |d_k| <= error differ from what stands for them by
//
//   |q.k - y| <= eps = e length + (|q| + e) length error + (2 head_dim + 32) 2^-24 |q| length
//
// the last term for rounding on either side. eps is that of the worst row, with the largest length and the largest
// length * error of all keys. A head of which eps exceeds most_logit_error, or one with finite keys or rows that codes
// cannot stand for, is not done by codes (by_codes()). That is the worst case, all errors in one direction: on recorded
// and generated data logits are off by 1/17 to 1/30 of eps (root mean square).
//
// 2 * rows * keys * dim 8-bit operations and rows * keys exponentials; reads dim + 12 bytes per key. Weights of 2 bytes
// per row and key are kept until the rows' sums are known; a pass is as many rows as have room. What weights become is
// the user's: scores of rows (sketched_mass.hpp), shares of voters (mass/code_votes.hpp).
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/sketch/code_blocks.hpp>
#include <quoka/select/sketch/coded_channels.hpp>
#include <quoka/select/sketch/coded_rows.hpp>
#include <quoka/select/sketch/mass_weights.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/select/steps/top_k.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The largest eps, in nats, with which a head is done by the sketch. Measured with logits made up to
// 10 times as large: heads below it lose 0.01 points of mass on average, and 0.12 at most.
inline constexpr float most_logit_error = 4.0f;

// Weights: their exponential and that of their sum, the 16 bits that are kept of them, and sums in float.
inline constexpr float weight_error = 0.0115f;
static_assert(weight_error > simd::weight_pair_max_error + 2 * simd::exp2_rough_max_error);

// How rows and keys are grouped.
struct MassShape {
  static constexpr Index pair = CodeBlocks::pair;
  // Passes of rows are a multiple of this, unless they are all.
  static constexpr Index tile = 12;
  static constexpr Index most_passes = 64;  // each is some parallel loops
  // Rows whose products are there at once.
  static constexpr Index most_height = std::max<Index>(VectorCodes::most_height, simd::tile_height);

  static Index pairs(Index keys) { return ceil_div(keys, pair); }
  // Rows whose weights fit at once.
  static Index pass_rows(Index rows, Index keys) {
    const Index row_bytes = pairs(keys) * pair * Index{sizeof(std::uint16_t)};
    const Index fit = tuning::mass_weight_bytes / std::max<Index>(row_bytes, 1) / tile * tile;
    const Index least = round_up(std::max<Index>(ceil_div(rows, most_passes), 1), tile);
    return std::min(CodedRows::padded(rows), std::max(fit, least));
  }
  static Index passes(Index rows, Index keys) {
    return keys == 0 ? 0 : ceil_div(CodedRows::padded(rows), pass_rows(rows, keys));
  }
  // Keys of a range, for so many rows: some 15 us of work. Sums are added up range by range, so that this
  // must not depend on the workers.
  static KeyRanges ranges(Index keys, Index rows) {
    return KeyRanges::by_size(keys, rows < 16 ? 2048 : rows < 48 ? 1024 : 256);
  }
};

// Sums over a range of a head's keys.
struct CodedRange {
  float longest, missed;
  bool coded;  // do codes stand for all finite keys?
};

// Memory that the tasks of a KV head share. Its weights and coded rows are given by its owner.
struct CodeMemory {
  CodeMemory(Arena& arena, Index row_count, Index keys, Index dim)
      : CodeMemory(arena, CodedRows::padded(row_count), MassShape::pairs(keys),
                   MassShape::ranges(keys, row_count).count, dim) {}

  CodedChannels channels;            // that are multiplied
  float *bounds, *shifts, *factors;  // [rows] of logits; minus the reference of the weights; the
                                     // largest logit, then what takes weights to scores
  float* units;                      // [keys] scale * length; -1: no key, or none with a weight
  std::uint8_t* partial;             // [pairs of blocks] is a unit of these keys -1?
  float* range_rows;                 // [ranges][rows] the largest logit, then the sum of weights
  CodedRange* of_ranges;
  std::uint32_t* weights = nullptr;  // [pair of blocks][pair of rows][keys of the blocks]
  CodedRows* coded = nullptr;        // the rows, of an even number, in units of log2
  bool by_codes = false, seeks_largest = false;
  float error = 0.0f;  // of the logits, in units of log2

 private:
  CodeMemory(Arena& arena, Index rows, Index pairs, Index ranges, Index dim)
      : channels(arena, dim),
        bounds(arena.take<float>(rows)),
        shifts(arena.take<float>(rows)),
        factors(arena.take<float>(rows)),
        units(arena.take<float>(pairs * MassShape::pair)),
        partial(arena.take<std::uint8_t>(pairs)),
        range_rows(arena.take<float>(ranges * rows)),
        of_ranges(arena.take<CodedRange>(ranges)) {}
};

// Scratch of one worker.
struct CodeScratch {
  CodeScratch(Arena& arena, Index row_count, Index dim)
      : sums(arena.take<float>(CodedRows::padded(row_count) * simd::lanes)),
        products(arena.take<float>(MassShape::most_height * MassShape::pair)),
        gathered(arena.take<std::uint8_t>(2 * simd::code_block_bytes(dim))),
        kept(arena.take<std::uint8_t>(2 * simd::code_block_bytes(dim))),
        channel_sums(arena.take<float>(CodedChannels::sums_size(dim))) {}

  float* sums;             // [rows][lanes]
  float* products;         // [rows of a tile][two blocks of keys]
  std::uint8_t* gathered;  // two blocks of codes
  std::uint8_t* kept;      // their channels that are multiplied
  float* channel_sums;     // of a sample of keys
};

// One KV head. Stages, in turns for the head and for ranges of keys: encode beside read_keys (ranges); bound; where it
// says so, seek_largest in a sample, judge_sample, seek_largest (ranges), shift_to_largest; then for each pass of rows
// compute_weights (ranges), and what its user makes of them: run_by_codes(). Tiles: what
// multiplies codes where tiles serve (kernels/code_units.hpp).
template <class Tiles>
class CodedWeights : protected MassShape {
 public:
  CodedWeights(const SketchedKeys& keys, const KeyRanges& ranges, Index b, Index kv_head,
               CodeMemory& memory, const CodeScratch& scratch)
      : keys_(keys),
        blocks_(keys.sketch(), keys.mapping(), ranges.keys, b, kv_head, keys.k().dim(),
                scratch.gathered),
        ranges_(ranges),
        b_(b),
        kv_head_(kv_head),
        m_(memory),
        s_(scratch) {}

  // Do codes serve?
  bool by_codes() const { return m_.by_codes; }

  // Units of the keys of a range and the largest lengths.
  void read_keys(Index r, RowReader& reader) const {
    const auto [begin, range_end] = ranges_.of(r);
    bool coded = true;
    const KeySketch& sketch = keys_.sketch();
    const float *const scales = sketch.scales(b_, kv_head_),
                       *const errors = sketch.errors(b_, kv_head_),
                       *const lengths = sketch.lengths(b_, kv_head_);
    simd::Packet longest = simd::zero(), missed = simd::zero();
    alignas(64) float room[3][pair];
    for (Index kv = begin; kv < range_end; kv += pair) {
      const Index count = std::min(pair, ranges_.keys - kv);
      const float* const scale = blocks_.numbers(scales, kv, count, room[0]);
      const float* const error = blocks_.numbers(errors, kv, count, room[1]);
      const float* const length = blocks_.numbers(lengths, kv, count, room[2]);
      for (Index i = count; i < pair; ++i)
        room[0][i] = room[2][i] = 0.0f, room[1][i] = simd::infinity;
      simd::Packet worst = simd::zero();
      for (Index i = 0; i < pair; i += simd::lanes) {
        const simd::Packet e = simd::load(error + i), l = simd::load(length + i);
        simd::store(m_.units + kv + i, simd::mul(simd::load(scale + i), l));
        worst = simd::max(worst, e);
        longest = simd::max(longest, l);
        // Where codes stand for nothing, the length is 0.
        missed = simd::max(missed, simd::mul(simd::min(e, simd::broadcast(1.0f)), l));
      }
      const bool partial = simd::reduce_max(worst) == simd::infinity;
      m_.partial[kv / pair] = partial ? 1 : 0;
      if (!partial) continue;
      for (Index i = 0; i < pair; ++i) {
        if (error[i] < simd::infinity) continue;
        if (i < count && finite(kv + i, reader)) coded = false;
        m_.units[kv + i] = -1.0f;
      }
    }
    m_.of_ranges[r] = {simd::reduce_max(longest), simd::reduce_max(missed), coded};
  }

  // Bounds on logits, and on their errors. Returns whether a row's largest is to be sought.
  bool bound() const {
    float longest = 0.0f, missed = 0.0f;
    for (Index r = 0; r < ranges_.count; ++r) {
      const CodedRange& range = m_.of_ranges[r];
      longest = std::max(longest, range.longest), missed = std::max(missed, range.missed);
      m_.by_codes = m_.by_codes && range.coded;
    }
    m_.seeks_largest = false;
    if (!m_.by_codes) return false;
    m_.error = 0.0f;
    for (Index m = 0; m < m_.coded->rows(); ++m) {
      const float length = m_.coded->lengths()[m], row_missed = m_.coded->missed()[m];
      const float rounding =
          static_cast<float>(2 * keys_.k().dim() + 32) * 0x1p-24f * length * longest;
      const float error = row_missed * longest + (length + row_missed) * missed + rounding;
      const float most = length * longest + error;
      m_.bounds[m] = most;
      m_.shifts[m] = -std::max(0.0f, most - most_weight);
      m_.error = std::max(m_.error, error);
    }
    m_.by_codes = m_.error * static_cast<float>(ln_2) <= most_logit_error;
    // Weights are taken against what lengths allow logits to be. Where the largest might be too far
    // below, logits of every 16th pair of blocks are looked at; where these are, too, of all: then
    // weights are taken against the row's largest.
    for (Index m = 0; m < stride(); ++m) m_.factors[m] = -m_.bounds[m];
    m_.seeks_largest = m_.by_codes && may_be_too_small();
    return m_.seeks_largest;
  }
  // Largest logits of a range, of every step-th pair of blocks.
  void seek_largest(Index r, Index step) const {
    if (m_.seeks_largest) largest_logits(r, step);
  }
  // Is that of a sample enough?
  void judge_sample() const {
    if (!m_.seeks_largest) return;
    find_largest();
    m_.seeks_largest = may_be_too_small();
  }
  void shift_to_largest() const {
    if (!m_.seeks_largest) return;
    find_largest();
    for (Index m = 0; m < stride(); ++m)
      m_.shifts[m] = std::isfinite(m_.factors[m]) ? -m_.factors[m] : 0.0f;
  }

  // Weights of a range for a pass of rows, and their sums.
  void compute_weights(Index pass, Index r) const {
    const auto [first, count] = rows_of(pass);
    std::fill_n(s_.sums, count * simd::lanes, 0.0f);
    if (count == 0) return;
    for_each_tile(pass, r, 1,
                  [&, from = first, pass_count = count](Index kv, Index m, Index height,
                                                        const auto* products) {
                    const WeightRows rows{height, m_.coded->units() + from + m,
                                          m_.shifts + from + m, s_.sums + m * simd::lanes};
                    std::uint32_t* const to = weights(kv, pass_count) + m * pair / 2;
                    if (m_.partial[kv / pair] != 0)
                      row_weights<true>(products, m_.units + kv, rows, to);
                    else
                      row_weights<false>(products, m_.units + kv, rows, to);
                  });
    leave_sums(r, 0, count, [](simd::Packet sum) { return simd::reduce_add(sum); });
  }

 protected:
  // The channels of `rows` [count, channels.dim()] to codes; they are in units of log2.
  void encode(const float* rows, Index count, Index pass_rows) const {
    m_.by_codes =
        m_.coded->template encode<Tiles>(rows, count, m_.channels.dim(), pass_rows, RowUnits::own);
    for (Index m = count; m < stride(); ++m) m_.bounds[m] = m_.shifts[m] = 0.0f;
  }

  // Rows in pairs.
  Index stride() const { return m_.coded->stride(); }
  // The rows of a pass: none where all have been, or codes do not serve.
  std::pair<Index, Index> rows_of(Index pass) const {
    return m_.by_codes && pass < m_.coded->passes() ? m_.coded->of(pass)
                                                    : std::pair<Index, Index>{0, 0};
  }
  // Weights of a pass of `count` rows for the pair of blocks at kv.
  std::uint32_t* weights(Index kv, Index count) const { return m_.weights + kv / 2 * count; }

  const SketchedKeys& keys_;
  CodeBlocks blocks_;
  KeyRanges ranges_;
  Index b_, kv_head_;
  CodeMemory& m_;
  const CodeScratch& s_;

 private:
  // Might a row's largest weight be too small?
  bool may_be_too_small() const {
    for (Index m = 0; m < m_.coded->rows(); ++m)
      if (m_.factors[m] + m_.shifts[m] < least_top) return true;
    return false;
  }
  template <class Reduce>
  void leave_sums(Index r, Index first, Index count, Reduce&& reduce) const {
    for (Index m = 0; m < count; ++m)
      m_.range_rows[r * stride() + first + m] = reduce(simd::load(s_.sums + m * simd::lanes));
  }
  // Sums of all ranges to factors.
  void find_largest() const {
    for (Index m = 0; m < stride(); ++m) {
      float most = -simd::infinity;
      for (Index r = 0; r < ranges_.count; ++r)
        most = std::max(most, m_.range_rows[r * stride() + m]);
      m_.factors[m] = most;
    }
  }
  bool finite(Index key, RowReader& reader) const {
    const Rows& k = keys_.k();
    return all_finite(reader.read(k.head(b_, kv_head_), key), k.dim());
  }

  void largest_logits(Index r, Index step) const {
    for (Index pass = 0; pass < m_.coded->passes(); ++pass) {
      const auto [first, count] = rows_of(pass);
      std::fill_n(s_.sums, count * simd::lanes, -simd::infinity);
      for_each_tile(
          pass, r, step, [&, from = first](Index kv, Index m, Index height, const auto* products) {
            for (Index i = 0; i < height; ++i) {
              float* const largest = s_.sums + (m + i) * simd::lanes;
              const simd::Packet unit = simd::broadcast(m_.coded->units()[from + m + i]);
              simd::Packet most = simd::load(largest);
              for (Index j = 0; j < pair; j += simd::lanes) {
                const simd::Packet key_unit = simd::load(m_.units + kv + j);
                const simd::Packet product = simd::load_dots(products + i * pair + j);
                const simd::Packet logit = simd::mul(simd::mul(product, key_unit), unit);
                const simd::Packet none = simd::broadcast(-simd::infinity);
                most = simd::max(most, simd::select_less(key_unit, simd::zero(), none, logit));
              }
              simd::store(largest, most);
            }
          });
      leave_sums(r, first, count, [](simd::Packet most) { return simd::reduce_max(most); });
    }
  }

  // use(kv, m, height, products): those of every step-th pair of blocks of a range, at kv, with rows [m, m + height) of
  // the pass.
  template <class Use>
  void for_each_tile(Index pass, Index r, Index step, Use&& use) const {
    const auto [begin, end] = ranges_.of(r);
    with_code_unit<Tiles>(
        m_.coded->codes(pass), m_.coded->packed(pass), [&, from = begin, to = end](auto& unit) {
          blocks_.for_each_pair(
              from, to, step, [&](Index kv, Index, CodePair codes, const simd::LaterBlocks& ahead) {
                const auto use_tile = [&](Index m, Index height, const auto* products) {
                  use(kv, m, height, products);
                };
                if (m_.channels.are_all()) {
                  unit.products(codes, s_.products, ahead, use_tile);
                } else {
                  const std::uint8_t* kept[2];
                  m_.channels.compact(codes, ahead, s_.kept, kept);
                  unit.products(std::as_const(kept), s_.products, {}, use_tile);
                }
              });
        });
  }
};

// All stages of all heads, which have so many ranges and passes each. What weights become is the stages' own:
//   with(task, worker, use)              makes head `task` and calls use(head)
//   encode(task, worker)                 the head's rows, beside the reading of keys
//   reader(worker)                       room for a key
//   find_factors(head, task, pass)       once the sums of the weights of all ranges are there
//   add(head, task, pass, range)
template <class Stages>
void run_by_codes(const Stages& stages, const HeadLoops& on, Index ranges, Index passes) {
  const auto per_head = [&](auto&& f) {
    on.each(1, [&](Index task, Index, int worker) {
      stages.with(task, worker, [&](const auto& head) { f(head, task); });
    });
  };
  const auto per_range = [&](auto&& f) {
    on.each(ranges, [&](Index task, Index range, int worker) {
      stages.with(task, worker, [&](const auto& head) { f(head, task, range); });
    });
  };
  on.each(1 + ranges, [&](Index task, Index part, int worker) {
    if (part == 0) return stages.encode(task, worker);
    stages.with(task, worker,
                [&](const auto& head) { head.read_keys(part - 1, stages.reader(worker)); });
  });
  std::atomic<bool> seeks{false};  // mostly no head does
  per_head([&](const auto& head, Index) {
    if (head.bound()) seeks.store(true, std::memory_order_relaxed);
  });
  if (seeks.load(std::memory_order_relaxed)) {
    // In a sample of the keys, then in all.
    per_range([](const auto& head, Index, Index range) { head.seek_largest(range, 16); });
    per_head([](const auto& head, Index) { head.judge_sample(); });
    per_range([](const auto& head, Index, Index range) { head.seek_largest(range, 1); });
    per_head([](const auto& head, Index) { head.shift_to_largest(); });
  }
  for (Index pass = 0; pass < passes; ++pass) {
    per_range([&](const auto& head, Index, Index range) { head.compute_weights(pass, range); });
    per_head([&](const auto& head, Index task) { stages.find_factors(head, task, pass); });
    per_range(
        [&](const auto& head, Index task, Index range) { stages.add(head, task, pass, range); });
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
