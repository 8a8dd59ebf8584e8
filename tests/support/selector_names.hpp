// The names of typed suites over selectors: those of methods/all.hpp.
#pragma once

#include <quoka/methods/all.hpp>

#include <string>
#include <type_traits>

namespace quoka_test {

struct SelectorNames {
  template <class S>
  static std::string GetName(int) {
    std::string found;
    quoka::for_each_selector([&]<class Listed>(const char* name) {
      if constexpr (std::is_same_v<S, Listed>) found = name;
    });
    return found;
  }
};

}  // namespace quoka_test
