// Arithmetics by name, for command lines and results.
#pragma once

#include <quoka/attention/attention.hpp>

#include <map>
#include <string>

namespace quoka_bench {

inline const std::map<std::string, quoka::Arithmetic> arithmetics{
    {"automatic", quoka::Arithmetic::automatic},
    {"float", quoka::Arithmetic::float_},
    {"bf16", quoka::Arithmetic::bf16},
    {"int8", quoka::Arithmetic::int8}};

// The arithmetic of attention over a cache of floats, if `asked` was asked for.
inline std::string used_arithmetic_name(quoka::Arithmetic asked) {
  return quoka::arithmetic_name(quoka::arithmetic_used(asked));
}

}  // namespace quoka_bench
