// May tiles be used, and do they compute? Some virtual machines are said to lose their contents.
#pragma once

#include <quoka/simd/isa/tiles.hpp>

#include <cstdio>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The system allows them, and agree() finds that they give what plain code gives; where they do not,
// one line says so, and `instead` is used. Each unit asks once.
inline bool tiles_pass(bool (*agree)(), const char* instead) {
  if (!simd::tiles_allowed()) return false;
  if (agree()) return true;
  std::fprintf(stderr, "quoka: this machine's AMX tiles give wrong products: using %s\n", instead);
  return false;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
