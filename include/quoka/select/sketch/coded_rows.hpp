// Query rows as 8-bit codes, to be multiplied with a sketch's keys (select/sketch/key_sketch.hpp):
//
//   row[m] = units[m] * code[m] + what codes miss, of a length of at most missed[m]
//
// Rows whose products are compared as integers share a unit; others have each their own. A pass is some rows at a time:
// all of them, or as many as the caller has memory for what becomes of their products.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/sketch/key_sketch_impl.hpp>

#include <algorithm>
#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

enum class RowUnits { shared, own };

class CodedRows {
 public:
  // Room for the rows in pairs.
  static constexpr Index padded(Index rows) { return rows + rows % 2; }

  // Room for `rows` rows of `dim` channels, in passes of `pass_rows`. Tiles: what multiplies them
  // (kernels/code_units.hpp).
  template <class Tiles>
  void reserve(Index rows, Index dim, Index pass_rows) {
    const Index stride = padded(rows), steps = simd::code_steps(dim);
    codes_.reserve(steps * stride);
    offsets_.reserve(stride);
    for (auto* buffer : {&units_, &lengths_, &missed_}) buffer->reserve(stride);
    // With fewer rows to pack, passes may be larger and others in number: this is the most of both.
    packed_.reserve(packed_bytes<Tiles>(stride, steps) *
                    ceil_div(stride, std::max<Index>(pass_rows, 1)));
  }
  Index bytes() const { return bytes_of(codes_, offsets_, packed_, units_, lengths_, missed_); }

  // Codes of rows [count, dim]. False where codes cannot stand for a row: one that is not finite, longer than 1e12, or
  // shorter than 1e-12 and not zero; of rows that share a unit the longest.
  template <class Tiles>
  bool encode(const float* rows, Index count, Index dim, Index pass_rows, RowUnits kind) {
    rows_ = count, steps_ = simd::code_steps(dim), pass_rows_ = pass_rows;
    packed_step_ = packed_bytes<Tiles>(pass_rows, steps_);
    std::fill_n(codes_.data(), steps_ * stride(), 0);
    std::fill_n(offsets_.data(), stride(), 0);
    for (auto* buffer : {&units_, &lengths_, &missed_}) std::fill_n(buffer->data(), stride(), 0.0f);
    float longest = 0.0f, largest = 0.0f;  // length, unit
    for (Index m = 0; m < count; ++m) {
      const float* const row = rows + m * dim;
      const float length = std::sqrt(sum_of_squares(row, dim)) * (1.0f + 1e-5f);
      if (!(length < most_coded_length)) return false;
      if (kind == RowUnits::own && !is_coded(row, dim, length)) return false;
      lengths_.data()[m] = length;
      units_.data()[m] = std::max(code_scale(row, dim), simd::run_scale(row, dim));
      longest = std::max(longest, length), largest = std::max(largest, units_.data()[m]);
    }
    if (kind == RowUnits::shared) {
      if (!is_coded(rows, count * dim, longest)) return false;
      std::fill_n(units_.data(), count, largest);
    }
    for (Index m = 0; m < count; ++m) {
      std::int32_t sum = 0;
      const auto put = [&](Index channel, Index n, const std::int8_t* codes) {
        simd::store_query_codes(codes, n, stride(), m, channel, codes_.data());
        sum += simd::sum_of_codes<code_slab>(codes);
      };
      missed_.data()[m] = detail::encode(rows + m * dim, dim, units_.data()[m], put);
      offsets_.data()[m] = simd::code_offset(sum);
    }
    for (Index pass = 0; pass < passes(); ++pass)
      pack_codes<Tiles>(codes(pass), packed_.data() + pass * packed_step_);
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
  const float* units() const { return units_.data(); }
  const float* lengths() const { return lengths_.data(); }  // rounded up
  const float* missed() const { return missed_.data(); }    // likewise

  // The operands of with_code_unit(): the rows of a pass, and the same packed.
  QueryCodes codes(Index pass) const {
    const auto [first, count] = of(pass);
    return {codes_.data() + first, offsets_.data() + first, std::min(count, rows_ - first),
            stride(), steps_};
  }
  const std::byte* packed(Index pass) const { return packed_.data() + pass * packed_step_; }

 private:
  static bool is_coded(const float* x, Index size, float length) {
    return length > least_coded_length ||
           std::all_of(x, x + size, [](float c) { return c == 0.0f; });
  }

  Buffer<std::int32_t> codes_;    // [steps][stride]: 4 channels of one row
  Buffer<std::int32_t> offsets_;  // [stride]
  Buffer<std::byte> packed_;      // [passes][packed_step_]
  Buffer<float> units_, lengths_, missed_;
  Index rows_ = 0, steps_ = 0, pass_rows_ = 0, packed_step_ = 0;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
