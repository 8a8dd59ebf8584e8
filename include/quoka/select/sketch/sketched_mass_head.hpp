// One KV head's softmax mass by the keys' sketch (sketched_mass.hpp): codes of the rows, their bound,
// weights of passes of rows, and shares of the mass.
#pragma once

#include <quoka/kernels/softmax_state.hpp>
#include <quoka/select/sketch/code_blocks.hpp>
#include <quoka/select/sketch/coded_rows.hpp>
#include <quoka/select/sketch/mass_weights.hpp>
#include <quoka/select/steps/top_k.hpp>
#include <quoka/simd/tuning.hpp>
#include <quoka/views/float_rows.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

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
  static constexpr Index most_passes = 64;  // each is some stages of a chain
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

// Some rows of a head's queries over some of its keys: what its ranges of keys share.
struct MassLook {
  struct Range {
    float longest, missed;
    bool coded;  // do codes stand for all finite keys?
  };
  enum class Method { sketch, floats, nothing };

  Buffer<float> rows;             // [rows][dim], finite ones
  CodedRows coded;                // the same in units of log2
  Buffer<float> bounds, shifts;   // [rows] of logits; minus the reference of the weights
  Buffer<float> factors;          // [rows] the largest logit; then from weight to share of the mass
  Buffer<float> units;            // [keys] scale * length; -1: no key, or none with a weight
  Buffer<std::uint8_t> partial;   // [pairs of blocks] is a unit of these keys -1?
  Buffer<std::uint32_t> weights;  // [pair of blocks][pair of rows][keys of the blocks]
  Buffer<float> range_rows;       // [ranges][rows]: the largest logit, then the sum of weights
  Buffer<Range> ranges;
  Index count = 0;  // of rows
  Method method = Method::nothing;
  bool seeks_largest = false;  // may a row's largest logit be too far below its bound?
  float error = 0.0f;          // of the logits, in units of log2

  template <class Tiles>
  void reserve(Index row_count, Index keys, Index dim) {
    const Index stride = CodedRows::padded(row_count), pairs = MassShape::pairs(keys);
    rows.reserve(row_count * dim);
    coded.reserve<Tiles>(row_count, dim, MassShape::pass_rows(row_count, keys));
    for (auto* buffer : {&bounds, &shifts, &factors}) buffer->reserve(stride);
    units.reserve_amortised(pairs * simd::code_pair);
    partial.reserve_amortised(pairs);
    // Few rows have fewer ranges, and as many as all of them lie within these.
    const Index most_ranges = MassShape::ranges(keys, 64).count;
    ranges.reserve_amortised(most_ranges);
    range_rows.reserve_amortised(most_ranges * stride);
    // A shorter cache may take more rows at once: whichever needs more.
    const Index row_words = pairs * simd::code_pair / 2;
    const Index most = tuning::mass_weight_bytes / Index{sizeof(std::uint32_t)};
    weights.reserve_amortised(std::max(MassShape::pass_rows(row_count, keys) * row_words,
                                       std::min(stride * row_words, most)));
  }
  Index bytes() const {
    return bytes_of(rows, coded, bounds, shifts, factors, units, partial, weights, range_rows,
                    ranges);
  }
};

// Scratch of one worker.
struct SketchedMassScratch {
  Buffer<float> sums;             // [rows][lanes]
  Buffer<float> products;         // [rows of a tile][two blocks of keys]
  Buffer<std::uint8_t> gathered;  // two blocks of codes
  FloatRow reader;

  void reserve(Index row_count, const Format* format, Index dim) {
    sums.reserve(CodedRows::padded(row_count) * simd::lanes);
    products.reserve(MassShape::most_height * simd::code_pair);
    gathered.reserve(2 * simd::code_block_bytes(dim));
    reader.reserve(*format, dim);
  }
  Index bytes() const { return bytes_of(sums, products, gathered, reader); }
};

