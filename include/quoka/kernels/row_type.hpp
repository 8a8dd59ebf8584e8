// The requirements on a row type that is to become a format (format_table.hpp has the list), as a
// concept. An optional member that is there and does not fit is an error, too: taken for absent,
// rows would be refused where they are written.
#pragma once

#include <quoka/rows/element_rows.hpp>
#include <quoka/simd/simd.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
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
concept Grouped = !std::is_void_v<typename Row::Group>;
template <class Row>
constexpr bool group_has_codes() {
  if constexpr (Grouped<Row>) return Row::Group::has_codes;
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
    !Grouped<Row> ||
    (Row::Group::channels % simd::lanes == 0 &&
     std::constructible_from<typename Row::Group, ConstRow, Index> &&
     requires { static_cast<simd::Packet (Row::Group::*)(Index) const>(&Row::Group::load); } &&
     (!group_has_codes<Row>() || CodedGroup<typename Row::Group>));

}  // namespace detail

// How a row of a format is stored, as format_table.hpp describes its members.
template <class Row>
concept RowType = requires(ConstRow row, Index c, const RowShape& shape) {
  { Row::name } -> std::convertible_to<const char*>;
  requires std::is_base_of_v<formats::AnyRow, Row>;
  { Row::bytes(shape) } -> std::same_as<Index>;
  static_cast<simd::Packet (*)(ConstRow, Index, const RowShape&)>(&Row::load);
  { Row::at(row, c, shape) } -> std::same_as<float>;
}
&&(detail::RowNarrows<Row> || !requires { &Row::narrow; }) && detail::RowGroupFits<Row>;

}  // namespace QUOKA_ABI
}  // namespace quoka
