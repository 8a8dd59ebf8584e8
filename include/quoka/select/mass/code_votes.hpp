// The shares of one KV head by its keys' sketch: from products of 8-bit codes (cache/key_sketch.hpp).
//
//   y[m][t] = unit[m] scale[t] length[t] (code_q[m] . code_k[t])      the sketched logit
//
// Of the channels at least half, those in which the rows' logits differ most from key to key (coded_channels.hpp); so few
// rows as fewest_choosing_rows take all. No logit is computed in float but those of the chunk: shares are others than in float, of nearly the same mass. A row
// q = unit code_q + d_q with |d_q| = e and a key k = length (scale code_k + d_k) with |d_k| <= error differ from what
// stands for them by
//
//   |q.k - y| <= eps = e length + (|q| + e) length error + (2 head_dim + 32) 2^-24 |q| length
//
// the last term for rounding on either side. eps is that of the worst row, with the largest length and the largest
// length * error of all keys. A head of which eps exceeds most_logit_error, or one with finite keys or rows that codes
// cannot stand for, is done in float. That is the worst case, all errors in one direction: on recorded and generated
// data logits are off by 1/17 to 1/30 of eps (root mean square). q and k are the channels that are multiplied.
//
// 2 * rows * keys * dim 8-bit operations and rows * keys exponentials; reads dim + 12 bytes per key. Weights of 2 bytes
// per row and key are kept until the rows' sums are known; a pass is as many rows as have room. Logits are in units of
// log2. Stages, in turns for the head and for ranges of keys: encode_rows beside read_keys (ranges); bound;
// where it says so, seek_largest in a sample, judge_sample, seek_largest (ranges), shift_to_largest; then for each pass
// compute_weights (ranges), find_factors, add (ranges).
#pragma once

#include <quoka/select/mass/coded_channels.hpp>
#include <quoka/select/mass/head_votes.hpp>
#include <quoka/select/sketch/code_blocks.hpp>
#include <quoka/select/sketch/coded_rows.hpp>
#include <quoka/select/sketch/mass_weights.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/select/sketch/sketched_mass_head.hpp>
#include <quoka/select/steps/top_k.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Of a range of a head's keys.
struct CodedRange {
  float longest, missed;
  bool coded;  // do codes stand for all finite keys?
};

// What the tasks of a KV head share, beside HeadVotes.
struct CodeMemory {
  CodeMemory(Arena& arena, const VoteShape& shape)
      : CodeMemory(arena, shape.rows(), MassShape::pairs(shape.keys),
                   MassShape::ranges(shape.keys, shape.rows()).count, shape.dim) {}
  CodeMemory(Arena& arena, Index rows, Index pairs, Index ranges, Index dim)
      : channels(arena, dim),
        dropped(arena.take<float>(rows)),
        bounds(arena.take<float>(rows)),
        shifts(arena.take<float>(rows)),
        factors(arena.take<float>(rows)),
        units(arena.take<float>(pairs * MassShape::pair)),
        partial(arena.take<std::uint8_t>(pairs)),
        range_rows(arena.take<float>(ranges * rows)),
        of_ranges(arena.take<CodedRange>(ranges)) {}

  CodedChannels channels;            // that are multiplied
  float* dropped;                    // [rows] what the others add to the logits of past keys
  float *bounds, *shifts, *factors;  // [rows] of logits; minus the reference of the weights
  float* units;                      // [keys] scale * length; -1: no key, or none with a weight
  std::uint8_t* partial;             // [pairs of blocks] is a unit of these keys -1?
  float* range_rows;                 // [ranges][rows] the largest logit, then the sum of weights
  CodedRange* of_ranges;
  CodedRows* coded = nullptr;  // the rows in units of log2
  bool by_codes = false, seeks_largest = false;
  float error = 0.0f;  // of the logits, in units of log2
};

