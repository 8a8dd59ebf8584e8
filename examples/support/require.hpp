// Checks of a program's arguments: each throws std::invalid_argument that names both
// numbers.
#pragma once

#include <quoka/base/index.hpp>

#include <sstream>
#include <stdexcept>
#include <string_view>

namespace quoka_examples {

using quoka::Index;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline void require_at_least(std::string_view name, Index value, Index least) {
  if (value < least) refuse(name, " is ", value, ", but must be at least ", least);
}
inline void require_at_most(std::string_view a, Index a_value, std::string_view b, Index b_value) {
  if (a_value > b_value)
    refuse(a, " is ", a_value, ", but must be at most ", b, ", which is ", b_value);
}
inline void require_equal(std::string_view a, Index a_value, std::string_view b, Index b_value) {
  if (a_value != b_value)
    refuse(a, " is ", a_value, ", but must equal ", b, ", which is ", b_value);
}
// a must be a positive multiple of b, and b positive.
inline void require_multiple(std::string_view a, Index a_value, std::string_view b, Index b_value) {
  if (b_value < 1 || a_value < 1 || a_value % b_value != 0)
    refuse(a, " is ", a_value, ", but must be a positive multiple of ", b, ", which is ", b_value);
}
[[noreturn]] inline void fail_range(std::string_view name, double value, std::string_view range) {
  refuse(name, " is ", value, ", not in ", range);
}

}  // namespace quoka_examples