// One KV head: rows and sketched keys to mass, in ranges of keys. Logits are in units of log2. Stages:
// encode_rows beside read_keys of each range; bound; seek_largest of the ranges in a sample, judge_sample, seek_largest
// in all of them, shift_to_largest; then for each pass of rows compute_weights of the ranges, find_factors, add of the
// ranges. Tiles: what multiplies codes where tiles serve (matrix/code_units.hpp).
template <class Tiles>
class SketchedMass : MassShape {
 public:
  // Of KV head `head`, b * kv_heads + kv_head; ranges: of the keys, which lie at `mapping`.
  SketchedMass(const KeySketch& sketch, const KeySketch::RowMapping* mapping, const Rows& k,
               Index head, const KeyRanges& ranges, MassLook& look, SketchedMassScratch& s)
      : sketch_(sketch),
        blocks_(sketch, mapping, ranges.keys, head / k.heads(), head % k.heads(), k.dim(),
                s.gathered.data()),
        k_(k),
        b_(head / k.heads()),
        head_(head % k.heads()),
        ranges_(ranges),
        keys_(ranges.keys),
        l_(look),
        s_(s) {}

  // Codes of all rows; from here on they are in units of log2.
  void encode_rows() {
    const Index size = l_.count * k_.dim();
    for (Index i = 0; i < size; ++i) l_.rows.data()[i] *= simd::log2_e;
    const bool coded = l_.coded.template encode<Tiles>(l_.rows.data(), l_.count, k_.dim(),
                                                       pass_rows(l_.count, keys_), RowUnits::own);
    l_.method = coded ? MassLook::Method::sketch : MassLook::Method::floats;
    for (Index m = l_.count; m < l_.coded.stride(); ++m)
      l_.bounds.data()[m] = l_.shifts.data()[m] = 0.0f;
  }

  // Units of the keys of a range and the largest lengths.
  void read_keys(Index r) {
    const auto [begin, range_end] = ranges_.of(r);
    bool coded = true;
    const float *const scales = sketch_.scales(b_, head_),
                       *const errors = sketch_.errors(b_, head_),
                       *const lengths = sketch_.lengths(b_, head_);
    float* const units = l_.units.data();
    simd::Packet longest = simd::zero(), missed = simd::zero();
    alignas(64) float room[3][pair];
    for (Index kv = begin; kv < range_end; kv += pair) {
      const Index count = std::min(pair, keys_ - kv);
      const float* const scale = blocks_.numbers(scales, kv, count, room[0]);
      const float* const error = blocks_.numbers(errors, kv, count, room[1]);
      const float* const length = blocks_.numbers(lengths, kv, count, room[2]);
      for (Index i = count; i < pair; ++i)
        room[0][i] = room[2][i] = 0.0f, room[1][i] = simd::infinity;
      simd::Packet worst = simd::zero();
      for (Index i = 0; i < pair; i += simd::lanes) {
        const simd::Packet e = simd::load(error + i), l = simd::load(length + i);
        simd::store(units + kv + i, simd::mul(simd::load(scale + i), l));
        worst = simd::max(worst, e);
        longest = simd::max(longest, l);
        // Where codes stand for nothing, the length is 0.
        missed = simd::max(missed, simd::mul(simd::min(e, simd::broadcast(1.0f)), l));
      }
      const bool partial = simd::reduce_max(worst) == simd::infinity;
      l_.partial.data()[kv / pair] = partial ? 1 : 0;
      if (!partial) continue;
      for (Index i = 0; i < pair; ++i) {
        if (error[i] < simd::infinity) continue;
        if (i < count && finite(kv + i)) coded = false;
        units[kv + i] = -1.0f;
      }
    }
    l_.ranges.data()[r] = {simd::reduce_max(longest), simd::reduce_max(missed), coded};
  }

