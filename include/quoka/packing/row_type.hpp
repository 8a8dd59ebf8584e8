// What a row type must have to become a format (format_table.hpp has the list), checked member by member:
// what is missing or does not fit is one sentence at compile time. No member is guessed at: one that has an
// optional member's name must be it, and products of 8-bit codes are taken where Group::has_codes says so.
#pragma once

#include <quoka/base/member.hpp>
#include <quoka/formats/format.hpp>
#include <quoka/simd/isa/dots.hpp>
#include <quoka/simd/simd.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_DEFINE_HAS_MEMBER(element_bytes);
QUOKA_DEFINE_HAS_MEMBER(is_bfloat16);
QUOKA_DEFINE_HAS_MEMBER(rounding);
QUOKA_DEFINE_HAS_MEMBER(separate_scales);
QUOKA_DEFINE_HAS_MEMBER(store);
QUOKA_DEFINE_HAS_MEMBER(put);
QUOKA_DEFINE_HAS_MEMBER(narrow);
QUOKA_DEFINE_HAS_MEMBER(Group);
QUOKA_DEFINE_HAS_MEMBER(has_codes);

// Has a row type a Group?
template <class Row>
concept Grouped = has_Group<Row>;

// Format::element_bytes.
template <class Row>
constexpr Index element_bytes_of() {
  if constexpr (has_element_bytes<Row>) return Row::element_bytes;
  return 0;
}

// Has its Group opted in to products of its 8-bit codes?
template <class Row>
constexpr bool group_has_codes() {
  if constexpr (has_Group<Row>) {
    if constexpr (has_has_codes<typename Row::Group>) return Row::Group::has_codes;
  }
  return false;
}

// True, or a sentence.
template <class Group>
constexpr bool checked_group() {
  constexpr bool channels = requires {
    requires Index { Group::channels }
    > 0;
    requires Index { Group::channels }
    % simd::lanes == 0;
  };
  constexpr bool made = std::constructible_from<Group, ConstRow, Index>;
  constexpr bool load = requires {
    static_cast<simd::Packet (Group::*)(Index) const>(&Group::load);
  };
  static_assert(channels,
                "quoka: a row type's Group needs static constexpr Index channels, a multiple of "
                "simd::lanes: 32 serves all");
  static_assert(made, "quoka: a row type's Group needs a constructor Group(ConstRow row, Index c)");
  static_assert(load, "quoka: a row type's Group needs simd::Packet load(Index c) const");
  constexpr bool fits = channels && made && load;
  if constexpr (!has_has_codes<Group>) {
    return fits;
  } else {
    constexpr bool constant = requires { typename std::bool_constant<Group::has_codes>; };
    static_assert(constant, "quoka: a Group's has_codes must be static constexpr bool");
    if constexpr (!constant) {
      return false;
    } else if constexpr (!Group::has_codes) {
      return fits;
    } else {
      constexpr bool codes = requires {
        requires Index { Group::channels }
        == simd::code_group;
        static_cast<const std::int8_t* const Group::*>(&Group::codes);
        static_cast<const simd::Packet Group::*>(&Group::scale);
      };
      static_assert(codes,
                    "quoka: a Group that has_codes needs 32 channels, const std::int8_t* codes and "
                    "simd::Packet scale, with x[c] = scale * codes[c]");
      return fits && codes;
    }
  }
}

// True, or a sentence for each member that is missing or does not fit.
template <class Row>
constexpr bool checked_row_type() {
  constexpr bool name = requires {
    { Row::name } -> std::convertible_to<const char*>;
    typename std::bool_constant<(Row::name != nullptr)>;
  };
  constexpr bool is_float = requires { typename std::bool_constant<bool{Row::is_float}>; };
  constexpr bool bytes = requires { static_cast<Index (*)(const RowShape&)>(&Row::bytes); };
  constexpr bool load = requires {
    static_cast<simd::Packet (*)(ConstRow, Index, const RowShape&)>(&Row::load);
  };
  constexpr bool at = requires {
    static_cast<float (*)(ConstRow, Index, const RowShape&)>(&Row::at);
  };
  static_assert(name, "quoka: a row type needs static constexpr const char* name");
  static_assert(is_float, "quoka: a row type needs static constexpr bool is_float");
  static_assert(bytes, "quoka: a row type needs static Index bytes(const RowShape&)");
  static_assert(
      load, "quoka: a row type needs static simd::Packet load(ConstRow, Index, const RowShape&)");
  static_assert(at, "quoka: a row type needs static float at(ConstRow, Index, const RowShape&)");
  bool fits = name && is_float && bytes && load && at;

  if constexpr (has_element_bytes<Row>) {
    constexpr bool ok = requires {
      requires Index { Row::element_bytes }
      == 0 || Index{Row::element_bytes} == 2 || Index{Row::element_bytes} == 4;
    };
    static_assert(ok,
                  "quoka: a row type's element_bytes must be static constexpr Index, 0, 2 or 4");
    fits = fits && ok;
  }
  if constexpr (has_is_bfloat16<Row>) {
    constexpr bool ok = requires { typename std::bool_constant<bool{Row::is_bfloat16}>; };
    static_assert(ok, "quoka: a row type's is_bfloat16 must be static constexpr bool");
    fits = fits && ok;
  }
  if constexpr (has_rounding<Row>) {
    constexpr bool ok = requires { requires float{Row::rounding} >= 0.0f; };
    static_assert(ok, "quoka: a row type's rounding must be static constexpr float, not negative");
    fits = fits && ok;
  }
  if constexpr (has_separate_scales<Row>) {
    constexpr bool ok = requires { static_cast<Index (*)(Index)>(&Row::separate_scales); };
    static_assert(
        ok, "quoka: a row type's separate_scales must be static Index separate_scales(Index dim)");
    fits = fits && ok;
  }
  if constexpr (has_store<Row> || has_put<Row>) {
    constexpr bool ok = requires {
      static_cast<void (*)(std::byte*, Index, const simd::Packet&, const RowShape&)>(&Row::store);
      static_cast<void (*)(std::byte*, Index, float, const RowShape&)>(&Row::put);
    };
    static_assert(ok,
                  "quoka: a row type that is written by channels needs both static void "
                  "store(std::byte*, Index, const simd::Packet&, const RowShape&) and static void "
                  "put(std::byte*, Index, float, const RowShape&)");
    fits = fits && ok;
  }
  if constexpr (has_narrow<Row>) {
    constexpr bool ok = requires {
      static_cast<void (*)(const float*, const RowShape&, std::byte*)>(&Row::narrow);
    };
    static_assert(ok,
                  "quoka: a row type's narrow must be static void narrow(const float*, const "
                  "RowShape&, std::byte*)");
    fits = fits && ok;
  }
  if constexpr (has_Group<Row>) {
    constexpr bool type = requires { typename Row::Group; };
    static_assert(type, "quoka: a row type's Group must be a type");
    if constexpr (type)
      fits = fits && checked_group<typename Row::Group>();
    else
      fits = false;
  }
  return fits;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
