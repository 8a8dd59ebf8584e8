// The table of a row type: every function of a Format from a few that read and write channels.
//
//   struct MyRow {
//     static constexpr const char* name = "mine";
//     static constexpr bool is_float = false;
//     static Index bytes(Index dim);                                    // of a row
//     static simd::Packet load(ConstRow row, Index c);                  // `lanes` channels from c
//     static float at(ConstRow row, Index c);                           // one channel
//     static void store(std::byte* row, Index c, const simd::Packet&);  // likewise
//     static void put(std::byte* row, Index c, float);
//   };
//   inline constexpr Format my_format = format_table<MyRow>();
#pragma once

#include <quoka/version.hpp>

// Its functions have this unit's instructions, and the compiled library's the same names.
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
#error "quoka: kernels and formats of your own need header-only use: link quoka::quoka"
#endif

#include <quoka/formats/element_formats.hpp>
#include <quoka/kernels/fixed_packing.hpp>
#include <quoka/kernels/packing.hpp>
#include <quoka/kernels/token_kernels.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Without fixed point where the ISA has none: attention() does not ask for it there.
template <class Row, bool fixed = simd::has_pair_sums>
constexpr Format format_table() {
  Format format{.name = Row::name,
                .is_float = Row::is_float,
                .row_bytes = Row::bytes,
                .widen = detail::widen_row<Row>,
                .narrow = detail::narrow_row<Row>,
                .pack_key_tile = detail::pack_key_tile<Row>,
                .pack_values = detail::pack_values<Row>,
                .pack_fixed_keys = nullptr,
                .pack_fixed_values = nullptr,
                .token_logits = detail::token_logits<Row>,
                .token_values = detail::token_values<Row>};
  if constexpr (fixed) {
    format.pack_fixed_keys = detail::pack_fixed_keys<Row>;
    format.pack_fixed_values = detail::pack_fixed_values<Row>;
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
