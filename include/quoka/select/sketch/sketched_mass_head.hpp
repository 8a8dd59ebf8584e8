// One KV head's softmax mass by the keys' sketch (sketched_mass.hpp): codes of the rows, their bound,
// weights of groups of rows, and shares of the mass.
#pragma once

#include <quoka/cache/key_sketch_impl.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/matrix/code_units.hpp>
#include <quoka/simd/tuning.hpp>
#include <quoka/select/sketch/code_blocks.hpp>
#include <quoka/select/sketch/mass_weights.hpp>
#include <quoka/select/sketch/sketched_mass_state.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// How rows and keys are grouped.
struct MassShape {
  static constexpr Index pair = simd::code_pair;
  // Passes of rows are a multiple of this, unless they are all.
  static constexpr Index tile = 12;
  static constexpr Index most_passes = 64;  // each is some stages of a chain
  // Rows whose products are there at once.
  static constexpr Index most_height = std::max<Index>(VectorCodes::most_height, simd::tile_height);
  // Room for the rows in pairs, and for a pair of blocks of keys.
  static Index padded(Index rows) { return rows + rows % 2; }
  static Index pairs(Index keys) { return ceil_div(keys, pair); }
  // Rows whose weights fit at once.
  static Index rows_at_once(Index rows, Index keys) {
    const Index of_row = pairs(keys) * pair * Index{sizeof(std::uint16_t)};
    const Index fit = tuning::mass_weight_bytes / std::max<Index>(of_row, 1) / tile * tile;
    const Index least = round_up(std::max<Index>(ceil_div(rows, most_passes), 1), tile);
    return std::min(padded(rows), std::max(fit, least));
  }
  static Index passes(Index rows, Index keys) {
    return keys == 0 ? 0 : ceil_div(padded(rows), rows_at_once(rows, keys));
  }
  // Keys of a range, for so many rows: some 15 us of work. Sums are added up range by range, so that this
  // must not depend on the workers.
  static KeyRanges ranges(Index keys, Index rows) {
    return KeyRanges::of_size(keys, rows < 16 ? 2048 : rows < 48 ? 1024 : 256);
  }
};

// One KV head: rows and sketched keys to mass, in ranges of keys. Logits are in units of log2. Stages:
// encode_rows beside read_keys of each range; bound; sample of the ranges, place, sample of all of them,
// place; then for each pass of rows weigh of the ranges, total, add of the ranges. Tiles: what multiplies
// codes where tiles serve (matrix/code_units.hpp).
template <class Tiles>
class SketchedMass : MassShape {
 public:
  // look.rows holds `rows` rows, times the logit scale.
  SketchedMass(const KeySketch& sketch, const KeySketch::Places* places, const HeadRows& k,
               const KeyRanges& ranges, Index b, Index head, Index rows, MassLook& look,
               SketchedMassScratch& s)
      : sketch_(sketch),
        blocks_(sketch, places, ranges.keys, b, head, k.shape.dim, s.gathered.data()),
        in_order_(places == nullptr),
        k_(k),
        b_(b),
        head_(head),
        ranges_(ranges),
        keys_(ranges.keys),
        dim_(k.shape.dim),
        rows_(rows),
        stride_(padded(rows)),
        l_(look),
        s_(s) {}

