// FlashPrefill against the oracle: scores of blocks, the threshold's counts, the budget's ranks, and
// mean keys that grow, are cut and grow again with the keys.

#include <quoka/methods/flash_prefill.hpp>

#include "support/baseline_fixtures.hpp"
#include "support/block_oracle.hpp"

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::FlashPrefillOptions;
using quoka::FlashPrefillScorer;
using quoka::FlashPrefillSelector;

Selection select(const FlashPrefillOptions& options, const Rows& q, const Rows& k) {
  return FlashPrefillSelector(options).select(q, k, {});
}

// In the order in which a budget takes them.
std::vector<Index> forced_blocks(const FlashPrefillOptions& options, Index kv_len) {
  const Index own = kv_len / options.block;
  return {0, own, own - 1, own - 2, own - 3, 1};
}

// Every score of a block, up to the set's factor, and the keys, by threshold or by budget.
template <class T>
void expect_agrees_with_oracle(const FlashPrefillOptions& options, const Tensor4<T>& q,
                               const Tensor4<T>& k) {
  const Index kv_len = k.dimension(2), q_len = q.dimension(2), block = options.block;
  SCOPED_TRACE("kv_len " + std::to_string(kv_len) + ", q_len " + std::to_string(q_len) +
               ", block " + std::to_string(block));
  SelectorInput input{q, k, LogitOptions{}};
  FlashPrefillScorer::State state;
  Selection selection;
  FlashPrefillScorer(options).decide(input, state, selection, quoka::SerialExecutor{});
  if (!options.by_threshold() && selection.is_all()) return;  // not scored
  const oracle::Positions keep = to_positions(selection);
  const float* score = state.blocks.scores.data();
  for (Index b = 0; b < k.dimension(0); ++b)
    for (Index g = 0; g < k.dimension(1); ++g) {
      const oracle::SetScores exact =
          oracle::flash_prefill_scores(to_oracle(q), to_oracle(k), b, g, block, 0);
      for (const auto& of_set : exact) {
        double total = 0;
        for (std::size_t j = 0; j < of_set.size(); ++j) total += static_cast<double>(score[j]);
        for (const double expected : of_set)  // weights below 2^-100 do not count
          ASSERT_NEAR(static_cast<double>(*score++), expected * total,
                      (2e-5 * expected + 1e-26) * total);
      }
      double margin = 1;
      const std::vector<Index> expected =
          options.by_threshold()
              ? oracle::keys_of_blocks(
                    oracle::flash_prefill_blocks(exact, q_len, kv_len, block, options.relative, 2,
                                                 4, &margin),
                    block, kv_len)
              : oracle::best_blocks(forced_blocks(options, kv_len), oracle::parts_of_best(exact),
                                    block, kv_len, options.budget.count(kv_len), &margin);
      ASSERT_GT(margin, 1e-6) << "another seed";
      EXPECT_EQ(keep[uz(b)][uz(g)], expected) << "batch " << b << ", head " << g;
    }
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(FlashPrefill, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(631);
    for (const Index group : {1, 3})
      for (const Index kv_len : {384, 501, 1200}) {
        const auto q = random.tensor<T>(2, 2 * group, 37, 24, 4.0);
        const auto k = random.tensor<T>(2, 2, kv_len, 24, 4.0);
        for (const double relative : {0.06, 0.5, 0.0})
          for (const Index block : {40, 16})
            expect_agrees_with_oracle(
                {.budget = Budget::keys(200), .block = block, .relative = relative}, q, k);
      }
  });
}

TEST(FlashPrefillSelects, AsTheOracleForEveryBlock) {
  Random random(632);
  const auto q = random.tensor<float>(1, 4, 75, 20, 3.0), k = random.tensor<float>(1, 2, 269, 20);
  for (const Index block : {1, 2, 7, 16, 64, 128, 268, 269, 300})
    for (const double relative : {0.3, 0.0})
      expect_agrees_with_oracle({.budget = Budget::keys(100), .block = block, .relative = relative},
                                q, k);
}

// Chunks and pasts that end within a block, or with one.
TEST(FlashPrefillSelects, AsTheOracleForEveryLength) {
  Random random(633);
  for (const Index kv_len : {2, 31, 32, 33, 127, 128, 129, 264, 400})
    for (const Index q_len : {1, 7, 127, 128, 130, 300}) {
      const auto q = random.tensor<float>(1, 4, q_len, 17, 4.0),
                 k = random.tensor<float>(1, 2, kv_len, 17, 2.0);
      expect_agrees_with_oracle({.relative = 0.4}, q, k);
      expect_agrees_with_oracle({.block = 32, .relative = 0.4}, q, k);
      expect_agrees_with_oracle({.budget = Budget::keys(1 + kv_len / 2), .block = 32}, q, k);
    }
}

