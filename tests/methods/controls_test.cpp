// The controls that look at no key: random keys, and the first and recent keys.

#include <quoka/methods/first_recent.hpp>
#include <quoka/methods/random.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::FirstRecentSelector;
using quoka::RandomSelector;

// ---- random -------------------------------------------------------------------------------------

std::vector<Index> drawn(std::uint64_t seed, Index kv_len) {
  Tensor4<float> q(1, 1, 1, 1), k(1, 1, kv_len, 1);
  q.setConstant(not_a_number);  // it looks at neither
  k.setConstant(not_a_number);
  return to_positions(
      RandomSelector({.budget = Budget::keys(7), .seed = seed}).select(q, k, {}))[0][0];
}

// By another implementation of the formula; the same on every machine.
TEST(RandomControl, DrawsTheseKeys) {
  EXPECT_EQ(drawn(0, 37), (std::vector<Index>{0, 3, 12, 13, 16, 20, 29}));
  EXPECT_EQ(drawn(7, 37), (std::vector<Index>{1, 6, 14, 17, 18, 31, 33}));
  EXPECT_EQ(drawn(0, 38), (std::vector<Index>{5, 16, 19, 21, 30, 31, 36}));
}

TEST(RandomControl, DrawsAnewForEverySeedSequenceHeadAndLength) {
  EXPECT_EQ(drawn(3, 501), drawn(3, 501));
  EXPECT_NE(drawn(3, 501), drawn(4, 501));
  EXPECT_NE(drawn(3, 501), drawn(3, 502));
  const Tensor4<float> q(2, 4, 1, 1), k(2, 2, 501, 1);
  const auto keep = to_positions(RandomSelector({.budget = Budget::keys(7)}).select(q, k, {}));
  EXPECT_NE(keep[0][0], keep[0][1]);
  EXPECT_NE(keep[0][0], keep[1][0]);
  EXPECT_NE(keep[0][1], keep[1][0]);
}

// ---- first and recent ---------------------------------------------------------------------------

std::vector<Index> first_and_recent(const quoka::FirstRecentOptions& options, Index kv_len) {
  Tensor4<float> q(1, 1, 1, 1), k(1, 1, kv_len, 1);
  q.setConstant(not_a_number);  // it looks at neither
  k.setConstant(not_a_number);
  return to_positions(FirstRecentSelector(options).select(q, k, {}))[0][0];
}
std::vector<Index> both(Index first, Index last, Index kv_len) {
  std::vector<Index> list = oracle::range(0, first);
  for (Index t = kv_len - last; t < kv_len; ++t) list.push_back(t);
  return list;
}

TEST(FirstRecentControl, KeepsSinksAndTheLastOnes) {
  for_each_draw("METHODS", 100, [](Random& random, std::uint64_t) {
    const Index kv_len = 1 + random.below(1000);
    quoka::FirstRecentOptions options;  // of four sinks
    options.budget = random.seldom(3) ? Budget::share(0.25) : Budget::keys(random.below(40));
    if (random.seldom(2)) options.keep_first = random.below(10);
    const Index count = options.budget.count(kv_len),
                first = std::min(options.keep_first, count);  // of few keys sinks alone
    EXPECT_EQ(first_and_recent(options, kv_len), both(first, count - first, kv_len))
        << count << " of " << kv_len;
  });
  EXPECT_EQ(quoka::FirstRecentOptions().keep_first, 4);
}

// From position 2^24 on two of them may be the same float.
TEST(FirstRecentControl, KeepsTheLastOfMorePositionsThanAFloatHas) {
  constexpr Index kv_len = (Index{1} << 24) + 2;
  const float row[] = {0.0f};
  const Rows q(TensorView<const float>(row, {1, 1, 1, 1}, {0, 0, 0, 1})),
      k(TensorView<const float>(row, {1, 1, kv_len, 1}, {0, 0, 0, 1}));
  EXPECT_EQ(to_positions(FirstRecentSelector({.budget = Budget::keys(5)}).select(q, k, {}))[0][0],
            both(4, 1, kv_len));
}

}  // namespace
