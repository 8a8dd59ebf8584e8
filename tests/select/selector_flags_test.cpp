// Budgets and numbers on a command line: accepted forms, and one sentence for each bad one, which
// quotes it and says what is allowed.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/selector_flags.hpp"

namespace {

using namespace quoka_examples;

// The answer of a program with these flags to the arguments; "" if it accepts them.
struct Program {
  Program() {
    add_run_flags(app, chunk, threads, rounds);
    add_quoka_flags(app, options);
    app.add_option("--budgets", budgets)->check(accepted_by(parse_budgets));
  }
  std::string answer(std::vector<std::string> reversed) {
    try {
      app.parse(reversed);
      return "";
    } catch (const CLI::ParseError& error) {
      return error.what();
    }
  }

  CLI::App app;
  Index chunk = 128;
  int threads = 2, rounds = 3;
  quoka::QuokaOptions options;
  std::string budgets;
};

std::string answer(const std::string& flag, const std::string& value) {
  return Program().answer({value, flag});
}

TEST(Budget, CountsAreTaken) {
  EXPECT_EQ(parse_budget("16").count(5000), 16);
  EXPECT_EQ(parse_budget("1024").count(5000), 1024);
  EXPECT_EQ(parse_budget("1000000000").count(5000), 5000);
}

TEST(Budget, FractionsAreTaken) {
  EXPECT_EQ(parse_budget("0.25").count(5000), 1250);
  EXPECT_EQ(parse_budget(".25").count(5000), 1250);
  EXPECT_EQ(parse_budget("1.0").count(5000), 5000);
  EXPECT_EQ(parse_budget("1.").count(5000), 5000);
  EXPECT_EQ(parse_budget("0.999").count(11001), 10989);
  EXPECT_EQ(parse_budget("2.5e-1").count(5000), 1250);
}

TEST(Budget, ListsAreTaken) {
  EXPECT_EQ(parse_budgets("128"), std::vector<std::string>{"128"});
  EXPECT_EQ(parse_budgets("128, 0.25 ,16"), (std::vector<std::string>{"128", "0.25", "16"}));
}

const std::vector<std::string> bad_budgets{
    "",     "nan",   "inf",    "abc",        "0",    "1",    "2",         "15",
    "01",   "true",  "-3",     "+3",         "1.5",  "0.0",  "-0.5",      "1.0x",
    "0.5x", "1e400", "1e400.", "1e3",        "0x10", "nan.", "1 2",       "99999999999999999999",
    ".",    "-",     "0.25.5", "1000000001", ":",    "mass", "mass:0.95", "relative:0.1:64",
    ":0.5"};

TEST(Budget, OthersAreRefusedByOneSentence) {
  for (const std::string& bad : bad_budgets) {
    SCOPED_TRACE(bad);
    try {
      parse_budget(bad);
      ADD_FAILURE() << "accepted";
    } catch (const CLI::ValidationError& error) {
      EXPECT_EQ(
          error.what(),
          '"' + bad +
              "\" is not a budget: give a count of keys from 16 to 1000000000, or with a point a "
              "share "
              "of the past in (0, 1], such as 0.25, or 1.0 for all of it");
    }
  }
}

TEST(Budget, OneBadItemRefusesTheList) {
  for (const std::string& bad : bad_budgets)
    for (const std::string& list : {bad, "128," + bad, bad + ",128", "128," + bad + ",0.5"}) {
      const std::string said = answer("--budgets", list);
      EXPECT_TRUE(said.starts_with("--budgets: \"" + bad + "\" is not a budget: ")) << list << said;
    }
  EXPECT_EQ(answer("--budgets", "128,0.5"), "");
}

TEST(WholeNumber, LimitsAreTaken) {
  for (const char* number : {"1", "128", "65536"}) EXPECT_EQ(answer("--chunk", number), "");
  Program program;
  EXPECT_EQ(program.answer({"7", "--threads", "65536", "--chunk"}), "");
  EXPECT_EQ(program.chunk, 65536);
  EXPECT_EQ(program.threads, 7);
}

TEST(WholeNumber, OthersAreRefusedByOneSentence) {
  for (const char* bad : {"0", "-1", "65537", "1.5", "abc", "1e3", "nan", "99999999999999999999"})
    EXPECT_EQ(answer("--chunk", bad),
              "--chunk: \"" + std::string(bad) + "\" is not a whole number from 1 to 65536");
  const auto refused = [](const std::string& flag, const std::string& value, const char* range) {
    EXPECT_EQ(answer(flag, value),
              flag + ": \"" + value + "\" is not a whole number from " + range);
  };
  refused("--threads", "0", "1 to 1024");
  refused("--threads", "-1", "1 to 1024");
  refused("--rounds", "1001", "1 to 1000");
  refused("--n-queries", "0", "1 to 65536");
  refused("--keep-first", "-1", "0 to 1000000000");
  refused("--keep-last", "-4", "0 to 1000000000");
}

}  // namespace
