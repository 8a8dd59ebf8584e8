// Softmax mass of one KV head by its keys' sketch: the scores of float_mass.hpp, from products of 8-bit codes
// (key_sketch.hpp).
//
//   y[m][t]       = unit[m] scale[t] length[t] (code_q[m] . code_k[t])      the sketched logit
//   weight[m][t]  = 2^(y[m][t] + shift[m])                                  16 bits of it
//   score[set][t] = mean over the set's rows m of weight(m, t) / (past(m) + chunk(m))
//
// Logits are in units of log2; those of the chunk's keys are in float. A row q = unit code_q + d_q with |d_q| = e and a
// key k = length (scale code_k + d_k) with |d_k| <= error differ from their codes by
//
//   |q.k - y| <= eps = e length + (|q| + e) length error + (2 head_dim + 32) 2^-24 |q| length
//
// the last term for rounding on either side. eps is that of the worst row, with the largest length and the largest
// length * error of all keys. So weights are off by factors within exp(+-eps), sums of a row's weights as well, and
// both by weight_error for what they are rounded to:
//
//   float's score exp(-a) <= score <= float's score exp(a),   a = 2 eps + weight_error
//
// (for scores above 1e-15; a smaller one stays below it), and the best keys by codes keep at least exp(-2a) of the mass
// that as many best keys in float keep. A head whose eps exceeds most_logit_error, or that has finite keys or rows that
// codes cannot represent, is done in float. That is the worst case, all errors in one direction: on recorded and
// generated data logits are off by 1/17 to 1/30 of eps (root mean square), and the best keep .002 points less on
// average, .03 in the worst head.
//
// If not all channels are asked for, and there are at least fewest_choosing_rows rows, only the channels in which the
// rows' logits differ most from key to key are multiplied (coded_channels.hpp).
//
// 2 * rows * keys * dim 8-bit operations and rows * keys exponentials; reads dim + 12 bytes per key. Weights of 2 bytes
// per row and key are kept until the rows' sums are known; a pass is as many rows as have room.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/select/coded_channels.hpp>
#include <quoka/select/codes.hpp>
#include <quoka/select/float_mass.hpp>
#include <quoka/simd/code_dots.hpp>
#include <quoka/simd/isa/bfloat16.hpp>
#include <quoka/simd/simd.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
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

// ---- of rows and a pair of blocks of keys: products of codes to weights, weights to scores ------
//
//   weight   2^(product * unit of the key * unit of the row + shift of the row)   pairs of bfloat16, [row / 2][key][2]
//   share    sum over the rows of weight * factor of the row
//
// A weight lies in 2^[least_weight, most_weight], a smaller one is raised to that; and a row's largest in 2^[least_top,
// most_weight], so that a raised weight is below 2^-50 of it. Shares are added up as multiples of 2^-64. Nothing
// overflows, and nothing is denormal, which would be slow. A key whose unit is below 0 has no weight.
inline constexpr float most_weight = 60.0f, least_top = -45.0f, least_weight = -95.0f;
inline constexpr float share_scale = 0x1p64f, least_share = 0x1p-62f;

// Some rows of a look, an even number, and the sums of their weights [height, lanes].
struct WeightRows {
  Index height;
  const float *units, *shifts;
  float* sums;
};

// products [height, code_pair], key_units: the keys' units. Partial: some of them are below 0.
template <bool Partial, class Product>
void row_weights(const Product* products, const float* key_units, const WeightRows& rows,
                 std::uint32_t* to) {
  constexpr Index pair = simd::code_pair;
  for (Index m = 0; m < rows.height; m += 2, products += 2 * pair, to += pair) {
    simd::Packet unit[2], shift[2], total[2];
    simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
      unit[i] = simd::broadcast(rows.units[m + i]);
      shift[i] = simd::broadcast(rows.shifts[m + i]);
      total[i] = simd::load(rows.sums + (m + i) * simd::lanes);
    });
    simd::unroll<pair / simd::lanes>([&](auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet key_unit = simd::load(key_units + j * simd::lanes);
      simd::Packet weight[2];
      simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
        const simd::Packet product = simd::load_dots(products + i * pair + j * simd::lanes);
        const simd::Packet logit = simd::fma(simd::mul(product, key_unit), unit[i], shift[i]);
        weight[i] = simd::exp2_rough(simd::max(logit, simd::broadcast(least_weight)));
        if constexpr (Partial)
          weight[i] = simd::select_less(key_unit, simd::zero(), simd::zero(), weight[i]);
        total[i] = simd::add(total[i], weight[i]);
      });
      simd::store_weight_pairs(to + j * simd::lanes, weight[0], weight[1]);
    });
    simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
      simd::store(rows.sums + (m + i) * simd::lanes, total[i]);
    });
  }
}