  // Codes of all rows.
  void encode_rows() {
    std::fill_n(l_.codes.data(), simd::code_steps(dim_) * stride_, 0);
    l_.by = MassLook::By::sketch;
    for (Index m = 0; m < stride_; ++m) {
      l_.offsets.data()[m] = 0;
      l_.row_units.data()[m] = l_.bounds.data()[m] = l_.shifts.data()[m] = 0.0f;
      if (m >= rows_) continue;
      const float* const row = l_.rows.data() + m * dim_;
      const float length = std::sqrt(sum_of_squares(row, dim_)) * (1.0f + 1e-5f);
      const bool zero = std::all_of(row, row + dim_, [](float x) { return x == 0.0f; });
      if (!zero && !(length > least_coded_length && length < most_coded_length)) {
        l_.by = MassLook::By::floats;
        return;
      }
      const float unit = std::max(code_scale(row, dim_), simd::run_scale(row, dim_));
      std::int32_t sum = 0;
      const auto put = [&](Index channel, Index n, const std::int8_t* codes) {
        simd::store_query_codes(codes, n, stride_, m, channel, l_.codes.data());
        sum += simd::sum_of_codes<code_slab>(codes);
      };
      // From here on in units of log2.
      l_.lengths.data()[m] = length * simd::log2_e;
      l_.missed.data()[m] = encode(row, dim_, unit, put) * simd::log2_e;
      l_.offsets.data()[m] = simd::code_offset(sum);
      l_.row_units.data()[m] = unit * simd::log2_e;
    }
    for (Index pass = 0; pass < passes(rows_, keys_); ++pass)
      pack_codes<Tiles>(codes_of(pass), packed_of(pass));
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
    alignas(64) float gathered[3][pair];
    for (Index kv = begin; kv < range_end; kv += pair) {
      const Index count = std::min(pair, keys_ - kv);
      const float *scale = scales + kv, *error = errors + kv, *length = lengths + kv;
      if (!in_order_ || count < pair) {
        for (Index first = 0; first < count; first += simd::code_block) {
          const Index n = std::min<Index>(simd::code_block, count - first);
          Index rows[simd::code_block];
          blocks_.rows(kv + first, n, rows);
          for (Index i = 0; i < n; ++i) {
            gathered[0][first + i] = scales[rows[i]];
            gathered[1][first + i] = errors[rows[i]];
            gathered[2][first + i] = lengths[rows[i]];
          }
        }
        scale = gathered[0], error = gathered[1], length = gathered[2];
        for (Index i = count; i < pair; ++i)
          gathered[0][i] = gathered[2][i] = 0.0f, gathered[1][i] = simd::infinity;
      }
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

  // What logits may be, and how far off they are.
  void bound() {
    float longest = 0.0f, missed = 0.0f;
    for (Index r = 0; r < ranges_.count; ++r) {
      const MassLook::Range& of = l_.ranges.data()[r];
      longest = std::max(longest, of.longest), missed = std::max(missed, of.missed);
      if (!of.coded) l_.by = MassLook::By::floats;
    }
    if (!by_sketch()) return;
    l_.error = 0.0f;
    for (Index m = 0; m < rows_; ++m) {
      const float length = l_.lengths.data()[m], of_row = l_.missed.data()[m];
      const float rounding = static_cast<float>(2 * dim_ + 32) * 0x1p-24f * length * longest;
      const float error = of_row * longest + (length + of_row) * missed + rounding;
      const float most = length * longest + error;
      l_.bounds.data()[m] = most;
      l_.shifts.data()[m] = -std::max(0.0f, most - most_weight);
      l_.error = std::max(l_.error, error);
    }
    if (!(l_.error * static_cast<float>(ln_2) <= most_logit_error)) l_.by = MassLook::By::floats;
    // Weights are taken against what lengths allow logits to be. Where the largest might be too far
    // below, logits of every 16th pair of blocks are looked at; where these are, too, of all: then
    // weights are taken against the row's largest.
    for (Index m = 0; m < stride_; ++m) l_.factors.data()[m] = -l_.bounds.data()[m];
    l_.far = far();
  }
  // Largest logits of ranges [first, end), of every step-th pair of blocks.
  void sample(Index first, Index end, Index step) {
    if (!by_sketch() || !l_.far) return;
    for (Index r = first; r < end; ++r) largest_logits(r, step);
  }
  void place_sampled() {
    if (!by_sketch() || !l_.far) return;
    find_largest();
    l_.far = far();
  }
  void place_largest() {
    if (!by_sketch() || !l_.far) return;
    find_largest();
    for (Index m = 0; m < stride_; ++m) {
      const float most = l_.factors.data()[m];
      l_.shifts.data()[m] = std::isfinite(most) ? -most : 0.0f;
    }
  }

  // Weights of a range for a pass of rows, and their sums.
  void weigh(Index pass, Index r) {
    const auto [first, count] = rows_of(pass);
    if (!by_sketch() || count <= 0) return;
    std::fill_n(s_.sums.data(), count * simd::lanes, 0.0f);
    with_unit(pass, [&, from = first, rows = count](auto& unit) { weigh(unit, from, rows, r); });
    leave_sums(r, 0, count, [](simd::Packet sum) { return simd::reduce_add(sum); });
  }
  // What takes each row's weights to its share of the mass.
  void total(Index pass, float share) {
    const auto [first, count] = rows_of(pass);
    if (!by_sketch() || count <= 0) return;
    for (Index m = 0; m < count; ++m) {
      float sum = 0.0f;
      for (Index r = 0; r < ranges_.count; ++r) sum += l_.range_rows.data()[r * stride_ + m];
      if (l_.rough)
        l_.rough_sums.data()[m] =
            simd::rough_logit_of_sum(first + m < rows_ ? sum : simd::infinity);
      l_.factors.data()[m] = first + m < rows_ && sum > 0.0f ? share * share_scale / sum : 0.0f;
    }
  }
  // mass [keys] of a range. Keys that are not finite have no mass to speak of. Of a rough look it is in the
  // order of the largest shares alone: 128 times their logarithms to base 2, off by rough_logit_error.
  void add(float* mass, Index pass, Index r, Aggregation over) {
    if (l_.by == MassLook::By::nothing && pass == 0) {
      const auto [begin, end] = ranges_.of(r);
      std::fill(mass + begin, mass + end, 0.0f);
    }
    const auto [first, count] = rows_of(pass);
    if (!by_sketch() || count <= 0) return;
    add(mass, first, count, over, r);
    leave_out(mass, r);
  }

 private:
  bool by_sketch() const { return l_.by == MassLook::By::sketch; }
  std::pair<Index, Index> rows_of(Index pass) const {
    const Index at_once = rows_at_once(rows_, keys_), first = pass * at_once;
    return {first, std::min(at_once, stride_ - first)};
  }
  QueryCodes codes_of(Index pass) const {
    const auto [first, count] = rows_of(pass);
    return {l_.codes.data() + first, l_.offsets.data() + first, count, stride_,
            simd::code_steps(dim_)};
  }
  std::byte* packed_of(Index pass) const {
    return l_.packed.data() +
           pass * packed_bytes<Tiles>(rows_at_once(rows_, keys_), simd::code_steps(dim_));
  }
  template <class Use>
  void with_unit(Index pass, Use&& use) const {
    with_code_unit<Tiles>(codes_of(pass), packed_of(pass), use);
  }

  // Might a row's largest weight be too small?
  bool far() const {
    for (Index m = 0; m < rows_; ++m)
      if (l_.factors.data()[m] + l_.shifts.data()[m] < least_top) return true;
    return false;
  }
  // Of rows [first, first + count), the first `count` of s.sums.
  template <class Reduce>
  void leave_sums(Index r, Index first, Index count, Reduce&& reduce) const {
    for (Index m = 0; m < count; ++m)
      l_.range_rows.data()[r * stride_ + first + m] =
          reduce(simd::load(s_.sums.data() + m * simd::lanes));
  }
  // Of all ranges, to factors.
  void find_largest() {
    for (Index m = 0; m < stride_; ++m) {
      float most = -simd::infinity;
      for (Index r = 0; r < ranges_.count; ++r)
        most = std::max(most, l_.range_rows.data()[r * stride_ + m]);
      l_.factors.data()[m] = most;
    }
  }

  bool finite(Index key) { return all_finite(s_.reader.read(k_, key), dim_); }

  void largest_logits(Index r, Index step) {
    const auto [begin, end] = ranges_.of(r);
    for (Index pass = 0; pass < passes(rows_, keys_); ++pass) {
      const auto [first, count] = rows_of(pass);
      std::fill_n(s_.sums.data(), count * simd::lanes, -simd::infinity);
      with_unit(pass, [&, at = begin, stop = end, from = first](auto& unit) {
        for (Index kv = at; kv < stop; kv += step * pair) largest_logits(unit, from, kv);
      });
      leave_sums(r, first, count, [](simd::Packet most) { return simd::reduce_max(most); });
    }
  }
  template <class Unit>
  void largest_logits(Unit& unit_of_rows, Index first, Index kv) {
    for_each_tile(unit_of_rows, kv, [&](Index m, Index height, const auto* products) {
      for (Index i = 0; i < height; ++i) {
        float* const largest = s_.sums.data() + (m + i) * simd::lanes;
        const simd::Packet unit = simd::broadcast(l_.row_units.data()[first + m + i]);
        simd::Packet most = simd::load(largest);
        for (Index j = 0; j < pair; j += simd::lanes) {
          const simd::Packet of_key = simd::load(l_.units.data() + kv + j);
          const simd::Packet product = simd::load_dots(products + i * pair + j);
          const simd::Packet logit = simd::mul(simd::mul(product, of_key), unit);
          const simd::Packet none = simd::broadcast(-simd::infinity);
          most = simd::max(most, simd::select_less(of_key, simd::zero(), none, logit));
        }
        simd::store(largest, most);
      }
    });
  }

  std::uint32_t* weights(Index kv, Index count) const { return l_.weights.data() + kv / 2 * count; }

  // use(m, height, products): those of the pair of blocks at kv with rows [m, m + height) of the unit.
  template <class Unit, class Use>
  void for_each_tile(Unit& unit, Index kv, Use&& use) {
    const Index n = std::min(pair, keys_ - kv);
    const std::uint8_t* keys[2];
    keys[0] = blocks_.block(kv, std::min<Index>(n, simd::code_block), 0);
    keys[1] = n > simd::code_block ? blocks_.block(kv + simd::code_block, n - simd::code_block, 1)
                                   : keys[0];
    const Index ahead = kv + tuning::sketch_prefetch_pairs * pair;
    simd::LaterBlocks later;
    if (ahead + pair <= keys_)
      later = {blocks_.around(ahead), blocks_.around(ahead + simd::code_block)};
    unit.products(keys, s_.products.data(), later, use);
  }

  // Weights of a range for rows [first, first + count) and their sums.
  template <class Unit>
  void weigh(Unit& unit, Index first, Index count, Index r) {
    const auto [begin, end] = ranges_.of(r);
    for (Index kv = begin; kv < end; kv += pair) {
      std::uint32_t* const to = weights(kv, count);
      const bool partial = l_.partial.data()[kv / pair] != 0;
      for_each_tile(unit, kv, [&](Index m, Index height, const auto* products) {
        const RowsToWeigh rows{height, l_.row_units.data() + first + m,
                               l_.shifts.data() + first + m, s_.sums.data() + m * simd::lanes};
        const float* const units = l_.units.data() + kv;
        if (l_.rough)
          weigh_roughly(partial, products, units, rows, to + m * pair / 2);
        else if (partial)
          weigh_rows<true>(products, units, rows, to + m * pair / 2);
        else
          weigh_rows<false>(products, units, rows, to + m * pair / 2);
      });
    }
  }

  void add(float* mass, Index first, Index count, Aggregation over, Index r) const {
    const bool fresh = first == 0;
    const auto [begin, end] = ranges_.of(r);
    for (Index kv = begin; kv < end; kv += pair) {
      alignas(64) float of_keys[pair];
      const std::uint32_t* const from = weights(kv, count);
      if (l_.rough)
        best_of_rough_weights(from, l_.rough_sums.data(), count, of_keys);
      else
        shares_of_weights(from, l_.factors.data(), count, over, of_keys);
      const Index n = std::min(pair, keys_ - kv);
      if (fresh)
        std::copy_n(of_keys, n, mass + kv);
      else if (over != Aggregation::max)
        for (Index i = 0; i < n; ++i) mass[kv + i] += of_keys[i];
      else
        for (Index i = 0; i < n; ++i) mass[kv + i] = std::max(mass[kv + i], of_keys[i]);
    }
  }

  void leave_out(float* mass, Index r) const {
    const auto [begin, end] = ranges_.of(r);
    for (Index kv = begin; kv < end; kv += pair)
      if (l_.partial.data()[kv / pair] != 0)
        for (Index t = kv; t < std::min(kv + pair, end); ++t)
          if (l_.units.data()[t] < 0.0f) mass[t] = std::numeric_limits<float>::quiet_NaN();
  }

  const KeySketch& sketch_;
  CodeBlocks blocks_;
  bool in_order_;
  HeadRows k_;
  Index b_, head_;
  const KeyRanges& ranges_;
  Index keys_, dim_, rows_, stride_;
  MassLook& l_;
  SketchedMassScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
