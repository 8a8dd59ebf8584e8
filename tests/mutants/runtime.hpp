// Read before every header with mutants in it (run.py): which mutant is alive in this run.
#pragma once

#include <type_traits>

namespace quoka_mutants {

extern int on[];                // what a mutant asks first
bool hit(int mutant) noexcept;  // and then

// Another value than the returned one.
constexpr bool other(bool x) { return !x; }

template <class T>
  requires std::is_arithmetic_v<T>
constexpr T other(T x) {
  return static_cast<T>(x + 1);
}

}  // namespace quoka_mutants

// Expressions that the compiler evaluates have no mutants.
#define QUOKA_MUTANT(number)                                                                       \
  (!__builtin_is_constant_evaluated() && __builtin_expect(::quoka_mutants::on[number], 0) != 0 && \
   ::quoka_mutants::hit(number))
