// A table of wrong calls: each is refused, and says so with both numbers.
#pragma once

#include "support/fixtures.hpp"

namespace quoka_test {

struct Refusal {
  std::function<void()> call;
  std::vector<Fragment> says;
  const char* file = __builtin_FILE();
  int line = __builtin_LINE();
};
inline void expect_all_refused(std::initializer_list<Refusal> table) {
  for (const Refusal& one : table) expect_refused(one.call, one.says, one.file, one.line);
}

}  // namespace quoka_test