TEST(FlashPrefillSelects, AsTheOracleForLogitsThatAreFarApart) {
  Random random(636);
  const auto q = random.tensor<float>(1, 6, 200, 8, 60.0), k = random.tensor<float>(1, 1, 300, 8);
  expect_agrees_with_oracle({.block = 16, .relative = 0.1}, q, k);
}

// ---- how many -----------------------------------------------------------------------------------

TEST(FlashPrefillSelects, ByCompactAttentionsAlphaMore) {
  EXPECT_EQ(FlashPrefillOptions::compact_attention().relative, 0.06);
  Random random(640);
  const auto q = random.tensor<float>(1, 4, 64, 16, 9.0),
             k = random.tensor<float>(1, 2, 5120, 16, 4.0);
  EXPECT_GT(select(FlashPrefillOptions::compact_attention(), q, k).sum_of_counts(),
            select(FlashPrefillOptions::paper(), q, k).sum_of_counts());
}

// ---- NaN and infinity ---------------------------------------------------------------------------

TEST(FlashPrefill, LeavesQueriesAndBlocksThatAreNotFiniteOut) {
  Random random(643);
  for (const float odd : {not_a_number, infinity, -infinity}) {
    auto q = random.tensor<Element>(1, 4, 37, 24, 4.0),
         k = random.tensor<Element>(1, 2, 300, 24, 2.0);
    q(0, 1, 5, 19) = q(0, 2, 36, 0) = stored<Element>(odd);
    k(0, 0, 100, 3) = k(0, 1, 299, 23) = stored<Element>(odd);
    for (const double relative : {0.4, 0.0})
      expect_agrees_with_oracle({.budget = Budget::keys(100), .block = 16, .relative = relative}, q,
                                k);
  }
}

// A head without a finite query chooses nothing, and neither does its set of blocks.
TEST(FlashPrefill, AHeadWithoutAQueryHasNoSay) {
  Random random(391);
  Tensor4<float> q = random.tensor<float>(1, 2, 16, 24), one(1, 1, 16, 24);
  const auto k = random.tensor<float>(1, 1, 640, 24);
  for (Index i = 0; i < 16; ++i)
    for (Index c = 0; c < 24; ++c) {
      one(0, 0, i, c) = q(0, 1, i, c);
      q(0, 0, i, c) = not_a_number;
    }
  for (const double relative : {0.0, 0.9}) {
    const quoka::FlashPrefillSelector selector(
        {.budget = Budget::keys(200), .block = 16, .relative = relative});
    EXPECT_EQ(selector.select(q, k, {}), selector.select(one, k, {}));
  }
}

TEST(FlashPrefill, ReadsTheKeysOfAWholeBlockOnce) {
  Random random(645);
  const auto q = random.tensor<Element>(1, 4, 7, 20);
  auto k = random.tensor<Element>(1, 2, 100, 20);
  const auto scores_of = [&](Index kv_len, FlashPrefillScorer::State& state) {
    Selection keep;
    FlashPrefillScorer({.budget = Budget::keys(60), .block = 16})
        .decide({q, Rows(k).slice(0, kv_len), LogitOptions{}}, state, keep, SerialExecutor{});
    const float* const scores = state.blocks.scores.data();
    return std::vector<float>(scores, scores + 4 * 7);
  };
  FlashPrefillScorer::State state, fresh;
  const auto scores = scores_of(100, fresh);
  (void)scores_of(89, state);
  for (Index t = 0; t < 80; ++t) k = with_row(std::move(k), t, 1000.0f);
  EXPECT_EQ(scores_of(100, state), scores);
}

TEST(FlashPrefillsState, KeepsAMeanKeyForEachBlock) {
  Random random(648);
  const auto q = random.tensor<float>(1, 4, 7, 20), k = random.tensor<float>(1, 2, 2048, 20);
  FlashPrefillSelector::State state;
  Selection keep;
  FlashPrefillSelector().select({q, k, LogitOptions{}}, state, keep, quoka::SerialExecutor{});
  EXPECT_EQ(state.kept_bytes(), 2 * (2048 / 128) * 20 * 4);
}

}  // namespace