// Of one worker.
struct CodeScratch {
  CodeScratch(Arena& arena, const VoteShape& shape)
      : sums(arena.take<float>(shape.rows() * simd::lanes)),
        products(arena.take<float>(MassShape::most_height * MassShape::pair)),
        gathered(arena.take<std::uint8_t>(2 * simd::code_block_bytes(shape.dim))),
        kept(arena.take<std::uint8_t>(2 * simd::code_block_bytes(shape.dim))),
        channel_sums(arena.take<float>(CodedChannels::sums_size(shape.dim))) {}

  float* sums;             // [rows][lanes]
  float* products;         // [rows of a tile][two blocks of keys]
  std::uint8_t* gathered;  // two blocks of codes
  std::uint8_t* kept;      // their channels that are multiplied
  float* channel_sums;     // of a sample of keys
};

// Tiles: what multiplies codes where tiles serve (matrix/code_units.hpp).
template <class Tiles>
class CodeVotes : MassShape {
 public:
  static Index passes(const VoteShape& shape) {
    return MassShape::passes(shape.rows(), shape.keys);
  }
  static Index weight_bytes(const VoteShape& shape) {
    return pass_rows(shape.rows(), shape.keys) * pairs(shape.keys) * pair *
           Index{sizeof(std::uint16_t)};
  }
  static KeyRanges ranges(const VoteShape& shape) {
    return MassShape::ranges(shape.keys, shape.rows());
  }
  static void reserve(const VoteShape& shape, CodedRows& coded) {
    coded.reserve<Tiles>(shape.rows(), shape.dim, pass_rows(shape.rows(), shape.keys));
  }

  CodeVotes(const VoteShape& shape, const SketchedKeys& keys, Index b, Index kv_head,
            HeadVotes& votes, CodeMemory& memory, const CodeScratch& scratch)
      : shape_(shape),
        keys_(keys),
        blocks_(keys.sketch(), keys.mapping(), shape.keys, b, kv_head, shape.dim, scratch.gathered),
        ranges_(ranges(shape)),
        b_(b),
        kv_head_(kv_head),
        v_(votes),
        m_(memory),
        s_(scratch) {}

  // Are the head's shares made by codes?
  bool by_codes() const { return m_.by_codes; }

  // Codes of the rows, which are in units of log2 from here on, and of the chosen channels.
  void encode_rows() const {
    for (Index i = 0; i < rows() * shape_.dim; ++i) v_.rows[i] *= simd::log2_e;
    CodedChannels& channels = m_.channels;
    channels.take_all();
    if (!shape_.all_channels && rows() >= tuning::fewest_choosing_rows && shape_.keys > 0) {
      const KeySketch& sketch = keys_.sketch();
      channels.sample(blocks_, sketch.scales(b_, kv_head_), sketch.lengths(b_, kv_head_),
                      shape_.keys, s_.channel_sums);
      channels.choose(v_.rows, rows(), s_.channel_sums);
    }
    channels.compact(v_.rows, rows(), m_.dropped);
    m_.by_codes = m_.coded->template encode<Tiles>(v_.rows, rows(), channels.dim(),
                                                   pass_rows(rows(), shape_.keys), RowUnits::own);
  }

