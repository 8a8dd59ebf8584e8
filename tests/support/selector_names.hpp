// Typed suites over all selectors of methods/all.hpp: their types, and the names that are listed
// there.
#pragma once

#include <quoka/methods/all.hpp>

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

namespace quoka_test {

namespace detail {
template <class List>
struct SelectorTypesOf;
template <class... Entries>
struct SelectorTypesOf<quoka::SelectorList<Entries...>> {
  using Types = ::testing::Types<typename Entries::Type...>;
};
}  // namespace detail
using SelectorTypes = detail::SelectorTypesOf<quoka::AllSelectors>::Types;

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
