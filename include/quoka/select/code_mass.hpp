// Softmax mass of one KV head by its keys' sketch: the scores of float_mass.hpp, from products of
// 8-bit codes (key_sketch.hpp).
//
//   y[m][t]        = unit[m] scale[t] length[t] (code_q[m] . code_k[t])      the sketched logit
//   weight[m][t]   = 2^(y[m][t] + shift[m])                                  16 bits of it
//   score[list][t] = mean over the list's rows m of weight(m, t) / (past(m) + chunk(m))
//
// Logits are in units of log2; those of the chunk's keys are in float. A row q = unit code_q + d_q
// with |d_q| = e and a key k = length (scale code_k + d_k) with |d_k| <= error differ from their
// codes by
//
//   |q.k - y| <= eps = e length + (|q| + e) length error + (2 head_dim + 32) 2^-24 |q| length
//
// the last term for rounding on either side. eps is that of the worst row, with the largest length
// and the largest length * error of all keys. So weights are off by factors within exp(+-eps), sums
// of a row's weights as well, and both by weight_error for what they are rounded to:
//
//   float's score exp(-a) <= score <= float's score exp(a),   a = 2 eps + weight_error
//
// (for scores above 1e-15; a smaller one stays below it), and the best keys by codes keep at least
// exp(-2a) of the mass that as many best keys in float keep. Where neighbours count (a kernel_size
// above 1), that holds for the sum of the pooled scores, not for the mass of the keys themselves. A
// head whose eps exceeds most_logit_error, or that has finite keys or rows that codes cannot
// represent, is done in float. eps is the worst case, all errors in one direction. On recorded and
// generated data logits are off by 1/17 to 1/30 of eps (root mean square), and the best keys keep
// .002 points less on average, .03 in the worst head.
//
// 2 * rows * keys * dim 8-bit operations and rows * keys exponentials; reads dim + 12 bytes per
// key. Weights of 2 bytes per row and key are kept until the rows' sums are known; a pass is the
// rows of a few lists, so that its weights stay in the caches (tuning::mass_pass_rows).
//
// Not for callers: softmax_scores.hpp includes it where definitions are compiled (QUOKA_DEFINES).
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/codes.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/float_mass.hpp>
#include <quoka/select/sketched_keys.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The largest eps, in nats, with which a head is done by the sketch. Measured with logits made up
// to 10 times as large: heads below it lose 0.01 points of mass on average, and 0.12 at most.
inline constexpr float most_logit_error = 4.0f;

// ---- a head -------------------------------------------------------------------------------------

// One KV head: memory that its tasks share, beside its MassRows, and the stages, which
// softmax_mass() of softmax_scores.hpp runs:
//
//   encode_rows beside read_keys, of each range; then bound(): do codes serve?
//   where bound() says so, seek_largest in a sample of each range, judge_sample, seek_largest,
//   shift_to_largest; they do nothing where this head does not seek
//   where codes serve, for each pass weigh, find_factors and add, as in FloatMass
//
// A pass or a range beyond the last is empty.
class CodeMass {
 public:
  // weights: memory of a pass, weight_bytes().
  CodeMass(Arena& arena, const MassShape& shape, MassRows& rows, std::byte* weights)
      : shape_(shape),
        mass_rows_(rows),
        ranges_(ranges(shape)),
        weights_(reinterpret_cast<std::uint32_t*>(weights)),
        coded_rows_(arena, shape.rows(), shape.dim, pass_rows(shape)),
        units_(arena.take<float>(pairs(shape) * pair)),
        partial_(arena.take<std::uint8_t>(pairs(shape))),
        range_rows_(arena.take<float>(ranges_.count * shape.rows())),
        of_ranges_(arena.take<RangeExtent>(ranges_.count)) {
    for (float** of_rows : {&bounds_, &largest_, &shifts_, &factors_})
      *of_rows = arena.take<float>(shape.rows());
  }

