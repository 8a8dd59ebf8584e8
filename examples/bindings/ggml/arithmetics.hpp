// Arithmetics of attention, by the names of QUOKA_ARITHMETIC, which are the library's. node.hpp
// resolves `automatic`.
#pragma once

#include <quoka/attention/attention_options.hpp>

#include <string>
#include <vector>

namespace quoka_ggml {

using quoka::Arithmetic, quoka::Index, quoka::arithmetic_named;

inline constexpr Arithmetic arithmetics[] = {Arithmetic::automatic, Arithmetic::float_,
                                             Arithmetic::bf16, Arithmetic::int8};

inline std::vector<const char*> arithmetic_names() {
  std::vector<const char*> names;
  for (const Arithmetic one : arithmetics) names.push_back(quoka::arithmetic_name(one));
  return names;
}
inline std::string name_of(Arithmetic arithmetic) { return quoka::arithmetic_name(arithmetic); }

}  // namespace quoka_ggml
