// Evicting selectors: refusals of their State, and that a throw leaves it as it was.

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

// Runs some tasks and throws.
struct FailingExecutor {
  Index tasks_done;
  static constexpr int workers() { return 2; }
  template <class F>
  void run(Index tasks, F&& f) const {
    for (Index task = 0; task < std::min(tasks, tasks_done); ++task) f(task, 1);
    throw std::runtime_error("the executor");
  }
};

class Eviction : public ::testing::Test {
 protected:
  static SelectorInput input(const Rows& k, std::uint64_t sequence = 0) {
    SelectorInput x{q_of(k), k, LogitOptions{}};
    x.sequence = sequence;
    return x;
  }
  static Rows q_of(const Rows& k) { return k.slice(0, std::min<Index>(k.len(), 1)); }
  Rows first(Index len) const { return Rows(k).slice(0, len); }

  // Takes keys in, chunk by chunk, up to each of `lens`.
  void feed(Evicting::State& state, std::initializer_list<Index> lens) const {
    for (Index len : lens) selector.appended(input(first(len)), state, SerialExecutor{});
  }
  Selection select(Evicting::State& state, Index len, const Evicting& by) const {
    Selection selection;
    by.select(input(first(len)), state, selection, SerialExecutor{});
    return selection;
  }
  Selection select(Evicting::State& state, Index len) const { return select(state, len, selector); }

  // Equal in all that a later call can see, at this length and back at every earlier one.
  void expect_same(Evicting::State& state, Evicting::State& expected, Index len,
                   std::initializer_list<Index> earlier) const {
    EXPECT_EQ(state.scorer.dropped_at.len(), expected.scorer.dropped_at.len());
    EXPECT_EQ(state.scorer.retained.len(), expected.scorer.retained.len());
    EXPECT_EQ(select(state, len), select(expected, len));
    for (Index back : earlier) {
      state.truncate(back), expected.truncate(back);
      EXPECT_EQ(select(state, back), select(expected, back)) << "back at " << back;
    }
  }

  Random random{430};
  Tensor4<float> k = random.tensor<float>(2, 2, 60, 3);
  Evicting selector{{.budget = Budget::keys(8), .keep_first = 1}};
};

TEST_F(Eviction, KeepsTheBestOfWhatIsLeft) {
  Evicting::State state;
  feed(state, {20, 35});
  const Selection keep = select(state, 35);
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 2; ++head) {
      std::vector<Index> left = oracle::range(0, 20);
      const auto evict = [&] {  // to the first key and the 7 best of the others
        std::sort(left.begin() + 1, left.end(),
                  [&](Index x, Index y) { return k(b, head, x, 0) > k(b, head, y, 0); });
        left.resize(8);
        std::sort(left.begin(), left.end());
      };
      evict();
      for (Index t = 20; t < 35; ++t) left.push_back(t);
      evict();
      const auto row = keep.row(b, head);
      EXPECT_EQ(std::vector<Index>(row.begin(), row.end()), left);
    }
}

// ---- after a throw ------------------------------------------------------------------------------

TEST_F(Eviction, AMethodThatThrowsLeavesTheStateAsItWas) {
  for (int throws_after : {0, 1, 3})
    for (bool in_select : {true, false}) {
      const Evicting throwing(
          {.budget = Budget::keys(8), .keep_first = 1, .throws_after = &throws_after});
      Evicting::State state, expected;
      feed(state, {20, 35}), feed(expected, {20, 35});
      Selection selection = Selection::all(1, 1, 5);
      EXPECT_THROW(in_select ? throwing.select(input(first(50)), state, selection, SerialExecutor{})
                             : throwing.appended(input(first(50)), state, SerialExecutor{}),
                   std::runtime_error);
      EXPECT_EQ(selection, Selection::all(1, 1, 5));
      expect_same(state, expected, 35, {30, 20, 7});
    }
}

// A State without keys does not belong to any sequence, even after a throw.
TEST_F(Eviction, AFirstCallThatThrowsLeavesTheStateToAnySequence) {
  Evicting::State state, expected;
  EXPECT_THROW(selector.appended(input(first(35), 9), state, FailingExecutor{1}),
               std::runtime_error);
  EXPECT_EQ(state.scorer.dropped_at.len(), 0);
  feed(state, {20}), feed(expected, {20});
  expect_same(state, expected, 20, {7});
}

}  // namespace