// shares [code_pair] from the weights of `count` rows, by their factors, in which share_scale is one.
inline void shares_of_weights(const std::uint32_t* weights, const float* factors, Index count,
                              float* shares) {
  constexpr Index pair = simd::code_pair, packets = pair / simd::lanes;
  constexpr int together = packets < 2 ? 1 : 2;
  for (Index j = 0; j < packets; j += together) {
    simd::Packet sum[together][2];
    simd::unroll<together, 2>([&](auto i, auto row)
                                  QUOKA_INLINE_LAMBDA { sum[i][row] = simd::zero(); });
    for (Index m = 0; m < count; m += 2) {
      const simd::Packet factor[2] = {simd::broadcast(factors[m]), simd::broadcast(factors[m + 1])};
      simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
        const std::uint32_t* const at = weights + m / 2 * pair + (j + i) * simd::lanes;
        const simd::Packet weight[2] = {simd::first_weights(at), simd::second_weights(at)};
        simd::unroll<2>([&](auto row) QUOKA_INLINE_LAMBDA {
          sum[i][row] = simd::fma(weight[row], factor[row], sum[i][row]);
        });
      });
    }
    simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
      const simd::Packet large =
          simd::max(simd::add(sum[i][0], sum[i][1]), simd::broadcast(least_share));
      simd::store(shares + (j + i) * simd::lanes,
                  simd::mul(large, simd::broadcast(1.0f / share_scale)));
    });
  }
}

// ---- a head ---------------------------------------------------------------------------------------

// How rows and keys are grouped.
struct CodeGroups {
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
  // Keys of a range, by the number of rows: some 15 us of work. Sums are added up range by range, so that this
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

// Memory that the tasks of a KV head share, beside HeadMass, which has the rows and the memory for weights.
struct CodeMemory {
  template <class Tiles>
  static CodeMemory with(Arena& arena, const MassShape& shape, std::byte* weights) {
    const Index rows = shape.rows(), pass_rows = CodeGroups::pass_rows(rows, shape.keys);
    CodeMemory memory(arena, rows, CodeGroups::pairs(shape.keys),
                      CodeGroups::ranges(shape.keys, rows).count, shape.dim);
    memory.coded = CodedRows::with<Tiles>(arena, rows, shape.dim, pass_rows);
    memory.weights = reinterpret_cast<std::uint32_t*>(weights);
    return memory;
  }

  CodedRows coded;                   // the rows, of an even number, in units of log2
  CodedChannels channels;            // that are multiplied
  float *bounds, *shifts, *factors;  // [rows] of logits; minus the reference of the weights; the
                                     // largest logit, then what takes weights to scores
  float* dropped;         // [rows] what channels that are not multiplied add to the logits
  float* units;           // [keys] scale * length; -1: no key, or none with a weight
  std::uint8_t* partial;  // [pairs of blocks] is a unit of these keys -1?
  float* range_rows;      // [ranges][rows] the largest logit, then the sum of weights
  CodedRange* of_ranges;
  std::uint32_t* weights = nullptr;  // [pair of blocks][pair of rows][keys of the blocks]
  bool by_codes = false, seeks_largest = false;
  float error = 0.0f;  // of the logits, in units of log2

