// Definitions of isa.hpp.
#pragma once

#include <quoka/runtime/isa.hpp>

#include <stdexcept>
#include <string>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC const char* isa() {
#define QUOKA_ISA_TEXT_(tags) #tags
#define QUOKA_ISA_TEXT(tags) QUOKA_ISA_TEXT_(tags)
  return &QUOKA_ISA_TEXT(QUOKA_WITH_TAGS(QUOKA_JOIN_TAGS))[1];  // behind the underscore
#undef QUOKA_ISA_TEXT
#undef QUOKA_ISA_TEXT_
}

#if !defined(QUOKA_COMPILED_LEVEL)  // one of several: compiled_levels.cpp

QUOKA_FUNC std::span<const char* const> isa_levels() {
  static const char* const only = isa();
  return {&only, 1};
}

QUOKA_FUNC void use_isa(std::string_view level) {
  if (level != isa())
    throw std::invalid_argument("quoka: no level " + std::string(level) + " here; there is " +
                                isa());
}

#endif

}  // namespace QUOKA_ABI
}  // namespace quoka
