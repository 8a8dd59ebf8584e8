// The table of a row type: every function of a Format from a few that read and write channels.
//
//   struct MyRow : formats::AnyRow {
//     static constexpr const char* name = "mine";
//     static Index bytes(const RowShape&);                                // of a row
//     static simd::Packet load(ConstRow row, Index c, const RowShape&);  // `lanes` channels from c
//     static float at(ConstRow row, Index c, const RowShape&);            // one channel
//
//     // optional: one row from floats; without it rows are only read
//     static void narrow(const float* from, const RowShape&, std::byte* row);
//
//     // optional: members of AnyRow, those of a Format
//     static constexpr float rounding = 0x1p-8f;
//
//     // optional, where channels side by side share a scale: some of a row, the scale read once.
//     // Decode loads channels by it, whole groups at a time, in place of load()
//     struct Group {
//       static constexpr Index channels = 32;  // of a group, a multiple of simd::lanes
//       Group(ConstRow row, Index c);          // from channel c on, a multiple of `channels`
//       simd::Packet load(Index c) const;  // `lanes` channels, c counted from the group's first
//       // true: decode multiplies 8-bit codes if that is faster. `channels` is 32 then, and
//       // x[c] = scale * codes[c], codes in [-127, 127]
//       static constexpr bool has_codes = true;
//       const std::int8_t* codes;
//       simd::Packet scale;                    // the same in each lane
//     };
//   };
//   inline constexpr Format my_format = format_table<MyRow>();
//
// load() is called with c a multiple of `lanes` and at least `lanes` channels left, narrow() with
// all channels of a row. The concept RowType says so to the compiler.
#pragma once

#include <quoka/base/version.hpp>

// Its functions have this unit's instructions, and the compiled library's the same names.
#if !QUOKA_DEFINES_KERNELS
#error "quoka: kernels and formats of your own need header-only use: link quoka::quoka"
#endif

#include <quoka/base/check.hpp>
#include <quoka/kernels/list_kernels.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/token_codes.hpp>
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/rows/element_rows.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Are rows written? Have they a Group, with products of 8-bit codes?
template <class Row>
concept RowNarrows = requires(const float* from, const RowShape& shape, std::byte* row) {
  Row::narrow(from, shape, row);
};
template <class Row>
constexpr bool group_has_codes() {
  if constexpr (formats::Grouped<Row>) return Row::Group::has_codes;
  return false;
}

// Pointers in place of same_as<Packet>: a vector type's attributes do not survive in a template's
// argument.
template <class Group>
concept CodedGroup = Group::channels == simd::code_group&& requires {
  static_cast<const std::int8_t* const Group::*>(&Group::codes);
  static_cast<const simd::Packet Group::*>(&Group::scale);
};
template <class Row>
concept RowGroupFits =
    !formats::Grouped<Row> ||
    (Row::Group::channels % simd::lanes == 0 &&
     std::constructible_from<typename Row::Group, ConstRow, Index> &&
     requires { static_cast<simd::Packet (Row::Group::*)(Index) const>(&Row::Group::load); } &&
     (!group_has_codes<Row>() || CodedGroup<typename Row::Group>));

template <class Row>
void refuse_to_narrow(const float*, const RowShape&, std::byte*) {
  fail_because(std::string("rows of format ") + Row::name + " are only read");
}

}  // namespace detail

// How a row of a format is stored: the members of MyRow above. An optional one that is there and
// does not fit is an error, too: taken for absent, rows would be refused where they are written.
template <class Row>
concept RowType = requires(ConstRow row, Index c, const RowShape& shape) {
  { Row::name } -> std::convertible_to<const char*>;
  requires std::is_base_of_v<formats::AnyRow, Row>;
  { Row::bytes(shape) } -> std::same_as<Index>;
  static_cast<simd::Packet (*)(ConstRow, Index, const RowShape&)>(&Row::load);
  { Row::at(row, c, shape) } -> std::same_as<float>;
}
&&(detail::RowNarrows<Row> || !requires { &Row::narrow; }) && detail::RowGroupFits<Row>;

// The table of a row type.
template <RowType Row>
constexpr Format format_table() {
  Format format{.name = Row::name,
                .is_float = Row::is_float,
                .is_bfloat16 = Row::is_bfloat16,
                .is_half = Row::is_half,
                .writes = detail::RowNarrows<Row>,
                .rounding = Row::rounding,
                .element_bytes = Row::element_bytes,
                .row_bytes = Row::bytes,
                .separate_scales = Row::separate_scales,
                .widen = detail::widen_row<Row>,
                .narrow = detail::refuse_to_narrow<Row>,
                .pack_key_tile = detail::pack_key_tile<Row>,
                .pack_values = detail::pack_values<Row>,
                .token_logits = detail::token_logits<Row>,
                .token_values = detail::token_values<Row>,
                .value_rows = detail::value_rows<Row>,
                .token_code_logits = nullptr,
                .gather_logits = nullptr,
                .gather_values = nullptr};
  if constexpr (detail::RowNarrows<Row>) format.narrow = Row::narrow;
  if constexpr (simd::has_token_codes && detail::group_has_codes<Row>())
    format.token_code_logits = detail::token_code_logits<typename Row::Group>;
  if constexpr (!Row::is_float && !Row::is_half && !Row::is_bfloat16) {
    format.gather_logits = detail::gather_logits_of<Row>;
    format.gather_values = detail::gather_values_of<Row>;
  }
  return format;
}

// A template, so that a format that is not used is not compiled.
template <class T>
const Format& format_of() {
  static constexpr Format format = format_table<formats::RowOf<T>>();
  return format;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
