// Contract checks at the public edge: each throws std::invalid_argument that names both numbers.
//
// The checks run before anything is written. The throwing half is cold and out of line, so a check
// costs its callers one compare.
#pragma once

#include <quoka/core/types.hpp>

#include <array>
#include <stdexcept>
#include <string>
#include <string_view>

namespace quoka::inline QUOKA_ABI {
namespace detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void fail(std::string_view a, Index a_value,
                                                        std::string_view relation,
                                                        std::string_view b, Index b_value) {
  std::string message = "quoka: ";
  message.append(a)
      .append(" is ")
      .append(std::to_string(a_value))
      .append(", ")
      .append(relation)
      .append(" ");
  if (!b.empty()) message.append(b).append(", which is ");
  message.append(std::to_string(b_value));
  throw std::invalid_argument(message);
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_range(std::string_view name, double value,
                                                              std::string_view range) {
  throw std::invalid_argument("quoka: " + std::string(name) + " is " + std::to_string(value) +
                              ", not in " + std::string(range));
}

inline void require_equal(std::string_view a, Index a_value, std::string_view b, Index b_value) {
  if (a_value != b_value) [[unlikely]]
    fail(a, a_value, "but must equal", b, b_value);
}

inline void require_at_least(std::string_view name, Index value, Index least) {
  if (value < least) [[unlikely]]
    fail(name, value, "but must be at least", "", least);
}

inline void require_at_most(std::string_view a, Index a_value, std::string_view b, Index b_value) {
  if (a_value > b_value) [[unlikely]]
    fail(a, a_value, "but must be at most", b, b_value);
}

// a must be a positive multiple of b; b must be positive.
inline void require_multiple(std::string_view a, Index a_value, std::string_view b, Index b_value) {
  if (b_value < 1 || a_value < 1 || a_value % b_value != 0) [[unlikely]]
    fail(a, a_value, "but must be a positive multiple of", b, b_value);
}

// Sizes of a tensor, axis by axis: [batch, heads, len] or [batch, heads, len, dim].
template <std::size_t Rank>
void require_sizes(std::string_view tensor, const std::array<Index, Rank>& sizes,
                   const std::array<Index, Rank>& expected) {
  static constexpr std::string_view axes[] = {"'s batch", "'s heads", "'s len", "'s dim"};
  for (std::size_t axis = 0; axis < Rank; ++axis)
    if (sizes[axis] != expected[axis]) [[unlikely]]
      fail(std::string(tensor).append(axes[axis]), sizes[axis], "but must be", "", expected[axis]);
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