 private:
  CodeMemory(Arena& arena, Index rows, Index pairs, Index ranges, Index dim)
      : channels(arena, dim),
        bounds(arena.take<float>(rows)),
        shifts(arena.take<float>(rows)),
        factors(arena.take<float>(rows)),
        dropped(arena.take<float>(rows)),
        units(arena.take<float>(pairs * CodeGroups::pair)),
        partial(arena.take<std::uint8_t>(pairs)),
        range_rows(arena.take<float>(ranges * rows)),
        of_ranges(arena.take<CodedRange>(ranges)) {}
};

// Scratch of one worker.
struct CodeScratch {
  CodeScratch(Arena& arena, Index rows, Index dim)
      : sums(arena.take<float>(rows * simd::lanes)),
        products(arena.take<float>(CodeGroups::most_height * CodeGroups::pair)),
        gathered(arena.take<std::uint8_t>(2 * simd::code_block_bytes(dim))),
        kept(arena.take<std::uint8_t>(2 * simd::code_block_bytes(dim))),
        channel_sums(arena.take<float>(CodedChannels::sums_size(dim))) {}

  float* sums;             // [rows][lanes]
  float* products;         // [rows of a tile][two blocks of keys]
  std::uint8_t* gathered;  // two blocks of codes
  std::uint8_t* kept;      // their channels that are multiplied
  float* channel_sums;     // of a sample of keys
};

// Stages, in turns for the head and for ranges of keys: encode_rows beside read_keys (ranges); bound; where it says so,
// seek_largest in a sample, judge_sample, seek_largest (ranges), shift_to_largest; then for each pass of rows
// compute_weights (ranges), find_factors, add (ranges). Tiles: what multiplies codes where tiles serve
// (kernels/code_units.hpp).
template <class Tiles>
class CodeMass : protected CodeGroups {
 public:
  CodeMass(const MassShape& shape, const SketchedKeys& keys, Index b, Index kv_head,
           const HeadMass& rows, CodeMemory& memory, const CodeScratch& scratch)
      : shape_(shape),
        keys_(keys),
        blocks_(keys.sketch(), keys.mapping(), shape.keys, b, kv_head, keys.k().dim(),
                scratch.gathered),
        ranges_(ranges(shape)),
        b_(b),
        kv_head_(kv_head),
        v_(rows),
        m_(memory),
        s_(scratch) {}

  static Index passes(const MassShape& shape) {
    return CodeGroups::passes(shape.rows(), shape.keys);
  }
  static KeyRanges ranges(const MassShape& shape) {
    return CodeGroups::ranges(shape.keys, shape.rows());
  }
  static Index weight_bytes(const MassShape& shape) {
    return pass_rows(shape.rows(), shape.keys) * pairs(shape.keys) * pair *
           Index{sizeof(std::uint16_t)};
  }

