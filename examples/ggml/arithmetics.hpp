// What attention multiplies in: the names of QUOKA_ARITHMETIC. What `automatic` comes to: node.hpp.
#pragma once

#include <quoka/attention/attention_options.hpp>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace quoka_ggml {

using quoka::Arithmetic, quoka::Index;

struct NamedArithmetic {
  const char* name;
  Arithmetic arithmetic;
};
// Another one is another line.
inline const NamedArithmetic arithmetics[] = {{"automatic", Arithmetic::automatic},
                                              {"float", Arithmetic::fp32},
                                              {"bf16", Arithmetic::bfloat16},
                                              {"int8", Arithmetic::int8}};

inline std::vector<const char*> arithmetic_names() {
  std::vector<const char*> names;
  for (const NamedArithmetic& one : arithmetics) names.push_back(one.name);
  return names;
}
// By a name of the table.
inline Arithmetic arithmetic_named(std::string_view name) {
  return std::find_if(std::begin(arithmetics), std::end(arithmetics),
                      [&](const NamedArithmetic& one) { return one.name == name; })
      ->arithmetic;
}
// The table's name.
inline std::string name_of(Arithmetic arithmetic) {
  return std::find_if(std::begin(arithmetics), std::end(arithmetics),
                      [&](const NamedArithmetic& one) { return one.arithmetic == arithmetic; })
      ->name;
}

}  // namespace quoka_ggml