  // Units of the keys of a range and the largest lengths.
  void read_keys(Index r, FloatRow& reader) const {
    const auto [begin, range_end] = ranges_.of(r);
    bool coded = true;
    const KeySketch& sketch = keys_.sketch();
    const float *const scales = sketch.scales(b_, kv_head_),
                       *const errors = sketch.errors(b_, kv_head_),
                       *const lengths = sketch.lengths(b_, kv_head_);
    simd::Packet longest = simd::zero(), missed = simd::zero();
    alignas(64) float room[3][pair];
    for (Index kv = begin; kv < range_end; kv += pair) {
      const Index count = std::min(pair, shape_.keys - kv);
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

  // What logits may be, and how far off they are. Returns whether a row's largest is to be sought.
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
    for (Index m = 0; m < rows(); ++m) {
      const float length = m_.coded->lengths()[m], row_missed = m_.coded->missed()[m];
      const float rounding = static_cast<float>(2 * shape_.dim + 32) * 0x1p-24f * length * longest;
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
    for (Index m = 0; m < rows(); ++m) m_.factors[m] = -m_.bounds[m];
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
    for (Index m = 0; m < rows(); ++m)
      m_.shifts[m] = std::isfinite(m_.factors[m]) ? -m_.factors[m] : 0.0f;
  }

  // Weights of a range for a pass of rows, and their sums.
  void compute_weights(Index pass, Index r) const {
    if (!by_codes()) return;
    const auto [first, count] = m_.coded->of(pass);
    std::fill_n(s_.sums, count * simd::lanes, 0.0f);
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
  // What takes each row's weights to its part of the shares.
  void find_factors(Index pass) const {
    if (!by_codes()) return;
    const auto [first, count] = m_.coded->of(pass);
    for (Index m = 0; m < count; ++m) {
      const Index row = first + m;
      double sum = 0.0;
      for (Index r = 0; r < ranges_.count; ++r)
        sum += static_cast<double>(m_.range_rows[r * rows() + m]);
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
      v_.chunk_share[row / shape_.voters.rows_of_list()] += static_cast<float>(part * of_chunk);
    }
  }
  // To the shares of the KV head's lists.
  void add(Index pass, Index r, const ShareRows& shares, Index first_list) const {
    if (!by_codes()) return;
    const auto [begin, end] = ranges_.of(r);
    const auto [first, count] = m_.coded->of(pass);
    const Index of_list = shape_.voters.rows_of_list();
    for (Index kv = begin; kv < end; kv += pair) {
      const Index n = std::min(pair, shape_.keys - kv);
      for (Index row = first, next = 0; row < first + count; row = next) {
        const Index list = row / of_list;
        next = std::min((list + 1) * of_list, first + count);
        alignas(64) float part[pair];
        shares_of_weights(weights(kv, count) + (row - first) * pair / 2, m_.factors + row - first,
                          next - row, Aggregation::mean, part);
        float* const to = shares[first_list + list] + kv;
        if (row == list * of_list)
          std::copy_n(part, n, to);
        else
          for (Index i = 0; i < n; ++i) to[i] += part[i];
      }
    }
    if (pass + 1 < m_.coded->passes()) return;
    for (Index kv = begin; kv < end; kv += pair)
      for (Index t = kv; m_.partial[kv / pair] != 0 && t < std::min(kv + pair, end); ++t)
        for (Index list = 0; m_.units[t] < 0.0f && list < shape_.voters.lists; ++list)
          shares[first_list + list][t] = -simd::infinity;
  }

 private:
  Index rows() const { return shape_.rows(); }
  // Might a row's largest weight be too small?
  bool may_be_too_small() const {
    for (Index m = 0; m < rows(); ++m)
      if (m_.factors[m] + m_.shifts[m] < least_top) return true;
    return false;
  }
  template <class Reduce>
  void leave_sums(Index r, Index first, Index count, Reduce&& reduce) const {
    for (Index m = 0; m < count; ++m)
      m_.range_rows[r * rows() + first + m] = reduce(simd::load(s_.sums + m * simd::lanes));
  }
  // Of all ranges, to factors.
  void find_largest() const {
    for (Index m = 0; m < rows(); ++m) {
      float most = -simd::infinity;
      for (Index r = 0; r < ranges_.count; ++r)
        most = std::max(most, m_.range_rows[r * rows() + m]);
      m_.factors[m] = most;
    }
  }
  bool finite(Index key, FloatRow& reader) const {
    return all_finite(reader.read(keys_.k().head(b_, kv_head_), key), shape_.dim);
  }

  void largest_logits(Index r, Index step) const {
    for (Index pass = 0; pass < m_.coded->passes(); ++pass) {
      const auto [first, count] = m_.coded->of(pass);
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

  std::uint32_t* weights(Index kv, Index count) const {
    return reinterpret_cast<std::uint32_t*>(v_.weights) + kv / 2 * count;
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

  const VoteShape& shape_;
  const SketchedKeys& keys_;
  CodeBlocks blocks_;
  KeyRanges ranges_;
  Index b_, kv_head_;
  HeadVotes& v_;
  CodeMemory& m_;
  const CodeScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