  // Rows of whole lists, so that passes do not change the order of a list's sums; fewer if their
  // weights would take too much memory.
  static Index pass_rows(const MassShape& shape) {
    const Index rows = shape.rows(), row_bytes = pairs(shape) * pair * Index{sizeof(std::uint16_t)};
    const Index lists =
        std::max({Index{1}, tuning::mass_pass_rows / std::max<Index>(shape.list_rows, 1),
                  ceil_div(shape.lists, most_passes)});
    const Index fit = tuning::mass_weight_bytes / std::max<Index>(row_bytes, 1) / tile * tile;
    const Index least = round_up(std::max<Index>(ceil_div(rows, most_passes), 1), tile);
    return std::min({CodedRows::padded(rows), lists * shape.list_rows, std::max(fit, least)});
  }
  static Index passes(const MassShape& shape) {
    return ceil_div(CodedRows::padded(shape.rows()), pass_rows(shape));
  }
  // Keys of a range, by the number of rows: some 15 us of work. Sums are added up range by range,
  // so that this must not depend on the workers.
  static KeyRanges ranges(const MassShape& shape) {
    const Index rows = shape.rows();
    return KeyRanges::by_size(shape.keys, rows < 16 ? 2048 : rows < 48 ? 1024 : 256);
  }
  static Index weight_bytes(const MassShape& shape) {
    return pass_rows(shape) * pairs(shape) * pair * Index{sizeof(std::uint16_t)};
  }

  // The keys of the head, and what multiplies their codes.
  void take_keys(const SketchedKeys& keys, Index b, Index kv_head, const CodeKernels& kernels) {
    const KeySketch& sketch = keys.sketch();
    kernels_ = &kernels;
    keys_ = keys.k().head(b, kv_head);
    blocks_ = CodeBlocks(keys, b, kv_head);
    scales_ = sketch.scales(b, kv_head), errors_ = sketch.errors(b, kv_head);
    lengths_ = sketch.lengths(b, kv_head);
  }
  // Do codes serve? Known after bound().
  bool serves() const { return serves_; }
  // The most by which logits may be off, in units of log2.
  float error() const { return error_; }

  // Makes codes of the rows. It overwrites MassRows::data: they are in units of log2 from here on.
  // Where the head is done in float after all, that does no harm: FloatMass multiplies the rows
  // that MassRows::pack() packed before.
  void encode_rows() {
    const Index rows = shape_.rows();
    for (Index i = 0; i < rows * shape_.dim; ++i) mass_rows_.data[i] *= log2_e;
    serves_ = coded_rows_.encode(mass_rows_.data, rows, RowUnits::own, *kernels_);
  }

  // Units of the keys of a range and the largest lengths.
  void read_keys(Index r, RowReader& reader) {
    const auto [begin, range_end] = ranges_.of(r);
    bool coded = true;
    KeyExtent extent;
    alignas(64) float room[3][pair];
    for (Index kv = begin; kv < range_end; kv += pair) {
      const Index count = std::min(pair, ranges_.keys - kv);
      const float* const scale = blocks_.numbers(scales_, kv, count, room[0]);
      const float* const error = blocks_.numbers(errors_, kv, count, room[1]);
      const float* const length = blocks_.numbers(lengths_, kv, count, room[2]);
      for (Index i = count; i < pair; ++i) room[0][i] = room[2][i] = 0.0f, room[1][i] = infinity;
      const bool partial = pair_units(scale, error, length, units_ + kv, extent);
      partial_[kv / pair] = partial ? 1 : 0;
      if (!partial) continue;
      for (Index i = 0; i < pair; ++i) {
        if (error[i] < infinity) continue;
        if (i < count && all_finite(reader.read(keys_, kv + i), shape_.dim)) coded = false;
        units_[kv + i] = -1.0f;
      }
    }
    of_ranges_[r] = {*std::max_element(extent.longest, extent.longest + most_lanes),
                     *std::max_element(extent.missed, extent.missed + most_lanes), coded};
  }