  // Codes of the rows, which are in units of log2 from here on, and of the chosen channels.
  void encode_rows() const {
    const Index rows = shape_.rows();
    for (Index i = 0; i < rows * shape_.dim; ++i) v_.rows[i] *= simd::log2_e;
    CodedChannels& channels = m_.channels;
    channels.take_all();
    if (!shape_.all_channels && rows >= tuning::fewest_choosing_rows && shape_.keys > 0) {
      const KeySketch& sketch = keys_.sketch();
      channels.sample(blocks_, sketch.scales(b_, kv_head_), sketch.lengths(b_, kv_head_),
                      shape_.keys, s_.channel_sums);
      channels.choose(v_.rows, rows, s_.channel_sums);
    }
    channels.compact(v_.rows, rows, m_.dropped);
    m_.by_codes = m_.coded.template encode<Tiles>(v_.rows, rows, channels.dim(), RowUnits::own);
  }

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
    for (Index m = 0; m < m_.coded.rows(); ++m) {
      const float length = m_.coded.lengths()[m], row_missed = m_.coded.missed()[m];
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
                    const WeightRows rows{height, m_.coded.units() + from + m, m_.shifts + from + m,
                                          s_.sums + m * simd::lanes};
                    std::uint32_t* const to = weights(kv, pass_count) + m * pair / 2;
                    if (m_.partial[kv / pair] != 0)
                      row_weights<true>(products, m_.units + kv, rows, to);
                    else
                      row_weights<false>(products, m_.units + kv, rows, to);
                  });
    leave_sums(r, 0, count, [](simd::Packet sum) { return simd::reduce_add(sum); });
  }

  // The factors that take each row's weights to its part of the scores.
  void find_factors(Index pass) const {
    const auto [first, count] = rows_of(pass);
    for (Index m = 0; m < count; ++m) {
      const Index row = first + m;
      double sum = 0.0;
      for (Index r = 0; r < ranges_.count; ++r)
        sum += static_cast<double>(m_.range_rows[r * stride() + m]);
      const SoftmaxState<float>& chunk = v_.chunk[row];
      const double of_chunk =
          chunk.sum > 0.0f
              ? static_cast<double>(chunk.sum) *
                    std::exp2(static_cast<double>(chunk.max) * static_cast<double>(simd::log2_e) +
                              static_cast<double>(m_.shifts[row] - m_.dropped[row]))
              : 0.0;
      sum += of_chunk;
      m_.factors[m] = 0.0f;
      if (!(sum > 0.0 && std::isfinite(sum))) continue;
      const double part = static_cast<double>(v_.part[row]) / sum;
      m_.factors[m] = static_cast<float>(part * static_cast<double>(share_scale));
      v_.chunk_score[row / shape_.set_rows] += static_cast<float>(part * of_chunk);
    }
  }
  // A range to the scores of all sets.
  void add(Index pass, Index r, const SetScores& scores) const {
    if (!by_codes()) return;
    const auto [begin, end] = ranges_.of(r);
    const auto [first, count] = rows_of(pass);
    const Index of_set = shape_.set_rows;
    for (Index kv = begin; kv < end; kv += pair) {
      const Index n = std::min(pair, shape_.keys - kv);
      for (Index row = first, next = 0; row < first + count; row = next) {
        const Index set = row / of_set;
        next = std::min((set + 1) * of_set, first + count);
        alignas(64) float part[pair];
        shares_of_weights(weights(kv, count) + (row - first) * pair / 2, m_.factors + row - first,
                          next - row, part);
        float* const to = scores[set] + kv;
        if (row == set * of_set)
          std::copy_n(part, n, to);
        else
          for (Index i = 0; i < n; ++i) to[i] += part[i];
      }
    }
    if (pass + 1 < m_.coded.passes()) return;
    for (Index kv = begin; kv < end; kv += pair)
      for (Index t = kv; m_.partial[kv / pair] != 0 && t < std::min(kv + pair, end); ++t)
        for (Index set = 0; m_.units[t] < 0.0f && set < shape_.sets; ++set)
          scores[set][t] = -simd::infinity;
  }

 private:
  // Rows in pairs.
  Index stride() const { return m_.coded.stride(); }
  // The rows of a pass: none where all have been, or codes do not serve.
  std::pair<Index, Index> rows_of(Index pass) const {
    return m_.by_codes && pass < m_.coded.passes() ? m_.coded.of(pass)
                                                   : std::pair<Index, Index>{0, 0};
  }
  // Weights of a pass of `count` rows for the pair of blocks at kv.
  std::uint32_t* weights(Index kv, Index count) const { return m_.weights + kv / 2 * count; }

  // Might a row's largest weight be too small?
  bool may_be_too_small() const {
    for (Index m = 0; m < m_.coded.rows(); ++m)
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
    for (Index pass = 0; pass < m_.coded.passes(); ++pass) {
      const auto [first, count] = rows_of(pass);
      std::fill_n(s_.sums, count * simd::lanes, -simd::infinity);
      for_each_tile(
          pass, r, step, [&, from = first](Index kv, Index m, Index height, const auto* products) {
            for (Index i = 0; i < height; ++i) {
              float* const largest = s_.sums + (m + i) * simd::lanes;
              const simd::Packet unit = simd::broadcast(m_.coded.units()[from + m + i]);
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
        m_.coded.codes(pass), m_.coded.packed(pass), [&, from = begin, to = end](auto& unit) {
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

  const MassShape& shape_;
  const SketchedKeys& keys_;
  CodeBlocks blocks_;
  KeyRanges ranges_;
  Index b_, kv_head_;
  const HeadMass& v_;
  CodeMemory& m_;
  CodeScratch s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