  // What logits may be, and how far off they are. Returns whether a row's largest is to be sought.
  bool bound() {
    float longest = 0.0f, missed = 0.0f;
    for (Index r = 0; r < ranges_.count; ++r) {
      const MassLook::Range& range = l_.ranges.data()[r];
      longest = std::max(longest, range.longest), missed = std::max(missed, range.missed);
      if (!range.coded) l_.method = MassLook::Method::floats;
    }
    l_.seeks_largest = false;
    if (!by_sketch()) return false;
    l_.error = 0.0f;
    for (Index m = 0; m < l_.count; ++m) {
      const float length = l_.coded.lengths()[m], row_missed = l_.coded.missed()[m];
      const float rounding = static_cast<float>(2 * k_.dim() + 32) * 0x1p-24f * length * longest;
      const float error = row_missed * longest + (length + row_missed) * missed + rounding;
      const float most = length * longest + error;
      l_.bounds.data()[m] = most;
      l_.shifts.data()[m] = -std::max(0.0f, most - most_weight);
      l_.error = std::max(l_.error, error);
    }
    if (!(l_.error * static_cast<float>(ln_2) <= most_logit_error))
      l_.method = MassLook::Method::floats;
    // Weights are taken against what lengths allow logits to be. Where the largest might be too far
    // below, logits of every 16th pair of blocks are looked at; where these are, too, of all: then
    // weights are taken against the row's largest.
    for (Index m = 0; m < stride(); ++m) l_.factors.data()[m] = -l_.bounds.data()[m];
    l_.seeks_largest = may_be_too_small();
    return l_.seeks_largest && by_sketch();
  }
  // Largest logits of ranges [first, end), of every step-th pair of blocks.
  void seek_largest(Index first, Index end, Index step) {
    if (!by_sketch() || !l_.seeks_largest) return;
    for (Index r = first; r < end; ++r) largest_logits(r, step);
  }
  // Is that of a sample enough?
  void judge_sample() {
    if (!by_sketch() || !l_.seeks_largest) return;
    find_largest();
    l_.seeks_largest = may_be_too_small();
  }
  void shift_to_largest() {
    if (!by_sketch() || !l_.seeks_largest) return;
    find_largest();
    for (Index m = 0; m < stride(); ++m) {
      const float most = l_.factors.data()[m];
      l_.shifts.data()[m] = std::isfinite(most) ? -most : 0.0f;
    }
  }

  // Weights of a range for a pass of rows, and their sums.
  void compute_weights(Index pass, Index r) {
    const auto [first, count] = rows_of(pass);
    if (!by_sketch() || count <= 0) return;
    std::fill_n(s_.sums.data(), count * simd::lanes, 0.0f);
    for_each_tile(pass, r, 1,
                  [&, from = first, pass_count = count](Index kv, Index m, Index height,
                                                        const auto* products) {
                    const WeightRows rows{height, l_.coded.units() + from + m,
                                          l_.shifts.data() + from + m,
                                          s_.sums.data() + m * simd::lanes};
                    const float* const units = l_.units.data() + kv;
                    std::uint32_t* const to = weights(kv, pass_count) + m * pair / 2;
                    if (l_.partial.data()[kv / pair] != 0)
                      row_weights<true>(products, units, rows, to);
                    else
                      row_weights<false>(products, units, rows, to);
                  });
    leave_sums(r, 0, count, [](simd::Packet sum) { return simd::reduce_add(sum); });
  }
  // What takes each row's weights to its share of the mass.
  void find_factors(Index pass, float share) {
    const auto [first, count] = rows_of(pass);
    if (!by_sketch() || count <= 0) return;
    for (Index m = 0; m < count; ++m) {
      float sum = 0.0f;
      for (Index r = 0; r < ranges_.count; ++r) sum += l_.range_rows.data()[r * stride() + m];
      l_.factors.data()[m] = first + m < l_.count && sum > 0.0f ? share * share_scale / sum : 0.0f;
    }
  }
  // mass [keys] of a range. Keys that are not finite have no mass to speak of.
  void add(float* mass, Index pass, Index r, Aggregation over) {
    const auto [begin, end] = ranges_.of(r);
    if (l_.method == MassLook::Method::nothing && pass == 0)
      std::fill(mass + begin, mass + end, 0.0f);
    const auto [first, count] = rows_of(pass);
    if (!by_sketch() || count <= 0) return;
    for (Index kv = begin; kv < end; kv += pair) {
      alignas(64) float shares[pair];
      shares_of_weights(weights(kv, count), l_.factors.data(), count, over, shares);
      const Index n = std::min(pair, keys_ - kv);
      if (pass == 0)
        std::copy_n(shares, n, mass + kv);
      else if (over != Aggregation::max)
        for (Index i = 0; i < n; ++i) mass[kv + i] += shares[i];
      else
        for (Index i = 0; i < n; ++i) mass[kv + i] = std::max(mass[kv + i], shares[i]);
      if (l_.partial.data()[kv / pair] == 0) continue;
      for (Index t = kv; t < std::min(kv + pair, end); ++t)
        if (l_.units.data()[t] < 0.0f) mass[t] = std::numeric_limits<float>::quiet_NaN();
    }
  }