  // Bounds on logits, and on their errors. Returns whether a row's largest is to be sought.
  bool bound() {
    float longest = 0.0f, missed = 0.0f;
    for (Index r = 0; r < ranges_.count; ++r) {
      const RangeExtent& range = of_ranges_[r];
      longest = std::max(longest, range.longest), missed = std::max(missed, range.missed);
      serves_ = serves_ && range.coded;
    }
    seeks_largest_ = false;
    if (!serves_) return false;
    error_ = 0.0f;
    for (Index m = 0; m < coded_rows_.rows(); ++m) {
      const float length = coded_rows_.lengths()[m], row_missed = coded_rows_.missed()[m];
      const float rounding = static_cast<float>(2 * shape_.dim + 32) * 0x1p-24f * length * longest;
      const float error = row_missed * longest + (length + row_missed) * missed + rounding;
      const float most = length * longest + error;
      bounds_[m] = most;
      shifts_[m] = -std::max(0.0f, most - most_weight);
      error_ = std::max(error_, error);
    }
    serves_ = error_ * static_cast<float>(ln_2) <= most_logit_error;
    // Weights are taken against a bound on the row's logits, by lengths. If a row's largest logit
    // might be far below the bound, it is looked for in a sample: in every 16th pair of blocks of
    // each range, the first one included. If it is far below there as well, it is looked for in all
    // pairs, and weights are taken against it. No logit is below -bounds_[m], so the largest is
    // not.
    for (Index m = 0; m < stride(); ++m) largest_[m] = -bounds_[m];
    seeks_largest_ = serves_ && may_be_too_small();
    return seeks_largest_;
  }
  // Largest logits of a range, of every step-th pair of blocks.
  void seek_largest(Index r, Index step, const MassScratch& s) {
    if (!seeks_largest_) return;
    const auto [begin, end] = ranges_.of(r);
    for (Index pass = 0; pass < coded_rows_.passes(); ++pass) {
      const auto [first, count] = rows_of(pass);
      std::fill_n(s.sums, count * kernel_sizes().lanes, -infinity);
      CodeScope scope(*kernels_, coded_rows_.codes(pass), coded_rows_.packed(pass));
      for (Index kv = begin; kv < end; kv += step * pair) {
        const KeyPair keys = blocks_.at(kv, end, s.gathered);
        scope->raise(keys, units_ + kv, coded_rows_.units() + first, s.sums);
      }
      maxima_of_lanes(s.sums, count, range_rows_ + r * stride() + first);
    }
  }
  // Are the largest logits of the sample large enough?
  void judge_sample() {
    if (!seeks_largest_) return;
    find_largest();
    seeks_largest_ = may_be_too_small();
  }
  void shift_to_largest() {
    if (!seeks_largest_) return;
    find_largest();
    for (Index m = 0; m < stride(); ++m)
      shifts_[m] = std::isfinite(largest_[m]) ? -largest_[m] : 0.0f;
  }

  // Weights of a range for a pass of rows, and their sums.
  void weigh(Index pass, Index r, const MassScratch& s) {
    const auto [first, count] = rows_of(pass);
    const auto [begin, end] = ranges_.of(r);
    if (count == 0 || r >= ranges_.count) return;
    std::fill_n(s.sums, count * kernel_sizes().lanes, 0.0f);
    const WeightRows rows{coded_rows_.units() + first, shifts_ + first, s.sums};
    CodeScope scope(*kernels_, coded_rows_.codes(pass), coded_rows_.packed(pass));
    for (Index kv = begin; kv < end; kv += pair) {
      const KeyPair keys = blocks_.at(kv, end, s.gathered);
      scope->weigh(keys, units_ + kv, partial_[kv / pair] != 0, rows, weights(kv, count));
    }
    sums_of_lanes(s.sums, count, range_rows_ + r * stride());
  }

