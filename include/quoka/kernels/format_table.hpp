// The table of a row type: every function of a Format from a few that read and write channels.
//
//   struct MyRow {
//     static constexpr const char* name = "mine";
//     static constexpr bool is_float = false;                             // Format::is_float
//     static Index bytes(const RowShape&);                                // of a row
//     static simd::Packet load(ConstRow row, Index c, const RowShape&);  // `lanes` channels from c
//     static float at(ConstRow row, Index c, const RowShape&);            // one channel
//
//     // to be written channel by channel ...
//     static void store(std::byte* row, Index c, const simd::Packet&, const RowShape&);
//     static void put(std::byte* row, Index c, float, const RowShape&);
//     // ... or as a whole, where channels share a scale; with neither, rows are only read
//     static void narrow(const float* from, const RowShape&, std::byte* row);
//
//     // optional
//     static constexpr Index element_bytes = 2;   // Format::element_bytes
//     static constexpr bool is_bfloat16 = false, is_half = false;  // Format's
//     static constexpr float rounding = 0x1p-8f;  // Format::rounding
//     static Index separate_scales(Index dim);       // how many floats RowShape::scales holds
//
//     // optional, where channels side by side share a scale: some of a row, the scale read once.
//     // Decode loads channels by it, whole groups at a time, in place of load()
//     struct Group {
//       static constexpr Index channels = 32;  // of a group, a multiple of simd::lanes
//       Group(ConstRow row, Index c);          // from channel c on, a multiple of `channels`
//       simd::Packet load(Index c) const;  // `lanes` channels, c counted from the group's first
//       // optional: decode multiplies 8-bit codes if that is faster. `channels` is 32 then, and
//       // x[c] = scale * codes[c], codes in [-127, 127]
//       static constexpr bool has_codes = true;
//       const std::int8_t* codes;
//       simd::Packet scale;                    // the same in each lane
//     };
//   };
//   inline constexpr Format my_format = format_table<MyRow>();
//
// load() is called with c a multiple of `lanes` and at least `lanes` channels left, narrow() with
// all channels of a row. The concept RowType (row_type.hpp) says so to the compiler.
#pragma once

#include <quoka/base/version.hpp>

// Its functions have this unit's instructions, and the compiled library's the same names.
#if !QUOKA_DEFINES_KERNELS
#error "quoka: kernels and formats of your own need header-only use: link quoka::quoka"
#endif

#include <quoka/base/check.hpp>
#include <quoka/kernels/list_kernels.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/row_type.hpp>
#include <quoka/kernels/token_codes.hpp>
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/rows/element_rows.hpp>

#include <string>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

template <class Row>
constexpr auto narrow_of() {
  using Narrow = void (*)(const float*, const RowShape&, std::byte*);
  if constexpr (RowNarrows<Row>)
    return Narrow{Row::narrow};
  else if constexpr (RowStores<Row>)
    return Narrow{narrow_row<Row>};
  else
    return Narrow{[](const float*, const RowShape&, std::byte*) {
      fail_because(std::string("rows of format ") + Row::name + " are only read");
    }};
}

template <class Row>
constexpr bool is_bfloat16() {
  if constexpr (requires { Row::is_bfloat16; }) return Row::is_bfloat16;
  return false;
}

template <class Row>
constexpr bool is_half() {
  if constexpr (requires { Row::is_half; }) return Row::is_half;
  return false;
}

template <class Row>
constexpr float rounding_of() {
  if constexpr (requires { Row::rounding; }) return Row::rounding;
  return 0.0f;
}

template <class Row>
Index separate_scales_of([[maybe_unused]] Index dim) {
  if constexpr (requires { Row::separate_scales(dim); }) return Row::separate_scales(dim);
  return 0;
}

// The format of a row type that was checked.
template <class Row>
constexpr Format table_of() {
  Format format{.name = Row::name,
                .is_float = Row::is_float,
                .is_bfloat16 = is_bfloat16<Row>(),
                .is_half = is_half<Row>(),
                .writes = RowNarrows<Row> || RowStores<Row>,
                .rounding = rounding_of<Row>(),
                .element_bytes = element_bytes_of<Row>(),
                .row_bytes = Row::bytes,
                .separate_scales = separate_scales_of<Row>,
                .widen = widen_row<Row>,
                .narrow = narrow_of<Row>(),
                .pack_key_tile = detail::pack_key_tile<Row>,
                .pack_values = detail::pack_values<Row>,
                .token_logits = detail::token_logits<Row>,
                .token_values = detail::token_values<Row>,
                .value_rows = detail::value_rows<Row>,
                .token_code_logits = nullptr,
                .gather_logits = nullptr,
                .gather_values = nullptr};
  if constexpr (simd::has_token_codes && group_has_codes<Row>())
    format.token_code_logits = detail::token_code_logits<typename Row::Group>;
  if constexpr (!Row::is_float && !is_half<Row>() && !is_bfloat16<Row>()) {
    format.gather_logits = detail::gather_logits_of<Row>;
    format.gather_values = detail::gather_values_of<Row>;
  }
  return format;
}

}  // namespace detail

// The table of a row type.
template <RowType Row>
constexpr Format format_table() {
  return detail::table_of<Row>();
}

// A template, so that a format that is not used is not compiled.
template <class T>
const Format& format_of() {
  static constexpr Format format = format_table<formats::RowOf<T>>();
  return format;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
