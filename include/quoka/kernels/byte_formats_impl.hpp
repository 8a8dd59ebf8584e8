// Definitions of byte_formats.hpp: the tables of the row types in rows/byte_rows.hpp.
#pragma once

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/kernels/format_table.hpp>
#include <quoka/rows/byte_rows.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

template <class Row>
const Format& format_of_row() {
  static constexpr Format format = format_table<Row>();
  return format;
}

}  // namespace detail

QUOKA_FUNC const Format& q8_0_format() { return detail::format_of_row<formats::Q8_0Row>(); }
QUOKA_FUNC const Format& u8_format() { return detail::format_of_row<formats::U8Row>(); }
QUOKA_FUNC const Format& i8_format() { return detail::format_of_row<formats::I8Row>(); }
QUOKA_FUNC const Format& i8_channel_format() {
  return detail::format_of_row<formats::I8ChannelRow>();
}
QUOKA_FUNC const Format& e4m3_format() { return detail::format_of_row<formats::E4m3Row>(); }

template <class T>
const Format& channel_major_format() {
  return detail::format_of_row<formats::ChannelMajorRow<typename formats::RowOf<T>::type>>();
}

}  // namespace QUOKA_ABI
}  // namespace quoka
