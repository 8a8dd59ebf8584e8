// 8-bit codes on both sides of a product: query rows as codes, and iteration over the codes that a sketch has of a
// head's keys (key_sketch.hpp).
//
//   row[m] = units[m] * code[m] + an error of a length of at most missed[m]
//
// Rows whose products are compared as integers share a unit; other rows each have their own. A pass handles some rows
// at a time: all of them, or as many as the caller has memory for their results. Keys come a pair of blocks (32 keys)
// at a time, in their own order wherever they lie in the cache. kernels/code_units.hpp multiplies both.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/simd/code_dots.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

enum class RowUnits { shared, own };

class CodedRows {
 public:
  // Room for the rows in pairs.
  static constexpr Index padded(Index rows) { return rows + rows % 2; }

  CodedRows() = default;
  // Room for `rows` rows of at most `dim` channels, in passes of `pass_rows`. Tiles: what multiplies them.
  template <class Tiles>
  static CodedRows with(Arena& arena, Index rows, Index dim, Index pass_rows) {
    const Index stride = padded(rows), steps = simd::code_steps(dim);
    CodedRows coded;
    coded.pass_rows_ = pass_rows;
    coded.codes_ = arena.take<std::int32_t>(steps * stride);
    coded.offsets_ = arena.take<std::int32_t>(stride);
    for (float** numbers : {&coded.units_, &coded.lengths_, &coded.missed_})
      *numbers = arena.take<float>(stride);
    // Fewer channels may fit tiles where all of them do not.
    if constexpr (simd::has_tiles || !std::is_same_v<Tiles, simd::Tiles>)
      coded.packed_ = arena.take<std::byte>(TiledQueries::bytes(pass_rows, steps) *
                                            ceil_div(stride, std::max<Index>(pass_rows, 1)));
    return coded;
  }

  // Codes of rows [count, dim]. False where codes cannot stand for a row: one that is not finite, longer than 1e12, or
  // shorter than 1e-12 and not zero; of rows that share a unit the longest.
  template <class Tiles>
  bool encode(const float* rows, Index count, Index dim, RowUnits kind) {
    rows_ = count, steps_ = simd::code_steps(dim);
    packed_step_ = packed_bytes<Tiles>(pass_rows_, steps_);
    std::fill_n(codes_, steps_ * stride(), 0);
    std::fill_n(offsets_, stride(), 0);
    for (float* numbers : {units_, lengths_, missed_}) std::fill_n(numbers, stride(), 0.0f);
    float longest = 0.0f, largest = 0.0f;  // length, unit
    for (Index m = 0; m < count; ++m) {
      const float* const row = rows + m * dim;
      const float length = std::sqrt(sum_of_squares(row, dim)) * (1.0f + 1e-5f);
      if (!(length < most_coded_length)) return false;
      if (kind == RowUnits::own && !is_coded(row, dim, length)) return false;
      lengths_[m] = length;
      units_[m] = std::max(code_scale(row, dim), simd::run_scale(row, dim));
      longest = std::max(longest, length), largest = std::max(largest, units_[m]);
    }
    if (kind == RowUnits::shared) {
      if (!is_coded(rows, count * dim, longest)) return false;
      std::fill_n(units_, count, largest);
    }
    for (Index m = 0; m < count; ++m) {
      std::int32_t sum = 0;
      const auto put = [&](Index channel, Index n, const std::int8_t* codes) {
        simd::store_query_codes(codes, n, stride(), m, channel, codes_);
        sum += simd::sum_of_codes<code_slab>(codes);
      };
      missed_[m] = detail::encode(rows + m * dim, dim, units_[m], put);
      offsets_[m] = simd::code_offset(sum);
    }
    for (Index pass = 0; pass < passes(); ++pass)
      pack_codes<Tiles>(codes(pass), packed_ + pass * packed_step_);
    return true;
  }

  Index rows() const { return rows_; }
  Index stride() const { return padded(rows_); }
  Index passes() const { return ceil_div(stride(), std::max<Index>(pass_rows_, 1)); }
  // The first row of a pass, and how many it has: an even number.
  std::pair<Index, Index> of(Index pass) const {
    const Index first = pass * pass_rows_;
    return {first, std::min(pass_rows_, stride() - first)};
  }
  // [stride()]; of a row that only fills up a pair 0.
  const float* units() const { return units_; }
  const float* lengths() const { return lengths_; }  // rounded up
  const float* missed() const { return missed_; }    // the same

  // The operands of with_code_unit(): the rows of a pass, and the same packed.
  QueryCodes codes(Index pass) const {
    const auto [first, count] = of(pass);
    return {codes_ + first, offsets_ + first, std::min(count, rows_ - first), stride(), steps_};
  }
  const std::byte* packed(Index pass) const { return packed_ + pass * packed_step_; }

 private:
  static bool is_coded(const float* x, Index size, float length) {
    return length > least_coded_length ||
           std::all_of(x, x + size, [](float c) { return c == 0.0f; });
  }

