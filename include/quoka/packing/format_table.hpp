// The table of a row type: every function of a Format from a few that read and write channels.
//
//   struct MyRow {
//     static constexpr const char* name = "mine";
//     static constexpr bool is_float = false;
//     static constexpr Index element_bytes = 2;  // optional: Format::element_bytes
//     static constexpr float rounding = 0x1p-8f; // optional: Format::rounding
//     static Index bytes(const RowShape&);                                // of a row
//     static Index scales_apart(Index dim);  // optional: how many floats RowShape::scales holds
//     static simd::Packet load(ConstRow row, Index c, const RowShape&);   // `lanes` channels from c
//     static float at(ConstRow row, Index c, const RowShape&);            // one channel
//     // to be written channel by channel ...
//     static void store(std::byte* row, Index c, const simd::Packet&, const RowShape&);
//     static void put(std::byte* row, Index c, float, const RowShape&);
//     // ... or as a whole, where channels share a scale; with neither, rows are only read
//     static void narrow(const float* from, const RowShape&, std::byte* row);
//     // optional, for rows of 8-bit integers: x[c] = scales[c / code_group] * codes[c], codes in
//     // [-127, 127]; false for a row that they cannot give
//     static bool read_codes(ConstRow row, const RowShape&, std::int8_t* codes, float* scales);
//   };
//   inline constexpr Format my_format = format_table<MyRow>();
//
// load() is called with c a multiple of `lanes` and at least `lanes` channels left, narrow() with
// all channels of a row.
#pragma once

#include <quoka/base/version.hpp>

// Its functions have this unit's instructions, and the compiled library's the same names.
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
#error "quoka: kernels and formats of your own need header-only use: link quoka::quoka"
#endif

#include <quoka/formats/element_rows.hpp>
#include <quoka/packing/panel_packing.hpp>
#include <quoka/packing/token_codes.hpp>
#include <quoka/packing/token_kernels.hpp>
#include <quoka/base/check.hpp>
#include <quoka/simd/code_rows.hpp>

#include <string>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

template <class Row>
concept ChannelWriter = requires(std::byte* row, simd::Packet x, const RowShape& shape) {
  Row::store(row, Index{}, x, shape);
  Row::put(row, Index{}, 0.0f, shape);
};
template <class Row>
concept RowNarrower = requires(const float* from, const RowShape& shape, std::byte* row) {
  Row::narrow(from, shape, row);
};

template <class Row>
constexpr auto narrow_of() {
  using Narrow = void (*)(const float*, const RowShape&, std::byte*);
  if constexpr (RowNarrower<Row>)
    return Narrow{Row::narrow};
  else if constexpr (ChannelWriter<Row>)
    return Narrow{narrow_row<Row>};
  else
    return Narrow{[](const float*, const RowShape&, std::byte*) {
      fail_because(std::string("rows of format ") + Row::name + " are only read");
    }};
}

template <class Row>
constexpr Index element_bytes_of() {
  if constexpr (requires { Row::element_bytes; }) return Row::element_bytes;
  return 0;
}

template <class Row>
constexpr bool is_bfloat16() {
  if constexpr (requires { Row::is_bfloat16; }) return Row::is_bfloat16;
  return false;
}

template <class Row>
constexpr float rounding_of() {
  if constexpr (requires { Row::rounding; }) return Row::rounding;
  return 0.0f;
}

template <class Row>
Index scales_apart_of([[maybe_unused]] Index dim) {
  if constexpr (requires { Row::scales_apart(dim); }) return Row::scales_apart(dim);
  return 0;
}

template <class Row>
void read_code_rows(const ConstRow* rows, Index count, const RowShape& shape, std::uint8_t* codes,
                    float* scales) {
  const Index groups = ceil_div(shape.dim, code_group), width = groups * code_group;
  for (Index i = 0; i < count; ++i, codes += width, scales += groups) {
    auto* const as_stored = reinterpret_cast<std::int8_t*>(codes);
    if (!Row::read_codes(rows[i], shape, as_stored, scales))
      std::fill_n(scales, groups, std::numeric_limits<float>::quiet_NaN());
    std::fill(as_stored + shape.dim, as_stored + width, std::int8_t{0});
    for (Index c = 0; c < width; c += code_group)
      for (Index j = 0; j < code_group; ++j)
        codes[c + j] = static_cast<std::uint8_t>(codes[c + j] ^ 0x80u);
  }
}

template <class Keys>
void score_codes(const Keys& keys, const simd::CodeQueries& queries, bool mean, float* scores) {
  if (mean)
    simd::code_row_scores<simd::CodeScores::sum>(keys, queries, scores);
  else
    simd::code_row_scores<simd::CodeScores::max>(keys, queries, scores);
}

}  // namespace detail

// The table of a row type.
template <class Row>
constexpr Format format_table() {
  Format format{.name = Row::name,
                .is_float = Row::is_float,
                .is_bfloat16 = detail::is_bfloat16<Row>(),
                .writes = detail::RowNarrower<Row> || detail::ChannelWriter<Row>,
                .rounding = detail::rounding_of<Row>(),
                .element_bytes = detail::element_bytes_of<Row>(),
                .row_bytes = Row::bytes,
                .scales_apart = detail::scales_apart_of<Row>,
                .widen = detail::widen_row<Row>,
                .narrow = detail::narrow_of<Row>(),
                .pack_key_tile = detail::pack_key_tile<Row>,
                .pack_values = detail::pack_values<Row>,
                .token_logits = detail::token_logits<Row>,
                .token_values = detail::token_values<Row>,
                .value_rows = detail::value_rows<Row>,
                .token_code_logits = nullptr,
                .read_codes = nullptr,
                .score_codes = nullptr,
                .square_codes = nullptr};
  if constexpr (simd::has_token_codes && requires { Row::Group::codes; })
    format.token_code_logits = detail::token_code_logits<typename Row::Group>;
  if constexpr (requires { Row::read_code_rows; })
    format.read_codes = Row::read_code_rows;
  else if constexpr (requires { Row::read_codes; })
    format.read_codes = detail::read_code_rows<Row>;
  if constexpr (
      requires { Row::read_code_rows; } || requires { Row::read_codes; }) {
    format.score_codes = detail::score_codes<simd::CodeRows>;
    format.square_codes = simd::code_row_squares<simd::CodeRows>;
  }
  return format;
}

// A template, so that a format that is not used is not compiled.
template <class T>
const Format& format_of() {
  static constexpr Format format = format_table<typename formats::RowOf<T>::type>();
  return format;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
