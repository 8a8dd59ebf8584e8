// The main of a test program, which holds several files: --file=NAME runs the tests of NAME.cpp alone, and fails
// where there are none.

#include <gtest/gtest.h>

#include <iostream>
#include <string>
#include <string_view>

namespace {

// The filter that leaves the tests of this file alone; empty where it has none.
std::string tests_of(const std::string& name) {
  std::string filter;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      if (std::string_view(test.file()).ends_with("/" + name + ".cpp"))
        filter += std::string(suite.name()) + "." + test.name() + ":";
    }
  }
  return filter;
}

}  // namespace

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  if (count == 1) return RUN_ALL_TESTS();
  const std::string_view argument = arguments[1];
  constexpr std::string_view option = "--file=";
  const std::string filter =
      argument.starts_with(option) ? tests_of(std::string(argument.substr(option.size()))) : "";
  if (filter.empty() || count > 2) {
    std::cerr << "no tests for " << argument << ": want --file=NAME, as of NAME.cpp\n";
    return 2;
  }
  const std::string unwanted = GTEST_FLAG_GET(filter);  // as in GTEST_FILTER=-Slow*
  const auto minus = unwanted.find('-');
  GTEST_FLAG_SET(filter, filter + (minus == unwanted.npos ? "" : unwanted.substr(minus)));
  return RUN_ALL_TESTS();
}
