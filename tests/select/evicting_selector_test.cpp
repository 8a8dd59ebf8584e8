// Evicting selectors: a method that throws leaves the State as it was. Executors that fail, and all else of a State:
// selection_fuzz_test.cpp; which keys are retained: methods/keydiff_test.cpp, methods/snapkv_test.cpp.

#include <quoka/methods/evicting_selector.hpp>

#include "support/fixtures.hpp"

#include <stdexcept>

namespace {

using namespace quoka_test;
using quoka::SelectorInput;

// Keeps the keys whose first channel is largest. Throws at one KV head.
struct LargestFirstChannel {
  struct Options {
    Budget budget = Budget::keys(8);
    Index keep_first = 0;
    const int* throws_after = nullptr;  // how many calls of score() are left; null: any number
  };
  struct Scratch {
    static Index bytes() { return 0; }
  };

  explicit LargestFirstChannel(const Options& options) : options_(options) {}
  Index score(const SelectorInput& input, Index b, Index kv_head,
              std::span<const Position> candidates, std::span<float> scores, Scratch&) const {
    if (options_.throws_after != nullptr && b * input.k.heads() + kv_head >= *options_.throws_after)
      throw std::runtime_error("the method");
    for (std::size_t i = 0; i < scores.size(); ++i)
      input.k.format().widen(input.k.row(b, kv_head, candidates[i]), {1}, &scores[i]);
    return 0;
  }

  Options options_;
};
using Evicting = quoka::EvictingSelector<LargestFirstChannel>;

TEST(Eviction, AMethodThatThrowsLeavesTheStateAsItWas) {
  Random random(430);
  const auto q = random.tensor<float>(2, 2, 1, 3), k = random.tensor<float>(2, 2, 60, 3);
  const auto input = [&](Index len) {
    return SelectorInput{q, Rows(k).slice(0, len), LogitOptions{}};
  };
  const Evicting selector({.budget = Budget::keys(8), .keep_first = 1});
  const auto select = [&](Evicting::State& state, Index len) {
    Selection selection;
    selector.select(input(len), state, selection, SerialExecutor{});
    return selection;
  };
  for (int throws_after : {0, 1, 3})
    for (bool in_select : {true, false}) {
      const Evicting throwing(
          {.budget = Budget::keys(8), .keep_first = 1, .throws_after = &throws_after});
      Evicting::State state, expected;
      for (Evicting::State* const one : {&state, &expected})
        for (const Index len : {20, 35}) selector.appended(input(len), *one, SerialExecutor{});
      Selection selection = Selection::all(1, 1, 5);
      EXPECT_THROW(in_select ? throwing.select(input(50), state, selection, SerialExecutor{})
                             : throwing.appended(input(50), state, SerialExecutor{}),
                   std::runtime_error);
      EXPECT_EQ(selection, Selection::all(1, 1, 5));
      EXPECT_EQ(select(state, 35), select(expected, 35));
      for (Index back : {30, 20, 7}) {
        state.truncate(back), expected.truncate(back);
        EXPECT_EQ(select(state, back), select(expected, back)) << "back at " << back;
      }
    }
}

}  // namespace
