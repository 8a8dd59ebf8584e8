// examples/support/layer_policy_file.hpp: a policy as it is written, and refusals by name.

#include "support/layer_policy_file.hpp"

#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace {

using nlohmann::json;
using quoka_examples::LayerPolicy;
using quoka_examples::parse_policy;
using quoka_test::Index;

LayerPolicy parsed(const char* text) { return parse_policy(json::parse(text, nullptr, false)); }

TEST(LayerPolicy, SaysWhichLayersAreDenseAndWhatTheOthersHave) {
  const LayerPolicy policy =
      parsed(R"({"mode": "recommended", "budget": 0.125, "dense_layers": [0, 3],
      "layer_budgets": {"2": 0.5, "7": 2048},
      "model": {"q_heads": 32, "kv_heads": 4, "head_dim": 64}})");
  ASSERT_TRUE(policy.budget.has_value());
  EXPECT_EQ(policy.budget->count(800), 100);
  EXPECT_EQ(policy.dense, (std::set<Index>{0, 3}));
  ASSERT_EQ(policy.budgets.size(), 2u);
  EXPECT_EQ(policy.budgets.at(2).count(800), 400);
  EXPECT_EQ(policy.budgets.at(7).count(8000), 2048);
  EXPECT_NO_THROW(policy.check(32, 4, 64, 8));
}

TEST(LayerPolicy, TakesANumberOfFirstLayersAndLeavesOutWhatIsNotThere) {
  const LayerPolicy policy = parsed(R"({"dense_layers": 2})");
  EXPECT_EQ(policy.dense, (std::set<Index>{0, 1}));
  EXPECT_FALSE(policy.budget.has_value());
  EXPECT_TRUE(policy.budgets.empty());
  EXPECT_NO_THROW(policy.check(7, 7, 7, 2));  // of any shape
  EXPECT_TRUE(parsed("{}").dense.empty());
}

TEST(LayerPolicy, TakesAllOfThePastAndTwoKeys) {
  EXPECT_EQ(parsed(R"({"budget": 1.0})").budget->count(800), 800);
  EXPECT_EQ(parsed(R"({"budget": 16})").budget->count(800), 16);
}

TEST(LayerPolicyRefuses, AnotherModel) {
  const LayerPolicy policy = parsed(
      R"({"layer_budgets": {"7": 19}, "model": {"q_heads": 32, "kv_heads": 4, "head_dim": 64}})");
  using quoka_test::expect_refused;
  expect_refused([&] { policy.check(16, 4, 64, 8); }, {32, 16, "query heads"});
  expect_refused([&] { policy.check(32, 8, 64, 8); }, {4, 8, "KV heads"});
  expect_refused([&] { policy.check(32, 4, 128, 8); }, {64, 128, "channels"});
  expect_refused([&] { policy.check(32, 4, 64, 7); }, {"layer 7", "7 layers"});
  expect_refused([&] { parsed(R"({"dense_layers": [9]})").check(1, 1, 1, 9); }, {"layer 9"});
}

TEST(LayerPolicyRefuses, WhatItDoesNotUnderstandByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"[]", "is not a JSON object"},
      {"{", "is not a JSON object"},
      {R"({"budgets": 3})", "budgets"},
      {R"({"budget": 1.5})", "1.5"},
      {R"({"budget": -1})", "-1"},
      {R"({"budget": 0})", "budget is 0, but must be a count of keys from 16"},
      {R"({"budget": 15})", "budget is 15, but must be a count of keys from 16"},
      {R"({"budget": 1})", "1.0 for all of it"},
      {R"({"budget": true})", "budget is true"},
      {R"({"budget": 18446744073709551615})", "18446744073709551615"},
      {R"({"budget": 1024.0})", "1024.0"},
      {R"({"layer_budgets": {"3": 1}})", "the budget of layer 3 is 1,"},
      {R"({"layer_budgets": {"3": 0}})", "layer 3 is 0"},
      {R"({"budget": "many"})", "many"},
      {R"({"budget": "mass:0.9"})", "budget is \"mass:0.9\", but must be a count of keys"},
      {R"({"dense_layers": 2000000000})", "dense_layers"},
      {R"({"model": {"heads": 4}})", "heads"},
      {R"({"dense_layers": [-1]})", "-1"},
      {R"({"dense_layers": [0.5]})", "0.5"},
      {R"({"dense_layers": "all"})", "all"},
      {R"({"dense_layers": "0,5"})",
       "must be a whole number from 0 to 10000, or a list of layers in brackets such as [0,5]"},
      {R"({"layer_budgets": {"x": 3}})", "a layer with a budget"},
      {R"({"layer_budgets": {"3": 0.0}})", "layer 3"},
      {R"({"layer_budgets": [1]})", "layer_budgets is [1], but must be an object"},
      {R"({"model": [1]})", "model is [1], but must be an object"},
      {R"({"model": {"q_heads": -4}})", "q_heads"},
  };
  for (const auto& [text, named] : cases)
    quoka_test::expect_refused([&, t = text] { (void)parsed(t); }, {named});
}

TEST(LayerPolicyRefuses, AllThatIsWrongAtOnce) {
  quoka_test::expect_refused(
      [] {
        (void)parsed(R"({"budget": 1.5, "dense_layers": [-1], "layer_budgets": {"x": 64, "3": 0},
                         "model": {"q_heads": -4, "heads": 4}, "mood": "paper"})");
      },
      {"budget is 1.5", "-1", "\"x\"", "layer 3 is 0", "q_heads is -4", "\"heads\"", "mood"});
}

TEST(LayerPolicyRefuses, AFolder) {
  quoka_test::expect_refused([] { (void)quoka_examples::read_policy(testing::TempDir()); },
                             {testing::TempDir(), "is a folder, but must be a file"});
}

TEST(LayerPolicyRefuses, AFileWithAMemberTwice) {
  const std::string path = testing::TempDir() + "policy_twice.json";
  const auto refused = [&](const char* text, const char* named) {
    std::ofstream(path) << text;
    quoka_test::expect_refused([&] { (void)quoka_examples::read_policy(path); }, {path, named});
  };
  refused(R"({"budget": 64, "budget": 128})", "\"budget\" occurs twice");
  refused(R"({"layer_budgets": {"3": 64, "3": 128}})", "\"3\" occurs twice");
  refused(R"({"budget": )", "not JSON");
  std::ofstream(path) << R"({"layer_budgets": {"3": 64}, "model": {"q_heads": 3}})";
  EXPECT_EQ(quoka_examples::read_policy(path).budgets.size(), 1u);
  std::remove(path.c_str());
}

}  // namespace