  std::int32_t* codes_ = nullptr;    // [steps][stride]: 4 channels of one row
  std::int32_t* offsets_ = nullptr;  // [stride]
  std::byte* packed_ = nullptr;      // [passes][packed_step_]
  float *units_ = nullptr, *lengths_ = nullptr, *missed_ = nullptr;
  Index rows_ = 0, steps_ = 0, pass_rows_ = 0, packed_step_ = 0;
};

// A block of the sketch that holds 16 keys in their order is read in place; others are gathered. The pair some
// way ahead is prefetched on the way.
class CodeBlocks {
 public:
  static constexpr Index pair = simd::code_pair;

  // Blocks of keys [0, end). mapping: null where key i is row i of the sketch. gathered: memory for two blocks.
  CodeBlocks(const KeySketch& sketch, const KeySketch::RowMapping* mapping, Index end, Index b,
             Index head, Index dim, std::uint8_t* gathered)
      : sketch_(sketch),
        mapping_(mapping),
        end_(end),
        b_(b),
        head_(head),
        steps_(simd::code_steps(dim)),
        gathered_(gathered) {}

  // use(kv, count, codes, ahead) for every step-th pair of blocks in [begin, end): codes of keys [kv, kv + count), of
  // which only the last pair may have fewer than 32, and the blocks to prefetch meanwhile. begin: a multiple of 32.
  template <class Use>
  void for_each_pair(Index begin, Index end, Index step, Use&& use) const {
    for (Index kv = begin; kv < end; kv += step * pair) {
      const Index count = std::min(pair, end - kv);
      const std::uint8_t* codes[2];
      codes[0] = block(kv, std::min<Index>(count, simd::code_block), 0);
      codes[1] = count > simd::code_block
                     ? block(kv + simd::code_block, count - simd::code_block, 1)
                     : codes[0];
      const Index later = kv + tuning::sketch_prefetch_pairs * pair;
      simd::LaterBlocks ahead;
      if (later + pair <= end_) ahead = {around(later), around(later + simd::code_block)};
      use(kv, count, std::as_const(codes), ahead);
    }
  }

  bool in_order() const { return mapping_ == nullptr; }
  // A number of each key of a pair, of the `column` that the sketch has of the head: in place, or copied to `room`
  // [32].
  const float* numbers(const float* column, Index kv, Index count, float* room) const {
    if (in_order() && count == pair) return column + kv;
    for (Index first = 0; first < count; first += simd::code_block) {
      const Index n = std::min<Index>(simd::code_block, count - first);
      if (in_one_block(kv + first))
        std::copy_n(column + row(kv + first), n, room + first);
      else
        for (Index i = 0; i < n; ++i) room[first + i] = column[row(kv + first + i)];
    }
    return room;
  }

 private:
  static constexpr Index line = simd::code_block * simd::code_channels;

  Index row(Index key) const { return mapping_ != nullptr ? (*mapping_)(key) : key; }
  bool in_one_block(Index first) const {
    return mapping_ == nullptr || mapping_->keeps_blocks(first);
  }
  // The block that holds this key.
  const std::uint8_t* around(Index key) const {
    return sketch_.codes(b_, head_, row(key) / simd::code_block);
  }

  // Codes of keys [first, first + n), 0 < n <= 16: in place, or in half 0 or 1 of the gathered
  // codes.
  const std::uint8_t* block(Index first, Index n, Index half) const {
    constexpr Index width = simd::code_block;
    if (in_one_block(first)) return around(first);
    Index rows[width] = {};  // n is not 0, which a compiler cannot see
    for (Index i = 0; i < n; ++i) rows[i] = row(first + i);
    bool in_place = rows[0] % width == 0;
    for (Index i = 0; i < n; ++i) in_place = in_place && rows[i] == rows[0] + i;
    if (in_place) return sketch_.codes(b_, head_, rows[0] / width);
    std::uint8_t* const to = gathered_ + half * steps_ * simd::code_channels * width;
    const std::uint8_t* prefetched = nullptr;
    for (Index i = 0; i < n; ++i) {
      const std::uint8_t* const from =
          sketch_.codes(b_, head_, rows[i] / width) + rows[i] % width * simd::code_channels;
      const Index ahead = first + i + tuning::gathered_prefetch_keys;
      const std::uint8_t* const later = ahead < end_ ? around(ahead) : prefetched;
      // A key's codes lie in every line of its block.
      for (Index s = 0; s < steps_; ++s) {
        std::memcpy(to + (s * width + i) * simd::code_channels, from + s * line,
                    simd::code_channels);
        if (later != prefetched) simd::prefetch(later + s * line);
      }
      prefetched = later;
    }
    return to;
  }

  const KeySketch& sketch_;
  const KeySketch::RowMapping* mapping_;
  Index end_, b_, head_, steps_;
  std::uint8_t* gathered_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
