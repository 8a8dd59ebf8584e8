// Which cases a suite draws: QUOKA_NAME_SEED=n that one alone, QUOKA_NAME_CASES=n this many in
// place of the usual number.
#pragma once

#include <quoka/base/index.hpp>

#include <cstdlib>
#include <string>

namespace quoka_test {

struct DrawnCases {
  quoka::Index first = 0, end = 0;

  DrawnCases(const std::string& name, quoka::Index usual) : end(usual) {
    const char* const seed = std::getenv(("QUOKA_" + name + "_SEED").c_str());
    const char* const asked = std::getenv(("QUOKA_" + name + "_CASES").c_str());
    if (asked != nullptr) end = std::atol(asked);
    if (seed != nullptr) first = std::atol(seed), end = first + 1;
  }
};

}  // namespace quoka_test