  // The factors that take each row's weights to its part of the scores.
  void find_factors(Index pass) {
    const auto [first, count] = rows_of(pass);
    for (Index m = 0; m < count; ++m) {
      const Index row = first + m;
      double sum = 0.0;
      for (Index r = 0; r < ranges_.count; ++r)
        sum += static_cast<double>(range_rows_[r * stride() + m]);
      const SoftmaxState<float>& chunk = mass_rows_.chunk[row];
      double of_chunk = 0.0, unit = 1.0;  // of sums
      if (chunk.sum > 0.0f && sum == 0.0) {
        of_chunk = static_cast<double>(chunk.sum);  // no key of the past has a weight
      } else if (chunk.sum > 0.0f) {
        const double reference = static_cast<double>(chunk.max) * static_cast<double>(log2_e) +
                                 static_cast<double>(shifts_[row]);
        // A chunk's weight may be beyond what a double holds.
        const double above = std::max(0.0, reference - most_exponent);
        unit = std::exp2(-above);
        of_chunk = static_cast<double>(chunk.sum) * std::exp2(reference - above);
      }
      sum = sum * unit + of_chunk;
      factors_[m] = static_cast<float>(mass_rows_.share_of(row, of_chunk, sum) * unit *
                                       static_cast<double>(share_scale));
    }
  }
  // Adds the shares of a range to the scores of all lists.
  void add(Index pass, Index r, float* scores) {
    const auto [begin, end] = ranges_.of(r);
    const auto [first, count] = rows_of(pass);
    const Index list_rows = shape_.list_rows;
    for (Index kv = begin; kv < end; kv += pair) {
      const Index n = std::min(pair, shape_.keys - kv);
      for (Index row = first, next = 0; row < first + count; row = next) {
        const Index list = row / list_rows;
        next = std::min((list + 1) * list_rows, first + count);
        alignas(64) float part[pair];
        shares_of_weights(weights(kv, count) + (row - first) * pair / 2, factors_ + row - first,
                          next - row, part);
        float* const to = scores + list * shape_.score_step + kv;
        if (row == list * list_rows)
          std::copy_n(part, n, to);
        else
          for (Index i = 0; i < n; ++i) to[i] += part[i];
      }
    }
    if (pass + 1 != coded_rows_.passes()) return;
    for (Index kv = begin; kv < end; kv += pair)
      for (Index t = kv; partial_[kv / pair] != 0 && t < std::min(kv + pair, end); ++t)
        for (Index list = 0; units_[t] < 0.0f && list < shape_.lists; ++list)
          scores[list * shape_.score_step + t] = -infinity;
  }

 private:
  static constexpr Index pair = CodeBlocks::pair;
  // A pass of part of a list has a multiple of this many rows.
  static constexpr Index tile = 12;
  static constexpr Index most_passes = 64;        // each takes some parallel loops
  static constexpr double most_exponent = 512.0;  // of a chunk's largest weight, as a sum has it

  // The largest length, and the largest length * error, of a range of keys.
  struct RangeExtent {
    float longest, missed;
    bool coded;  // do codes represent all finite keys?
  };

  static Index pairs(const MassShape& shape) { return ceil_div(shape.keys, pair); }
  // The number of rows, made even.
  Index stride() const { return coded_rows_.stride(); }
  // The rows of a pass: none where all have been.
  std::pair<Index, Index> rows_of(Index pass) const {
    return pass < coded_rows_.passes() ? coded_rows_.of(pass) : std::pair<Index, Index>{0, 0};
  }
  // Weights of a pass of `count` rows for the pair of blocks at kv.
  std::uint32_t* weights(Index kv, Index count) const { return weights_ + kv / 2 * count; }

  // Might a row's largest weight be too small?
  bool may_be_too_small() const {
    for (Index m = 0; m < coded_rows_.rows(); ++m)
      if (largest_[m] + shifts_[m] < least_top) return true;
    return false;
  }
  // largest_[m] becomes the largest logit of row m among those that seek_largest() saw.
  void find_largest() {
    for (Index m = 0; m < stride(); ++m) {
      float most = -infinity;
      for (Index r = 0; r < ranges_.count; ++r)
        most = std::max(most, range_rows_[r * stride() + m]);
      largest_[m] = most;
    }
  }

  const MassShape& shape_;
  MassRows& mass_rows_;  // the rows as floats, and the chunk's keys
  const CodeKernels* kernels_ = nullptr;
  KeyRanges ranges_;
  HeadRows keys_;
  CodeBlocks blocks_;                         // the keys' codes
  const float *scales_, *errors_, *lengths_;  // of the sketch
  std::uint32_t* weights_;                    // [pair of blocks][pair of rows][keys of the blocks]
  CodedRows coded_rows_;                      // of an even number, in units of log2
  float* bounds_;                             // [rows] no logit is larger
  float* largest_;  // [rows] the largest logit, once it is sought; before, a lower bound of it
  float* shifts_;   // [rows] minus the reference of the weights
  float* factors_;  // [rows of a pass] from their weights to scores
  float* units_;    // [keys] scale * length; -1: no key, or none with a weight
  std::uint8_t* partial_;  // [pairs of blocks] is a unit of these keys -1?
  float* range_rows_;      // [ranges][rows] the largest logit, then the sum of weights
  RangeExtent* of_ranges_;
  bool serves_ = false, seeks_largest_ = false;
  float error_ = 0.0f;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
