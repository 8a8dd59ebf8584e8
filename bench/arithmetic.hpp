// Arithmetics by name, for command lines and results.
#pragma once

#include <quoka/attention/attention.hpp>

#include <map>
#include <string>

namespace quoka_bench {

inline const std::map<std::string, quoka::Arithmetic> arithmetics{
    {"automatic", quoka::Arithmetic::automatic},
    {"single", quoka::Arithmetic::single},
    {"bfloat16", quoka::Arithmetic::bfloat16},
    {"bfloat16_x2", quoka::Arithmetic::bfloat16_x2},
    {"bfloat16_x3", quoka::Arithmetic::bfloat16_x3},
    {"int8", quoka::Arithmetic::int8}};

// What attention over a cache of floats was computed in, if `asked` was.
inline std::string arithmetic_name(quoka::Arithmetic asked) {
  const quoka::Arithmetic used = quoka::arithmetic_used(asked);
  return used == quoka::Arithmetic::single ? "float" : used.name();
}

}  // namespace quoka_bench
