// Arithmetics by name, for command lines and results.
#pragma once

#include <quoka/attention/attention.hpp>

#include <map>
#include <string>

namespace quoka_bench {

inline const std::map<std::string, quoka::Arithmetic> arithmetics{
    {"single", quoka::Arithmetic::single}, {"fixed16", quoka::Arithmetic::fixed16}};

// What attention was computed in, if `asked` was.
inline std::string arithmetic_name(quoka::Arithmetic asked) {
  if (asked == quoka::Arithmetic::single) return "float";
  return quoka::arithmetic_used(asked) == asked ? "16-bit fixed point"
                                                : "float (no 16-bit dot products here)";
}

}  // namespace quoka_bench
