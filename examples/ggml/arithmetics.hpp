// What attention multiplies in: the names of QUOKA_ARITHMETIC, and what `automatic` comes to.
#pragma once

#include <quoka/attention/attention_options.hpp>

#include <ggml.h>

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
inline constexpr NamedArithmetic arithmetics[] = {{"automatic", Arithmetic::automatic},
                                                  {"float", Arithmetic::single},
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
// The table's name, or the library's where the table has none: bfloat16_x3.
inline std::string name_of(Arithmetic arithmetic) {
  for (const NamedArithmetic& one : arithmetics)
    if (one.arithmetic == arithmetic) return one.name;
  return arithmetic.name();
}

// Does llama.cpp's CPU backend round as much over keys and values so stored as products of bfloat16 do?
//
// Errors of FLASH_ATTN_EXT, the largest over logits with standard deviations from 0.3 to 10 (ggml_bench --errors;
// bench/results/ggml.md):
//
//   cache                                  llama.cpp         bf16 here
//   quantised: q8_0, q4_0 ...              1.7e-2 to 2.3e-2  1.0e-2   queries are rounded to 8 bits there
//   bf16                                   5.2e-3 to 6.8e-3  6.1e-3   queries to bfloat16; small logits: 5e-4, here 2e-3
//   f16, fewer than 64 queries             6.7e-3            1.1e-2   queries and sums to half
//   f16 from 64 queries on, f32            2e-6              1.1e-2   float
//
// So one answer by type is right at any number of queries.
inline bool llama_rounds_as_bf16(ggml_type k, ggml_type v) {
  return ggml_is_quantized(k) && ggml_is_quantized(v);
}

// What a node with so many queries is told to compute in, where a setting asks for `asked`. Automatic: bf16 where that
// is faster than float and llama.cpp rounds as much; elsewhere, and for decode steps, what the library has for caches of
// that type, which rounds no more than the cache did.
inline Arithmetic arithmetic_of_node(Arithmetic asked, ggml_type k, ggml_type v, Index queries) {
  constexpr Index of_a_chunk = 32;  // fewer may be decode steps of several sequences
  if (asked == Arithmetic::automatic && queries >= of_a_chunk && llama_rounds_as_bf16(k, v) &&
      quoka::arithmetic_used(Arithmetic::bfloat16) == Arithmetic::bfloat16)
    return Arithmetic::bfloat16;
  return asked;
}

}  // namespace quoka_ggml