 private:
  bool by_sketch() const { return l_.method == MassLook::Method::sketch; }
  Index stride() const { return l_.coded.stride(); }
  // The rows of a pass: none where all have been.
  std::pair<Index, Index> rows_of(Index pass) const {
    return pass < l_.coded.passes() ? l_.coded.of(pass) : std::pair<Index, Index>{0, 0};
  }

  // Might a row's largest weight be too small?
  bool may_be_too_small() const {
    for (Index m = 0; m < l_.count; ++m)
      if (l_.factors.data()[m] + l_.shifts.data()[m] < least_top) return true;
    return false;
  }
  template <class Reduce>
  void leave_sums(Index r, Index first, Index count, Reduce&& reduce) const {
    for (Index m = 0; m < count; ++m)
      l_.range_rows.data()[r * stride() + first + m] =
          reduce(simd::load(s_.sums.data() + m * simd::lanes));
  }
  // Of all ranges, to factors.
  void find_largest() {
    for (Index m = 0; m < stride(); ++m) {
      float most = -simd::infinity;
      for (Index r = 0; r < ranges_.count; ++r)
        most = std::max(most, l_.range_rows.data()[r * stride() + m]);
      l_.factors.data()[m] = most;
    }
  }

  bool finite(Index key) { return all_finite(s_.reader.read(k_.head(b_, head_), key), k_.dim()); }

  void largest_logits(Index r, Index step) {
    for (Index pass = 0; pass < l_.coded.passes(); ++pass) {
      const auto [first, count] = rows_of(pass);
      std::fill_n(s_.sums.data(), count * simd::lanes, -simd::infinity);
      for_each_tile(
          pass, r, step, [&, from = first](Index kv, Index m, Index height, const auto* products) {
            for (Index i = 0; i < height; ++i) {
              float* const largest = s_.sums.data() + (m + i) * simd::lanes;
              const simd::Packet unit = simd::broadcast(l_.coded.units()[from + m + i]);
              simd::Packet most = simd::load(largest);
              for (Index j = 0; j < pair; j += simd::lanes) {
                const simd::Packet key_unit = simd::load(l_.units.data() + kv + j);
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

  std::uint32_t* weights(Index kv, Index count) const { return l_.weights.data() + kv / 2 * count; }

  // use(kv, m, height, products): those of every step-th pair of blocks of a range, at kv, with rows [m, m + height) of
  // the pass.
  template <class Use>
  void for_each_tile(Index pass, Index r, Index step, Use&& use) const {
    const auto [begin, end] = ranges_.of(r);
    with_code_unit<Tiles>(
        l_.coded.codes(pass), l_.coded.packed(pass), [&, from = begin, to = end](auto& unit) {
          blocks_.for_each_pair(
              from, to, step, [&](Index kv, Index, CodePair codes, const simd::LaterBlocks& ahead) {
                unit.products(codes, s_.products.data(), ahead,
                              [&](Index m, Index height, const auto* products) {
                                use(kv, m, height, products);
                              });
              });
        });
  }

  const KeySketch& sketch_;
  CodeBlocks blocks_;
  const Rows& k_;
  Index b_, head_;
  const KeyRanges& ranges_;
  Index keys_;
  MassLook& l_;
  SketchedMassScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
