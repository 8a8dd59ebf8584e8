// Included by headers with mutants in them (run.py): which mutant is alive in this run.
#pragma once

namespace quoka_mutants {

inline constexpr int most = 1024;
extern int on[most];            // what a mutant asks first
bool hit(int mutant) noexcept;  // and then

}  // namespace quoka_mutants

#define QUOKA_MUTANT(number) \
  (__builtin_expect(::quoka_mutants::on[number], 0) != 0 && ::quoka_mutants::hit(number))
